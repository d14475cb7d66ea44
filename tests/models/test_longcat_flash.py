"""LongCat-Flash against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

from auraflux.errors import FormatError
from auraflux.models.longcat_flash import Config
from tests.models.oracles import check_family, save
from tests.models.test_deepseek_v3 import YARN
from tests.models.test_qwen3_moe import scale_embeddings

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 128,
    "ffn_hidden_size": 160,
    "expert_ffn_hidden_size": 64,
    "num_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 7,
    "zero_expert_num": 3,
    "moe_topk": 4,
    "max_position_embeddings": 512,
    "routed_scaling_factor": 2.0,
}


def longcat(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = LongcatFlashForCausalLM(LongcatFlashConfig(**SMALL | changes))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("classifier.weight"):
                tensor.mul_(8)
            if name.endswith("e_score_correction_bias"):
                tensor.uniform_(0, 0.05)
    return scale_embeddings(model)


VARIANTS = {
    "longcat": longcat,
    "longcat-odd": lambda: longcat(num_attention_heads=3, v_head_dim=20, expert_ffn_hidden_size=60, moe_topk=2, num_layers=1),
    "longcat-mostly-zero": lambda: longcat(n_routed_experts=2, zero_expert_num=9, attention_bias=True),
    "longcat-no-zero": lambda: longcat(zero_expert_num=0, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_family(model, save(model, tmp_path))


@pytest.mark.parametrize(("key", "value"), [("zero_expert_type", "drop"), ("router_bias", True), ("qk_head_dim", 40)])
def test_what_is_not_supported_is_refused(key: str, value: Any):
    with pytest.raises(FormatError, match=key):
        Config.from_hf(LongcatFlashConfig(**SMALL).to_dict() | {key: value})
