"""Llama and its relatives against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from auraflux.errors import FormatError
from auraflux.models.llama import Config
from tests.models.mlx_oracle import check_mlx, quantized
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


def qwen2(**changes: object) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, **changes))


def qwen3() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=48))


def mistral() -> MistralForCausalLM:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48}
    return MistralForCausalLM(MistralConfig(**SMALL, **heads, sliding_window=33))


def ministral3(**changes: object) -> Ministral3ForCausalLM:
    """Return a model whose query scale grows twice within the tokens of a test."""
    rope = {**YARN, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48}
    return Ministral3ForCausalLM(Ministral3Config(**{**SMALL, **heads, "rope_parameters": rope, **changes}))


def with_vision(text: Any) -> Mistral3ForConditionalGeneration:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    vision = {**sizes, "head_dim": 16, "patch_size": 14, "model_type": "pixtral"}
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return Mistral3ForConditionalGeneration(config)


VARIANTS = {
    "grouped": llama,
    "all-heads": lambda: llama(num_key_value_heads=8),
    "one-key-head": lambda: llama(num_key_value_heads=1),
    "tied": lambda: llama(tie_word_embeddings=True),
    "biased": lambda: llama(attention_bias=True),
    "llama3-rope": lambda: llama(rope_parameters=LLAMA3),
    "yarn": lambda: llama(rope_parameters=YARN),
    "qwen2": qwen2,
    "qwen2-windows": lambda: qwen2(use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3": qwen3,
    "mistral": mistral,
    "ministral3": ministral3,
    "ministral3-window": lambda: ministral3(sliding_window=70),
    "with-vision": lambda: with_vision(ministral3().config),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    torch.manual_seed(0)
    model = VARIANTS[variant]()
    check_family(model, save(model, tmp_path))


def test_llama_4_scaling_matches_mlx_lm(tmp_path: Path):
    torch.manual_seed(0)
    model = ministral3(head_dim=64)
    check_mlx(model, quantized(save(model, tmp_path / "hf"), tmp_path / "mlx", lambda config: config))


def test_llama_4_scaling_without_original_length_is_refused():
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    sizes = {**SMALL, "num_attention_heads": 4, "rms_norm_eps": 1e-6, "rope_parameters": rope}
    with pytest.raises(FormatError, match="llama_4_scaling_beta and does not say 'original_max_position_embeddings'"):
        Config.from_hf({"model_type": "ministral3", **sizes})
