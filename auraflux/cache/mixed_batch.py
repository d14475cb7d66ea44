"""A mixed batch: decode tokens and a prefill chunk that share one step."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from auraflux.cache.batch import Batch, Logits

Rows = TypeVar("Rows", Tensor, Tensor | None)


class MixedBatch:
    """Run token-wise layers on the concatenated tokens; attention and recurrent states run per part.

    decode   one token of each of its sequences; their rows are first
    prefill  a chunk of one sequence's prompt that needs no logits
    single   see `Batch`
    logits   see `Logits`
    """

    single = False
    logits = Logits.DECODE

    def __init__(self, decode: Batch, prefill: Batch):
        self.decode, self.prefill = decode, prefill

    def extend(self, size: int, padding: int) -> None:
        """Allocate a token of each decoding sequence and `size` prompt tokens, all or nothing.

        padding  how many of the prompt tokens are padding
        """
        ones = [1] * len(self.decode.sequences)
        self.decode.prepare(ones)
        self.prefill.prepare([size])
        # for both parts before either grows: a growing sequence releases the pages that its length puts outside the window
        for group in self.prefill.sequences[0].group_states:
            extensions = [*self.decode.extensions(group, ones), *self.prefill.extensions(group, [size])]
            self.decode.reserve_pages(group, extensions)
        self.decode.allocate(ones, None)
        self.prefill.allocate([size], padding)

    @property
    def length_bucket(self) -> int:
        """Tokens of a sequence that the indexes have room for."""
        return max(self.decode.length_bucket, self.prefill.length_bucket)

    @property
    def counts(self) -> list[int]:
        """Number of new tokens of each sequence, decoding sequences first."""
        return [*self.decode.counts, *self.prefill.counts]

    @property
    def lengths(self) -> list[int]:
        """Length of each sequence, decoding sequences first."""
        return [sequence.length for batch in (self.decode, self.prefill) for sequence in batch.sequences]

    def roll_back(self, lengths: list[int]) -> None:
        """Remove the tokens of a failed step, see `Batch`."""
        self.decode.roll_back(lengths[:-1])
        self.prefill.roll_back(lengths[-1:])

    def put_embeddings(self, x: Tensor) -> Tensor:
        """Put the embeddings of the prefill part's images in place of those of their tokens: [T, H]."""
        if self.prefill.embeddings is None:
            return x
        decode, prefill = self.split(x)
        return torch.cat([decode, self.prefill.put_embeddings(prefill)])

    def split(self, rows: Rows) -> tuple[Rows, Rows]:
        """Split rows [T, ...] into those of the decode part and those of the prefill part; None stays None."""
        count = self.decode.tokens
        return (rows, rows) if rows is None else (rows[:count], rows[count:])

    def map_parts(self, run: Callable[..., Any], *rows: Tensor | None) -> Any:
        """Call `run` with each part and its rows; concatenate the tensors that it returns."""
        first, second = zip(*map(self.split, rows), strict=True)
        found = run(self.decode, *first), run(self.prefill, *second)
        if isinstance(found[0], Tensor):
            return torch.cat(found)
        return tuple(torch.cat(each) for each in zip(*found, strict=True))

    def append_only(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None, Batch]:
        """Return the prefill part with its rows."""
        count = self.decode.tokens
        return x[count:], None if delta is None else delta[count:], self.prefill

    def with_logits(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None, Batch]:
        """Return the decode part with its rows."""
        count = self.decode.tokens
        return x[:count], None if delta is None else delta[:count], self.decode
