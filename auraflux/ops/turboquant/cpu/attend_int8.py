"""Decode attention on codes that never become floats: one query a head.

Positions come in blocks: score them, update the running maximum, turn scores into weights rounded to 14 bits with one scale
per block, add the weighted values. Heads that share a key head go over a block in tiles of four, two and one.
"""

import numpy as np

from auraflux.ops.simd.jit import floats, int32s, int64s, jit, octets
from auraflux.ops.simd.math import bits_of_float, exp, float_of_bits, rint
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill, softcapped
from auraflux.ops.turboquant.cpu.attend_int8_softmax import block_top, block_weights
from auraflux.ops.turboquant.cpu.attend_int8_tiles import (
    BYTES,
    LANES,
    PLUS,
    add_values,
    key_scores,
    spread_weights,
    turn_values,
)
from auraflux.ops.turboquant.cpu.centres import SPAN, add_centres
from auraflux.ops.turboquant.cpu.codes import HIGH, UNITS, WIDE_BITS, widen_codes
from auraflux.ops.turboquant.cpu.items import begin_at, place_of, row_nbytes, run_of
from auraflux.ops.turboquant.cpu.levels import CHUNK

BLOCK = 128  # positions
LINE = 4 * BLOCK
SIDE = 8 * BLOCK + LINE  # bytes: addresses of rows, then their norms
MOST = 127 * HIGH + 64  # of a weight; an approximate exponential may be a little above
MOST_Q = 127 * HIGH  # of a query's coordinate
TINY, INFINITE = np.float32(1e-30), np.float32(np.inf)
ONE = np.float32(1)


