"""Hunyuan 4 (sparse latent attention with sinks, hyper-connections) against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HYV4Config, HYV4ForCausalLM

from auraflux.errors import FormatError
from auraflux.models.hy_v4 import Config
from tests.models.oracles import check_family, save
from tests.models.test_deepseek_v3 import SMALL, YARN
from tests.models.test_deepseek_v32 import INDEX, sharpen_indexers


def hunyuan4(**changes: Any) -> Any:
    """Return a model whose streams, sinks and gates differ, and whose experts reach their limit."""
    torch.manual_seed(0)
    alone = {"n_group": 1, "topk_group": 1, "swiglu_limit": 0.3, "indexer_types": ["full", "shared", "full"]}
    alone |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    model = sharpen_indexers(HYV4ForCausalLM(HYV4Config(**{**SMALL, **INDEX, **alone, **changes})))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("_hc.base", "hc_base", "sinks", "_hc.scale", "hc_scale", "k_norm.bias")):
                tensor.normal_()
            elif name.endswith(("_hc.fn", "hc_fn")):
                tensor.normal_(0, 0.1)
            elif name.endswith("k_norm.weight"):
                tensor.uniform_(0.3, 1.7)
    return model


MODELS: dict[str, dict[str, Any]] = {
    "hy_v4": {},
    "odd": {
        "index_n_heads": 11,
        "index_head_dim": 20,
        "index_topk": 7,
        "v_head_dim": 36,
        "hc_mult": 3,
        "hc_magnitude": 1.3,
        "hc_eps": 0.01,
        "attention_bias": True,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "indexer_types": ["full", "full", "shared"],
    },
    "groups": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2, "tie_word_embeddings": True},
    "yarn": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "index_topk": 500, "rms_norm_eps": 1e-3},
}
# with few selected tokens, a quantized cache selects others
QUANTIZES = {"hy_v4", "yarn"}


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_transformers(name: str, tmp_path: Path):
    model = hunyuan4(**MODELS[name])
    check_family(model, save(model, tmp_path), quantizes=name in QUANTIZES)


def test_rules_stand_for_lists():
    config = hunyuan4().config.to_dict()
    for key in ("indexer_types", "mlp_layer_types", "layer_types"):
        config[key] = None
    found = Config.from_hf({**config, "num_hidden_layers": 6})
    assert found.sparse == (False, *(True,) * 5)
    assert found.index.layers == (True, True, False, False, False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"swiglu_limit": 0.0}, "swiglu_limit"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**hunyuan4().config.to_dict(), **changes})
