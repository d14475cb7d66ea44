"""Phi-3.5-MoE against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PhimoeConfig, PhimoeForCausalLM

from auraflux.errors import FormatError
from auraflux.models.phimoe import Config
from tests.models.oracles import check_family, error, logits, save, tokens, transformers_logits
from tests.models.test_qwen3_moe import check_layouts, scale_embeddings

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_local_experts": 7,
    "max_position_embeddings": 512,
    "eos_token_id": None,
}
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [2.0 + 0.7 * i for i in range(8)]
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG}
LONGROPE |= {"short_mscale": 1.24, "long_mscale": 1.31, "original_max_position_embeddings": 256}


def phimoe(**changes: Any) -> Any:
    torch.manual_seed(0)
    return scale_embeddings(PhimoeForCausalLM(PhimoeConfig(**SMALL | changes)))


VARIANTS: dict[str, dict[str, Any]] = {
    "phimoe": {"attention_bias": True, "lm_head_bias": True, "rope_parameters": LONGROPE},
    "phimoe-odd": {"hidden_size": 108, "num_key_value_heads": 1, "intermediate_size": 60, "router_jitter_noise": 0.4},
    "phimoe-window": {"sliding_window": 40, "tie_word_embeddings": True, "router_jitter_noise": 0.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = phimoe(**VARIANTS[variant])
    check_family(model, save(model, tmp_path))


def test_caches_beyond_the_original_context_take_the_long_factors(tmp_path: Path):
    """transformers takes the long scale and the short factors there; Microsoft's code takes both, as it does here."""
    given = {**LONGROPE, "original_max_position_embeddings": 32}
    model = phimoe(rope_parameters={**given, "short_factor": LONG, "short_mscale": given["long_mscale"]})
    ids = tokens(model, 100)
    save(model, tmp_path)
    expected = transformers_logits(model, ids)
    model.config.rope_parameters = given
    model.config.save_pretrained(tmp_path)
    assert error(logits(tmp_path, ids), expected) < 1e-5


def test_every_expert_layout_gives_the_same_logits(tmp_path: Path):
    model = phimoe()
    check_layouts(model, save(model, tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 3}, "num_experts_per_tok 3; only 2"),
        ({"rope_parameters": {**LONGROPE, "rope_type": "yarn", "factor": 4.0}}, "'yarn' RoPE; 'default' and 'longrope'"),
        ({"rope_parameters": {**LONGROPE, "long_mscale": None}}, "long_mscale"),
    ],
)
def test_what_differs_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf(phimoe().config.to_dict() | changes)
