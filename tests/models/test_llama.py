"""Llama and its relatives against transformers."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.models.oracles import check_family, save

SMALL = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def llama(**changes: object) -> LlamaForCausalLM:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **heads, **changes}))


def qwen2() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**SMALL, num_attention_heads=4, num_key_value_heads=2))


def qwen3() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=48))


VARIANTS = {
    "grouped": llama,
    "all-heads": lambda: llama(num_key_value_heads=8),
    "one-key-head": lambda: llama(num_key_value_heads=1),
    "tied": lambda: llama(tie_word_embeddings=True),
    "biased": lambda: llama(attention_bias=True),
    "llama3-rope": lambda: llama(rope_parameters=LLAMA3),
    "yarn": lambda: llama(rope_parameters=YARN),
    "qwen2": qwen2,
    "qwen3": qwen3,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path):
    torch.manual_seed(0)
    model = VARIANTS[variant]()
    check_family(model, save(model, tmp_path))
