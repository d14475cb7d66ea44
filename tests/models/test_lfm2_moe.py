"""LFM2 mixtures against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

from auraflux.errors import FormatError
from auraflux.models.lfm2_moe import Config
from tests.models.oracles import check_family, save
from tests.models.test_qwen3_moe import check_layouts, scale_embeddings

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "num_dense_layers": 1,
    "max_position_embeddings": 512,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}


def lfm2(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = Lfm2MoeForCausalLM(Lfm2MoeConfig(**SMALL | changes))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("feed_forward.gate.weight"):
                # initialised with zeros
                tensor.normal_(std=0.2)
            if name.endswith("expert_bias"):
                tensor.uniform_(0, 0.2)
            if name.endswith("conv.conv.weight"):
                tensor.mul_(2)
    return scale_embeddings(model)


VARIANTS = {
    "lfm2": lfm2,
    "lfm2-odd": lambda: lfm2(
        num_attention_heads=4, moe_intermediate_size=60, num_experts_per_tok=1, conv_L_cache=4, conv_bias=True
    ),
    "lfm2-no-bias": lambda: lfm2(
        use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=1.5, tie_word_embeddings=False, conv_L_cache=2
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_family(model, save(model, tmp_path))


def test_every_expert_layout_gives_the_same_logits(tmp_path: Path):
    model = lfm2()
    check_layouts(model, save(model, tmp_path))


def test_longer_convolutions_are_refused():
    with pytest.raises(FormatError, match="a convolution over 5 tokens; up to 4 are supported"):
        Config.from_hf(lfm2().config.to_dict() | {"conv_L_cache": 5})
