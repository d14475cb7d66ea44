"""Ling 3 (KDA and gated latent attention) against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BailingHybridConfig, BailingHybridForCausalLM

from auraflux.errors import FormatError
from auraflux.models.bailing_hybrid import Config
from tests.models.oracles import check_family, save
from tests.models.test_deepseek_v3 import sharpen_routers

DELTA, ATTENTION = "linear_attention", "full_attention"
SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_token": 3,
    "num_expert_group": 4,
    "topk_group": 2,
    "model_max_length": 512,
    "pad_token_id": None,
    "eos_token_id": None,
}


def bailing(**changes: Any) -> Any:
    """Return a model whose recurrent states decay over several tokens."""
    torch.manual_seed(0)
    model = sharpen_routers(BailingHybridForCausalLM(BailingHybridConfig(**SMALL | changes)))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("A_log"):
                tensor.uniform_(-1.5, 0.5)
            if name.endswith("dt_bias"):
                tensor.uniform_(-4, 1)
    return model


VARIANTS: dict[str, dict[str, Any]] = {
    "small": {},
    "odd-heads": {
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 20,
        "moe_renormalize": False,
        "num_shared_experts": 2,
    },
    "no-floor": {"kda_safe_gate": False, "layer_types": [ATTENTION, DELTA, DELTA, ATTENTION]},
    "other-floor": {"kda_lower_bound": -2.5, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "rope_theta": 1e4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = bailing(**VARIANTS[variant])
    check_family(model, save(model, tmp_path))


def test_rules_stand_for_lists():
    listed = bailing().config.to_dict()
    ruled = {key: value for key, value in listed.items() if key not in ("layer_types", "mlp_layer_types", "linear_head_dim")}
    found, wanted = Config.from_hf({**ruled, "head_dim": 32}), Config.from_hf(listed)
    assert (found.kinds, found.sparse, found.delta_width) == (wanted.kinds, wanted.sparse, wanted.delta_width)


def test_other_convolutions_are_refused():
    with pytest.raises(FormatError, match="convolution over 3 tokens; only 4"):
        Config.from_hf(bailing().config.to_dict() | {"linear_conv_kernel_dim": 3})
