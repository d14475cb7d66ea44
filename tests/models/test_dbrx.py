"""DBRX against transformers and mlx-lm."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DbrxConfig, DbrxForCausalLM

from auraflux.errors import FormatError
from auraflux.models.config import experts_per_token, has_experts
from auraflux.models.dbrx import Config
from tests.models.mlx_oracle import check_mlx, quantized
from tests.models.oracles import check_family, error, logits, prefill, save, tokens, transformers_logits
from tests.models.test_graphs import engines
from tests.models.test_qwen3_moe import sharpen_routers

SMALL: dict[str, Any] = {"vocab_size": 259, "d_model": 96, "n_layers": 3, "n_heads": 6, "max_seq_len": 512}
ATTENTION: dict[str, Any] = {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 5e5}
EXPERTS: dict[str, Any] = {"ffn_hidden_size": 64, "moe_num_experts": 7, "moe_top_k": 3}


def dbrx(attn: dict[str, Any] | None = None, ffn: dict[str, Any] | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    sections = {"attn_config": ATTENTION | (attn or {}), "ffn_config": EXPERTS | (ffn or {})}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    return sharpen_routers(DbrxForCausalLM(DbrxConfig(**SMALL | sections | rope | changes)), "router.layer.weight")


VARIANTS: dict[str, dict[str, Any]] = {
    "dbrx": {},
    "odd": {"d_model": 108, "attn": {"kv_n_heads": 1, "clip_qkv": 0.4}, "ffn": {"ffn_hidden_size": 60, "moe_top_k": 1}},
    "unnormalised": {"attn": {"kv_n_heads": 6, "clip_qkv": 8}, "ffn": {"moe_normalize_expert_weights": None}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = dbrx(**VARIANTS[variant])
    # with one expert per token, the error of an 8-bit cache changes all of some tokens' outputs
    check_family(model, save(model, tmp_path), quantizes=variant != "odd")


@pytest.mark.slow
def test_logits_match_mlx_lm(tmp_path: Path):
    model = dbrx(attn={"clip_qkv": 2.5})

    def published(config: dict[str, Any]) -> dict[str, Any]:
        return {**config, "attn_config": {**config["attn_config"], "rope_theta": 5e5}, "rope_parameters": None}

    check_mlx(model, quantized(save(model, tmp_path / "hf"), tmp_path / "mlx", published))


def test_published_configs_have_the_base_of_rotations_in_a_section():
    config = {**dbrx().config.to_dict(), "rope_parameters": None}
    config["attn_config"] = {**config["attn_config"], "rope_theta": 5e5}
    assert torch.equal(
        Config.from_hf(config).rotation.frequencies, Config.from_hf(dbrx().config.to_dict()).rotation.frequencies
    )


def test_without_a_limit_nothing_is_clipped(tmp_path: Path):
    """transformers fails without one."""
    model = dbrx(attn={"clip_qkv": 1e5})
    folder, ids = save(model, tmp_path), tokens(model, 40)
    expected = transformers_logits(model, ids)
    config = json.loads((folder / "config.json").read_text())
    config["attn_config"]["clip_qkv"] = None
    (folder / "config.json").write_text(json.dumps(config))
    assert error(logits(folder, ids), expected) < 1e-5


def test_decode_steps_are_replayed(tmp_path: Path):
    model = dbrx()
    folder, ids, found = save(model, tmp_path), tokens(model, 30), {}
    for graphs, engine in engines(folder, "k8v4").items():
        sequence = engine.cache.open()
        prefill(engine, sequence, ids[:20])
        batch = engine.cache.batch([sequence])
        found[graphs] = torch.stack([engine.decode(batch, [token]) for token in ids[20:]])
        assert (engine.graphs.refused is None) == graphs, engine.graphs.refused
    assert torch.equal(found[True], found[False])


def test_experts_are_counted():
    config = dbrx().config.to_dict()
    assert has_experts(config)
    assert experts_per_token(config) == 3


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("ffn_config", {"moe_normalize_expert_weights": 2.0}, "moe_normalize_expert_weights"),
        ("ffn_config", {"ffn_act_fn": {"name": "gelu"}}, "name"),
        ("ffn_config", {"moe_top_k": 8}, "moe_top_k 8 of moe_num_experts 7"),
        ("attn_config", {"clip_qkv": -1}, "clip_qkv"),
    ],
)
def test_what_is_not_supported_is_refused(section: str, changes: dict[str, Any], message: str):
    config = dbrx().config.to_dict()
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**config, section: {**config[section], **changes}})
