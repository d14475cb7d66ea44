"""Where tokens lie in a pool of pages, in Triton: the place of a new one, and those of keys to be read."""

import triton
import triton.language as tl


@triton.jit
def place_token(token, table, lengths, starts, sequences, table_width, pool, PAGE: tl.constexpr, S: tl.constexpr):
    """Find the page and the slot a new token belongs to; a page outside the pool is given as -1."""
    b = tl.arange(0, S)
    start = tl.load(starts + b, mask=b < sequences, other=1 << 30)
    sequence = tl.sum((start <= token).to(tl.int32), 0) - 1
    position = tl.load(lengths + sequence) - tl.load(starts + sequence + 1) + token
    inside = (position >= 0) & (position < table_width * PAGE)
    page = tl.load(table + sequence.to(tl.int64) * table_width + position // PAGE, mask=inside, other=-1)
    return tl.where(page < pool, page, -1).to(tl.int64), position % PAGE


@triton.jit
def place_keys(
    table, first, end, head, table_width, pool, HEADS: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Find N keys in the pool: a row, how many rows each lies after it, and whether it is there.

    A table that leads outside the pool is not followed. ALIGNED means that all N keys lie in one page.
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
