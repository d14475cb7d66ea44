"""DeepSeek V3 and models of the same architecture against transformers and mlx-lm."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AXK1Config,
    AXK1ForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Mistral4Config,
    Mistral4ForCausalLM,
)

from auraflux.errors import FormatError
from auraflux.models.deepseek_v3 import Config
from auraflux.quant import quantize
from tests.models.mlx_oracle import check_mlx, legacy_config, quantized
from tests.models.oracles import agreement, check_family, error, logits, save, tokens, transformers_logits

SMALL = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16}


def sharpen_routers(model: Any) -> Any:
    """Widen the margins of a model's routers, in scores and biases."""
    with torch.no_grad():
        # near-ties turn a small error into another expert: wide margins, small weights
        model.get_input_embeddings().weight.mul_(8)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("gate.weight"):
                tensor.mul_(4)
            if name.endswith("e_score_correction_bias"):
                tensor.uniform_(0, 0.2)
    return model


def deepseek(**changes: Any) -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    return sharpen_routers(DeepseekV3ForCausalLM(DeepseekV3Config(**{**SMALL, **changes})))


def glm_lite(**changes: Any) -> Glm4MoeLiteForCausalLM:
    torch.manual_seed(0)
    without = {key: value for key, value in SMALL.items() if key not in ("n_group", "topk_group", "first_k_dense_replace")}
    return sharpen_routers(Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**{**without, **changes})))


def kimi() -> Kimi_K25ForConditionalGeneration:
    """Return a model with a vision tower."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = DeepseekV3Config(**{**SMALL, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}})
    tower = {"projection_hidden_size": 32, "vision_config": sizes, "tie_word_embeddings": False}
    return sharpen_routers(Kimi_K25ForConditionalGeneration(Kimi_K25Config(text_config=text, **tower)))


def deepseek_v2(**changes: Any) -> DeepseekV2ForCausalLM:
    torch.manual_seed(0)
    groups = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0}
    return sharpen_routers(DeepseekV2ForCausalLM(DeepseekV2Config(**{**SMALL, **groups, **changes})))


def axk1(**changes: Any) -> AXK1ForCausalLM:
    torch.manual_seed(0)
    return sharpen_routers(AXK1ForCausalLM(AXK1Config(**{**SMALL, "bos_token_id": 0, "eos_token_id": 1, **changes})))


def mistral4(**changes: Any) -> Mistral4ForCausalLM:
    """Return a model whose query scale grows twice within the tokens of a test."""
    torch.manual_seed(0)
    rope = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    one = {"n_group": 1, "topk_group": 1, "rope_parameters": rope}
    return sharpen_routers(Mistral4ForCausalLM(Mistral4Config(**{**SMALL, **one, **changes})))


VARIANTS: dict[str, dict[str, Any]] = {
    "groups": {},
    "one-group": {"n_group": 1, "topk_group": 1},
    "no-query-rank": {"q_lora_rank": None},
    "six-heads": {"num_attention_heads": 6, "num_key_value_heads": 6, "qk_nope_head_dim": 32, "v_head_dim": 32},
    "halves-rotated": {"rope_interleave": False},
    "two-shared": {"n_shared_experts": 2, "attention_bias": True},
    "raw-weights": {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
    "all-dense-tied": {"first_k_dense_replace": 3, "tie_word_embeddings": True},
    "yarn": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "yarn-uneven": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    "yarn-plain": {"rope_parameters": YARN},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = deepseek(**VARIANTS[variant])
    check_family(model, save(model, tmp_path))


RELATIVES: dict[str, Any] = {
    "glm4_moe_lite": glm_lite,
    "glm4_moe_lite-listed": lambda: glm_lite(mlp_layer_types=["sparse", "dense", "sparse"], q_lora_rank=None),
    "kimi_k25": kimi,
    "mistral4": mistral4,
    "deepseek_v2": deepseek_v2,
    "deepseek_v2-greedy": lambda: deepseek_v2(
        topk_method="greedy", q_lora_rank=None, num_attention_heads=2, num_key_value_heads=2, moe_intermediate_size=60
    ),
    "deepseek_v2-yarn": lambda: deepseek_v2(rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, n_group=2),
    "axk1": axk1,
    "axk1-odd": lambda: axk1(
        mlp_layer_types=["sparse", "dense", "sparse"], num_attention_heads=3, num_key_value_heads=3, moe_intermediate_size=60
    ),
    "mistral4-no-query-rank": lambda: mistral4(q_lora_rank=None, first_k_dense_replace=0, norm_topk_prob=False),
}


def saved(model: Any, folder: Path) -> Path:
    """Save a model under published tensor names, since transformers renames the layers of Kimi's language model."""
    found = load_file(save(model, folder) / "model.safetensors")
    for ours, published in {"language_model.model.blocks.": "language_model.model.layers.", "model.mm_": "mm_"}.items():
        found = {name.replace(ours, published): tensor for name, tensor in found.items()}
    rewrite(folder, found)
    return folder


@pytest.mark.parametrize("name", RELATIVES)
def test_logits_of_related_models_match_transformers(name: str, tmp_path: Path):
    model = RELATIVES[name]()
    check_family(model, saved(model, tmp_path))


