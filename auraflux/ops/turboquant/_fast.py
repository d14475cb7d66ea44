"""Decode attention on codes that never become floats: one query a head, 4-bit or 8-bit keys, 4-bit values.

Positions come in blocks: score them, update the running maximum, turn scores into weights rounded to 14 bits with one scale
per block, add the weighted values. Heads that share a key head go over a block in tiles of four, two and one.
"""

import numpy as np

from auraflux.ops._jit import bits_of_float, exp, float_of_bits, floats, int32s, int64s, jit, octets, rint
from auraflux.ops.attention._softmax import NOTHING, ZERO, fill, softcapped
from auraflux.ops.turboquant._fast_softmax import block_top, block_weights
from auraflux.ops.turboquant._fast_tiles import (
    BYTES,
    HIGH,
    KEY_UNITS,
    LANES,
    MOST,
    MOST_Q,
    OFFSET,
    VALUE_UNIT,
    add_values,
    key_scores,
    spread_weights,
    turn_values,
)

BLOCK = 128  # positions
LINE = 4 * BLOCK
PLACES = 16 * BLOCK + 2 * LINE  # bytes: addresses of keys and values, norms of keys and values
TINY, INFINITE = np.float32(1e-30), np.float32(np.inf)


@jit
def fast_scratch(heads, width):
    """Bytes to work in."""
    blocks = 2 * PLACES + BLOCK * width // 2 + heads * (LINE + 2 * BLOCK + 16) + 2 * heads * BYTES * (BLOCK // LANES)
    return blocks + heads * 2 * width + 2 * heads * BYTES * (width // 8) + 1024


@jit
def _tile(left):
    return 4 if left >= 4 else 2 if left >= 2 else 1


@jit
def _spread_query(q_at, width, bits, tile, h, target_at):
    """Round one query to 14 bits and lay it out for `key_scores`; give what a step is worth."""
    q = floats(q_at, width)
    top = np.int32(0)
    for d in range(width):
        # sizes order like their bits, not-a-number above all
        size = bits_of_float(q[d]) & np.int32(0x7FFFFFFF)
        top = size if size > top else top
    largest = float_of_bits(top)
    factor = np.float32(MOST_Q) / largest if TINY < largest < INFINITE else ZERO
    target, vectors = octets(target_at, 2 * width * tile), 8 // bits
    for d in range(width):
        n = np.int64(rint(q[d] * factor)) if factor != ZERO else 0
        high = (n + HIGH // 2) >> 7
        word, place = d * bits // 32, d % (32 // bits)
        # low halves of bytes first, then high halves
        at = (((word * vectors + place % vectors) * tile + h) * 2) * 4 + place // vectors
        target[at], target[at + 4] = high + OFFSET, n - HIGH * high + OFFSET
    return largest / np.float32(MOST_Q)


@jit
def _locate(cache, keys, values, first, count, target):
    """Addresses of the keys and values of a block's positions, and their norms; those past the end repeat the last."""
    key_rows, value_rows = int64s(target, BLOCK), int64s(target + 8 * BLOCK, BLOCK)
    key_norms, value_norms = floats(target + 16 * BLOCK, BLOCK), floats(target + 16 * BLOCK + LINE, BLOCK)
    key_step, value_step = cache.width * keys.bits // 8, cache.width * values.bits // 8
    page, slot, j = first // cache.page, first % cache.page, 0
    while j < count:
        number = np.int64(int32s(cache.table + 4 * page, 1)[0])
        row = (number * cache.heads + cache.head) * cache.page + slot
        some = min(count - j, cache.page - slot)
        key, value = keys.codes + row * key_step, values.codes + row * value_step
        key_norm, value_norm = floats(keys.norms + 4 * row, some), floats(values.norms + 4 * row, some)
        for i in range(some):
            key_rows[j + i], value_rows[j + i] = key + i * key_step, value + i * value_step
        for i in range(some):
            key_norms[j + i], value_norms[j + i] = key_norm[i], value_norm[i]
        j, page, slot = j + some, page + 1, 0
    for i in range(count, BLOCK):
        key_rows[i], value_rows[i] = key_rows[count - 1], value_rows[count - 1]
        key_norms[i] = value_norms[i] = ZERO


@jit
def _weigh(scores_at, count, groups, norms, largest, softcap, state_at, found_at, target):
    """Turn a block's scores of one head into rounded weights of values, whose norms are `largest` at most.

    Update its (maximum, sum); give the factor for what was summed before and what a step of the weights is worth.
    """
    scores, state, found = floats(scores_at, BLOCK), floats(state_at, 2), floats(found_at, 2)
    if softcap > ZERO:
        for j in range(count):
            scores[j] = softcapped(scores[j], softcap)
    for j in range(count, groups * LANES):
        scores[j] = NOTHING
    block_top((scores_at, groups, found_at))
    before, top = state[0], found[0]
    peak = top if top > before else before
    base = peak if peak != NOTHING else ZERO
    most = exp(top - base) * largest
    usable = TINY < most < INFINITE
    factor = np.float32(MOST) / most if usable else ZERO
    block_weights((scores_at, groups, base, norms, factor, target, target + BLOCK, found_at))
    keep, total, products = exp(before - base), found[0], found[1]
    state[0], state[1] = peak, state[1] * keep + total
    # sums that are no numbers, or infinite, must not vanish in the rounding
    return keep, most / np.float32(MOST) if usable and abs(products) < INFINITE else products


@jit
def _score(tile, bits, rows, groups, width, norms, q, units, out, ahead):
    quads, soon = width * bits // 128, (ahead, ahead + 8 * BLOCK)
    if bits == 4:
        if tile == 4:
            key_scores((4, 4, rows, groups, quads, norms, q, units, out, LINE, soon))
        elif tile == 2:
            key_scores((2, 4, rows, groups, quads, norms, q, units, out, LINE, soon))
        else:
            key_scores((1, 4, rows, groups, quads, norms, q, units, out, LINE, soon))
    elif tile == 4:
        key_scores((4, 8, rows, groups, quads, norms, q, units, out, LINE, soon))
    elif tile == 2:
        key_scores((2, 8, rows, groups, quads, norms, q, units, out, LINE, soon))
    else:
        key_scores((1, 8, rows, groups, quads, norms, q, units, out, LINE, soon))


@jit
def _add(tile, turned, groups, columns, rounded, spread, keeps, gains, sums):
    step = BYTES * (BLOCK // LANES)
    if tile == 4:
        spread_weights((4, rounded, BLOCK, groups, spread))
        add_values((4, turned, step, groups, columns, spread, keeps, gains, sums, 8 * BYTES))
    elif tile == 2:
        spread_weights((2, rounded, BLOCK, groups, spread))
        add_values((2, turned, step, groups, columns, spread, keeps, gains, sums, 4 * BYTES))
    else:
        spread_weights((1, rounded, BLOCK, groups, spread))
        add_values((1, turned, step, groups, columns, spread, keeps, gains, sums, 2 * BYTES))


@jit
def _gather(sums_at, tile, h, width, out_at):
    """Add up the quarters of sums, and put even and odd coordinates in their places."""
    out = floats(out_at, width)
    for d in range(width):
        column, side, lane = d // 8, d % 2, d % 8 // 2
        sums = floats(sums_at + ((column * 2 + side) * tile + h) * BYTES, LANES)
        total = ZERO
        for i in range(lane, LANES, 4):
            total += sums[i]
        out[d] = total


@jit
def attend_fast(rows, cache, keys, values, softcap, first, last, out, out_step, ends, ends_step, work):
    """Attend from the heads of one token to positions [first, last), all of them visible; otherwise as `attend_exact`."""
    heads, width, columns = rows.size, cache.width, cache.width // 8
    # where a block's rows are, then the next block's
    here, there = work, work + PLACES
    turned = work + 2 * PLACES
    scores = turned + BLOCK * width // 2
    rounded = scores + heads * LINE
    spread = rounded + heads * 2 * BLOCK
    queries = spread + 2 * heads * BYTES * (BLOCK // LANES)
    sums = (queries + heads * 2 * width + 63) // 64 * 64
    units = sums + 2 * heads * BYTES * columns
    keeps, gains, state = units + 4 * heads, units + 8 * heads, units + 12 * heads
    found = state + 8 * heads
    fill(sums, 2 * heads * LANES * columns, ZERO)
    h = 0
    while h < heads:
        tile = _tile(heads - h)
        for i in range(h, h + tile):
            floats(state + 8 * i, 2)[0], floats(state + 8 * i, 2)[1] = NOTHING, ZERO
            worth = _spread_query(
                rows.q + 4 * rows.room * (rows.row + i), width, keys.bits, tile, i - h, queries + h * 2 * width
            )
            floats(units, heads)[i] = worth * KEY_UNITS[keys.bits] / np.float32(np.sqrt(np.float32(width)))
        h += tile
    if first < last:
        _locate(cache, keys, values, first, min(BLOCK, last - first), here)
    for start in range(first, last, BLOCK):
        count, rest = min(BLOCK, last - start), min(BLOCK, last - start - BLOCK)
        groups = (count + LANES - 1) // LANES
        if rest > 0:
            _locate(cache, keys, values, start + BLOCK, rest, there)
        ahead = there if rest > 0 else here
        h = 0
        while h < heads:
            tile, mine, q = _tile(heads - h), scores + h * LINE, queries + h * 2 * width
            _score(tile, keys.bits, here, groups, width, here + 16 * BLOCK, q, units + 4 * h, mine, ahead)
            h += tile
        block_top((here + 16 * BLOCK + LINE, groups, found))
        largest = floats(found, 1)[0]
        turn_values((here + 8 * BLOCK, groups, width // 32, turned, BYTES * (BLOCK // LANES)))
        h = 0
        while h < heads:
            tile = _tile(heads - h)
            for i in range(h, h + tile):
                target, norms = rounded + i * 2 * BLOCK, here + 16 * BLOCK + LINE
                keep, gain = _weigh(scores + i * LINE, count, groups, norms, largest, softcap, state + 8 * i, found, target)
                floats(keeps, heads)[i] = keep
                floats(gains, heads)[i] = gain * VALUE_UNIT / np.float32(np.sqrt(np.float32(width)))
            mine = sums + 2 * h * BYTES * columns
            _add(tile, turned, groups, columns, rounded + h * 2 * BLOCK, spread, keeps + 4 * h, gains + 4 * h, mine)
            h += tile
        here, there = there, here
    h = 0
    while h < heads:
        tile = _tile(heads - h)
        for i in range(h, h + tile):
            place = rows.row + i
            _gather(sums + 2 * h * BYTES * columns, tile, i - h, width, out + place * out_step)
            floats(ends[0] + place * ends_step, 1)[0] = floats(state + 8 * i, 2)[0]
            floats(ends[1] + place * ends_step, 1)[0] = floats(state + 8 * i, 2)[1]
        h += tile