@jit
def fast_scratch(heads, width):
    """Bytes to work in."""
    places = 4 * (SIDE + BLOCK * width)
    blocks = places + BLOCK * width + heads * (LINE + 2 * BLOCK + 20) + 8 * BYTES * (BLOCK // LANES)
    return blocks + heads * 2 * width + heads * BYTES * (width // 4) + 1024


@jit
def _tile(left):
    return 4 if left >= 4 else 2 if left >= 2 else 1


@jit
def _spread_query(q_at, width, bits, tile, h, target_at):
    """Round one query to two bytes and lay it out for `key_scores`; give what a step is worth, and what to take back."""
    q = floats(q_at, width)
    top = np.int32(0)
    for d in range(width):
        # sizes order like their bits, not-a-number above all
        size = bits_of_float(q[d]) & np.int32(0x7FFFFFFF)
        top = size if size > top else top
    largest = float_of_bits(top)
    factor = np.float32(MOST_Q) / largest if TINY < largest < INFINITE else ZERO
    target, vectors, total = octets(target_at, 2 * width * tile), 8 // bits, 0
    for d in range(width):
        n = np.int64(rint(q[d] * factor)) if factor != ZERO else 0
        high = (n + HIGH // 2) >> 7
        word, place = d * bits // 32, d % (32 // bits)
        # low halves of bytes first, then high halves
        at = (((word * vectors + place % vectors) * tile + h) * 2) * 4 + place // vectors
        target[at], target[at + 4] = high & 255, (n - HIGH * high) & 255
        # where levels have two bytes, the low ones are multiplied by the query's high bytes
        total += n if bits == 4 else n + high
    return largest / np.float32(MOST_Q), total * PLUS


@jit
def _locate(cache, side, first, count, target):
    """Addresses of a block's rows, and their norms; those past the end repeat the last. Narrow codes are widened."""
    rows, norms = int64s(target, BLOCK), floats(target + 8 * BLOCK, BLOCK)
    wide, nbytes, widened, j = WIDE_BITS[side.bits], row_nbytes(cache, side), target + SIDE, 0
    step = cache.width * wide // 8
    while j < count:
        row, some = run_of(cache, first + j, first + count)
        source, given = side.codes + row * nbytes, floats(side.norms + 4 * row, some)
        if wide > side.bits:
            place = widened + j * step
            widen_codes((side.bits, source, some * (cache.width // CHUNK), place))
            source = place
        for i in range(some):
            rows[j + i] = source + i * step
        for i in range(some):
            norms[j + i] = given[i]
        j += some
    for i in range(count, BLOCK):
        rows[i], norms[i] = rows[count - 1], ZERO


@jit
def _weigh(scores_at, count, groups, norms, largest, softcap, threshold, state_at, found_at, target):
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
    keep, best = exp(before - base), exp(top - base)
    most = best * largest
    usable = TINY < most < INFINITE
    factor = np.float32(MOST) / most if usable else ZERO
    # the sum of all weights will be no less than what is known of it here
    least = threshold * (state[1] * keep + best)
    block_weights((scores_at, groups, base, least, norms, factor, target, target + BLOCK, found_at))
    total, products = found[0], found[1]
    state[0], state[1] = peak, state[1] * keep + total
    # sums that are no numbers, or infinite, must not vanish in the rounding
    return keep, most / np.float32(MOST) if usable and abs(products) < INFINITE else products


@jit
def _live(heads, rounded, groups):
    """The first and the last group of tokens that any head gives a weight, the last excluded."""
    first, last = groups, 0
    for row in range(2 * heads):
        weights = int32s(rounded + row * BLOCK, groups * LANES // 4)
        for i in range(len(weights)):
            if weights[i] != 0:
                first, last = min(first, 4 * i // LANES), max(last, 4 * i // LANES + 1)
    return first, last


@jit
def _gather(sums_at, tile, h, width, bits, keep, out_at):
    """Add up the quarters of sums, and put the coordinates that shared a byte in their places."""
    out, vectors = floats(out_at, width), 8 // bits
    for d in range(width):
        column, side, lane = d // (4 * vectors), d % vectors, d % (4 * vectors) // vectors
        sums = floats(sums_at + ((column * vectors + side) * tile + h) * BYTES, LANES)
        total = ZERO
        for i in range(lane, LANES, 4):
            total += sums[i]
        out[d] = total * keep


@jit
def _spread_queries(rows, width, bits, queries, units, excess, state):
    """Lay out the queries of all heads, and begin with nothing seen."""
    heads, root, h = rows.size, np.float32(np.sqrt(np.float32(width))), 0
    while h < heads:
        tile = _tile(heads - h)
        for i in range(h, h + tile):
            floats(state + 8 * i, 2)[0], floats(state + 8 * i, 2)[1] = NOTHING, ZERO
            q, target = rows.q + 4 * rows.room * (rows.row + i), queries + h * 2 * width
            worth, over = _spread_query(q, width, WIDE_BITS[bits], tile, i - h, target)
            floats(units, heads)[i], int32s(excess, heads)[i] = worth * UNITS[bits] / root, over
        h += tile


@jit
def _leave_heads(item, width, bits, sums, keeps, state):
    """Leave the sums of all heads where parts are joined, with their maxima and totals."""
    rows, heads, h = item.rows, item.rows.size, 0
    while h < heads:
        tile = _tile(heads - h)
        for i in range(h, h + tile):
            to, keep = place_of(rows, i), floats(keeps, heads)[i]
            _gather(sums + h * BYTES * (width // 4), tile, i - h, width, bits, keep, item.out + to * item.out_step)
            floats(item.m + to * item.step, 1)[0] = floats(state + 8 * i, 2)[0]
            floats(item.totals + to * item.step, 1)[0] = floats(state + 8 * i, 2)[1]
        h += tile


@jit
def attend_fast(item, keys, values, softcap, threshold, work):
    """Attend from the heads of one token to an item's positions, all of them visible."""
    rows, cache, heads, width = item.rows, item.cache, item.rows.size, item.cache.width
    key_bits, value_bits, root = WIDE_BITS[keys.bits], WIDE_BITS[values.bits], np.float32(np.sqrt(np.float32(width)))
    columns = width * value_bits // 32
    # where a block's keys are and its values, then the next block's
    here, there, place = work, work + 2 * (SIDE + BLOCK * width), SIDE + BLOCK * width
    turned = work + 4 * place
    scores = turned + BLOCK * width
    rounded = scores + heads * LINE
    spread = rounded + heads * 2 * BLOCK
    queries = spread + 8 * BYTES * (BLOCK // LANES)
    sums = (queries + heads * 2 * width + 63) // 64 * 64
    units = sums + heads * BYTES * (width // 4)
    excess, keeps, gains, state = units + 4 * heads, units + 8 * heads, units + 12 * heads, units + 16 * heads
    found = state + 8 * heads
    fill(sums, heads * LANES * (width // 4), ZERO)
    fill(keeps, heads, ONE)
    _spread_queries(rows, width, keys.bits, queries, units, excess, state)
    # codes that are widened have been fetched by that
    soon = (
        row_nbytes(cache, keys) if key_bits == keys.bits else 0,
        row_nbytes(cache, values) if value_bits == values.bits else 0,
    )
    products, unturned = work + fast_scratch(heads, width) // 64 * 64, rows.unturned + 4 * rows.room * rows.row
    met, begun = (item.centres, unturned, heads, rows.room, width), -1
    origin = begin_at(item, SPAN)
    if item.first < item.last:
        count = min(origin + BLOCK, item.last) - item.first
        _locate(cache, keys, item.first, count, here)
        _locate(cache, values, item.first, count, here + place)
    for base in range(origin, item.last, BLOCK):
        start, rest = max(base, item.first), min(BLOCK, item.last - base - BLOCK)
        count = min(base + BLOCK, item.last) - start
        groups = (count + LANES - 1) // LANES
        if rest > 0:
            _locate(cache, keys, base + BLOCK, rest, there)
            _locate(cache, values, base + BLOCK, rest, there + place)
        norms, ahead = here + place + 8 * BLOCK, there if rest > 0 else here
        h = 0
        while h < heads:
            tile = _tile(heads - h)
            source = here, groups, width * key_bits // 128, here + 8 * BLOCK, queries + h * 2 * width
            target = units + 4 * h, excess + 4 * h, scores + h * LINE, LINE
            # the first pass over a block asks for the next one
            nbytes = soon if h == 0 else (0, 0)
            key_scores((tile, keys.bits, source, target, ahead, nbytes[0], ahead + place, nbytes[1]))
            h += tile
        if item.centres.table:
            begun = add_centres(*met, start, count, item.last, begun, scores, LINE, products)
        block_top((norms, groups, found))
        largest = floats(found, 1)[0]
        for h in range(heads):
            target = rounded + h * 2 * BLOCK
            keep, gain = _weigh(
                scores + h * LINE, count, groups, norms, largest, softcap, threshold, state + 8 * h, found, target
            )
            floats(keeps, heads)[h] *= keep
            floats(gains, heads)[h] = gain * UNITS[values.bits] / root
        first, last = _live(heads, rounded, groups) if threshold > ZERO else (0, groups)
        if first < last:
            turn_values((here + place + 8 * LANES * first, last - first, width * value_bits // 128, turned, LINE))
            h = 0
            while h < heads:
                tile = _tile(heads - h)
                spread_weights((tile, rounded + h * 2 * BLOCK + LANES * first, BLOCK, last - first, spread))
                target = keeps + 4 * h, gains + 4 * h, sums + h * BYTES * (width // 4)
                add_values((tile, values.bits, turned, LINE, last - first, columns, spread, target))
                h += tile
            fill(keeps, heads, ONE)
        here, there = there, here
    _leave_heads(item, width, value_bits, sums, keeps, state)
