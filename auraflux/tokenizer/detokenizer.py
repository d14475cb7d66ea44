"""Incremental detokenization. A token may end inside a UTF-8 character, which is held back until it is complete."""

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenSource(Protocol):
    """Interface of the tokenizer."""

    @property
    def starts_with_space(self) -> bool: ...
    def piece(self, token: int) -> bytes: ...
    def is_special(self, token: int) -> bool: ...


class Detokenizer:
    """Decoder of one sequence, token by token, in constant time per token.

    Every returned string ends at a character boundary; joined, they are the text of all tokens. Invalid bytes become U+FFFD as
    soon as their invalidity is certain.

    special    include special tokens
    show       special tokens that are always included
    continues  the text continues another one: do not strip the space that some tokenizers put before the first word
    """

    def __init__(
        self, tokenizer: TokenSource, *, special: bool = False, show: frozenset[int] = frozenset(), continues: bool = False
    ):
        self._tokenizer, self._special, self._show = tokenizer, special, show
        self._strip = tokenizer.starts_with_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Return the text that this token completes: no, one or several characters."""
        if not self._shown(token):
            return ""
        return self._decode(self._tokenizer.piece(token))

    def flush(self) -> str:
        """Return the rest of an incomplete character."""
        return self._decode(b"", final=True)

    def decode_all(self, tokens: Iterable[int]) -> str:
        """Return the text of all tokens, flushed."""
        return self._decode(b"".join(map(self._tokenizer.piece, filter(self._shown, tokens))), final=True)

    def _shown(self, token: int) -> bool:
        return self._special or token in self._show or not self._tokenizer.is_special(token)

    def _decode(self, piece: bytes, final: bool = False) -> str:
        text = self._decoder.decode(piece, final)
        if text and self._strip:
            self._strip = False
            return text.removeprefix(" ")
        return text
