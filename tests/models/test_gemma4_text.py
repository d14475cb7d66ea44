"""Gemma 4 against transformers and mlx-lm."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
)

from auraflux.cache import CacheSettings
from auraflux.engine.calibrate import calibrate_keys
from auraflux.engine.engine import Engine
from auraflux.errors import FormatError
from auraflux.models import gemma4_text
from auraflux.models.gemma4_text import Config, make_caches
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.models.mlx_oracle import check_mlx, quantized
from tests.models.oracles import agreement, check_family, error, logits, save, tokens, transformers_logits
from tests.models.test_deepseek_v3 import rewrite

SLIDING, FULL = "sliding_attention", "full_attention"
SMALL = {
    "vocab_size": 259,
    "vocab_size_per_layer_input": 259,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "layer_types": [SLIDING, FULL] * 2,
    "sliding_window": 20,
    "max_position_embeddings": 512,
    "num_experts": 9,
    "top_k_experts": 3,
    "moe_intermediate_size": 64,
}
MIXTURE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True}
SMALL_VARIANT = {
    "hidden_size_per_layer_input": 64,
    "num_hidden_layers": 7,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}


def randomize_scales(model: Any) -> Any:
    """Scale embeddings, attention and layer scalars so that every part affects the logits."""
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("layer_scalar"):
                tensor.uniform_(0.5, 1.2)
            if name.endswith("q_norm.weight"):
                tensor.mul_(0.2)
            if name.endswith("router.proj.weight"):
                tensor.mul_(40)
            if name.endswith("per_expert_scale"):
                tensor.uniform_(0.5, 1.5)
    return model


def gemma4(**changes: Any) -> Gemma4ForCausalLM:
    torch.manual_seed(0)
    return randomize_scales(Gemma4ForCausalLM(Gemma4TextConfig(**{**SMALL, **changes})))


def mixture(**changes: Any) -> Gemma4ForCausalLM:
    return gemma4(**{**MIXTURE, **changes})


def small_gemma4(**changes: Any) -> Gemma4ForCausalLM:
    return gemma4(**{**SMALL_VARIANT, **changes})


VARIANTS = {
    "dense": lambda: gemma4(tie_word_embeddings=False),
    "keys-as-values": lambda: gemma4(attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=3.0),
    "mixture": mixture,
    "small_gemma4": small_gemma4,
    "odd-heads": lambda: small_gemma4(num_attention_heads=3, num_key_value_heads=1, head_dim=48, global_head_dim=80),
    "all-sliding-but-the-last": lambda: gemma4(layer_types=[SLIDING] * 3 + [FULL], sliding_window=33),
}
QUICK = "mixture", "small_gemma4"
SLOW = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]


@pytest.mark.parametrize("variant", SLOW)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    folder = save(model, tmp_path)
    check_family(model, folder)
    ids = tokens(model, 40)
    assert error(logits(folder, ids), transformers_logits(model, ids)) < 1e-5


def with_towers() -> Gemma4ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 8, "position_embedding_size": 16}
    audio = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32}
    text = Gemma4TextConfig(**{**SMALL, **SMALL_VARIANT})
    return randomize_scales(
        Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision, audio_config=audio))
    )


@pytest.mark.slow
def test_towers_are_skipped(tmp_path: Path):
    model = with_towers()
    folder, ids = save(model, tmp_path), tokens(model, 60)
    assert error(logits(folder, ids), transformers_logits(model, ids)) < 1e-5


def for_mlx(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite the layer widths in the keys of Google's files."""
    if "text_config" in config:
        return {**config, "text_config": for_mlx(config["text_config"])}
    config.pop("per_layer_config")
    return {**config, "global_head_dim": 64, "num_global_key_value_heads": 1 if config["attention_k_eq_v"] else None}


