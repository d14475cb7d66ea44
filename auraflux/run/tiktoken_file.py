"""Tokenizers from a file of tiktoken, as Kimi's models have it: one token a line, its bytes in base64 and its rank.

The rank of a token is its number and says how early it is merged, whichever two tokens it is merged from. So every pair that
makes a token is listed as a merge, in the order of what it makes.
"""

import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from auraflux.errors import FormatError
from auraflux.run.vocabulary import KIMI
from auraflux.weights.boundary import read_text, shown
from auraflux.weights.model_keys import check_added_tokens

NAME = "tiktoken.model"
KIND = "TikTokenTokenizer"  # what Kimi's tokenizer_config.json calls its tokenizer, which has words of its own
MOST_NBYTES, LONGEST_TOKEN, MOST_SPECIAL = 64 << 20, 1 << 10, 1 << 12


def read_tiktoken(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer of a folder that has no tokenizer.json, but such a file."""
    if config.get("tokenizer_class") != KIND:
        raise FormatError(
            f"{folder / NAME} does not say how texts are cut into words, and tokenizer_config.json has the tokenizer_class "
            f"{shown(config.get('tokenizer_class'))}; only that of {KIND} (Kimi) is known. A tokenizer.json says it."
        )
    ranks = _ranks(folder)
    spelled = {token: "".join(_SPELLING[byte] for byte in token) for token in ranks}
    merges = [(spelled[left], spelled[right]) for token in ranks for left, right in _pairs(token, ranks)]
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    # a word that is a token as a whole is not merged from its parts
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in KIMI]
    built.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    built.decoder = decoders.ByteLevel()
    _add_reserved(built, folder, config, len(ranks))
    return built


def _ranks(folder: Path) -> dict[bytes, int]:
    """Tokens with their ranks, which must be 0, 1, 2 and so on, single bytes among them."""
    path, found = folder / NAME, dict[bytes, int]()
    for number, line in enumerate(read_text(path, folder, MOST_NBYTES).split("\n"), 1):
        if not line.strip():
            continue
        word, _, rank = line.strip().partition(" ")
        try:
            token = binascii.a2b_base64(word, strict_mode=True)
        except ValueError as err:
            raise FormatError(f"Line {number} of {path} is no token in base64 and its rank: {shown(line)}.") from err
        if rank != str(len(found)) or token in found or not 0 < len(token) <= LONGEST_TOKEN:
            raise FormatError(
                f"Line {number} of {path} should have a new token of at most {LONGEST_TOKEN:,} bytes with the "
                f"rank {len(found)}, and is {shown(line)}."
            )
        found[token] = len(found)
    if missing := [byte for byte in range(256) if bytes([byte]) not in found]:
        raise FormatError(f"{path} has no token for the byte {missing[0]}, so not every text can be read.")
    return found


def _pairs(token: bytes, ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
    yield from sorted((pair for pair in cuts if pair[0] in ranks and pair[1] in ranks), key=lambda pair: ranks[pair[0]])


def _add_reserved(built: Tokenizer, folder: Path, config: dict[str, Any], first: int) -> None:
    """Add a special token for every number between the ranks and the last one that tokenizer_config.json lists."""
    listed = config.get("added_tokens_decoder") or {}
    check_added_tokens(folder / "tokenizer_config.json", listed)
    found = {int(number): about for number, about in listed.items()}
    last = max(found, default=-1)
    if last - first >= MOST_SPECIAL:
        raise FormatError(f"tokenizer_config.json has a token {last}, but {folder / NAME} ends with {first - 1}.")
    wanted = {number: {"content": f"<|reserved_token_{number}|>"} for number in range(first, last + 1)}
    wanted |= {number: about for number, about in found.items() if number >= first}
    built.add_tokens(
        [AddedToken(each["content"], normalized=False, special=each.get("special", True)) for each in wanted.values()]
    )
    for number, about in wanted.items():
        if built.token_to_id(about["content"]) != number:
            raise FormatError(f"tokenizer_config.json has {shown(about['content'])} as token {number}, which is another one.")


def _spelling() -> list[str]:
    """How byte-level BPE writes each byte: as itself where it is a visible character, else as one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


_SPELLING = _spelling()
