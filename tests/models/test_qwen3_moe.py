"""Qwen3 MoE and related models against transformers and mlx-lm."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MellumConfig,
    MellumForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from auraflux.errors import FormatError
from auraflux.models.qwen3_moe import Config
from auraflux.quant import quantize
from auraflux.weights.convert.quantize_large import fitting_group
from tests.models.mlx_oracle import check_mlx, legacy_config, quantized
from tests.models.oracles import check_family, error, logits, save, tokens, transformers_logits

SMALL = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 512,
    "norm_topk_prob": True,
}


ROUTERS = ("mlp.gate.weight", "mlp.router.weight", "gate.wg.weight", "feed_forward.gate.weight", "shared_expert_gate.weight")


def scale_embeddings(model: Any) -> Any:
    """Scale up the embeddings, so that a changed routing decision does not change the top token."""
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    return model


def sharpen_routers(model: Any, router: str) -> Any:
    """Widen the margins of the routers, whose weights have names that end with `router`, and scale up the embeddings."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(router):
                parameter.mul_(8)
    return scale_embeddings(model)


def qwen3_moe(**changes: Any) -> Any:
    torch.manual_seed(0)
    return scale_embeddings(Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SMALL, **changes})))


def qwen2_moe(**changes: Any) -> Any:
    torch.manual_seed(0)
    without = {key: value for key, value in SMALL.items() if key not in ("head_dim", "norm_topk_prob")}
    return scale_embeddings(Qwen2MoeForCausalLM(Qwen2MoeConfig(**without, shared_expert_intermediate_size=96, **changes)))


def olmoe() -> Any:
    torch.manual_seed(0)
    without = {key: value for key, value in SMALL.items() if key not in ("head_dim", "moe_intermediate_size")}
    return scale_embeddings(OlmoeForCausalLM(OlmoeConfig(**{**without, "intermediate_size": 64, "norm_topk_prob": False})))


def mixtral() -> Any:
    torch.manual_seed(0)
    names = "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    sizes = {name: SMALL[name] for name in names} | {"max_position_embeddings": 512}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 64}
    return scale_embeddings(MixtralForCausalLM(MixtralConfig(**sizes, **experts, sliding_window=40)))


def mellum(**changes: Any) -> Any:
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return scale_embeddings(MellumForCausalLM(MellumConfig(**{**SMALL, "layer_types": kinds, "sliding_window": 21, **changes})))


YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
MELLUM = {
    "mellum": mellum,
    "mellum-yarn": lambda: mellum(rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_theta": 1e3}}),
    "mellum-dense": lambda: mellum(mlp_layer_types=["dense", "sparse", "dense"], head_dim=18, num_key_value_heads=1),
}
RELATIVES = {"qwen2_moe": qwen2_moe, "olmoe": olmoe, "mixtral": mixtral}
WINDOW = {"use_sliding_window": True, "sliding_window": 21}
LISTED = {**WINDOW, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
WINDOWS: dict[str, Any] = {
    "qwen3-every-layer": lambda: qwen3_moe(**WINDOW),
    "qwen3-ignores-its-list": lambda: qwen3_moe(**LISTED),
    "qwen2-every-second-layer": lambda: qwen2_moe(**WINDOW),
    "qwen2-first-layers": lambda: qwen2_moe(**WINDOW, max_window_layers=1),
    "qwen2-listed": lambda: qwen2_moe(**LISTED),
}
VARIANTS = {
    "grouped": {},
    "all-heads": {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 32},
    "unnormalized-weights": {"norm_topk_prob": False},
    "every-second-layer": {"decoder_sparse_step": 2},
    "dense-first-layer": {"mlp_only_layers": [0]},
    "tied": {"tie_word_embeddings": True},
    "all-experts": {"num_experts_per_tok": 8},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = qwen3_moe(**VARIANTS[variant])
    check_family(model, save(model, tmp_path))


@pytest.mark.parametrize("name", RELATIVES)
def test_logits_of_related_models_match_transformers(name: str, tmp_path: Path):
    model = RELATIVES[name]()
    check_family(model, save(model, tmp_path))


@pytest.mark.parametrize("name", MELLUM)
def test_logits_of_mellum_match_transformers(name: str, tmp_path: Path):
    model = MELLUM[name]()
    check_family(model, save(model, tmp_path))


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_match_transformers(name: str, tmp_path: Path):
    model = WINDOWS[name]()
    ids = tokens(model, 70)
    assert error(logits(save(model, tmp_path), ids), transformers_logits(model, ids)) < 1e-5


def stack_experts(folder: Path) -> Path:
    """Stack experts as published for Qwen3.5: gate and up of all experts in one tensor."""
    path = folder / "model.safetensors"
    parts = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
    found = {re.sub(r"\.w\d\.", lambda part: parts[part[0]], name): each for name, each in load_file(path).items()}
    assert any(name.endswith("experts.0.up_proj.weight") for name in found)
    for name in [name for name in found if name.endswith("experts.0.up_proj.weight")]:
        home = name.removesuffix(".0.up_proj.weight")
        count = sum(other.startswith(f"{home}.") for other in found) // 3
        each = [[found.pop(f"{home}.{e}.{kind}_proj.weight") for kind in ("gate", "up", "down")] for e in range(count)]
        found[f"{home}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
        found[f"{home}.down_proj"] = torch.stack([down for _, _, down in each])
    save_file(found, path, metadata={"format": "pt"})
    return folder


def quantize_weights(model: Any) -> Any:
    """Quantize every matrix but the routers to 4 bits, as loading with `bits` does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            group = fitting_group(parameter.shape[-1], 64) if parameter.dim() > 1 else None
            if group is not None and not name.endswith(ROUTERS):
                parameter.copy_(quantize(parameter.detach(), 4, group).dequantize(torch.float32))
    return model


def check_layouts(model: Any, folder: Path) -> None:
    """Compare the logits of separate and stacked experts, and of experts quantized while loading and before."""
    ids = tokens(model, 40)
    separate, stacked = logits(folder, ids), logits(stack_experts(folder), ids)
    assert torch.equal(separate, stacked)
    assert error(logits(folder, ids, bits=4), transformers_logits(quantize_weights(model), ids)) < 1e-5


def test_every_expert_layout_gives_the_same_logits(tmp_path: Path):
    model = qwen3_moe()
    check_layouts(model, save(model, tmp_path))


def for_mlx(config: dict[str, Any]) -> dict[str, Any]:
    return {**legacy_config(config), "num_experts": config["num_local_experts"]}


@pytest.mark.parametrize("variant", ["grouped", "unnormalized-weights", "dense-first-layer", "tied"])
def test_logits_match_mlx_lm(variant: str, tmp_path: Path):
    model = qwen3_moe(**VARIANTS[variant])
    check_mlx(model, quantized(save(model, tmp_path / "hf"), tmp_path / "mlx", for_mlx))


@pytest.mark.slow
@pytest.mark.parametrize("name", RELATIVES)
def test_logits_of_related_models_match_mlx_lm(name: str, tmp_path: Path):
    model = RELATIVES[name]()
    # mlx-lm ignores Mixtral's sliding window
    model.config.sliding_window = None
    check_mlx(model, quantized(save(model, tmp_path / "hf"), tmp_path / "mlx", legacy_config))


@pytest.mark.slow
@pytest.mark.parametrize("name", RELATIVES)
def test_every_expert_layout_of_related_models_gives_the_same_logits(name: str, tmp_path: Path):
    model = RELATIVES[name]()
    check_layouts(model, save(model, tmp_path))


def test_a_missing_key_is_named():
    with pytest.raises(FormatError, match="'qwen3_moe' has no 'moe_intermediate_size'"):
        Config.from_hf({**SMALL, "model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "moe_intermediate_size": None})


def test_a_missing_expert_is_named(tmp_path: Path):
    folder = save(qwen3_moe(), tmp_path)
    found = load_file(folder / "model.safetensors")
    found.pop("model.layers.1.mlp.experts.5.up_proj.weight")
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"1 missing: model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight\.$"):
        logits(folder, [1, 2, 3])
