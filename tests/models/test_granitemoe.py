"""Granite 3 and 4 mixtures against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    GraniteMoeSWAConfig,
    GraniteMoeSWAForCausalLM,
)

from auraflux.errors import FormatError
from auraflux.models.granitemoehybrid import Config
from tests.models.oracles import check_family, save
from tests.models.test_qwen3_moe import sharpen_routers

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.5,
}
SCAN = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1}
KINDS = ["linear_attention", "full_attention", "linear_attention"]


def granite(**changes: Any) -> Any:
    torch.manual_seed(0)
    return sharpened(GraniteMoeForCausalLM(GraniteMoeConfig(**SMALL | MULTIPLIERS | changes)))


def shared(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = SMALL | MULTIPLIERS | {"shared_intermediate_size": 100}
    return sharpened(GraniteMoeSharedForCausalLM(GraniteMoeSharedConfig(**sizes | changes)))


def swash(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = SMALL | MULTIPLIERS | {"shared_intermediate_size": 100, "sliding_window": 20, "num_hidden_layers": 5}
    config = GraniteMoeSWAConfig(**sizes | changes, attn_implementation="eager")
    return sharpened(GraniteMoeSWAForCausalLM(config))


def hybrid(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = SMALL | MULTIPLIERS | SCAN | {"shared_intermediate_size": 100, "layer_types": KINDS}
    return sharpened(GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**sizes | changes)))


def sharpened(model: Any) -> Any:
    return sharpen_routers(model, "router.weight")


VARIANTS = {
    "granitemoe": granite,
    "granitemoe-odd": lambda: granite(num_attention_heads=3, num_key_value_heads=1, intermediate_size=60, rms_norm_eps=1e-3),
    "granitemoe-plain": lambda: granite(**dict.fromkeys(MULTIPLIERS, 1.0), tie_word_embeddings=True, attention_bias=True),
    "granitemoeshared": shared,
    "granitemoeshared-none": lambda: shared(shared_intermediate_size=0, num_experts_per_tok=1),
    "swash": swash,
    "swash-listed": lambda: swash(
        layer_types=["sliding_attention"] * 3 + ["full_attention"] * 2,
        layer_rope_theta=[1e4, 0, 5e5, 1e4, 0],
        shared_intermediate_size=0,
        num_key_value_heads=1,
    ),
    "hybrid": hybrid,
    "hybrid-rope-groups": lambda: hybrid(position_embedding_type="rope", mamba_n_groups=2, mamba_expand=1, mamba_d_head=12),
    "hybrid-dense": lambda: hybrid(num_local_experts=0, mamba_conv_bias=False),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_family(model, save(model, tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'; only 'rope' or 'nope'"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias"),
        ({"mamba_d_head": 7}, "8 Mamba heads of 7 channels in 1 groups, which do not make 192"),
        ({"time_step_limit": [0.1, 2.0]}, "only steps without limits"),
        ({"layer_types": ["mamba", "moe", "mamba"]}, "layer_types moe; mamba and attention"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], message: str):
    config = hybrid().config.to_dict() | {"layer_types": ["mamba", "attention", "mamba"]}
    with pytest.raises(FormatError, match=message):
        Config.from_hf(config | changes)
