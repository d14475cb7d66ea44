"""ERNIE 4.5 mixtures against transformers and mlx-lm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

from auraflux.errors import FormatError
from auraflux.models.ernie4_5_moe import Config
from tests.models.mlx_oracle import check_mlx, legacy_config, quantized
from tests.models.oracles import check_family, error, logits, save, tokens, transformers_logits
from tests.models.test_qwen3_moe import check_layouts

SMALL = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_num_experts": 9,
    "moe_k": 3,
    "max_position_embeddings": 512,
}


def ernie(bias: float = 0.3, **changes: Any) -> Ernie4_5_MoeForCausalLM:
    """Return a model whose correction biases change the routing."""
    torch.manual_seed(0)
    model = Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**{**SMALL, **changes}))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2 if model.config.tie_word_embeddings else 8)
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.normal_(0, 0.1)
            if name.endswith("e_score_correction_bias"):
                parameter.uniform_(0, bias)
    return model


VARIANTS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False, "moe_num_shared_experts": 0},
    "some-layers": {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_layer_interval": 2},
}


@pytest.mark.parametrize("variant", ["untied", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tied", "some-layers"))])
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = ernie(**VARIANTS[variant])
    check_family(model, save(model, tmp_path))


def test_correction_bias_affects_routing(tmp_path: Path):
    model = ernie(tie_word_embeddings=False)
    folder, ids = save(model, tmp_path), tokens(model, 30)
    found = logits(folder, ids)
    assert error(found, transformers_logits(model, ids)) < 1e-5
    for name, parameter in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.data.zero_()
    assert error(found, transformers_logits(model, ids)) > 1e-2


@pytest.mark.slow
def test_every_expert_layout_gives_the_same_logits(tmp_path: Path):
    model = ernie()
    check_layouts(model, save(model, tmp_path))


@pytest.mark.slow
def test_logits_match_mlx_lm(tmp_path: Path):
    model = ernie(0.0, tie_word_embeddings=False)
    check_mlx(model, quantized(save(model, tmp_path / "hf"), tmp_path / "mlx", legacy_config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_k": None}, "has no 'moe_k'"),
        ({"use_bias": True}, "use_bias True; only False"),
        ({"moe_gate_act": "sigmoid"}, "moe_gate_act 'sigmoid'; only 'softmax'"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**Ernie4_5_MoeConfig(**SMALL).to_dict(), **change})
