"""Qwen3-Next and Qwen3.5, dense and MoE, against transformers and mlx-lm."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.errors import FormatError
from auraflux.models import family
from auraflux.models.qwen3_5_moe import Config, make_caches, rename
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.models.mlx_oracle import check_mlx, legacy_config, quantized
from tests.models.oracles import check_family, error, logits, save, tokens, transformers_logits
from tests.models.test_qwen3_moe import check_layouts, scale_embeddings, stack_experts

DELTA, ATTENTION = "linear_attention", "full_attention"
SMALL = {
    "vocab_size": 259,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 512,
}
DENSE = {"intermediate_size": 192}
MIXED = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}


def qwen3_next(**changes: Any) -> Any:
    return Qwen3NextForCausalLM(Qwen3NextConfig(**{**SMALL, **DENSE, **MIXED, **changes}))


def qwen3_5(**changes: Any) -> Any:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SMALL, **DENSE, **changes}))


def qwen3_5_moe(**changes: Any) -> Any:
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**SMALL, **MIXED, **changes}))


def with_vision(**changes: Any) -> Any:
    """Return a dense model with a vision tower."""
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config={**SMALL, **DENSE, **changes}, vision_config=VISION, **changes)
    )


def moe_with_vision(**changes: Any) -> Any:
    return Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(text_config={**SMALL, **MIXED, **changes}, vision_config=VISION, **changes)
    )


FEW_KEYS = {"linear_num_key_heads": 1, "linear_num_value_heads": 4, "linear_value_head_dim": 64}
EQUAL_HEADS = {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 48}
VARIANTS = {
    "next": lambda: qwen3_next(),
    "next-few-keys": lambda: qwen3_next(**FEW_KEYS),
    "next-equal-heads": lambda: qwen3_next(**EQUAL_HEADS, mlp_only_layers=[1]),
    "next-unnormalized-weights": lambda: qwen3_next(norm_topk_prob=False, decoder_sparse_step=2),
    "dense": lambda: qwen3_5(),
    "dense-tied": lambda: qwen3_5(tie_word_embeddings=True, num_key_value_heads=1),
    "dense-attention-first": lambda: qwen3_5(layer_types=[ATTENTION, DELTA, DELTA, ATTENTION], **EQUAL_HEADS),
    "dense-with-vision": lambda: with_vision(tie_word_embeddings=True),
    "moe": lambda: qwen3_5_moe(),
    "moe-few-keys": lambda: qwen3_5_moe(**FEW_KEYS, num_attention_heads=6, head_dim=32),
    "moe-attention-only": lambda: qwen3_5_moe(num_hidden_layers=2, layer_types=[ATTENTION, ATTENTION]),
    "moe-delta-mostly": lambda: qwen3_5_moe(layer_types=[DELTA, ATTENTION, DELTA, DELTA]),
    "moe-with-vision": lambda: moe_with_vision(),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    torch.manual_seed(0)
    model = scale_embeddings(VARIANTS[variant]())
    check_family(model, save(model, tmp_path))


def change_tensors(folder: Path, drop: tuple[str, ...] = (), **add: torch.Tensor) -> Path:
    path = folder / "model.safetensors"
    retained = {name: tensor for name, tensor in load_file(path).items() if name not in drop}
    save_file({**retained, **add}, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("make", [qwen3_next, qwen3_5_moe])
def test_every_expert_layout_gives_the_same_logits(make: Any, tmp_path: Path):
    torch.manual_seed(0)
    model = scale_embeddings(make())
    check_layouts(model, save(model, tmp_path))


def next_for_mlx(config: dict[str, Any]) -> dict[str, Any]:
    share = config["rope_parameters"]["partial_rotary_factor"]
    kinds = config.pop("layer_types")
    return {**legacy_config(config), "partial_rotary_factor": share, "full_attention_interval": kinds.index(ATTENTION) + 1}


def under_text_config(config: dict[str, Any]) -> dict[str, Any]:
    kinds = config.pop("layer_types")
    inner = {**config, "full_attention_interval": kinds.index(ATTENTION) + 1}
    return {"model_type": config["model_type"].removesuffix("_text"), "text_config": inner}


MLX = {
    "next": (lambda: qwen3_next(), next_for_mlx),
    "next-few-keys": (lambda: qwen3_next(**FEW_KEYS, layer_types=[DELTA, ATTENTION] * 2), next_for_mlx),
    "dense": (lambda: qwen3_5(), under_text_config),
    "dense-tied": (lambda: qwen3_5(tie_word_embeddings=True, layer_types=[DELTA, ATTENTION] * 2), under_text_config),
    "moe": (lambda: qwen3_5_moe(), under_text_config),
    "moe-few-keys": (lambda: qwen3_5_moe(**FEW_KEYS), under_text_config),
}


@pytest.mark.parametrize("variant", MLX)
def test_logits_match_mlx_lm(variant: str, tmp_path: Path):
    torch.manual_seed(0)
    make, change = MLX[variant]
    model = scale_embeddings(make())
    folder = save(model, tmp_path / "hf")
    if variant.startswith("moe"):
        stack_experts(folder)
    check_mlx(model, quantized(folder, tmp_path / "mlx", change))


def test_sequences_of_a_batch_are_independent(tmp_path: Path):
    torch.manual_seed(0)
    model = scale_embeddings(qwen3_5_moe())
    checkpoint = open_checkpoint(save(model, tmp_path))
    config = Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, rename)
    loaded = family(checkpoint.config).Model(config, weights)
    engine = Engine(loaded, make_caches(config), CacheSettings("none"), context=64, sequences=3, exact=True)
    ids = tokens(model, 60)
    prompts = [ids[:17], ids[17:20], ids[20:60]]
    first, second, third = (engine.cache.open() for _ in prompts)
    # out of order, so that their states are not adjacent
    batch = engine.cache.batch([third, first, second])
    hidden = [engine.step(batch, [prompts[2][:-2], prompts[0][:-2], prompts[1][:-2]])]
    hidden += [engine.step(batch, [[prompts[2][at]], [prompts[0][at]], [prompts[1][at]]]) for at in (-2, -1)]
    last = engine.compute_logits(hidden[-1])
    for found, prompt in zip(last, (prompts[2], prompts[0], prompts[1]), strict=True):
        assert error(found, transformers_logits(model, prompt)[-1]) < 2e-4


def test_mtp_layers_are_skipped(tmp_path: Path):
    torch.manual_seed(0)
    model = qwen3_5()
    ids = tokens(model, 20)
    folder = save(model, tmp_path)
    plain = logits(folder, ids)
    change_tensors(folder, **{"mtp.layers.0.input_layernorm.weight": torch.ones(128), "mtp.fc.weight": torch.ones(128, 256)})
    assert torch.equal(logits(folder, ids), plain)


def test_oversized_head_counts_are_refused_before_allocation(tmp_path: Path):
    config = json.loads((save(qwen3_next(), tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "linear_num_value_heads": 1 << 16}))
    with pytest.raises(FormatError, match=r"in_proj_qkvz\.weight has shape \[\d+, 128\], \[\d{7}, 128\] is needed"):
        logits(tmp_path, [1])


def test_missing_misshapen_and_unknown_tensors_are_named(tmp_path: Path):
    torch.manual_seed(0)
    folder = save(qwen3_next(), tmp_path)
    wide, conv = (f"model.layers.0.linear_attn.{name}.weight" for name in ("in_proj_qkvz", "conv1d"))
    short = {wide: torch.zeros(100, 128), "model.layers.0.mlp.strange": torch.zeros(1)}
    with pytest.raises(FormatError) as caught:
        logits(change_tensors(folder, drop=(conv,), **short), [1, 2])
    assert f"1 missing: {conv}" in str(caught.value)
    assert f"{wide} has shape [100, 128]" in str(caught.value)
    assert "1 that the model does not know: model.layers.0.mlp.strange" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_key_heads": None}, "has no 'linear_num_key_heads'"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads 3, which 4 value heads cannot share"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim 3; only 4 is supported"),
        ({"attn_output_gate": False}, "attn_output_gate False"),
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "sliding_attention"),
        ({"layer_types": ["linear_attention"]}, "1 layer_types for num_hidden_layers 4"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({"model_type": "qwen3_5", "text_config": {**SMALL, **DENSE, "rms_norm_eps": 1e-6, **change}})
