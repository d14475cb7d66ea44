"""A tiny Llama with heads of 64 channels, as the caches of other engines require."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from auraflux.loading.language_model import LanguageModel
from auraflux.loading.load import load
from tests.models.oracles import save
from tests.tokenizer.toy_tokenizers import CHATML, byte_level, folder

WIDTHS = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}


@cache
def tiny_heads() -> Path:
    """Return the folder of a model with random weights and a tokenizer."""
    torch.manual_seed(0)
    path = Path(mkdtemp(prefix="auraflux-tiny-heads-"))
    vocab = byte_level().get_vocab_size()
    config = LlamaConfig(vocab_size=vocab, num_hidden_layers=2, max_position_embeddings=1024, eos_token_id=0, **WIDTHS)
    save(LlamaForCausalLM(config), path)
    folder(path, byte_level(), tokenizer_config={"chat_template": CHATML, "eos_token": "<|im_end|>"})
    return path


@cache
def loaded() -> LanguageModel:
    return load(tiny_heads(), device="cpu", kv="none", exact=True, context=1024)
