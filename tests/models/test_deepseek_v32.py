"""DeepSeek V3.2 and GLM 5 with sparse attention (DSA) against transformers and mlx-lm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from auraflux.errors import FormatError
from auraflux.models.deepseek_v32 import Config, Model
from tests.models.mlx_oracle import check_mlx, legacy_config, quantized
from tests.models.oracles import agreement, error, logits, save, tokens, transformers_logits
from tests.models.test_deepseek_v3 import SMALL, YARN, rewrite, sharpen_routers

# with few heads many scores are 0, and the order of ties is undefined
INDEX = {"index_n_heads": 12, "index_head_dim": 32, "index_topk": 40}


def sharpen_indexers(model: Any) -> Any:
    """Widen the margins of a model's indexers, so that token selection affects the logits."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "indexer.w" in name:
                tensor.normal_(0, 0.3)
    return sharpen_routers(model)


def deepseek(**changes: Any) -> DeepseekV32ForCausalLM:
    torch.manual_seed(0)
    return sharpen_indexers(DeepseekV32ForCausalLM(DeepseekV32Config(**{**SMALL, **INDEX, **changes})))


def glm(**changes: Any) -> GlmMoeDsaForCausalLM:
    torch.manual_seed(0)
    one = {"n_group": 1, "topk_group": 1}
    return sharpen_indexers(GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**{**SMALL, **INDEX, **one, **changes})))


def glm_shared() -> GlmMoeDsaForCausalLM:
    """Return a model whose second layer reuses the token selection of the first."""
    return glm(indexer_types=["full", "shared", "full"])


MODELS: dict[str, Any] = {
    "deepseek_v32": deepseek,
    "yarn": lambda: deepseek(rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "odd": lambda: deepseek(index_n_heads=11, index_head_dim=20, index_topk=7, attention_bias=True),
    "one-position": lambda: deepseek(index_topk=1),
    "all-positions": lambda: deepseek(index_topk=500),
    "glm_moe_dsa": glm,
    "glm_moe_dsa-shared": glm_shared,
}
QUICK = {"deepseek_v32", "glm_moe_dsa-shared"}
# largest error of a quantized KV cache: with few selected tokens, a different selection weighs more
COSTS = {"odd": 0.05, "one-position": 0.15}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in MODELS])
def test_logits_match_transformers(name: str, tmp_path: Path):
    model = MODELS[name]()
    save(model, tmp_path)
    ids = tokens(model)
    expected = transformers_logits(model, ids)
    for chunk in (512, 37, 1):
        assert error(logits(tmp_path, ids, chunk=chunk), expected) < 2e-4
    quantized_kv = logits(tmp_path, ids, kv="k8v8")
    assert error(quantized_kv, expected) < COSTS.get(name, 0.02)
    assert agreement(quantized_kv, expected) >= 0.99


def test_token_selection_changes_the_logits(tmp_path: Path):
    """Check that dense attention gives other logits from the first token on that has more than `index_topk` positions."""
    model = deepseek()
    save(model, tmp_path)
    ids = tokens(model, 60)
    expected = logits(tmp_path, ids)
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors"), index_topk=500)
    found = logits(tmp_path, ids)
    assert torch.equal(found[:40], expected[:40])
    assert error(found[40:], expected[40:]) > 0.01


# keys of published configs that transformers drops
PUBLISHED_KEYS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


def as_published(config: dict[str, Any]) -> dict[str, Any]:
    return {**PUBLISHED_KEYS, **legacy_config(config)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_logits_match_mlx_lm(name: str, tmp_path: Path):
    model = MODELS[name]()
    keys = {"deepseek_v32": as_published, "glm_moe_dsa": lambda config: {**PUBLISHED_KEYS, **config}}[name]
    check_mlx(model, quantized(save(model, tmp_path / "hf"), tmp_path / "mlx", keys))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_topk": None}, "has no 'index_topk'"),
        ({"q_lora_rank": None}, "has no 'q_lora_rank', which the indexer reads"),
        ({"index_head_dim": 8}, "index_head_dim 8, of which qk_rope_head_dim 16 are to be rotated"),
        ({"indexer_types": ["shared", "full", "full"]}, "the first must have its own"),
        ({"index_topk_pattern": "FS"}, "names 2 indexers for num_hidden_layers 3"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**DeepseekV32Config(**SMALL, **INDEX).to_dict(), **change})


def test_indexer_layers_are_parsed_from_three_config_keys():
    plain = DeepseekV32Config(**SMALL, **INDEX).to_dict()
    ways = {"indexer_types": ["full", "full", "shared"]}, {"index_topk_pattern": "FFS"}, {"index_topk_freq": 2}
    assert {Config.from_hf({**plain, **way}).index.layers for way in ways} == {(True, True, False)}


def test_pipeline_parallelism_needs_an_indexer_in_every_layer():
    plain = DeepseekV32Config(**SMALL, **INDEX).to_dict()
    shared = Config.from_hf({**plain, "indexer_types": ["full", "shared", "full"]})
    assert Model.no_pipeline_parallel(Config.from_hf(plain)) is None
    assert Model.no_pipeline_parallel(shared) == "some layers attend to positions that earlier layers select."
