"""Grammar-constrained decoding: token masks, computed on the CPU while the model computes logits.

A mask has one bit per token, packed into int32, so that little is copied to a GPU; `sampler.apply_token_masks` applies it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.tokenizer.llguidance_limits import LONGEST, error_text, guidance, limits
from auraflux.tokenizer.tokenizer import Tokenizer

BITS = 32


class GrammarCompiler:
    """Compiler of grammars for one model.

    width  of the logits and of masks; ids without a token are never allowed
    ends   tokens that end a sequence
    """

    def __init__(self, tokenizer: Tokenizer, width: int, ends: Iterable[int]):
        self._guidance, self._limits = guidance(), limits()
        self._width, self._ends = width, frozenset(ends)
        if not self._ends:
            raise InputError("The model has no end-of-sequence token, which a grammar needs.")
        # a tokenizer may have tokens without logits
        known = max(width, tokenizer.vocab_size)
        self._tokenizer = self._guidance.LLTokenizer(tokenizer.json, n_vocab=known, eos_token=sorted(self._ends))

    def matcher(self, grammar: str, ends: Iterable[int] | None = None) -> "Matcher":
        """Compile a grammar for one sequence; `ends` overrides the tokens that end it. Raise InputError if it is invalid."""
        if len(grammar) > LONGEST * 2:
            raise InputError(f"The grammar has {len(grammar):,} characters; the limit is {LONGEST * 2:,}.")
        inner = self._guidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if inner.is_error():
            raise InputError(f"The grammar is invalid: {error_text(inner.get_error())}.")
        return Matcher(
            inner, self._tokenizer.vocab_size, self._width, self._ends, self._ends if ends is None else frozenset(ends)
        )


class Matcher:
    """Grammar state of one sequence."""

    def __init__(self, inner: Any, tokens: int, width: int, known: frozenset[int], ends: frozenset[int]):
        self._inner, self._words, self._ends = inner, mask_words(width), ends
        self._room, self._ended = torch.empty(mask_words(tokens), dtype=torch.int32), False
        # end tokens that llguidance does not know, and those it knows that do not end this sequence
        self._more, self._fewer = _bits(ends - known, tokens), _bits(known - ends, tokens)

    def mask(self) -> Tensor:
        """Return the mask of allowed next tokens, end tokens included where the grammar accepts; valid until the next call.

        Raise InputError where the grammar exceeds the work limit.
        """
        room = self._room
        self._inner.unsafe_compute_mask_ptr(room.data_ptr(), room.numel() * room.element_size())
        self._check()
        if self._inner.is_accepting():
            room.bitwise_or_(self._more).bitwise_and_(~self._fewer)
        return room[: self._words]

    def take(self, token: int) -> None:
        """Advance by one token. Raise InputError if the grammar forbids it."""
        if token in self._ends and self._inner.is_accepting():
            self._ended = True
        elif not self._inner.consume_token(token):
            self._check()

    @property
    def done(self) -> bool:
        """True if only an end token may follow."""
        return self._ended or self._inner.is_stopped()

    def _check(self) -> None:
        if self._inner.is_error():
            raise InputError(f"The grammar failed: {error_text(self._inner.get_error())}.")


def mask_words(tokens: int) -> int:
    """Return the number of int32 words of a mask."""
    return (tokens + BITS - 1) // BITS


def _bits(tokens: Iterable[int], count: int) -> Tensor:
    mask = torch.zeros(mask_words(count) * BITS, dtype=torch.bool)
    mask[[token for token in tokens if token < count]] = True
    packed = mask.view(-1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)
    return packed.sum(1, dtype=torch.uint8).view(torch.int32)
