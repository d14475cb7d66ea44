"""Attention of rows of queries to a block of positions, whose keys and values are laid out in scratch memory as float32.

Blocks begin at multiples of BLOCK, parts at multiples of PART. Every part is summed up from nothing and joined to those before
it, in their order: what a row gives then follows from its own position alone, whoever works on which part.
"""

from typing import NamedTuple

import numpy as np

from auraflux.ops.attention.cpu.decode_tiles import LANES
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
    """Which positions rows see: row r is token (row + r) // group, and sees `reach` positions before its own.

    position   of the first token, or how far before it a query may be thought to stand
    row, size  the first of the rows meant, and how many
    """

    position: int
    row: int
    size: int
    group: int
    reach: int


class Desk(NamedTuple):
    """What rows are worked on with: addresses.

    room      floats of a row
    block     [BLOCK][room]  a block's keys, then its values; one batch of keys more may be read
    laid      [BLOCK][room]  the keys as tiles take them
    sums      [ROWS][room]
    queries   [ROWS][room]
    scores    [ROWS][BLOCK]
    state     [ROWS][2]      highest scores, and sums of weights
    keeps     [ROWS]         factors that sums are still to be multiplied with
    """

    room: int
    block: int
    laid: int
    sums: int
    queries: int
    scores: int
    state: int
    keeps: int


@jit
def rows_scratch(room):
    """Floats that `lay_rows` divides, for rows of `room` floats."""
    return 2 * BLOCK * room + 2 * ROWS * room + ROWS * BLOCK + 3 * ROWS + 32


@jit
def lay_rows(room, work):
    laid = work + 4 * BLOCK * room
    sums = laid + 4 * BLOCK * room
    queries = sums + 4 * ROWS * room
    scores = queries + 4 * ROWS * room
    state = scores + ROWS * LINE
    return Desk(room, work, laid, sums, queries, scores, state, state + 8 * ROWS)


@jit
def begin_part(desk, size):
    """Nothing is seen yet."""
    fill(desk.sums, size * desk.room, ZERO)
    fill(desk.keeps, size, ONE)
    state = floats(desk.state, 2 * size)
    for r in range(size):
        state[2 * r], state[2 * r + 1] = NOTHING, ZERO


@jit
def limits(seen, r, base, first, last):
    """Of a block's positions those that a row sees among [first, last), the last excluded."""
    position = seen.position + (seen.row + r) // seen.group
    low, high = max(first, position - seen.reach), min(last, position + 1)
    return max(low - base, 0), min(high - base, BLOCK)


@jit
def score_block(seen, desk, base, first, last, softcap, threshold, more, more_step):
    """Weigh the positions [first, last) of the block at `base`, whose keys are laid out.

    more  address of what is added to the first row's scores, the next `more_step` bytes on; or 0
    """
    step, skipped = 4 * desk.room, (first - base) // LANES
    batches = (last - base + LANES - 1) // LANES - skipped
    keys, place = desk.block + step * LANES * skipped, base + LANES * skipped
    # what others have left there may be so small that products with it take a hundred times as long
    fill(keys, (first - place) * desk.room, ZERO)
    fill(keys + step * (last - place), (batches * LANES - (last - place)) * desk.room, ZERO)
    laid = laid_keys(keys, step, batches, desk.laid)
    score_rows(seen.size, desk.queries, step, laid, step, batches, desk.scores + 4 * LANES * skipped, LINE)
    weigh_block(seen, desk, base, first, last, softcap, threshold, more, more_step)


@jit
def weigh_block(seen, desk, base, first, last, softcap, threshold, more, more_step):
    """Turn the scores of a block's positions [first, last) into weights; `more` as `score_block` takes it."""
    for r in range(seen.size):
        scores, added = desk.scores + r * LINE, ZERO
        if more:
            added = floats(more + r * more_step, 1)[0]
        if softcap > ZERO:
            cap_row((scores, added, softcap))
            added = ZERO
        low, high = limits(seen, r, base, first, last)
        weigh_row((scores, first - base, last - base, low, high, added, threshold, desk.state + 8 * r, desk.keeps + 4 * r))


@jit
def _all_finite(values_at, count):
    values, largest = floats(values_at, count), np.int32(0)
    for i in range(count):
        largest = max(largest, bits_of_float(values[i]) & NOT_FINITE)
    return largest < NOT_FINITE


@jit
def _all_seen(seen, base, first, last):
    """Whether every row sees every position."""
    late, early = limits(seen, seen.size - 1, base, first, last), limits(seen, 0, base, first, last)
    return late[0] <= first - base and early[1] >= last - base


@jit
def value_block(seen, desk, base, first, last):
    """Add the values of positions [first, last) of the block at `base`, which are laid out."""
    step, place = 4 * desk.room, first - base
    values, weights, count = desk.block + step * place, desk.scores + 4 * place, last - first
    if _all_seen(seen, base, first, last) or _all_finite(values, count * desk.room):
        add_values(seen.size, weights, LINE, values, step, count, desk.sums, step, desk.keeps)
    else:
        # 0 times not-a-number is not 0: each row meets only what it sees
        for r in range(seen.size):
            low, high = limits(seen, r, base, first, last)
            here, mine = desk.block + low * step, desk.scores + r * LINE + 4 * low
            add_values(1, mine, LINE, here, step, max(high - low, 0), desk.sums + r * step, step, desk.keeps + 4 * r)
    fill(desk.keeps, seen.size, ONE)


@jit
def leave_row(desk, r, width, joined, out, peak, total):
    """Leave a row's part, or join it to what lies there."""
    sums, keep, found = desk.sums + 4 * r * desk.room, floats(desk.keeps + 4 * r, 1)[0], floats(desk.state + 8 * r, 2)
    if joined:
        if found[1] != ZERO:
            fold_row((sums, keep, found[0], found[1], width, out, peak, total))
        return
    source, target = floats(sums, width), floats(out, width)
    for i in range(width):
        target[i] = source[i] * keep
    floats(peak, 1)[0], floats(total, 1)[0] = found[0], found[1]


@jit
def copy_row(source_at, count, scale, target_at, room):
    """Copy a row times a factor, and fill it up with zeros."""
    source, target = floats(source_at, count), floats(target_at, room)
    for i in range(count):
        target[i] = source[i] * scale
    for i in range(count, room):
        target[i] = ZERO
