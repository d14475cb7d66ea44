"""Kimi Linear (delta attention with per-channel decay) against transformers and mlx-lm."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from auraflux.errors import FormatError
from auraflux.models.kimi_linear import Config
from tests.models.mlx_oracle import check_mlx, quantized
from tests.models.oracles import check_family, logits, save, tokens
from tests.models.test_deepseek_v3 import sharpen_routers

DELTA, ATTENTION = "linear_attention", "full_attention"
SMALL = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "layer_types": [DELTA, ATTENTION, DELTA],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "linear_num_heads": 3,
    "linear_head_dim": 32,
    "model_max_length": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def kimi_linear(**changes: Any) -> KimiLinearForCausalLM:
    """Return a model whose recurrent states decay over several tokens."""
    torch.manual_seed(0)
    model = sharpen_routers(KimiLinearForCausalLM(KimiLinearConfig(**{**SMALL, **changes})))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("A_log"):
                tensor.uniform_(-1.5, 0.5)
            if name.endswith("dt_bias"):
                tensor.uniform_(-4, 1)
    return model


VARIANTS: dict[str, dict[str, Any]] = {
    "small": {},
    "groups": {"num_expert_group": 4, "topk_group": 2},
    "query-rank": {"q_lora_rank": 48, "num_shared_experts": 2},
    "odd-heads": {"linear_num_heads": 5, "linear_head_dim": 20, "moe_renormalize": False},
    "dense": {"layer_types": [ATTENTION, DELTA, DELTA], "mlp_layer_types": ["dense"] * 3},
}


@pytest.mark.parametrize("variant", [pytest.param(v, marks=[pytest.mark.slow] if v != "small" else []) for v in VARIANTS])
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = kimi_linear(**VARIANTS[variant])
    check_family(model, save(model, tmp_path))


def as_published(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a transformers config in the keys that Moonshot publishes."""
    kinds = config.pop("layer_types")
    numbers = {kind: [i + 1 for i, each in enumerate(kinds) if each == kind] for kind in (DELTA, ATTENTION)}
    linear = {"num_heads": config.pop("linear_num_heads"), "head_dim": config.pop("linear_head_dim")}
    linear |= {"short_conv_kernel_size": 4, "kda_layers": numbers[DELTA], "full_attn_layers": numbers[ATTENTION]}
    gone = ("mlp_layer_types", "linear_conv_kernel_dim", "qk_head_dim")
    published = {key: value for key, value in config.items() if key not in gone}
    extra_keys = {
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "rope_theta": 10000.0,
    }
    return {**published, **extra_keys, "linear_attn_config": linear, "mla_use_nope": True, "use_grouped_topk": True}


def test_published_config_is_equivalent(tmp_path: Path):
    model = kimi_linear()
    path = save(model, tmp_path) / "config.json"
    ids = tokens(model, 20)
    expected = logits(tmp_path, ids)
    path.write_text(json.dumps(as_published(json.loads(path.read_text()))))
    assert torch.equal(logits(tmp_path, ids), expected)


@pytest.mark.slow
def test_logits_match_mlx_lm(tmp_path: Path):
    model = kimi_linear(linear_head_dim=64)
    path = save(model, tmp_path / "hf") / "model.safetensors"
    # transformers saves the first layer's MLP under the name of the MoE block
    found = {name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): tensor for name, tensor in load_file(path).items()}
    save_file(found, path, metadata={"format": "pt"})
    check_mlx(model, quantized(path.parent, tmp_path / "mlx", as_published))


LINEAR = {"num_heads": 3, "head_dim": 32, "full_attn_layers": [2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope False; only True"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'; only 'sigmoid'"),
        ({"linear_conv_kernel_dim": 3}, "a convolution over 3 tokens; only 4"),
        ({"layer_types": None, "linear_attn_config": LINEAR}, "linear_attn_config has no kda_layers; a list"),
        ({"layer_types": None, "linear_attn_config": {**LINEAR, "kda_layers": [1, 4]}}, "not those of num_hidden_layers 3"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**KimiLinearConfig(**SMALL).to_dict(), **change})
