"""How attention on codes is divided: an item is one key head of one sequence, some rows of queries, a part of the positions."""

from typing import NamedTuple

import numpy as np

from auraflux.ops.attention.cpu.prefill import ROWS
from auraflux.ops.simd.jit import arguments, int32s, jit
from auraflux.ops.turboquant.cpu.levels import CHUNK


class Side(NamedTuple):
    """Keys or values: addresses of codes, norms and levels, and the bits of a code."""

    codes: int
    norms: int
    book: int
    bits: int


class Step(NamedTuple):
    """A call: addresses, sizes, and two floats that arrive as bits.

    q               rotated and scaled, rows of `padded(width)` floats
    page            tokens in a page
    reach           how far back a query sees
    softcap         0 for none
    threshold       values with a smaller share of the weights need not be read
    block, parts    parts are of `block` positions each, or share what is seen
    o, m, totals    sums, highest scores and sums of weights, `slots` for each row
    space, scratch  what jobs work in, and how many bytes each
    fewest, most    new tokens of the sequences meant
    """

    q: int
    heads: int
    width: int
    page: int
    table: int
    table_width: int
    lengths: int
    starts: int
    sequences: int
    key_heads: int
    key_codes: int
    key_norms: int
    key_book: int
    key_bits: int
    value_codes: int
    value_norms: int
    value_book: int
    value_bits: int
    reach: int
    softcap: float
    threshold: float
    block: int
    parts: int
    o: int
    m: int
    totals: int
    slots: int
    space: int
    scratch: int
    fewest: int
    most: int


class Cache(NamedTuple):
    """One sequence's part of a head: its row of the page table, rows in a page, heads, which head, and the width."""

    table: int
    page: int
    heads: int
    head: int
    width: int


class Rows(NamedTuple):
    """Queries of one sequence and key head: row r is head r % group of the token at `position` + r // group.

    q       address of the first token's first head, rows of `room` floats, `heads` of them a token
    row, size  the first of the rows meant, and how many
    reach   how far back a query sees
    """

    q: int
    room: int
    heads: int
    group: int
    position: int
    row: int
    size: int
    reach: int


class Item(NamedTuple):
    """A piece of work: its rows see positions [first, last).

    out        address of the sum of the first token's first head, the next head's `out_step` bytes on
    m, totals  addresses of its highest score and its sum of weights, the next head's `step` bytes on
    """

    rows: Rows
    cache: Cache
    first: int
    last: int
    out: int
    out_step: int
    m: int
    totals: int
    step: int


FIELDS = len(Step._fields)


@jit
def opened(args):
    """A kernel's arguments."""
    return Step(*arguments(args, FIELDS))


@jit
def padded(width):
    return (width + CHUNK - 1) // CHUNK * CHUNK


@jit
def sides(step):
    keys = Side(step.key_codes, step.key_norms, step.key_book, step.key_bits)
    return keys, Side(step.value_codes, step.value_norms, step.value_book, step.value_bits)


@jit
def count_items(step, b):
    """How many items a sequence makes: none unless its number of new tokens is among those meant."""
    starts = int32s(step.starts, step.sequences + 1)
    new = np.int64(starts[b + 1]) - starts[b]
    if new < step.fewest or new > step.most:
        return 0
    return (new * (step.heads // step.key_heads) + ROWS - 1) // ROWS * step.key_heads * step.parts


@jit
def item_at(step, b, number):
    """One of a sequence's items."""
    starts, group, room = int32s(step.starts, step.sequences + 1), step.heads // step.key_heads, padded(step.width)
    token, length = np.int64(starts[b]), np.int64(int32s(step.lengths, step.sequences)[b])
    new = starts[b + 1] - token
    position = length - new
    oldest = max(0, position - step.reach)
    part, head = number % step.parts, number // step.parts % step.key_heads
    row = number // step.parts // step.key_heads * ROWS
    size = min(ROWS, new * group - row)
    origin, extent = 0, step.block
    if extent == 0:
        origin, extent = oldest, (length - oldest + step.parts - 1) // step.parts
    # from the first position that the first row sees to the last row's own
    first = max(max(oldest, position + row // group - step.reach), origin + part * extent)
    last = min(position + (row + size - 1) // group + 1, origin + (part + 1) * extent)
    place = token * step.heads + head * group
    slot = place * step.slots + part
    rows = Rows(step.q + 4 * place * room, room, step.heads, group, position, row, size, step.reach)
    cache = Cache(step.table + 4 * b * step.table_width, step.page, step.key_heads, head, step.width)
    ends = step.m + 4 * slot, step.totals + 4 * slot, 4 * step.slots
    return Item(rows, cache, first, last, step.o + 4 * slot * step.width, 4 * step.slots * step.width, *ends)


@jit
def place_of(rows, r):
    """Which head a row is, counted from the first token's first."""
    return (rows.row + r) // rows.group * rows.heads + (rows.row + r) % rows.group


@jit
def run_of(cache, position, last):
    """The row of the pool that holds a position, and how many up to `last` lie side by side from there on."""
    number, slot = position // cache.page, position % cache.page
    page = np.int64(int32s(cache.table, number + 1)[number])
    return (page * cache.heads + cache.head) * cache.page + slot, min(cache.page - slot, last - position)


@jit
def row_nbytes(cache, side):
    return (cache.width * side.bits + 31) // 32 * 4
