"""MiMo-V2-Flash against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.errors import AurafluxError
from auraflux.models.mimo_v2_flash import Config
from tests.models.oracles import check_family, error, loaded, logits, save, tokens, transformers_logits
from tests.models.test_afmoe import SHARED
from tests.models.test_deepseek_v3 import sharpen_routers
from tests.models.test_qwen3_moe import check_layouts, scale_embeddings

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {"head_dim": 48, "v_head_dim": 32, "moe_intermediate_size": 64, "n_routed_experts": 7, "num_experts_per_tok": 3}


def mimo(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SHARED, **SIZES, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
    return scale_embeddings(sharpen_routers(MiMoV2FlashForCausalLM(MiMoV2FlashConfig(**{**sizes, **changes}))))


VARIANTS = {
    "mimo": mimo,
    "mimo-odd": lambda: mimo(head_dim=20, v_head_dim=36, num_key_value_heads=1, num_attention_heads=6, n_group=1),
    "mimo-listed": lambda: mimo(
        layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING],
        mlp_layer_types=["sparse", "dense", "sparse", "sparse", "dense"],
        rope_parameters={FULL: {"rope_theta": 1e5, "partial_rotary_factor": 0.5}, SLIDING: {"rope_theta": 1e3}},
    ),
    "mimo-groups": lambda: mimo(n_routed_experts=8, n_group=2, topk_group=1, attention_value_scale=1.0, attention_bias=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_family(model, save(model, tmp_path), quantizes=False)


def test_every_expert_layout_gives_the_same_logits(tmp_path: Path):
    model = mimo()
    check_layouts(model, save(model, tmp_path))


def test_published_configs_count_the_tokens_before(tmp_path: Path):
    model = mimo()
    path = save(model, tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window_size": 39, "sliding_window": None}))
    ids = tokens(model, 60)
    assert error(logits(tmp_path, ids), transformers_logits(model, ids)) < 1e-5


def test_a_quantized_cache_is_refused(tmp_path: Path):
    found = loaded(save(mimo(), tmp_path))
    with pytest.raises(AurafluxError, match="keys have width 48 and its values 32; quantization needs one width"):
        Engine(found.model, found.shapes, CacheSettings("k4v4"), context=64)


def test_defaults_are_those_of_transformers():
    found = Config.from_hf(MiMoV2FlashConfig().to_dict())
    assert (found.windows[:6], found.value_scale) == ((None, *[129] * 4, None), 0.707)
