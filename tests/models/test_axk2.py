"""A.X K2 (gated sparse latent attention) against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AXK2Config, AXK2ForCausalLM

from auraflux.models.axk2 import Config
from tests.models.oracles import agreement, error, logits, save, tokens, transformers_logits
from tests.models.test_deepseek_v3 import SMALL, YARN
from tests.models.test_deepseek_v32 import INDEX, sharpen_indexers


def axk2(**changes: Any) -> Any:
    torch.manual_seed(0)
    alone = {"n_group": None, "topk_group": None, "gated_norm_rank": 6}
    return sharpen_indexers(AXK2ForCausalLM(AXK2Config(**{**SMALL, **INDEX, **alone, **changes})))


MODELS: dict[str, Any] = {
    "axk2": axk2,
    "groups": lambda: axk2(n_group=4, topk_group=2, mlp_layer_types=["sparse", "dense", "sparse"]),
    "odd": lambda: axk2(index_n_heads=11, index_head_dim=20, attention_bias=True, v_head_dim=36, gated_norm_rank=3),
    "yarn": lambda: axk2(rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, index_topk=500),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_transformers(name: str, tmp_path: Path):
    model = MODELS[name]()
    save(model, tmp_path)
    ids = tokens(model)
    expected = transformers_logits(model, ids)
    for chunk in (512, 37, 1):
        assert error(logits(tmp_path, ids, chunk=chunk), expected) < 1e-5
    quantized_kv = logits(tmp_path, ids, kv="k8v8")
    assert error(quantized_kv, expected) < 0.02
    assert agreement(quantized_kv, expected) >= 0.99


def test_the_first_layer_is_dense_without_a_list():
    found = Config.from_hf({**axk2().config.to_dict(), "mlp_layer_types": None})
    assert found.sparse == (False, True, True)
