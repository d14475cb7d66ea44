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

from auraflux.errors import FormatError
from auraflux.models.gemma3_text import Config, make_caches
from tests.models.mlx_oracle import check_mlx, quantized
from tests.models.oracles import agreement, check_family, error, save, scores, tokens, truth

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
        # what layers give has the size of their norms' weights; a token must be heard among them
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
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path):
    model = gemma(**VARIANTS[variant])
    check_family(model, save(model, tmp_path))


def test_scores_are_capped(tmp_path: Path):
    model = gemma(attn_logit_softcapping=0.5, attn_implementation="eager")
    save(model, tmp_path)
    ids = tokens(model)
    with torch.no_grad():
        # transformers leaves it to the caller to pass the cap on
        wanted = model.eval()(torch.tensor([ids]), softcap=0.5).logits[0]
    assert error(scores(tmp_path, ids), wanted) < 2e-4
    assert error(wanted, truth(model, ids)) > 1e-3


def with_vision() -> Gemma3ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = SiglipVisionConfig(**sizes, image_size=16, patch_size=8)
    text = Gemma3TextConfig(**SMALL)
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))


def test_vision_is_left_out(tmp_path: Path):
    model = with_vision()
    save(model, tmp_path)
    ids = tokens(model)
    assert error(scores(tmp_path, ids), truth(model, ids)) < 2e-4


def in_older_words(config: dict[str, Any]) -> dict[str, Any]:
    """Say rotation and layers as config files did before transformers 5, and as mlx-lm reads them."""
    if "text_config" in config:
        return {**config, "text_config": in_older_words(config["text_config"]), "vocab_size": SMALL["vocab_size"]}
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
def test_logits_are_those_of_mlx_lm(variant: str, tmp_path: Path):
    model = MLX_VARIANTS[variant]()
    folder = quantized(save(model, tmp_path / "hf"), tmp_path / "mlx", in_older_words)
    check_mlx(model, folder)


def test_older_words_mean_the_same(tmp_path: Path):
    model = gemma(rope_parameters=LINEAR)
    save(model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(in_older_words(json.loads(path.read_text()))))
    ids = tokens(model)
    assert error(scores(tmp_path, ids), truth(model, ids)) < 2e-4


def test_weights_are_rounded_on_the_way(tmp_path: Path):
    model = gemma()
    save(model, tmp_path)
    ids = tokens(model)
    wanted = truth(model, ids)
    assert error(scores(tmp_path, ids, bits=8), wanted) < 0.05
    found = scores(tmp_path, ids, bits=4)
    assert error(found, wanted) < 0.35
    assert agreement(found, wanted) > 0.9


def test_what_a_config_leaves_out_is_transformers_default():
    """The text_config of google/gemma-3-4b-it."""
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
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ],
)
def test_configs_that_cannot_be_honoured_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**Gemma3TextConfig(**SMALL).to_dict(), **change})