@pytest.mark.parametrize("variant", ["mixture", "small_gemma4", pytest.param("keys-as-values", marks=pytest.mark.slow)])
def test_logits_match_mlx_lm(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_mlx(model, quantized(save(model, tmp_path / "hf"), tmp_path / "mlx", for_mlx))


def test_unused_key_projections_of_shared_kv_layers_are_skipped(tmp_path: Path):
    """Load a folder with such projections, which Google's files have."""
    model = small_gemma4()
    found = load_file(save(model, tmp_path) / "model.safetensors")
    shared = [name for name in found if ".layers.3.self_attn." in name and name.split(".")[-2][0] in "kv"]
    rewrite(tmp_path, found | {name.replace(".3.", ".5."): found[name].clone() for name in shared})
    ids = tokens(model, 20)
    assert len(shared) == 3
    assert error(logits(tmp_path, ids), transformers_logits(model, ids)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["k8v4", "k4v4", "k4v2", "k3v3"])
@pytest.mark.parametrize("make", [mixture, small_gemma4])
def test_every_kv_setting_runs(make: Any, kv: str, tmp_path: Path):
    model = make()
    folder, ids = save(model, tmp_path), tokens(model)
    single_chunk = logits(folder, ids, kv=kv)
    assert agreement(single_chunk, transformers_logits(model, ids)) > 0.8
    assert error(logits(folder, ids, kv=kv, chunk=1), single_chunk) < 1e-3


@pytest.mark.slow
def test_experts_are_quantized_while_loading(tmp_path: Path):
    model = mixture()
    folder, ids = save(model, tmp_path), tokens(model)
    expected = transformers_logits(model, ids)
    assert error(logits(folder, ids, bits=8), expected) < 0.05
    assert agreement(logits(folder, ids, bits=4), expected) > 0.9


def test_shared_kv_layers_have_no_cache_and_no_calibration(tmp_path: Path):
    model = small_gemma4()
    checkpoint = open_checkpoint(save(model, tmp_path))
    config = Config.from_hf(checkpoint.config)
    shapes = make_caches(config)
    assert [(shape.heads, shape.width, shape.window) for shape in shapes] == [(2, 32, 20)] * 2 + [(2, 64, None), (2, 32, 20)]
    assert config.sources == (0, 1, 2, 3, 2, 3, 2)
    ours = gemma4_text.Model(config, Weights(checkpoint, gemma4_text.rename))
    ids = tokens(model, 64)
    vectors = calibrate_keys(ours, shapes, ids, torch.float32, "cpu")
    assert sorted(vectors.layers) == [0, 1, 2, 3]
    engine = Engine(ours, shapes, CacheSettings("k8v8"), context=64, key_calibration=vectors, exact=True)
    assert error(engine.all_logits(engine.cache.open(), ids), transformers_logits(model, ids)) < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers 4, and no"),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input 100; only 259"),
        (
            {"per_layer_config": {"0": {"num_key_value_heads": 3}}},
            "layer 0 has 3 key heads in config.json, which 4 query heads",
        ),
        (
            {"num_key_value_heads": 3, "per_layer_config": {"0": {"num_key_value_heads": None}}},
            "layer 0 has 3 key heads in config.json, which 4 query heads",
        ),
        ({"per_layer_config": {"0": {"head_dim": 16}}}, "sliding_attention layers of several widths"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**Gemma4TextConfig(**SMALL).to_dict(), **change})


def test_missing_config_keys_default_as_in_transformers():
    """Check the text_config of google/gemma-4-E2B-it: of 35 layers the last 20 share the KV cache of others."""
    text = {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "model_type": "gemma4_text",
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
        "sliding_window": 512,
        "global_head_dim": 512,
    }
    ours = Config.from_hf({"model_type": "gemma4", "text_config": text})
    assert len(make_caches(ours)) == ours.own == 15
    assert ours.sources[15:20] == (13, 13, 13, 13, 14)
    assert (ours.inners[14], ours.inners[15]) == (6144, 12288)
    assert {(each.count, each.kv, each.width) for each in ours.heads} == {(8, 1, 256), (8, 1, 512)}
    turned = ours.rotations[FULL].frequencies
    assert (len(turned), int((turned > 0).sum())) == (256, 64)


def unified() -> Gemma4UnifiedForCausalLM:
    torch.manual_seed(0)
    different = (
        "vocab_size_per_layer_input",
        "hidden_size_per_layer_input",
        "num_experts",
        "top_k_experts",
        "moe_intermediate_size",
    )
    sizes = {key: value for key, value in SMALL.items() if key not in different}
    options = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    return randomize_scales(Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig(**sizes, **options)))


@pytest.mark.slow
def test_unified_model_matches_transformers(tmp_path: Path):
    model = unified()
    check_family(model, save(model, tmp_path))
    # released with a text_config inside a multimodal config
    path, ids = tmp_path / "config.json", tokens(model, 20)
    path.write_text(json.dumps({"model_type": "gemma4_unified", "text_config": json.loads(path.read_text())}))
    assert error(logits(tmp_path, ids), transformers_logits(model, ids)) < 2e-4
