"""Nemotron-H, whose blocks are Mamba-2, attention, MLPs or mixtures, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHConfig, NemotronHForCausalLM

from auraflux.errors import FormatError
from auraflux.models import family
from auraflux.models.nemotron_h import Config
from auraflux.ops.simd.isa import ISA
from auraflux.weights.convert.mlx_folder import convert
from auraflux.weights.convert.pack import pack
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.models.oracles import check_family, error, logits, save, tokens, transformers_logits
from tests.models.test_deepseek_v3 import sharpen_routers
from tests.weights.formats.quantized_folders import FOLDERS, rewrite

SMALL = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 192,
    "hybrid_override_pattern": "MEM*EM-",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 96,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 512,
    # transformers clamps time steps to this in prefill but not in decode; the published code does not clamp
    "time_step_min": 1e-9,
}


def nemotron_h(**changes: Any) -> NemotronHForCausalLM:
    """Return a model whose recurrent states decay over several tokens."""
    torch.manual_seed(0)
    model = sharpen_routers(NemotronHForCausalLM(NemotronHConfig(**{**SMALL, **changes})))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("A_log"):
                tensor.uniform_(-1.5, 0.5)
            if name.endswith("dt_bias"):
                tensor.uniform_(-4, 1)
            if name.endswith("conv1d.bias"):
                tensor.normal_(0, 0.3)
    return model


VARIANTS: dict[str, dict[str, Any]] = {
    "small": {},
    "groups-of-experts": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    "odd-heads": {"mamba_num_heads": 6, "mamba_head_dim": 20, "n_groups": 3, "ssm_state_size": 33, "use_conv_bias": False},
    "experts-in-a-latent": {"moe_latent_size": 96},
    "dense": {"hybrid_override_pattern": "M-*-MM*-", "num_key_value_heads": 1},
    "attention-last": {"hybrid_override_pattern": "M*", "n_groups": 8},
}


@pytest.mark.parametrize("variant", [pytest.param(v, marks=[pytest.mark.slow] if v != "small" else []) for v in VARIANTS])
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = nemotron_h(**VARIANTS[variant])
    check_family(model, save(model, tmp_path))


def test_transformers_clamps_time_steps_in_prefill_only():
    """Show why the limit is ignored: in transformers prefill and decode disagree with it."""
    model = nemotron_h(time_step_min=0.2)
    ids = torch.tensor([tokens(model, 12)])
    with torch.no_grad():
        prefill = model.eval()(ids).logits[0, -1]
        begun = model(ids[:, :-1], use_cache=True)
        step = model(ids[:, -1:], past_key_values=begun.past_key_values, use_cache=True).logits[0, -1]
    assert error(step, prefill) > 1e-4


def test_published_config_is_equivalent(tmp_path: Path):
    model = nemotron_h()
    path = save(model, tmp_path) / "config.json"
    ids = tokens(model, 20)
    expected = logits(tmp_path, ids)
    found = json.loads(path.read_text())
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    older = [kinds.get(each, each) for each in found.pop("layers_block_type")]
    for keys in ({"hybrid_override_pattern": "MEM*EM-", "num_hidden_layers": 7}, {"layers_block_type": older}):
        path.write_text(json.dumps({**found, **keys, "time_step_limit": [0.0, float("inf")]}))
        assert torch.equal(logits(tmp_path, ids), expected)


def test_stacked_experts_give_the_same_logits(tmp_path: Path):
    model = nemotron_h()
    path = save(model, tmp_path) / "model.safetensors"
    ids = tokens(model, 20)
    expected = logits(tmp_path, ids)
    found = load_file(path)
    for layer in (1, 4):
        for kind in ("up", "down"):
            stem = f"backbone.layers.{layer}.mixer.experts"
            found[f"{stem}.{kind}_proj"] = torch.stack([found.pop(f"{stem}.{e}.{kind}_proj.weight") for e in range(16)])
    save_file(found, path, metadata={"format": "pt"})
    assert torch.equal(logits(tmp_path, ids), expected)


@pytest.mark.parametrize("latent", [None, pytest.param(96, marks=pytest.mark.slow)])
def test_nvfp4_is_packed_and_converted(latent: int | None, tmp_path: Path):
    """Load experts as NVIDIA publishes them: separate NVFP4 tensors."""
    source = save(nemotron_h(moe_latent_size=latent), tmp_path / "hf")
    skip = ("embeddings", "lm_head", "norm", "gate.", "conv1d")
    dequantized = rewrite(source, tmp_path / "q", *FOLDERS["nvfp4"], skip=skip)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in dequantized.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    (plain / "config.json").write_bytes((source / "config.json").read_bytes())
    other = NemotronHForCausalLM.from_pretrained(plain, dtype=torch.float32)
    ids = tokens(other, 40)
    assert error(logits(tmp_path / "q", ids), transformers_logits(other, ids)) < 1e-4
    checkpoint = open_checkpoint(tmp_path / "q")
    packed = pack(checkpoint, family(checkpoint.config), tmp_path / "packed", lanes=ISA.lanes)
    assert error(logits(packed, ids), logits(tmp_path / "q", ids)) < 1e-6
    again = pack(open_checkpoint(packed), family(checkpoint.config), tmp_path / "again", lanes=ISA.lanes)
    assert error(logits(again, ids), logits(packed, ids)) == 0
    written = convert(checkpoint, family(checkpoint.config), tmp_path / "mlx", bits=8, group=32)
    assert error(logits(written, ids), logits(tmp_path / "q", ids)) < 0.06


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'; only 'relu2'"),
        ({"use_bias": True}, "use_bias True; only False"),
        ({"conv_kernel": 3}, "conv_kernel 3; only 4"),
        ({"time_step_limit": [0.1, 1.0]}, r"time_step_limit \[0.1, 1.0\]; only steps without limits"),
        ({"n_groups": 3}, "8 mamba_num_heads, which 3 n_groups cannot share"),
        ({"layers_block_type": ["mlp", "moe"]}, "block 0 in config.json is mlp and follows no block of Mamba"),
        ({"layers_block_type": ["mamba", "moe", "mlp"]}, "block 2 in config.json is mlp and follows no"),
        ({"layers_block_type": None, "hybrid_override_pattern": "MX"}, "has blocks X;"),
        ({"num_hidden_layers": 5}, "lists 7 blocks for num_hidden_layers 5"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**NemotronHConfig(**SMALL).to_dict(), **change})
