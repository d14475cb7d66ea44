"""Llama and its relatives against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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
from auraflux.models.decoder import text_name
from auraflux.models.llama import Config, Model
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.models.mlx_oracle import check_mlx, quantized
from tests.models.oracles import check_family, error, loaded, logits, save, tokens, transformers_logits

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
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 21,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


# of the 150 tokens of a test, 64 are within the original context
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}


def llama(**changes: object) -> LlamaForCausalLM:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **heads, **changes}))


def qwen2(**changes: object) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, **changes))


def qwen3(**changes: object) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=48, **changes))


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
    "dynamic-rope": lambda: llama(rope_parameters=DYNAMIC, max_position_embeddings=64),
    "longrope": lambda: llama(rope_parameters=LONGROPE),
    "qwen2": qwen2,
    "qwen2-windows": lambda: qwen2(use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen2-listed-windows": lambda: qwen2(**WINDOWS),
    "qwen3": qwen3,
    "qwen3-listed-windows": lambda: qwen3(**WINDOWS, max_window_layers=1),
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


def test_listed_windows_need_use_sliding_window():
    config = {**Qwen3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2).to_dict(), **WINDOWS}
    Config.from_hf(config)
    with pytest.raises(FormatError, match="has layer_types sliding_attention and use_sliding_window false"):
        Config.from_hf({**config, "use_sliding_window": False})


def untied(folder: Path) -> LlamaForCausalLM:
    """Save a model whose config ties a head that differs from the embedding; return it as transformers loads it."""
    model = llama(hidden_size=96, tie_word_embeddings=False)
    save(model, folder)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    return LlamaForCausalLM.from_pretrained(folder)


def test_a_head_that_differs_from_a_tied_embedding_is_used(tmp_path: Path):
    torch.manual_seed(0)
    model = untied(tmp_path)
    ids, mine = tokens(model, 40), Weights(open_checkpoint(tmp_path), text_name)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert error(logits(tmp_path, ids), transformers_logits(model, ids)) < 1e-5
    Model(Config.from_hf(open_checkpoint(tmp_path).config), mine)
    assert any("lm_head differs from the embedding" in note for note in mine.notes())


def test_a_head_that_repeats_a_tied_embedding_is_not_loaded(tmp_path: Path):
    save(llama(), tmp_path)
    path = tmp_path / "model.safetensors"
    found = load_file(path)
    save_file({**found, "lm_head.weight": found["model.embed_tokens.weight"].clone()}, path, metadata={"format": "pt"})
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    model = loaded(tmp_path).model
    assert model.head is model.table


def test_quantization_takes_a_group_that_fits_or_says_so(tmp_path: Path):
    torch.manual_seed(0)
    save(llama(hidden_size=96, intermediate_size=120, num_attention_heads=6, num_key_value_heads=2), tmp_path)
    weights = Weights(open_checkpoint(tmp_path), text_name, bits=4)
    model = Model(Config.from_hf(open_checkpoint(tmp_path).config), weights)
    weights.check_loaded()
    mlp = model.layers[0].mlp
    assert (mlp.gate.bits, mlp.gate.group) == (4, 32)
    assert not hasattr(mlp.down, "bits")
    assert weights.notes() == ["3 weights are not quantized, since no group of 32 divides their widths: 120."]


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_a_cache_within_the_original_context_rotates_as_trained(rope: dict[str, Any], tmp_path: Path):
    torch.manual_seed(0)
    model = llama(rope_parameters=rope, max_position_embeddings=64 if rope is DYNAMIC else 512)
    folder = save(model, tmp_path)
    ids = tokens(model, 64)
    assert error(logits(folder, ids), transformers_logits(model, ids)) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"long_factor": None}, "'longrope' RoPE without 'long_factor'"),
        ({"short_factor": [1.0] * 7}, "has 7 values of short_factor for 8 frequencies"),
        ({"rope_type": "dynamic"}, "'dynamic' RoPE without 'factor'"),
        ({"rope_type": "axial"}, "has 'axial' RoPE; default, linear"),
    ],
)
def test_incomplete_rope_settings_are_refused(change: dict[str, Any], message: str):
    config = {**LlamaConfig(**SMALL, num_attention_heads=8).to_dict(), "rope_parameters": {**LONGROPE, **change}}
    with pytest.raises(FormatError, match=message):
        Config.from_hf(config)


def test_llama_4_scaling_without_original_length_is_refused():
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    sizes = {**SMALL, "num_attention_heads": 4, "rms_norm_eps": 1e-6, "rope_parameters": rope}
    with pytest.raises(FormatError, match="llama_4_scaling_beta and does not say 'original_max_position_embeddings'"):
        Config.from_hf({"model_type": "ministral3", **sizes})
