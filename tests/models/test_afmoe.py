"""AFMoE and Muse Glimmer against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
)

from auraflux.errors import FormatError
from auraflux.models.muse_glimmer_text import Config as MuseConfig
from tests.models.oracles import check_family, error, logits, save, tokens, transformers_logits
from tests.models.test_deepseek_v3 import sharpen_routers
from tests.models.test_qwen3_moe import check_layouts, scale_embeddings

SHARED: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "sliding_window": 40,
    "max_position_embeddings": 512,
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 7, "num_experts_per_tok": 3}
ENDS = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
# no tower is compared; its weights are in the folder and are skipped
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def afmoe(**changes: Any) -> Any:
    torch.manual_seed(0)
    return scale_embeddings(sharpen_routers(AfmoeForCausalLM(AfmoeConfig(**{**SHARED, **EXPERTS, **changes}))))


def muse(projector: dict[str, Any] | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    # scores and logits in which rounding to 8 bits changes few top tokens
    text = {**SHARED, **ENDS, "qk_scale_factor": 1.3, "output_multiplier": 1.0, "final_logit_softcapping": 60.0, **changes}
    config = MuseGlimmerConfig(
        text_config=text, vision_config=VISION, image_token_id=300, video_token_id=301, **projector or {}
    )
    model = MuseGlimmerForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers." in name and "post_" in name:
                # embeddings of one, which decide most top tokens, are not lost among the layers' outputs
                parameter.sub_(0.9)
    return model


VARIANTS = {
    "afmoe": afmoe,
    "afmoe-scaled": lambda: afmoe(mup_enabled=True, route_scale=2.5, num_shared_experts=1, num_dense_layers=2),
    "afmoe-odd": lambda: afmoe(
        head_dim=18, num_attention_heads=3, num_key_value_heads=3, num_experts_per_tok=1, moe_intermediate_size=60
    ),
    "afmoe-listed": lambda: afmoe(layer_types=["full_attention"] + ["sliding_attention"] * 4, tie_word_embeddings=True),
    "muse": muse,
    "muse-odd": lambda: muse(head_dim=18, num_key_value_heads=1, intermediate_size=200, post_norm_eps=1e-5),
    "muse-listed": lambda: muse(
        layer_types=["full_attention", *["sliding_attention"] * 4], layer_rope_theta=[0, 1e4, 1e4, 0, 0], sliding_window=9
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_family(model, save(model, tmp_path))


def test_the_text_model_alone(tmp_path: Path):
    model = muse()
    config = save(model, tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text())["text_config"]))
    ids = tokens(model, 50)
    assert error(logits(tmp_path, ids), transformers_logits(model, ids)) < 1e-5


def test_every_expert_layout_gives_the_same_logits(tmp_path: Path):
    model = afmoe()
    check_layouts(model, save(model, tmp_path))


def test_other_activations_are_refused():
    with pytest.raises(FormatError, match="hidden_activation 'gelu'; only 'silu'"):
        MuseConfig.from_hf({**SHARED, "model_type": "muse_glimmer_text", "hidden_activation": "gelu"})
