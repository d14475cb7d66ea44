"""Attention of rows of queries to a block of positions, whose keys and values are laid out in scratch memory as float32.

Blocks begin at multiples of BLOCK, parts at multiples of PART. Every part is summed on its own and merged into those before
it, in their order: a row's result follows from its own position alone, whichever thread works on which part.
"""

from typing import NamedTuple

import numpy as np

from auraflux.ops.attention.cpu.dtypes import LANES
from auraflux.ops.attention.cpu.row_tiles import (
    BLOCK,
    add_values,
    cap_row,
    fold_row,
    laid_keys,
    score_rows,
    weigh_row,
)
from auraflux.ops.simd.jit import floats, jit
from auraflux.ops.simd.math import bits_of_float
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill

ROWS = 128
LINE = 4 * BLOCK
ONE = np.float32(1)
NOT_FINITE = np.int32(0x7F800000)


class Seen(NamedTuple):
    """Visible positions of rows: row r is token (row + r) // group, and sees `reach` positions before its own.

    position   of the first token, or how far before it a query may be thought to stand
    row, size  the first of the rows meant, and how many
    """

    position: int
    row: int
    size: int
    group: int
    reach: int


class Buffers(NamedTuple):
    """Addresses of the buffers of a block of rows.

    room      floats of a row
    block     [BLOCK][room]  a block's keys, then its values; one batch of keys more may be read
    laid      [BLOCK][room]  the keys as tiles take them
    sums      [ROWS][room]
    queries   [ROWS][room]
    scores    [ROWS][BLOCK]
    state     [ROWS][2]      highest scores, and sums of weights
    rescales  [ROWS]         factors that sums are still to be multiplied by
    """

    room: int
    block: int
    laid: int
    sums: int
    queries: int
    scores: int
    state: int
    rescales: int


@jit
def rows_scratch(room):
    """Return how many floats `lay_rows` divides, for rows of `room` floats."""
    return 2 * BLOCK * room + 2 * ROWS * room + ROWS * BLOCK + 3 * ROWS + 32


@jit
def lay_rows(room, work):
    laid = work + 4 * BLOCK * room
    sums = laid + 4 * BLOCK * room
    queries = sums + 4 * ROWS * room
    scores = queries + 4 * ROWS * room
    state = scores + ROWS * LINE
    return Buffers(room, work, laid, sums, queries, scores, state, state + 8 * ROWS)


@jit
def begin_part(buffers, size):
    """Clear sums and states for a new part."""
    fill(buffers.sums, size * buffers.room, ZERO)
    fill(buffers.rescales, size, ONE)
    state = floats(buffers.state, 2 * size)
    for r in range(size):
        state[2 * r], state[2 * r + 1] = NOTHING, ZERO


@jit
def limits(seen, r, base, first, last):
    """Return which of a block's positions a row sees among [first, last), the last excluded."""
    position = seen.position + (seen.row + r) // seen.group
    low, high = max(first, position - seen.reach), min(last, position + 1)
    return max(low - base, 0), min(high - base, BLOCK)


@jit
def score_block(seen, buffers, base, first, last, softcap, threshold, more, more_step):
    """Score and weigh the positions [first, last) of the block at `base`, whose keys are laid out.

    more  address of a number to add to the first row's scores, the next row's `more_step` bytes on; or 0
    """
    step, skipped = 4 * buffers.room, (first - base) // LANES
    batches = (last - base + LANES - 1) // LANES - skipped
    keys, place = buffers.block + step * LANES * skipped, base + LANES * skipped
    # what others have left there may be so small that products with it take a hundred times as long
    fill(keys, (first - place) * buffers.room, ZERO)
    fill(keys + step * (last - place), (batches * LANES - (last - place)) * buffers.room, ZERO)
    laid = laid_keys(keys, step, batches, buffers.laid)
    score_rows(seen.size, buffers.queries, step, laid, step, batches, buffers.scores + 4 * LANES * skipped, LINE)
    weigh_block(seen, buffers, base, first, last, softcap, threshold, more, more_step)


@jit
def weigh_block(seen, buffers, base, first, last, softcap, threshold, more, more_step):
    """Convert the scores of a block's positions [first, last) into weights; `more` as `score_block` takes it."""
    for r in range(seen.size):
        scores, added = buffers.scores + r * LINE, ZERO
        if more:
            added = floats(more + r * more_step, 1)[0]
        if softcap > ZERO:
            cap_row((scores, added, softcap))
            added = ZERO
        low, high = limits(seen, r, base, first, last)
        weigh_row(
            (scores, first - base, last - base, low, high, added, threshold, buffers.state + 8 * r, buffers.rescales + 4 * r)
        )


@jit
def _all_finite(values_at, count):
    values, largest = floats(values_at, count), np.int32(0)
    for i in range(count):
        largest = max(largest, bits_of_float(values[i]) & NOT_FINITE)
    return largest < NOT_FINITE


@jit
def _all_seen(seen, base, first, last):
    """Return whether every row sees every position."""
    late, early = limits(seen, seen.size - 1, base, first, last), limits(seen, 0, base, first, last)
    return late[0] <= first - base and early[1] >= last - base


@jit
def value_block(seen, buffers, base, first, last):
    """Add the values of positions [first, last) of the block at `base`, which are laid out."""
    step, place = 4 * buffers.room, first - base
    values, weights, count = buffers.block + step * place, buffers.scores + 4 * place, last - first
    if _all_seen(seen, base, first, last) or _all_finite(values, count * buffers.room):
        add_values(seen.size, weights, LINE, values, step, count, buffers.sums, step, buffers.rescales)
    else:
        # 0 times not-a-number is not 0: each row meets only what it sees
        for r in range(seen.size):
            low, high = limits(seen, r, base, first, last)
            here, mine = buffers.block + low * step, buffers.scores + r * LINE + 4 * low
            add_values(1, mine, LINE, here, step, max(high - low, 0), buffers.sums + r * step, step, buffers.rescales + 4 * r)
    fill(buffers.rescales, seen.size, ONE)


@jit
def store_row(buffers, r, width, joined, out, peak, total):
    """Write a row's part to `out`, or merge it into what `out` holds."""
    sums, rescale, found = (
        buffers.sums + 4 * r * buffers.room,
        floats(buffers.rescales + 4 * r, 1)[0],
        floats(buffers.state + 8 * r, 2),
    )
    if joined:
        if found[1] != ZERO:
            fold_row((sums, rescale, found[0], found[1], width, out, peak, total))
        return
    source, target = floats(sums, width), floats(out, width)
    for i in range(width):
        target[i] = source[i] * rescale
    floats(peak, 1)[0], floats(total, 1)[0] = found[0], found[1]


@jit
def copy_row(source_at, count, scale, target_at, room):
    """Copy a row times a factor, and fill it up with zeros."""
    source, target = floats(source_at, count), floats(target_at, room)
    for i in range(count):
        target[i] = source[i] * scale
    for i in range(count, room):
        target[i] = ZERO
