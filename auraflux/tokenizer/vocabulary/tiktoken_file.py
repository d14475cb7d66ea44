"""Tokenizers from a tiktoken file, as in Kimi's models: one token per line, its bytes in base64 and its rank.

A token's rank is its id and its merge priority, whichever two tokens it is merged from. So every pair that forms a token is a
merge, ordered by the token it forms.
"""

import binascii
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from auraflux.errors import FormatError
from auraflux.tokenizer.tokenizer_config import ANYTHING, CONTENT, added_tokens
from auraflux.tokenizer.vocabulary.gguf import KIMI
from auraflux.weights.fields import Fields
from auraflux.weights.formats.untrusted import FLAG, read_text, shown

NAME = "tiktoken.model"
KIND = "TikTokenTokenizer"  # tokenizer_class of Kimi, which has its own pre-tokenizer
MAX_NBYTES, MAX_TOKEN_NBYTES, MAX_SPECIAL = 64 << 20, 1 << 10, 1 << 12


def read_tiktoken(folder: Path, config: Fields) -> Tokenizer:
    """Build the tokenizer of a folder with tiktoken.model and without tokenizer.json."""
    kind = config.get("tokenizer_class", ANYTHING, None)
    if kind != KIND:
        raise FormatError(
            f"{folder / NAME} does not define a pre-tokenizer, and tokenizer_config.json has the tokenizer_class "
            f"{shown(kind)}; only {KIND} (Kimi) is supported. Add a tokenizer.json."
        )
    ranks = _ranks(folder)
    spelled = {token: "".join(_SPELLING[byte] for byte in token) for token in ranks}
    merges = [(spelled[left], spelled[right]) for token in ranks for left, right in _pairs(token, ranks)]
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    # a word in the vocabulary is one token, whatever its merges
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in KIMI]
    built.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    built.decoder = decoders.ByteLevel()
    _add_reserved(built, folder, config, len(ranks))
    return built


def _ranks(folder: Path) -> dict[bytes, int]:
    """Read tokens and ranks, which must be 0, 1, 2 and so on and include every byte."""
    path, found = folder / NAME, dict[bytes, int]()
    for number, line in enumerate(read_text(path, folder, MAX_NBYTES).split("\n"), 1):
        if not line.strip():
            continue
        word, _, rank = line.strip().partition(" ")
        try:
            token = binascii.a2b_base64(word, strict_mode=True)
        except ValueError as err:
            raise FormatError(f"Line {number} of {path} is not a base64 token and its rank: {shown(line)}.") from err
        if rank != str(len(found)) or token in found or not 0 < len(token) <= MAX_TOKEN_NBYTES:
            raise FormatError(
                f"Line {number} of {path} should have a new token of at most {MAX_TOKEN_NBYTES:,} bytes with the "
                f"rank {len(found)}, but is {shown(line)}."
            )
        found[token] = len(found)
    if missing := [byte for byte in range(256) if bytes([byte]) not in found]:
        raise FormatError(f"{path} has no token for the byte {missing[0]}.")
    return found


def _pairs(token: bytes, ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
    yield from sorted((pair for pair in cuts if pair[0] in ranks and pair[1] in ranks), key=lambda pair: ranks[pair[0]])


def _add_reserved(built: Tokenizer, folder: Path, config: Fields, first: int) -> None:
    """Add a special token for every id between the ranks and the last token of tokenizer_config.json."""
    found = added_tokens(config)
    last = max(found, default=-1)
    if last - first >= MAX_SPECIAL:
        raise FormatError(f"tokenizer_config.json has a token {last}, but {folder / NAME} ends with {first - 1}.")
    wanted = {number: (f"<|reserved_token_{number}|>", True) for number in range(first, last + 1)}
    given = {number: about for number, about in found.items() if number >= first}
    wanted |= {number: (each.read("content", CONTENT), each.get("special", FLAG, True)) for number, each in given.items()}
    built.add_tokens([AddedToken(content, normalized=False, special=special) for content, special in wanted.values()])
    for number, (content, _) in wanted.items():
        if built.token_to_id(content) != number:
            raise FormatError(
                f"tokenizer_config.json has {shown(content)} as token {number}, but tiktoken.model gives it another id."
            )


def _spelling() -> list[str]:
    """Return the character that stands for each byte in byte-level BPE: itself if visible, else one from U+0100 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


_SPELLING = _spelling()
