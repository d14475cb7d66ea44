"""Positions of tokens in a paged KV pool, in Triton: of a new one, and of keys to be read."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Index(NamedTuple):
    """Pages of the sequences of a step, as kernels take them.

    table      [sequences, width]  int32, the pages of each sequence in order
    lengths    [sequences]         positions, those of this step included
    starts     [sequences + 1]     first new token of each sequence in the batch
    pool       pages in the pool
    """

    table: Tensor
    lengths: Tensor
    starts: Tensor
    sequences: int
    width: int
    pool: int


def index_of(pages: Any, starts: Tensor) -> Index:
    """Return the index of pages of any kind."""
    sequences, width = pages.table.shape
    return Index(pages.table, pages.lengths, starts, sequences, width, pages.pool[0])


@triton.jit
def position_of(token, index, S: tl.constexpr):
    """Return the sequence of a new token, and its position there."""
    b = tl.arange(0, S)
    start = tl.load(index.starts + b, mask=b < index.sequences, other=1 << 30)
    sequence = tl.sum((start <= token).to(tl.int32), 0) - 1
    return sequence, tl.load(index.lengths + sequence) - tl.load(index.starts + sequence + 1) + token


@triton.jit
def place_of(table, sequence, position, width, pool, PAGE: tl.constexpr):
    """Return the page and the slot of a position; -1 for a page outside the pool or past the table."""
    inside = (position >= 0) & (position < width * PAGE)
    page = tl.load(table + sequence.to(tl.int64) * width + position // PAGE, mask=inside, other=-1)
    return tl.where(page < pool, page, -1).to(tl.int64), position % PAGE


@triton.jit
def place_token(token, index, PAGE: tl.constexpr, S: tl.constexpr):
    """Return the page and the slot of a new token; -1 for a page outside the pool."""
    sequence, position = position_of(token, index, S)
    return place_of(index.table, sequence, position, index.width, index.pool, PAGE)


@triton.jit
def place_keys(
    table, first, end, head, table_width, pool, HEADS: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Locate N keys in the pool: a base row, the offset of each key's row, and whether it exists.

    Table entries outside the pool are ignored. ALIGNED means that all N keys lie in one page.
    """
    key = first + tl.arange(0, N)
    if ALIGNED:
        page = tl.load(table + first // PAGE, mask=first < table_width * PAGE, other=-1)
        there = (key < end) & (page >= 0) & (page < pool)
        origin = (page.to(tl.int64) * HEADS + head) * PAGE + first % PAGE
        row = tl.arange(0, N)
    else:
        page = tl.load(table + key // PAGE, mask=(key < end) & (key < table_width * PAGE), other=-1)
        there = (page >= 0) & (page < pool)
        origin = tl.cast(0, tl.int64)
        row = (page.to(tl.int64) * HEADS + head) * PAGE + key % PAGE
    return origin, row, there
