"""Llama 4's text model against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration, Llama4TextConfig

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.errors import FormatError, SettingsError
from auraflux.models.llama4_text import Config
from tests.models.oracles import check_family, error, loaded, logits, save, tokens, transformers_logits
from tests.models.test_qwen3_moe import sharpen_routers

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 64,
    "intermediate_size_mlp": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 7,
    "attention_chunk_size": 64,
    "floor_scale": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "pad_token_id": None,
}
SCOUT = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "original_max_position_embeddings": 64}
SCOUT |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}


def llama4(**changes: Any) -> Any:
    torch.manual_seed(0)
    return sharpen_routers(Llama4ForCausalLM(Llama4TextConfig(**SMALL | changes)), "router.weight")


VARIANTS: dict[str, dict[str, Any]] = {
    "scout": {"rope_parameters": SCOUT},
    "maverick": {"interleave_moe_layer_step": 2, "use_qk_norm": False, "no_rope_layer_interval": 2, "floor_scale": 9},
    "odd": {"head_dim": 18, "num_attention_heads": 3, "num_key_value_heads": 1, "num_experts_per_tok": 3, "moe_layers": [0, 3]},
    "listed": {
        "no_rope_layers": [0, 1, 0, 1],
        "layer_types": ["chunked_attention", "full_attention", "full_attention", "chunked_attention"],
        "attn_temperature_tuning": False,
        "attention_chunk_size": 128,
        "attention_bias": True,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = llama4(**VARIANTS[variant])
    check_family(model, save(model, tmp_path))


def test_experts_of_either_layout_give_the_same_logits(tmp_path: Path):
    """Hidden width and twice the inner width are equal here: the shape does not tell which is which."""
    model = llama4(intermediate_size=48)
    ids = tokens(model, 40)
    assert error(logits(save(model, tmp_path), ids), transformers_logits(model, ids)) < 1e-5


def test_sequences_of_a_batch_are_in_chunks_of_their_own(tmp_path: Path):
    """Three sequences decode together from both sides of a chunk's end, quantized and not."""
    model = llama4()
    mine, ids = loaded(save(model, tmp_path)), tokens(model, 150)
    for kv, most in (("none", 1e-5), ("k8v4", 0.0)):
        engine = Engine(mine.model, mine.shapes, CacheSettings(kv), context=200, sequences=4, chunk=50, exact=True)
        alone = engine.all_logits(engine.cache.open(), ids)
        if kv == "none":
            assert error(alone, transformers_logits(model, ids)) < 1e-5
        sequences, lengths = [engine.cache.open() for _ in range(3)], (20, 61, 126)
        engine.all_logits(sequences[0], ids[:20])
        engine.all_logits(sequences[1], ids[:61])
        engine.all_logits(sequences[2], ids[:126])
        batch = engine.decode_batch(sequences)
        for step in range(8):
            found = engine.decode(batch, [ids[length + step] for length in lengths])
            expected = torch.stack([alone[length + step] for length in lengths])
            assert error(found, expected) <= max(most, 1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_chunk_size": None}, "has layers with chunked_attention and no attention_chunk_size"),
        ({"no_rope_layers": [1, 0]}, "lists 2 no_rope_layers for num_hidden_layers 4"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "scales queries by 1.13863, not by 1"),
    ],
)
def test_other_attention_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf(llama4().config.to_dict() | changes)


def test_chunks_hold_whole_pages(tmp_path: Path):
    mine = loaded(save(llama4(attention_chunk_size=48), tmp_path))
    with pytest.raises(SettingsError, match="chunks of 48 tokens does not fit pages of 64: give a divisor of 48"):
        Engine(mine.model, mine.shapes, CacheSettings("none"), context=100)


def test_the_text_part_of_a_model_that_sees(tmp_path: Path):
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    vision |= {"patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    text = SMALL | {"rope_parameters": SCOUT}
    config = Llama4Config(text_config=text, vision_config=vision, boi_token_index=0, eoi_token_index=1, image_token_index=2)
    model = sharpen_routers(Llama4ForConditionalGeneration(config), "router.weight")
    ids = [3 + token % 200 for token in range(90)]
    assert error(logits(save(model, tmp_path), ids), transformers_logits(model, ids)) < 1e-5
