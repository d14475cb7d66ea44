"""Paged caches that attention reads and `append_*` writes.

Positions of a sequence live in pages of a pool; row b of `table` lists the pages of sequence b in order. Entries of pages that
are no longer read (they left the window) may hold anything. `lengths` include the tokens being appended or attended from.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import Declined, check_dense, check_dtype, check_shape
from auraflux.validation import check_fields

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class KVPages:
    """Keys and values per head.

    k        [P, Hkv, page, D]   float32, bfloat16 or float16
    v        [P, Hkv, page, Dv]  the same dtype
    table    [B, M]              int32
    lengths  [B]                 int32
    """

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        check_fields(self)
        check_dense(k=self.k, v=self.v, table=self.table, lengths=self.lengths)
        check_shape("k", self.k, None, None, None, None)
        check_shape("v", self.v, *self.k.shape[:3], None)
        check_dtype("k", self.k, *DTYPES)
        check_dtype("v", self.v, self.k.dtype)
        _check_index(self.table, self.lengths, self.pool)

    @cached_property
    def pool(self) -> tuple[int, int]:
        """Number of pages, and tokens per page."""
        return self.k.shape[0], self.k.shape[2]


@dataclass(frozen=True, eq=False)
class LatentPages:
    """MLA cache: one compressed vector per token for all heads, and one rotated key.

    latent   [P, page, C]  float32, bfloat16 or float16
    rope     [P, page, R]  the same dtype
    table    [B, M]        int32
    lengths  [B]           int32
    """

    latent: Tensor
    rope: Tensor
    table: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        check_fields(self)
        check_dense(latent=self.latent, rope=self.rope, table=self.table, lengths=self.lengths)
        check_shape("latent", self.latent, None, None, None)
        check_shape("rope", self.rope, *self.latent.shape[:2], None)
        check_dtype("latent", self.latent, *DTYPES)
        check_dtype("rope", self.rope, self.latent.dtype)
        if self.rope.shape[2] == 0:
            raise InputError("rotated keys have width 0; use KVPages without them.")
        _check_index(self.table, self.lengths, self.pool)

    @cached_property
    def pool(self) -> tuple[int, int]:
        """Number of pages, and tokens per page."""
        return self.latent.shape[0], self.latent.shape[1]


@dataclass(frozen=True, eq=False)
class RowPages:
    """Pages of one row per position.

    rows     [P, page, C]  float32, bfloat16 or float16
    table    [B, M]        int32
    lengths  [B]           int32
    """

    rows: Tensor
    table: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        check_fields(self)
        check_dense(rows=self.rows, table=self.table, lengths=self.lengths)
        check_dtype("rows", self.rows, *DTYPES)
        check_shape("rows", self.rows, None, None, None)
        _check_index(self.table, self.lengths, self.pool)

    @cached_property
    def pool(self) -> tuple[int, int]:
        """Number of pages, and tokens per page."""
        return self.rows.shape[0], self.rows.shape[1]

    def rows_of(self, sequence: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return page and slot of each position in [first, last) of a sequence."""
        return rows_of(self, sequence, first, last)


Pages = KVPages | LatentPages | RowPages


def _check_index(table: Tensor, lengths: Tensor, pool: tuple[int, int]) -> None:
    if pool[1] == 0:
        raise InputError(f"{pool[0]} pages of 0 tokens; a page must hold at least one.")
    check_shape("table", table, None, None)
    check_shape("lengths", lengths, table.shape[0])
    check_dtype("table", table, torch.int32)
    check_dtype("lengths", lengths, torch.int32)


def causal_only(ends: Tensor | None) -> None:
    """Decline queries that see positions after their own."""
    if ends is not None:
        raise Declined("the tokens of an image attend to each other in both directions")


def check_starts(starts: Tensor, pages: Any) -> None:
    """Check that `starts` has one entry more than there are sequences, for pages of any kind."""
    check_dtype("starts", starts, torch.int32)
    check_shape("starts", starts, pages.lengths.shape[0] + 1)


def spans(pages: Pages, starts: Tensor, tokens: int, lookback: int | None) -> list[tuple[int, int, int, int, int]]:
    """Return (sequence, first of its stacked tokens, their number, first position accessed, length) per sequence with tokens.

    Raises InputError where a position lies outside the pages.
    lookback  positions accessed before a sequence's first new token; None for all of them
    """
    bounds, lengths = starts.tolist(), pages.lengths.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens or any(a > b for a, b in pairwise(bounds)):
        raise InputError(f"'starts' {_short(bounds)} do not increase from 0 to {tokens}, the number of tokens.")
    found = []
    for b, length in enumerate(lengths):
        new = bounds[b + 1] - bounds[b]
        if new == 0:
            continue
        if length < new:
            raise InputError(f"sequence {b} has length {length} but gets {new} tokens; 'lengths' include the new tokens.")
        first = 0 if lookback is None else max(0, length - new - lookback)
        check_pages(pages, b, first, length)
        found.append((b, bounds[b], new, first, length))
    return found


def check_pages(pages: Pages, sequence: int, first: int, length: int) -> None:
    """Check that positions from `first` on of a sequence lie in the pool."""
    (count, size), width = pages.pool, pages.table.shape[1]
    needed = -(-length // size)
    if needed > width:
        raise InputError(
            f"sequence {sequence} of length {length} needs {needed} pages of {size}; its row of the table has {width}."
        )
    for i, page in enumerate(pages.table[sequence, first // size : needed].tolist(), first // size):
        if not 0 <= page < count:
            raise InputError(f"page {i} of sequence {sequence} is {page} in the table; the pool has {count} pages.")


def rows_of(pages: Pages, sequence: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return page and slot of each position in [first, last) of a sequence, checked to be in the pool."""
    check_pages(pages, sequence, first, last)
    return places_of(pages, sequence, first, last)


def places_of(pages: Pages, sequence: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return page and slot of each position in [first, last) of a sequence, unchecked."""
    positions = torch.arange(first, last, device=pages.table.device)
    size = pages.pool[1]
    return pages.table[sequence, positions // size].long(), positions % size


def _short(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"{str(numbers[:7])[:-1]}, ...]"
