"""Gemma 3 against transformers and mlx-lm."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.errors import FormatError
from auraflux.models.gemma3_text import Config, make_caches
from tests.models.mlx_oracle import check_mlx, quantized
from tests.models.oracles import agreement, check_family, error, loaded, logits, save, tokens, transformers_logits
from tests.weights.embedding_models import gemma as embedding_model
from tests.weights.embedding_models import hidden_states

SLIDING, FULL = "sliding_attention", "full_attention"
SMALL = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "query_pre_attn_scalar": 32,
    "sliding_window": 20,
    "sliding_window_pattern": 2,
}
LINEAR = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 5000.0},
}


def gemma(**changes: Any) -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**{**SMALL, **changes}))
    with torch.no_grad():
        # layer outputs have the scale of their norm weights; the embedding must not vanish among them
        model.model.embed_tokens.weight.mul_(8)
    return model


VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "five-to-one": {"num_hidden_layers": 7, "sliding_window_pattern": 6, "sliding_window": 33},
    "full-first": {"layer_types": [FULL, SLIDING, SLIDING, FULL], "sliding_window": 64},
    "linear-rope": {"rope_parameters": LINEAR},
    "odd-heads": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 48, "attention_bias": True},
    "capped-logits": {"final_logit_softcapping": 3.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = gemma(**VARIANTS[variant])
    check_family(model, save(model, tmp_path))


def test_attention_logits_are_capped(tmp_path: Path):
    model = gemma(attn_logit_softcapping=0.5, attn_implementation="eager")
    save(model, tmp_path)
    ids = tokens(model)
    with torch.no_grad():
        # transformers takes the cap as an argument
        expected = model.eval()(torch.tensor([ids]), softcap=0.5).logits[0]
    assert error(logits(tmp_path, ids), expected) < 2e-4
    assert error(logits(tmp_path, ids, kv="k8v8"), expected) < 0.02
    assert error(expected, transformers_logits(model, ids)) > 1e-3


def with_vision() -> Gemma3ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = SiglipVisionConfig(**sizes, image_size=16, patch_size=8)
    text = Gemma3TextConfig(**SMALL)
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))


def test_vision_tower_is_skipped(tmp_path: Path):
    model = with_vision()
    save(model, tmp_path)
    ids = tokens(model)
    assert error(logits(tmp_path, ids), transformers_logits(model, ids)) < 2e-4


def legacy_config(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite RoPE and layer settings in the keys used before transformers 5, which mlx-lm reads."""
    if "text_config" in config:
        return {**config, "text_config": legacy_config(config["text_config"]), "vocab_size": SMALL["vocab_size"]}
    rope = config.pop("rope_parameters")
    config.pop("layer_types")
    scaling = {k: v for k, v in rope[FULL].items() if k != "rope_theta"}
    return {
        **config,
        "rope_theta": rope[FULL]["rope_theta"],
        "rope_local_base_freq": rope[SLIDING]["rope_theta"],
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
    }


MLX_VARIANTS = {
    "tied": gemma,
    "linear-rope": lambda: gemma(rope_parameters=LINEAR, tie_word_embeddings=False),
    "with-vision": with_vision,
}


@pytest.mark.parametrize("variant", MLX_VARIANTS)
def test_logits_match_mlx_lm(variant: str, tmp_path: Path):
    model = MLX_VARIANTS[variant]()
    folder = quantized(save(model, tmp_path / "hf"), tmp_path / "mlx", legacy_config)
    check_mlx(model, folder)


def test_legacy_config_is_equivalent(tmp_path: Path):
    model = gemma(rope_parameters=LINEAR)
    save(model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(legacy_config(json.loads(path.read_text()))))
    ids = tokens(model)
    assert error(logits(tmp_path, ids), transformers_logits(model, ids)) < 2e-4


def test_weights_are_quantized_while_loading(tmp_path: Path):
    model = gemma()
    save(model, tmp_path)
    ids = tokens(model)
    expected = transformers_logits(model, ids)
    assert error(logits(tmp_path, ids, bits=8), expected) < 0.05
    found = logits(tmp_path, ids, bits=4)
    assert error(found, expected) < 0.35
    assert agreement(found, expected) > 0.9


@pytest.mark.parametrize("changes", [{}, {"head_dim": 16, "num_key_value_heads": 3, "sliding_window": 6}])
def test_bidirectional_attention_matches_transformers(changes: dict[str, Any], tmp_path: Path):
    embedding_model(**changes).save_pretrained(tmp_path)
    mine, generator = loaded(tmp_path), torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 700, (count,), generator=generator).tolist() for count in (1, 5, 90, 150)]
    # a step longer than a chunk
    engine = Engine(*mine, CacheSettings("none"), context=200, sequences=4, chunk=64, exact=True)
    found = engine.prefill([engine.cache.open() for _ in prompts], prompts, hidden=True)
    each = found.split([len(prompt) for prompt in prompts])
    for ours, theirs in zip(each, hidden_states(tmp_path, prompts), strict=True):
        assert error(ours, theirs) < 1e-5
    alone = engine.prefill([engine.cache.open()], prompts[2:3], hidden=True)
    torch.testing.assert_close(alone, each[2], atol=1e-5, rtol=1e-5)


def test_missing_config_keys_default_as_in_transformers():
    """Check the text_config of google/gemma-3-4b-it."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    ours = Config.from_hf({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}})
    theirs = Gemma3TextConfig(**text)
    assert ours.vocab == theirs.vocab_size
    assert (ours.heads, ours.kv_heads, ours.head_width) == (8, 4, 256)
    assert (ours.eps, ours.scale, ours.tied) == (theirs.rms_norm_eps, theirs.query_pre_attn_scalar**-0.5, True)
    assert list(ours.kinds) == theirs.layer_types
    assert [shape.window for shape in make_caches(ours)[4:7]] == [1024, None, 1024]
    for kind, first in ((FULL, 1 / 8), (SLIDING, 1.0)):
        assert ours.rotations[kind].frequencies[0] == first
    slow = [float(ours.rotations[kind].frequencies[64]) for kind in (FULL, SLIDING)]
    assert slow == pytest.approx([1e6**-0.5 / 8, 1e4**-0.5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types chunked_attention"),
        ({"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"use_bidirectional_attention": True, "attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**Gemma3TextConfig(**SMALL).to_dict(), **change})
