"""Text from tokens as they come. A token may end inside a character; the rest of it is waited for."""

import codecs
from collections.abc import Iterable
from typing import Protocol


class Speller(Protocol):
    """What is needed of a tokenizer."""

    @property
    def starts_with_space(self) -> bool: ...
    def piece(self, token: int) -> bytes: ...
    def is_special(self, token: int) -> bool: ...


class Detokenizer:
    """Turns tokens into text one by one, in time that does not depend on how many there were.

    The pieces are whole characters, and joined they are the text of all tokens. Bytes that are part of no character become
    U+FFFD as soon as that is certain.

    special    show special tokens, too
    show       special tokens to show in any case
    continues  the text goes on from another: keep the space that some tokenizers put before the first word of every text
    """

    def __init__(
        self, tokenizer: Speller, *, special: bool = False, show: frozenset[int] = frozenset(), continues: bool = False
    ):
        self._tokenizer, self._special, self._show = tokenizer, special, show
        self._strip = tokenizer.starts_with_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Give the text that is complete with this token; often none, sometimes several characters."""
        if not self._shown(token):
            return ""
        return self._decode(self._tokenizer.piece(token))

    def flush(self) -> str:
        """Give what is left of a character that was never completed."""
        return self._decode(b"", final=True)

    def whole(self, tokens: Iterable[int]) -> str:
        """Give the text of these tokens, to the end."""
        return self._decode(b"".join(map(self._tokenizer.piece, filter(self._shown, tokens))), final=True)

    def _shown(self, token: int) -> bool:
        return self._special or token in self._show or not self._tokenizer.is_special(token)

    def _decode(self, piece: bytes, final: bool = False) -> str:
        text = self._decoder.decode(piece, final)
        if text and self._strip:
            self._strip = False
            return text.removeprefix(" ")
        return text
