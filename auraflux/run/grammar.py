"""Grammars beside the model: which tokens may come next, as bits that are made while scores are computed.

A mask has one bit a token, in int32 words, so that little is copied to a GPU; `sampler.forbid` applies it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.run.guidance import LONGEST, guidance, limits, sentence
from auraflux.run.tokenizer import Tokenizer

BITS = 32


class Grammars:
    """Makes matchers for one model.

    width  of the scores, which is that of masks; numbers that are no tokens are never allowed
    ends   tokens that end a text
    """

    def __init__(self, tokenizer: Tokenizer, width: int, ends: Iterable[int]):
        self._guidance, self._limits = guidance(), limits()
        self._width, self._ends = width, frozenset(ends)
        if not self._ends:
            raise InputError("The model names no token that ends a text, so a grammar could not end one.")
        # a tokenizer may have tokens that have no scores
        known = max(width, tokenizer.vocab_size)
        self._tokenizer = self._guidance.LLTokenizer(tokenizer.json, n_vocab=known, eos_token=sorted(self._ends))

    def matcher(self, grammar: str, ends: Iterable[int] | None = None) -> "Matcher":
        """Make a matcher of one text; `ends` are the tokens that end it, where they are not the model's.

        InputError where the grammar cannot be read.
        """
        if len(grammar) > LONGEST * 2:
            raise InputError(f"The grammar has {len(grammar):,} characters; at most {LONGEST * 2:,} are taken.")
        inner = self._guidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if inner.is_error():
            raise InputError(f"The grammar cannot be used: {sentence(inner.get_error())}.")
        return Matcher(
            inner, self._tokenizer.vocab_size, self._width, self._ends, self._ends if ends is None else frozenset(ends)
        )


class Matcher:
    """Follows one text through its grammar."""

    def __init__(self, inner: Any, tokens: int, width: int, known: frozenset[int], ends: frozenset[int]):
        self._inner, self._words, self._ends = inner, words(width), ends
        self._room, self._ended = torch.empty(words(tokens), dtype=torch.int32), False
        # ends that llguidance does not know of, and those it knows that end other texts but not this
        self._more, self._fewer = _bits(ends - known, tokens), _bits(known - ends, tokens)

    def mask(self) -> Tensor:
        """Give the tokens that may come next, one bit each, valid until the next call.

        Where the text may end, its ends are among them. InputError where the grammar takes too much work.
        """
        room = self._room
        self._inner.unsafe_compute_mask_ptr(room.data_ptr(), room.numel() * room.element_size())
        self._check()
        if self._inner.is_accepting():
            room.bitwise_or_(self._more).bitwise_and_(~self._fewer)
        return room[: self._words]

    def take(self, token: int) -> None:
        """Go on to the next token. InputError where the grammar does not allow it."""
        if token in self._ends and self._inner.is_accepting():
            self._ended = True
        elif not self._inner.consume_token(token):
            self._check()

    @property
    def done(self) -> bool:
        """Whether nothing may follow but an end."""
        return self._ended or self._inner.is_stopped()

    def _check(self) -> None:
        if self._inner.is_error():
            raise InputError(f"The grammar cannot be followed further: {sentence(self._inner.get_error())}.")


def words(tokens: int) -> int:
    """Count the words of a mask."""
    return (tokens + BITS - 1) // BITS


def _bits(tokens: Iterable[int], count: int) -> Tensor:
    mask = torch.zeros(words(count) * BITS, dtype=torch.bool)
    mask[[token for token in tokens if token < count]] = True
    packed = mask.view(-1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)
    return packed.sum(1, dtype=torch.uint8).view(torch.int32)
