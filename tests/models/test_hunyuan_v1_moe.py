"""Hunyuan 1 mixtures against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HunYuanMoEV1Config, HunYuanMoEV1ForCausalLM

from auraflux.errors import FormatError
from auraflux.models.hunyuan_v1_moe import Config
from tests.models.oracles import check_family, error, logits, save, tokens, transformers_logits
from tests.models.test_qwen3_moe import check_layouts, sharpen_routers

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 7,
    "moe_topk": 3,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 100.0, "factor": 1.0}


def hunyuan(**changes: Any) -> Any:
    torch.manual_seed(0)
    return sharpen_routers(HunYuanMoEV1ForCausalLM(HunYuanMoEV1Config(**SMALL | changes)), "gate.wg.weight")


VARIANTS = {
    "hunyuan": hunyuan,
    "hunyuan-odd": lambda: hunyuan(head_dim=18, num_attention_heads=3, num_key_value_heads=1, intermediate_size=60, moe_topk=1),
    "hunyuan-alpha": lambda: hunyuan(rope_parameters=ALPHA, tie_word_embeddings=True, attention_bias=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_family(model, save(model, tmp_path))


def test_every_expert_layout_gives_the_same_logits(tmp_path: Path):
    model = hunyuan()
    check_layouts(model, save(model, tmp_path))


def test_published_configs_list_numbers_by_layer(tmp_path: Path):
    model = hunyuan(rope_parameters=ALPHA)
    path = save(model, tmp_path) / "config.json"
    config = json.loads(path.read_text())
    scaling = {key: value for key, value in config.pop("rope_parameters").items() if key != "rope_theta"}
    lists = {"moe_topk": [3] * 3, "num_shared_expert": [1] * 3, "rope_scaling": scaling, "rope_theta": 1e4}
    path.write_text(json.dumps(config | lists))
    ids = tokens(model, 60)
    assert error(logits(tmp_path, ids), transformers_logits(model, ids)) < 1e-5
    with pytest.raises(FormatError, match="one number for all layers is supported"):
        Config.from_hf(config | {"moe_topk": [3, 2, 3]})
    with pytest.raises(FormatError, match="exactly one shared expert"):
        Config.from_hf(config | {"num_shared_expert": 2})