def test_kimi_k2_is_loaded_as_deepseek_v3(tmp_path: Path):
    model = deepseek(n_group=1, topk_group=1)
    rewrite(save(model, tmp_path), load_file(tmp_path / "model.safetensors"), model_type="kimi_k2")
    ids = tokens(model, 20)
    assert error(logits(tmp_path, ids), transformers_logits(model, ids)) < 1e-5


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    """Replace the tensors of a folder and update its config."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def test_shared_experts_are_optional(tmp_path: Path):
    model = deepseek()
    for layer in model.model.layers[1:]:
        torch.nn.init.zeros_(layer.mlp.shared_experts.down_proj.weight)
    save(model, tmp_path)
    remaining = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if "shared_experts" not in k}
    rewrite(tmp_path, remaining, n_shared_experts=None)
    ids = tokens(model)
    assert error(logits(tmp_path, ids), transformers_logits(model, ids)) < 2e-4


def test_mtp_layers_are_skipped(tmp_path: Path):
    model = deepseek()
    save(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    more = {k.replace("layers.2.", "layers.3."): v.clone() for k, v in found.items() if "layers.2." in k}
    more["model.layers.3.eh_proj.weight"] = torch.zeros(128, 256)
    rewrite(tmp_path, found | more, num_nextn_predict_layers=1)
    ids = tokens(model, 20)
    assert error(logits(tmp_path, ids), transformers_logits(model, ids)) < 2e-4
    rewrite(tmp_path, found | more, num_nextn_predict_layers=0)
    with pytest.raises(FormatError, match=r"that the model does not know: model\.layers\.3\.eh_proj\.weight"):
        logits(tmp_path, ids)


MLX_VARIANTS = {
    "embed_q-quantized": {},
    # not a multiple of 32: mlx-lm leaves the key half dense
    "embed_q-dense": {"qk_nope_head_dim": 48, "n_group": 1, "topk_group": 1},
    "yarn": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "q_lora_rank": None},
}


@pytest.mark.parametrize("variant", MLX_VARIANTS)
def test_logits_match_mlx_lm(variant: str, tmp_path: Path):
    model = deepseek(**MLX_VARIANTS[variant])
    folder = quantized(save(model, tmp_path / "hf"), tmp_path / "mlx", legacy_config)
    check_mlx(model, folder)


def legacy_text_config(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "text_config": legacy_config(config["text_config"])}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm4_moe_lite", "kimi_k25", "mistral4"])
def test_logits_of_related_models_match_mlx_lm(name: str, tmp_path: Path):
    model = RELATIVES[name]()
    keys = {"glm4_moe_lite": legacy_config, "kimi_k25": legacy_text_config, "mistral4": lambda config: config}[name]
    check_mlx(model, quantized(saved(model, tmp_path / "hf"), tmp_path / "mlx", keys))


def test_quantized_kv_b_proj_is_loaded_unsplit(tmp_path: Path):
    """Load folders of mlx-lm versions that did not split the matrix."""
    model = deepseek()
    save(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    for layer, attention in enumerate(each.self_attn for each in model.model.layers):
        weight, name = attention.kv_b_proj.weight, f"model.layers.{layer}.self_attn.kv_b_proj"
        codes = quantize(weight.detach(), 4, 64)
        assert codes.biases is not None
        found |= {f"{name}.weight": codes.packed.view(torch.uint32), f"{name}.scales": codes.scales}
        found[f"{name}.biases"] = codes.biases
        weight.data.copy_(codes.dequantize())
    rewrite(tmp_path, found, quantization={"group_size": 64, "bits": 4})
    ids = tokens(model)
    for chunk in (512, 1):
        assert error(logits(tmp_path, ids, chunk=chunk), transformers_logits(model, ids)) < 2e-4


def test_weights_are_quantized_while_loading(tmp_path: Path):
    model = deepseek()
    save(model, tmp_path)
    ids = tokens(model)
    expected = transformers_logits(model, ids)
    assert error(logits(tmp_path, ids, bits=8, group=32), expected) < 0.05
    found = logits(tmp_path, ids, bits=4, group=32)
    assert error(found, expected) < 0.35
    assert agreement(found, expected) > 0.9


def test_every_missing_tensor_is_named(tmp_path: Path):
    model = deepseek()
    save(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    gone = ["model.layers.0.self_attn.kv_b_proj.weight", "model.layers.2.mlp.gate.e_score_correction_bias"]
    rewrite(tmp_path, {k: v for k, v in found.items() if k not in gone})
    with pytest.raises(FormatError, match=f"2 missing: {', '.join(gone)}"):
        logits(tmp_path, tokens(model, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": None}, "has no 'kv_lora_rank'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'; only 'noaux_tc'"),
        ({"model_type": "mistral4"}, "n_group 4; only 1"),
        ({"mlp_layer_types": ["dense", "moe", "dense"]}, "mlp_layer_types moe; dense and sparse are supported"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**DeepseekV3Config(**SMALL).to_dict(), **change})
