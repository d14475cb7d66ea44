"""MiniMax-Text-01 (lightning attention) against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MiniMaxConfig, MiniMaxForCausalLM

from auraflux.errors import FormatError
from auraflux.models.minimax import Config
from tests.models.oracles import check_family, save
from tests.models.test_deepseek_v3 import sharpen_routers
from tests.models.test_qwen3_moe import check_layouts

LIGHTNING, ATTENTION = "linear_attention", "full_attention"
SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 7,
    "block_size": 32,
    "max_position_embeddings": 512,
    "full_attn_alpha_factor": 1.5,
    "linear_attn_alpha_factor": 2.5,
    "linear_attn_beta_factor": 0.75,
    "mlp_alpha_factor": 1.25,
}


def minimax(**changes: Any) -> Any:
    torch.manual_seed(0)
    return sharpen_routers(MiniMaxForCausalLM(MiniMaxConfig(**SMALL | changes)))


VARIANTS: dict[str, dict[str, Any]] = {
    "minimax": {},
    "minimax-odd": {"head_dim": 18, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 60},
    "minimax-listed": {
        "layer_types": [LIGHTNING, LIGHTNING, ATTENTION, LIGHTNING],
        "sliding_window": 40,
        "full_attn_beta_factor": 0.5,
        "mlp_beta_factor": 2,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = minimax(**VARIANTS[variant])
    check_family(model, save(model, tmp_path))


def test_every_expert_layout_gives_the_same_logits(tmp_path: Path):
    model = minimax()
    check_layouts(model, save(model, tmp_path))


def test_some_channels_rotate_where_a_file_says_so():
    found = Config.from_hf({**minimax().config.to_dict(), "rotary_dim": 16})
    assert len(found.rotation.frequencies) == 8


def test_one_layer_is_refused():
    with pytest.raises(FormatError, match="has 1 layer; the rates of fading need two or more"):
        Config.from_hf({**minimax().config.to_dict(), "num_hidden_layers": 1, "layer_types": [LIGHTNING]})
