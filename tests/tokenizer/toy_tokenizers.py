"""Small tokenizers of all supported kinds, trained on a few lines."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from auraflux.tokenizer.tokenizer import Tokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock; they'll say we've won, don't you think?",
    "def f(x):\n    return [i ** 2 for i in range(10)]  # squares\n\n\tif x != 3.14: pass\n",
    "Größe, naïve café, señor, Ελληνικά, Привет мир, こんにちは世界, 你好世界, 안녕하세요, مرحبا, हिन्दी, 👩‍👩‍👧 🦙🦙 e\u0301",
    "<html>&amp;</html> {'a': 1} a=b; c+=1; -> => :: ... --- *** ### |x| ~~ 100% $5 @me C:\\dir\r\n",
    "        deep\n            deeper\n  \n   three   spaces   \u3000wide\u00a0hard x²½Ⅷ٣",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def byte_level(digits: bool = True) -> tokenizers.Tokenizer:
    """Train byte-level BPE with GPT-2's pre-tokenizer; `digits` splits numbers into digits."""
    built = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words]) if digits else words
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    )
    built.add_tokens(["<think>", "深い", "   "])
    return built


@cache
def sentence_piece(first_space: bool = True) -> tokenizers.Tokenizer:
    """Train SentencePiece BPE: ▁ for spaces, and byte fallback."""
    built = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if first_space else replace
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if first_space else parts)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    built.train_from_iterator(
        LINES[:1] * 3 + LINES[1:2], trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    )
    # the trainer makes byte tokens special, which they are not
    content = built.to_str()
    for byte in range(256):
        content = content.replace(_added(f"<0x{byte:02X}>", 3 + byte), "")
    return tokenizers.Tokenizer.from_str(content)


def _added(token: str, number: int) -> str:
    flags = '"single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true'
    return f',{{"id":{number},"content":"{token}",{flags}}}'


def gguf_metadata(pre: str = "smollm", **more: Any) -> dict[str, Any]:
    """Return the GGUF metadata of the byte-level tokenizer."""
    model = byte_level()
    tokens = [model.id_to_token(number) for number in range(model.get_vocab_size())]
    added = model.get_added_tokens_decoder()
    kinds = [(3 if added[number].special else 4) if number in added else 1 for number in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges_of(model),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
        **more,
    }


def merges_of(model: tokenizers.Tokenizer) -> list[str]:
    return [" ".join(pair) for pair in json.loads(model.to_str())["model"]["merges"]]


def folder(path: Path, model: tokenizers.Tokenizer, **files: Any) -> Path:
    """Write a folder with this tokenizer.json and further JSON files, by stem."""
    model.save(str(path / "tokenizer.json"))
    for stem, content in files.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    return path


@cache
def all_toys() -> dict[str, Tokenizer]:
    return {
        "bytes": Tokenizer(byte_level()),
        "gguf": Tokenizer.from_gguf(gguf_metadata()),
        "pieces": Tokenizer(sentence_piece()),
        "pieces, no space": Tokenizer(sentence_piece(False)),
    }
