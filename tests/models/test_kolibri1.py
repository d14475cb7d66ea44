"""Kolibri 1 against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Kolibri1Config, Kolibri1ForCausalLM

from tests.models.oracles import check_family, save
from tests.models.test_afmoe import EXPERTS, SHARED
from tests.models.test_deepseek_v3 import sharpen_routers
from tests.models.test_qwen3_moe import check_layouts, scale_embeddings

SIZES = {**{key: value for key, value in SHARED.items() if key != "intermediate_size"}, **EXPERTS}


def kolibri(**changes: Any) -> Any:
    torch.manual_seed(0)
    ends = {"shared_expert_intermediate_size": 56, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
    model = Kolibri1ForCausalLM(Kolibri1Config(**SIZES | ends | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "post_self_attn" in name or "post_mlp" in name:
                # embeddings, which decide most top tokens, are not lost among the layers' outputs
                parameter.sub_(0.9)
    return scale_embeddings(sharpen_routers(model))


VARIANTS = {
    "kolibri": kolibri,
    "kolibri-odd": lambda: kolibri(head_dim=18, num_attention_heads=3, num_key_value_heads=1, moe_intermediate_size=60),
    "kolibri-listed": lambda: kolibri(
        layer_types=["full_attention", *["sliding_attention"] * 4], norm_topk_prob=True, tie_word_embeddings=True
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_family(model, save(model, tmp_path))


def test_every_expert_layout_gives_the_same_logits(tmp_path: Path):
    model = kolibri()
    check_layouts(model, save(model, tmp_path))
