"""Folders of a tiny Llama or a tiny mixture, with or without tokenizer, for tests of generation."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.models.oracles import save
from tests.tokenizer.toy_tokenizers import CHATML, byte_level, folder

WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


MIXED = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "head_dim": 16}


@cache
def tiny(text: bool = True, mixture: bool = False) -> Path:
    """Return the folder of a model with random weights."""
    torch.manual_seed(0)
    path = Path(mkdtemp(prefix="auraflux-tiny-"))
    sizes = {"vocab_size": byte_level().get_vocab_size(), "num_hidden_layers": 2, "max_position_embeddings": 512, **WIDTHS}
    if mixture:
        save(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **MIXED, eos_token_id=0)), path)
    else:
        save(LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=0)), path)
    if text:
        folder(path, byte_level(), tokenizer_config={"chat_template": CHATML, "eos_token": "<|im_end|>"})
    return path
