"""Laguna against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LagunaConfig, LagunaForCausalLM

from auraflux.errors import FormatError
from auraflux.models.laguna import Config
from tests.models.oracles import check_family, save
from tests.models.test_afmoe import EXPERTS, SHARED
from tests.models.test_deepseek_v3 import sharpen_routers
from tests.models.test_qwen3_moe import check_layouts, scale_embeddings

SLIDING, FULL = "sliding_attention", "full_attention"
LISTED = {"layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING], "num_attention_heads_per_layer": [4, 6, 2, 4, 6]}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}


def laguna(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SHARED, **EXPERTS, **LISTED, "shared_expert_intermediate_size": 44, "pad_token_id": None}
    return scale_embeddings(sharpen_routers(LagunaForCausalLM(LagunaConfig(**{**sizes, **changes}))))


VARIANTS = {
    "laguna": laguna,
    "laguna-elements": lambda: laguna(gating="per-element", num_key_value_heads=1, moe_routed_scaling_factor=2.5),
    "laguna-odd": lambda: laguna(
        head_dim=20,
        num_key_value_heads=1,
        num_attention_heads_per_layer=[3, 1, 5, 3, 1],
        gating="per-head",
        moe_intermediate_size=60,
    ),
    "laguna-yarn": lambda: laguna(
        gating="per-head",
        rope_parameters={FULL: {**YARN, "partial_rotary_factor": 0.25}, SLIDING: {"rope_theta": 1e3}},
        mlp_layer_types=["sparse", "dense", "dense", "sparse", "sparse"],
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_family(model, save(model, tmp_path))


def test_every_expert_layout_gives_the_same_logits(tmp_path: Path):
    model = laguna()
    check_layouts(model, save(model, tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping, which is not supported"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input True; only False"),
        ({"gating": False}, "gating False; only True or 'per-head' or 'per-element'"),
        ({"num_attention_heads_per_layer": [4, 6, 3, 4, 6]}, r"query heads \[4, 6, 3, 4, 6\] for 5 layers of 2 key heads"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str):
    sizes = {**SHARED, **EXPERTS, **LISTED, "model_type": "laguna", "rms_norm_eps": 1e-6}
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**sizes, **change})
