"""FlexOlmo against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import FlexOlmoConfig, FlexOlmoForCausalLM

from tests.models.oracles import check_family, save
from tests.models.test_deepseek_v3 import sharpen_routers
from tests.models.test_qwen3_moe import check_layouts

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_experts": 7,
    "num_experts_per_tok": 5,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "eos_token_id": None,
}


def flex_olmo(**changes: Any) -> Any:
    torch.manual_seed(0)
    return sharpen_routers(FlexOlmoForCausalLM(FlexOlmoConfig(**SMALL | changes)))


VARIANTS = {
    "flex-olmo": {},
    "flex-olmo-odd": {"hidden_size": 108, "num_key_value_heads": 3, "intermediate_size": 60, "num_experts_per_tok": 2},
    "flex-olmo-normalised": {"norm_topk_prob": True, "tie_word_embeddings": True, "num_key_value_heads": 6},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = flex_olmo(**VARIANTS[variant])
    # routers read the residual stream without a norm: the error of an 8-bit cache changes experts of the others
    check_family(model, save(model, tmp_path), quantizes=variant == "flex-olmo")


def test_every_expert_layout_gives_the_same_logits(tmp_path: Path):
    model = flex_olmo()
    check_layouts(model, save(model, tmp_path))
