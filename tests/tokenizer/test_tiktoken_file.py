"""Kimi's tokenizer, from a folder's tiktoken.model and from a GGUF file: the tokens of tiktoken and of transformers."""

import base64
import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from auraflux.errors import FormatError
from auraflux.tokenizer import tokenizer as ours
from tests.tokenizer.toy_tokenizers import LINES

tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
# from the code published with Kimi's weights (tokenization_kimi.py)
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SPELLED = bytes_to_unicode()
BYTE = {letter: byte for byte, letter in SPELLED.items()}
PARTS = [*"ab1 \n\t'.éÉ你好ー々²٣", "'ll", "'S", "  ", "HelloWorld", "iPhone世界X", *LINES]
TEXTS = st.text(max_size=40) | st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


@cache
def ranks() -> dict[bytes, int]:
    """Return bytes and tokens that were merged from a few lines, with their ranks."""
    trained = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    trained.pre_tokenizer = pre_tokenizers.Sequence(splits)
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    trained.train_from_iterator(LINES * 2 + [LINES[0].upper()], trainer)
    listed = sorted(trained.get_vocab().items(), key=lambda pair: pair[1])
    return {bytes(BYTE[letter] for letter in token): rank for token, rank in listed}


@cache
def theirs() -> "tiktoken.Encoding":
    special = {"[BOS]": len(ranks()), "<|im_end|>": len(ranks()) + 2}
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens=special)


def written(folder: Path, lines: list[str] | None = None, **config: object) -> Path:
    first = len(ranks())
    listed = {str(first): {"content": "[BOS]", "special": True}, str(first + 2): {"content": "<|im_end|>", "special": True}}
    about = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": listed, "eos_token": "<|im_end|>"} | config
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks().items()] if lines is None else lines
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module")
def from_folder(tmp_path_factory) -> ours.Tokenizer:
    found = ours.Tokenizer.from_folder(written(tmp_path_factory.mktemp("kimi")))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def from_gguf() -> ours.Tokenizer:
    """Build from the merges of llama.cpp's converter: of each token, the last pair that merges."""
    merges = []
    for token, rank in ranks().items():
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            best = min((ranks().get(left + right, rank), place) for place, (left, right) in enumerate(pairwise(parts)))
            parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
        merges += [" ".join(spelled(part) for part in parts)] if len(parts) == 2 else []
    tokens = [*map(spelled, ranks()), "[BOS]", "[PAD]", "<|im_end|>"]
    return ours.Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "kimi-k2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * len(ranks()) + [3, 5, 3],
            "tokenizer.ggml.merges": merges,
        }
    )


def spelled(token: bytes) -> str:
    return "".join(SPELLED[byte] for byte in token)


@settings(deadline=None, max_examples=200)
@given(text=TEXTS)
def test_tokens_are_those_of_tiktoken(from_folder, from_gguf, text):
    ids = from_folder.encode(text)
    assert ids == from_gguf.encode(text) == theirs().encode(text, allowed_special="all")
    assert from_folder.decode(ids, special=True) == text


def test_tokens_are_those_of_transformers(from_folder, tmp_path):
    found = TikTokenConverter(str(written(tmp_path) / "tiktoken.model"), pattern=PATTERN).converted()
    for text in (*LINES, "".join(PARTS)):
        assert from_folder.encode(text) == found.encode(text).ids


def test_special_tokens_have_their_ids_and_gaps_are_reserved(from_folder):
    first = len(ranks())
    assert from_folder.encode("a[BOS]b<|im_end|>")[1::2] == [first, first + 2]
    assert from_folder.token_id(f"<|reserved_token_{first + 1}|>") == first + 1
    assert from_folder.eos_ids == {first + 2}
    assert from_folder.vocab_size == first + 3


@pytest.mark.parametrize(
    ("lines", "config", "reason"),
    [
        (None, {"tokenizer_class": "QwenTokenizer"}, "tokenizer_class 'QwenTokenizer'; only TikTokenTokenizer"),
        (["AA== 0", "?? 1"], {}, "Line 2 of .* is not a base64 token and its rank: '\\?\\? 1'"),
        (["AA== 0", "AQ== 2"], {}, "Line 2 of .* with the rank 1, but is 'AQ== 2'"),
        (["AA== 0", "AA== 1"], {}, "a new token"),
        (["AA== 0"], {}, "no token for the byte 1"),
        (
            None,
            {"added_tokens_decoder": {"600": {"content": "a", "special": True}}},
            "'a' as token 600, but tiktoken.model gives it another id",
        ),
        (None, {"added_tokens_decoder": {"9999999": {"content": "x"}}}, "has a token 9999999, but .* ends with 599"),
    ],
)
def test_invalid_files_are_refused(tmp_path, lines, config, reason):
    with pytest.raises(FormatError, match=reason):
        ours.Tokenizer.from_folder(written(tmp_path, lines, **config))
