"""Thinking budgets: reasoning that reaches its budget is closed as the model itself would close it, and the answer follows."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from auraflux.engine.request import ThinkingBudget
from auraflux.tokenizer.grammar import mask_words

# bytes of the text in which tags are looked for; longer than every tag
WINDOW = 256
LONGEST_CHARACTER = 4  # bytes, in UTF-8


class TokenMatcher(Protocol):
    """The tokens that may come next."""

    def mask(self) -> Tensor: ...
    def take(self, token: int) -> None: ...
    @property
    def done(self) -> bool: ...


class ThinkingMatcher:
    """Counts the reasoning of one sequence, and allows nothing but its closing tokens once the budget is spent.

    piece  returns a token's bytes
    words  of a mask
    inner  grammar of the answer; None for free text
    """

    def __init__(self, budget: ThinkingBudget, piece: Callable[[int], bytes], vocab: int, inner: TokenMatcher | None):
        self.budget, self._piece, self._inner = budget, piece, inner
        self._words = mask_words(vocab)
        self._inside, self._spent, self._closed_once = budget.opened, 0, False
        self._text, self._watching = b"", True
        # the last bytes of the text, to see whether they end a character
        self._tail = b""
        self._forced: tuple[int, ...] = ()
        self._force_if_spent()

    @property
    def done(self) -> bool:
        """Return whether the answer is complete by its grammar."""
        return self._inner is not None and self._inner.done

    def mask(self) -> Tensor:
        """Return the mask of allowed next tokens."""
        inner = None if self._inner is None else self._inner.mask()
        if self._forced:
            only = self._forced[0]
            if inner is None or int(inner[only // 32]) >> only % 32 & 1:
                return _only(only, self._words)
            # the grammar goes first: it asks for the rest of a character, or for another kind of message
            if not _is_unfinished(self._tail):
                self._forced = ()
        return torch.full((self._words,), -1, dtype=torch.int32) if inner is None else inner

    def take(self, token: int) -> None:
        """Advance by one token."""
        if self._inner is not None:
            self._inner.take(token)
        piece = self._piece(token)
        waits, self._tail = _is_unfinished(self._tail), (self._tail + piece)[-LONGEST_CHARACTER:]
        if self._forced:
            if token == self._forced[0]:
                self._forced = self._forced[1:]
            elif not waits:
                self._forced = ()
            return
        self._text = (self._text + piece)[-WINDOW:]
        if self._inside is None:
            self._look_for_opening()
        else:
            self._spent += 1
            if self._inside.closing.encode() in self._text:
                self._close()
        self._force_if_spent()

    def _look_for_opening(self) -> None:
        if not self._watching:
            return
        text = self._text.lstrip()
        for tags in self.budget.tags:
            opening = tags.opening.encode()
            if opening in text if self.budget.reopens else text.startswith(opening):
                self._inside, self._text = tags, b""
                return
        self._watching = self.budget.reopens or any(tags.opening.encode().startswith(text) for tags in self.budget.tags)

    def _close(self) -> None:
        self._inside, self._text = None, b""
        self._watching = self.budget.reopens

    def _force_if_spent(self) -> None:
        if self._inside is None or self._spent < self.budget.tokens:
            return
        self._forced = self._inside.again_ids if self._closed_once else self._inside.close_ids
        self._closed_once = True
        self._close()


def _is_unfinished(text: bytes) -> bool:
    """Return whether a text ends within a character."""
    for count, byte in enumerate(reversed(text[-LONGEST_CHARACTER + 1 :]), 1):
        if byte < 0x80:
            return False
        if byte >= 0xC0:
            return count < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False


def _only(token: int, words: int) -> Tensor:
    mask = torch.zeros(words, dtype=torch.int32)
    mask[token // 32] = torch.tensor(1 << token % 32, dtype=torch.int64).to(torch.int32)
    return mask
