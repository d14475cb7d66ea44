"""Step 3.7 Flash against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Step3p7Config, Step3p7ForConditionalGeneration

from auraflux.models.step3p7 import Config, activation
from auraflux.ops import limited_swiglu
from tests.models.oracles import check_family, error, logits, save, tokens, transformers_logits
from tests.models.test_afmoe import SHARED
from tests.models.test_deepseek_v3 import sharpen_routers
from tests.models.test_qwen3_moe import scale_embeddings

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = [FULL, SLIDING, SLIDING, FULL, SLIDING]
SIZES = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "share_expert_dim": 56,
    "num_sliding_attention_heads": 6,
    "layer_types": KINDS,
    "moe_router_scaling_factor": 1.7,
    "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}
LIMITS = {"swiglu_limits": [0, None, 0, 0.02, 0.02], "swiglu_limits_shared": [0.05, 0, 0, 0.03, 0]}
# no tower is compared; its weights are in the folder and are skipped
VISION = {"width": 24, "heads": 2, "layers": 1, "image_size": 28, "patch_size": 14, "mlp_ratio": 1.5}


def step(**changes: Any) -> Any:
    torch.manual_seed(0)
    text = SHARED | SIZES | {"bos_token_id": 0, "eos_token_id": 1} | changes
    model = Step3p7ForConditionalGeneration(Step3p7Config(text_config=text, vision_config=VISION, image_token_id=258))
    return scale_embeddings(sharpen_routers(model))


VARIANTS = {
    "step": step,
    "step-odd": lambda: step(
        head_dim=20, num_attention_heads=3, num_sliding_attention_heads=5, num_key_value_heads=1, query_pre_attn_scalar=30
    ),
    "step-limited": lambda: step(**LIMITS, mlp_layer_types=["dense", "sparse", "sparse", "sparse", "sparse"]),
    "step-biased": lambda: step(attention_bias=True, num_experts_per_tok=1, share_expert_dim=60),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_family(model, save(model, tmp_path))


def test_published_configs_list_layers_and_mtp_layers(tmp_path: Path):
    model = step(mlp_layer_types=["dense", "sparse", "sparse", "dense", "sparse"], **LIMITS)
    path = save(model, tmp_path) / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"]
    for name in ("n_routed_experts", "num_experts_per_tok", "share_expert_dim", "num_key_value_heads", "rope_parameters"):
        del text[name]
    for name in ("mlp_layer_types", "num_sliding_attention_heads", "per_layer_config"):
        text.pop(name, None)
    sliding = [kind == SLIDING for kind in [*KINDS, SLIDING]]
    text |= {
        "moe_num_experts": 7,
        "moe_top_k": 3,
        "share_expert_dims": 56,
        "num_attention_groups": 2,
        "moe_layers_enum": "1,2,4,5",
        "attention_other_setting": {"num_attention_heads": 6},
        "num_nextn_predict_layers": 1,
        "layer_types": [*KINDS, SLIDING],
        "rope_theta": [1e4 if each else 1e5 for each in sliding],
        "partial_rotary_factors": [1.0 if each else 0.5 for each in sliding],
        **{name: [*each, 0.0] for name, each in LIMITS.items()},
    }
    path.write_text(json.dumps(config))
    ids = tokens(model, 60)
    expected = transformers_logits(model, ids)
    assert error(logits(tmp_path, ids), expected) < 1e-5
    # the text model alone
    path.write_text(json.dumps({**text, "model_type": "step3p5"}))
    assert Config.from_hf(json.loads(path.read_text())).sparse == {1, 2, 4}
    assert error(logits(tmp_path, ids), expected) < 1e-5


@pytest.mark.parametrize("limit", [0.01, 1.0, 7.0, 16.0])
def test_silu_is_limited_by_its_argument(limit: float):
    gate, found = torch.linspace(-30, 30, 501, dtype=torch.float64), activation(limit)
    limited = limited_swiglu(gate.float(), torch.ones(501), 1.0, found.gate)
    torch.testing.assert_close(limited, torch.nn.functional.silu(gate).clamp(max=limit).float(), rtol=1e-6, atol=1e-7)
