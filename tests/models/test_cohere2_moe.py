"""Command A+ against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cohere2MoeConfig, Cohere2MoeForCausalLM

from auraflux.errors import FormatError
from auraflux.models.cohere2_moe import Config
from tests.models.oracles import check_family, save
from tests.models.test_deepseek_v3 import sharpen_routers
from tests.models.test_qwen3_moe import check_layouts

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 64,
    "prefix_dense_intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "sliding_window": 40,
    "max_position_embeddings": 512,
    "logit_scale": 0.5,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
}


def cohere(**changes: Any) -> Any:
    torch.manual_seed(0)
    return sharpen_routers(Cohere2MoeForCausalLM(Cohere2MoeConfig(**SMALL | changes)))


VARIANTS = {
    "cohere": cohere,
    "cohere-odd": lambda: cohere(
        head_dim=18, num_attention_heads=3, num_key_value_heads=1, intermediate_size=60, num_shared_experts=0
    ),
    "cohere-sigmoid": lambda: cohere(
        expert_selection_fn="sigmoid", rms_norm_eps=1e-6, shared_expert_combination_strategy="sum", tie_word_embeddings=False
    ),
    "cohere-listed": lambda: cohere(
        first_k_dense_replace=2,
        prefix_dense_sliding_window_pattern=2,
        sliding_window_pattern=3,
        expert_selection_fn="sigmoid",
        norm_topk_prob=False,
        attention_bias=True,
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_family(model, save(model, tmp_path))


def test_every_expert_layout_gives_the_same_logits(tmp_path: Path):
    model = cohere()
    check_layouts(model, save(model, tmp_path))


def test_rules_stand_for_lists():
    listed = cohere().config.to_dict()
    ruled = {**listed, "layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 1}
    found, wanted = Config.from_hf(ruled), Config.from_hf(listed)
    assert (found.windows, found.sparse, set(found.others)) == (wanted.windows, wanted.sparse, set(wanted.others))


def test_other_scores_are_refused():
    with pytest.raises(FormatError, match="expert_selection_fn 'max'; only 'softmax' or 'sigmoid'"):
        Config.from_hf(cohere().config.to_dict() | {"expert_selection_fn": "max"})
