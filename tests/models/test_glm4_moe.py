"""GLM 4 mixtures and MiniMax M2 against transformers and mlx-lm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Dots1Config,
    Dots1ForCausalLM,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    HYV3Config,
    HYV3ForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    SolarOpenConfig,
    SolarOpenForCausalLM,
)

from auraflux.errors import FormatError
from auraflux.models.glm4_moe import Config
from tests.models.mlx_oracle import check_mlx, legacy_config, quantized
from tests.models.oracles import check_family, error, logits, save, tokens, transformers_logits
from tests.models.test_deepseek_v3 import rewrite, sharpen_routers
from tests.models.test_qwen3_moe import check_layouts

SHARED = {
    "vocab_size": 259,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
}
GLM = {"intermediate_size": 192, "moe_intermediate_size": 64, "n_routed_experts": 9, "routed_scaling_factor": 1.5}
MINIMAX = {"intermediate_size": 64, "num_local_experts": 9}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def glm(**changes: Any) -> Glm4MoeForCausalLM:
    torch.manual_seed(0)
    return sharpen_routers(Glm4MoeForCausalLM(Glm4MoeConfig(**{**SHARED, **GLM, "num_mtp_layers": 0, **changes})))


def minimax(**changes: Any) -> MiniMaxM2ForCausalLM:
    torch.manual_seed(0)
    return sharpen_routers(MiniMaxM2ForCausalLM(MiniMaxM2Config(**{**SHARED, **MINIMAX, "rope_parameters": HALF, **changes})))


def solar(**changes: Any) -> SolarOpenForCausalLM:
    torch.manual_seed(0)
    sizes = {key: value for key, value in GLM.items() if key != "intermediate_size"}
    return sharpen_routers(SolarOpenForCausalLM(SolarOpenConfig(**{**SHARED, **sizes, **changes})))


def dots(**changes: Any) -> Dots1ForCausalLM:
    torch.manual_seed(0)
    sizes = {**SHARED, **GLM, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True}
    return sharpen_routers(Dots1ForCausalLM(Dots1Config(**{**sizes, **changes})))


def hunyuan(**changes: Any) -> HYV3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"intermediate_size": 200, "moe_intermediate_size": 60, "num_experts": 7, "num_shared_experts": 1}
    return sharpen_routers(HYV3ForCausalLM(HYV3Config(**{**SHARED, **sizes, **changes})))


def exaone(**changes: Any) -> ExaoneMoeForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "intermediate_size": 200,
        "moe_intermediate_size": 60,
        "num_experts": 7,
        "sliding_window": 40,
        "num_hidden_layers": 5,
    }
    made = ExaoneMoeForCausalLM(ExaoneMoeConfig(**{**SHARED, **sizes, "sliding_window": 40, "eos_token_id": 1, **changes}))
    return sharpen_routers(made)


DOTS_WINDOWS = {"sliding_window": 40, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
VARIANTS = {
    "glm": glm,
    "glm-normed-biased": lambda: glm(use_qk_norm=True, attention_bias=True, n_shared_experts=2),
    "glm-groups": lambda: glm(n_group=3, topk_group=2, first_k_dense_replace=2, norm_topk_prob=False),
    "glm-full-rotary": lambda: glm(rope_parameters={**HALF, "partial_rotary_factor": 1.0}, tie_word_embeddings=True),
    "minimax": minimax,
    "solar": solar,
    "solar-odd": lambda: solar(
        head_dim=20, n_shared_experts=2, num_experts_per_tok=1, num_attention_heads=3, num_key_value_heads=3
    ),
    "dots": dots,
    "dots-windows": lambda: dots(n_group=3, topk_group=2, num_key_value_heads=1, routed_scaling_factor=2.5, **DOTS_WINDOWS),
    "hunyuan": hunyuan,
    "hunyuan-odd": lambda: hunyuan(mlp_layer_types=["sparse", "dense", "sparse"], head_dim=18, router_scaling_factor=1.3),
    "exaone": exaone,
    "exaone-odd": lambda: exaone(head_dim=18, num_shared_experts=2, first_k_dense_replace=2, num_key_value_heads=1),
    "exaone-listed": lambda: exaone(layer_types=["full_attention", *["sliding_attention"] * 4], n_group=1, sliding_window=7),
    "exaone-full": lambda: exaone(layer_types=["full_attention"] * 5, norm_topk_prob=False),
    "minimax-odd-heads": lambda: minimax(num_attention_heads=3, num_key_value_heads=1, head_dim=48, num_experts_per_tok=9),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_family(model, save(model, tmp_path))


@pytest.mark.parametrize("variant", ["glm", "minimax"])
def test_every_expert_layout_gives_the_same_logits(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_layouts(model, save(model, tmp_path))


def for_mlx(config: dict[str, Any]) -> dict[str, Any]:
    part = config["rope_parameters"]["partial_rotary_factor"]
    more = {"partial_rotary_factor": part, "rotary_dim": int(config["head_dim"] * part), "shared_intermediate_size": 0}
    return {**legacy_config(config), **more, "rope_scaling": None}


@pytest.mark.parametrize("variant", ["glm", "glm-normed-biased", "minimax"])
def test_logits_match_mlx_lm(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_mlx(model, quantized(save(model, tmp_path / "hf"), tmp_path / "mlx", for_mlx))


def test_mtp_layers_are_skipped(tmp_path: Path):
    model = glm()
    found = load_file(save(model, tmp_path) / "model.safetensors")
    more = {name.replace("layers.2.", "layers.3."): each.clone() for name, each in found.items() if "layers.2." in name}
    rewrite(tmp_path, found | more | {"model.layers.3.eh_proj.weight": torch.zeros(128, 256)}, num_nextn_predict_layers=1)
    ids = tokens(model, 20)
    assert error(logits(tmp_path, ids), transformers_logits(model, ids)) < 2e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": None}, "has no 'num_local_experts'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'; only 'sigmoid'"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size 64; only 0"),
        ({"use_qk_norm": False}, "use_qk_norm False; only True"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**MiniMaxM2Config(**SHARED, **MINIMAX).to_dict(), **change})
