"""MiniMax M3 against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MiniMaxM3SparseForConditionalGeneration, MiniMaxM3VLConfig

from auraflux.errors import FormatError
from auraflux.models.minimax_m3_vl import Config
from tests.models.oracles import check_family, error, logits, save, tokens, transformers_logits
from tests.models.test_deepseek_v3 import sharpen_routers
from tests.models.test_qwen3_moe import check_layouts, scale_embeddings

BLOCKS, FULL = "minimax_m3_sparse", "full_attention"
SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 64,
    "dense_intermediate_size": 128,
    "shared_intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    "layer_types": [FULL, BLOCKS, BLOCKS, FULL],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "swiglu_limit": 0.3,
    "index_n_heads": 2,
    "index_head_dim": 24,
    "index_block_size": 16,
    "index_topk_blocks": 3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# no tower is compared; its weights are in the folder and are skipped
VISION = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}


def minimax(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = MiniMaxM3VLConfig(text_config=SMALL | changes, vision_config=VISION, projector_hidden_size=24)
    return scale_embeddings(sharpen_routers(MiniMaxM3SparseForConditionalGeneration(config)))


VARIANTS = {
    "minimax": minimax,
    "minimax-odd": lambda: minimax(
        num_attention_heads=6, num_key_value_heads=6, index_n_heads=3, index_block_size=7, intermediate_size=60
    ),
    "minimax-local": lambda: minimax(index_local_blocks=2, index_topk_blocks=2, index_n_heads=1, swiglu_alpha=1.0),
    "minimax-no-local": lambda: minimax(index_local_blocks=0, num_experts_per_tok=1),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = VARIANTS[variant]()
    check_family(model, save(model, tmp_path))


def test_every_expert_layout_gives_the_same_logits(tmp_path: Path):
    model = minimax()
    check_layouts(model, save(model, tmp_path))


def test_published_configs_have_a_section(tmp_path: Path):
    model = minimax()
    path = save(model, tmp_path) / "config.json"
    config = json.loads(path.read_text())
    text = {key: value for key, value in config["text_config"].items() if not key.startswith("index_")}
    text |= {"layer_types": None, "mlp_layer_types": None, "moe_layer_freq": [0, 1, 1, 1], "hidden_act": "swigluoai"}
    sizes = {"sparse_num_index_heads": 2, "sparse_index_dim": 24, "sparse_block_size": 16, "sparse_topk_blocks": 3}
    text["sparse_attention_config"] = {**sizes, "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1, 0]}
    path.write_text(json.dumps(config | {"text_config": text}))
    ids = tokens(model, 90)
    expected = transformers_logits(model, ids)
    assert error(logits(tmp_path, ids), expected) < 1e-5
    # the text model alone
    path.write_text(json.dumps({**text, "model_type": "minimax_m3_vl_text"}))
    assert error(logits(tmp_path, ids), expected) < 1e-5


def test_index_heads_that_do_not_divide_are_refused():
    with pytest.raises(FormatError, match="3 heads of the indexer, which do not divide 2 KV heads"):
        Config.from_hf({**minimax().config.text_config.to_dict(), "index_n_heads": 3})
