"""Qwen4, whose tokens have several vectors, choose blocks and read n-grams from disk, against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from tests.models.oracles import error, save, scores, tokens, truth

DELTA, ATTENTION = "linear_attention", "indexed_attention"
SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "layer_types": [DELTA, DELTA, ATTENTION, DELTA],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "hc_count": 3,
    "hc_lowrank": 32,
    "ple_layer_ids": [2, 4],
    "ple_embed_dim": 64,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 211,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 3,
    "indexer_n_heads": 12,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 20,
    "indexer_budget": 40,
    "indexer_compress_ratio": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 512,
    "eos_token_id": 7,
    "pad_token_id": 0,
    "bos_token_id": 1,
}


def qwen4(**changes: Any) -> Qwen4ExpForCausalLM:
    """A model whose parts all matter: indexers decide clearly, n-grams say something, memories last for some tokens."""
    torch.manual_seed(0)
    model = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**{**SMALL, **changes}))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if any(part in name for part in ("index_qk_proj", "ngram_embedding", "ple.conv1d", "block_inject_weight")):
                tensor.normal_(0, 0.3)
            elif name.endswith(("input_mix_weight_down.weight", "input_mix_weight_up.weight", "gate.weight")):
                tensor.normal_(0, 0.1)
            elif name.endswith("A_log"):
                tensor.uniform_(-1.5, 0.5)
            elif name.endswith("dt_bias"):
                tensor.uniform_(-4, 1)
    return model


MODELS: dict[str, Any] = {
    "qwen4_exp": qwen4,
    "sigmoid": lambda: qwen4(output_gate_type="sigmoid", hc_count=2),
    "no-ngrams": lambda: qwen4(ple_layer_ids=None),
    "long-ngrams": lambda: qwen4(ngram_size=5, heads_per_ngram=1, ple_conv_kernel_size=3, ple_layer_ids=[1]),
    "pairs": lambda: qwen4(ngram_size=2, heads_per_ngram=4, ple_conv_kernel_size=2, eos_token_id=[9, 7]),
    "one-block": lambda: qwen4(indexer_budget=8, indexer_compress_ratio=8),
    "all-blocks": lambda: qwen4(indexer_budget=500, indexer_compress_ratio=4, norm_topk_prob=False, tie_word_embeddings=True),
    "wide-blocks": lambda: qwen4(indexer_budget=64, indexer_compress_ratio=32, num_key_value_heads=6),
}
QUICK = {"qwen4_exp", "sigmoid"}


def some_tokens(model: Any, count: int = 150) -> list[int]:
    """Tokens of which some end texts, so that n-grams stop there."""
    ids = tokens(model, count)
    ends = model.config.eos_token_id
    return [ends[0] if isinstance(ends, list) else ends if at % 17 == 11 else token for at, token in enumerate(ids)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in MODELS])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path):
    model = MODELS[name]()
    save(model, tmp_path)
    ids = some_tokens(model)
    wanted = truth(model, ids)
    for chunk in (512, 37, 1):
        assert error(scores(tmp_path, ids, chunk=chunk), wanted) < 1e-5
