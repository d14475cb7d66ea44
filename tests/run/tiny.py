"""A tiny Llama in a folder, with a tokenizer or without: what the tests of generation run on."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.oracles import save
from tests.run.toy_tokenizers import CHATML, byte_level, folder

WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@cache
def tiny(text: bool = True) -> Path:
    """The folder of a model with random weights."""
    torch.manual_seed(0)
    path = Path(mkdtemp(prefix="auraflux-tiny-"))
    vocab = byte_level().get_vocab_size()
    config = LlamaConfig(vocab_size=vocab, num_hidden_layers=2, max_position_embeddings=512, eos_token_id=0, **WIDTHS)
    save(LlamaForCausalLM(config), path)
    if text:
        folder(path, byte_level(), tokenizer_config={"chat_template": CHATML, "eos_token": "<|im_end|>"})
    return path
