"""Attention on codes that never become floats.

Positions come in blocks that begin at multiples of BLOCK: score them, update the running maximum, turn scores into weights
rounded to 14 bits with one scale per row and block, add the weighted values. Rows of queries, the heads that share a key head
of one token or several, go over a block in tiles of four, two and one; none depends on those beside it.
"""

from typing import NamedTuple

import numpy as np

from auraflux.ops.attention.cpu.row_blocks import copy_row
from auraflux.ops.attention.cpu.row_tiles import fold_row
from auraflux.ops.simd.jit import call_kernel, floats, int32s, int64s, jit, real
from auraflux.ops.simd.math import bits_of_float, exp, float_of_bits, rint
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill, softcapped
from auraflux.ops.simd.vectors import copy
from auraflux.ops.turboquant.cpu.attend_int8_softmax import block_top, block_weights
from auraflux.ops.turboquant.cpu.attend_int8_tiles import (
    BYTES,
    LANES,
    PLUS,
    STRAIGHT,
    TILES,
    WAYS,
    Loops,
    ask_for,
    list_rows,
    spread_weights,
    transpose_values,
)
from auraflux.ops.turboquant.cpu.centres import SPAN, add_centres, meet_centres
from auraflux.ops.turboquant.cpu.codes import HIGH, KEY_UNITS, REST, UNITS, WIDE_BITS, widen_codes
from auraflux.ops.turboquant.cpu.items import (
    begin_run,
    clear_slots,
    item_at,
    parts_of,
    place_and_run,
    place_of,
    row_nbytes,
    run_of,
    sides,
)
from auraflux.ops.turboquant.cpu.levels import CHUNK

BLOCK = 128  # positions
LINE = 4 * BLOCK
SIDE = 8 * BLOCK + LINE  # bytes: addresses of rows, then their norms
MOST = 127 * HIGH + 64  # of a weight; an approximate exponential may be a little above
MOST_Q = 127 * HIGH  # of a query's coordinate
TINY, INFINITE = np.float32(1e-30), np.float32(np.inf)
ONE = np.float32(1)
THREES = 3 in TILES
ONE_TILE = 4  # rows; for more, a block's keys are turned and looked up once


@jit
def fast_scratch(heads, width):
    """Bytes to work in."""
    places = 4 * (SIDE + BLOCK * width)
    blocks = places + BLOCK * width + heads * (LINE + 2 * BLOCK + 20) + 8 * BYTES * (BLOCK // LANES)
    return (
        blocks
        + (heads + 1) * 2 * width
        + heads * BYTES * (width // 4)
        + 4 * width
        + 4 * heads * width
        + 2 * BLOCK * width
        + 1024
    )


@jit
def _tile(left):
    return 4 if left >= 4 else left if left < 3 or THREES else 2


@jit
def _round_query(q_at, width, rounded_at):
    """Round one query to numbers of two bytes: what a step is worth, and the sums of the numbers and of their upper bytes.

    rounded  [2, width] int32  upper and lower bytes, each in the lowest of its word
    """
    q, top = floats(q_at, width), np.int32(0)
    for d in range(width):
        # sizes order like their bits, not-a-number above all
        size = bits_of_float(q[d]) & np.int32(0x7FFFFFFF)
        top = size if size > top else top
    largest, total, upper = float_of_bits(top), np.int32(0), np.int32(0)
    highs, lows = int32s(rounded_at, width), int32s(rounded_at + 4 * width, width)
    if TINY < largest < INFINITE:
        factor = np.float32(MOST_Q) / largest
        for d in range(width):
            n = np.int32(rint(q[d] * factor))
            high = np.int32(np.int32(n + np.int32(HIGH // 2)) >> np.int32(7))
            total, upper = np.int32(total + n), np.int32(upper + high)
            highs[d], lows[d] = high & np.int32(255), np.int32(n - np.int32(HIGH) * high) & np.int32(255)
    else:
        fill(rounded_at, 2 * width, ZERO)
    return largest / np.float32(MOST_Q), np.int64(total), np.int64(upper)


@jit
def _four_bytes(bytes_at, step):
    """The lowest bytes of four words, `step` apart, as one."""
    words = int32s(bytes_at, 3 * step + 1)
    return words[0] | words[step] << np.int32(8) | words[2 * step] << np.int32(16) | words[3 * step] << np.int32(24)


@jit
def _spread_query(q_at, width, bits, room, h, target_at, rounded_at):
    """Round one query to two bytes and lay it out for `key_scores`; give what a step is worth, and what to take back."""
    worth, total, upper = _round_query(q_at, width, rounded_at)
    target, vectors = int32s(target_at, width * room // 2), 2 if bits == 4 else 1
    for word in range(width // (4 * vectors)):
        # low halves of bytes first, then high halves
        for half in range(vectors):
            at, source = 2 * ((word * vectors + half) * room + h), rounded_at + 4 * (4 * word * vectors + half)
            target[at], target[at + 1] = _four_bytes(source, vectors), _four_bytes(source + 4 * width, vectors)
    if bits == 8 and STRAIGHT:
        # levels are half a step above their bytes, and their rest half of one
        return worth, -((total >> 1) + upper * HIGH // (2 * REST))
    # where levels have two bytes, the low ones are multiplied by the query's high bytes
    return worth, (total if bits == 4 else total + upper) * PLUS


@jit
def _locate(cache, side, first, offset, count, target):
    """Addresses of the rows of `count` positions from `first` on, `offset` into their block; their norms are asked for.

    Those before repeat the first, those after the last. Narrow codes are widened.
    """
    wide, nbytes, widened, j = WIDE_BITS[side.bits], row_nbytes(cache, side), target + SIDE, offset
    step, end = cache.width * wide // 8, offset + count
    while j < end:
        row, some = run_of(cache, first + j - offset, first + count)
        source = side.codes + row * nbytes
        ask_for((side.norms + 4 * row, 4 * some))
        if wide > side.bits:
            place = widened + j * step
            widen_codes((side.bits, source, some * (cache.width // CHUNK), place))
            source = place
        list_rows((source, step, some, target + 8 * j))
        j += some
    rows = int64s(target, BLOCK)
    list_rows((rows[offset], 0, offset, target))
    list_rows((rows[end - 1], 0, BLOCK - end, target + 8 * end))


@jit
def _copy_norms(cache, side, first, offset, count, target):
    """The norms of a block's rows; 0 for those before and after."""
    norms, j, end = target + 8 * BLOCK, offset, offset + count
    fill(norms, offset, ZERO)
    while j < end:
        row, some = run_of(cache, first + j - offset, first + count)
        copy((side.norms + 4 * row, 4 * some, norms + 4 * j))
        j += some
    fill(norms + 4 * end, BLOCK - end, ZERO)


@jit
def _largest(norms_at, low, high):
    """The largest norm of some positions."""
    norms, largest = floats(norms_at, BLOCK), ZERO
    for j in range(low, high):
        largest = norms[j] if norms[j] > largest else largest
    return largest


@jit
def _weigh(scores_at, low, high, groups, norms, largest, softcap, threshold, state_at, found_at, target):
    """Turn a block's scores [low, high) of one row into rounded weights of values, whose norms are `largest` at most.

    Update its (maximum, sum); give the factor for what was summed before and what a step of the weights is worth.
    """
    scores, state, found = floats(scores_at, BLOCK), floats(state_at, 2), floats(found_at, 2)
    if softcap > ZERO:
        for j in range(BLOCK):
            scores[j] = softcapped(scores[j], softcap)
    for j in range(low):
        scores[j] = NOTHING
    for j in range(high, groups * LANES):
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
    """The first and the last group of tokens that any head gives a weight, the last excluded; multiples of WAYS."""
    first, last = groups, 0
    for row in range(2 * heads):
        weights = int32s(rounded + row * BLOCK, groups * LANES // 4)
        for i in range(len(weights)):
            if weights[i] != 0:
                turn = 4 * i // (WAYS * LANES)
                first, last = min(first, turn * WAYS), max(last, (turn + 1) * WAYS)
    return first, last


@jit
def _gather(sums_at, tile, h, width, bits, out_at):
    """Add up the quarters of sums, and put the coordinates that shared a byte in their places."""
    out, vectors = floats(out_at, width), 8 // bits
    for column in range(width // (4 * vectors)):
        for side in range(vectors):
            sums = floats(sums_at + ((column * vectors + side) * tile + h) * BYTES, LANES)
            for lane in range(4):
                total = ZERO
                for i in range(lane, LANES, 4):
                    total += sums[i]
                out[(4 * column + lane) * vectors + side] = total


@jit
def _spread_queries(rows, width, bits, queries, units, excess, rounded):
    """Lay out the queries of all rows; 8 bytes for each coordinate of one are worked in at `rounded`."""
    heads, root, h = rows.size, np.float32(np.sqrt(np.float32(width))), 0
    while h < heads:
        tile = _tile(heads - h)
        for i in range(h, h + tile):
            q, target = rows.q + 4 * rows.room * place_of(rows, i), queries + h * 2 * width
            worth, over = _spread_query(q, width, WIDE_BITS[bits], 4 if tile == 3 else tile, i - h, target, rounded)
            floats(units, heads)[i], int32s(excess, heads)[i] = worth * KEY_UNITS[bits] / root, over
        h += tile


class Desk(NamedTuple):
    """What rows are worked on with: addresses.

    here, there  where a block's keys are and, `place` bytes on, its values; the next block's
    turned       a block's values
    scores       [rows][BLOCK]
    rounded      [rows][2][BLOCK]  weights
    spread       weights of a tile
    queries      as `_spread_query` leaves them
    sums         of all rows
    units, excess, keeps, gains  [rows]
    state        [rows][2]         highest scores, and sums of weights
    found        [4]
    gathered     [width]           a row's sums in their places
    unrotated     [rows][width]     queries, where keys have centres
    levels       of a block's keys, two bytes each at most
    products     what `meet_centres` works in
    """

    here: int
    there: int
    place: int
    turned: int
    scores: int
    rounded: int
    spread: int
    queries: int
    sums: int
    units: int
    excess: int
    keeps: int
    gains: int
    state: int
    found: int
    gathered: int
    unrotated: int
    levels: int
    products: int


@jit
def _lay_out(heads, width, work):
    place = SIDE + BLOCK * width
    turned = work + 4 * place
    scores = turned + BLOCK * width
    rounded = scores + heads * LINE
    spread = rounded + heads * 2 * BLOCK
    queries = spread + 8 * BYTES * (BLOCK // LANES)
    # three queries are laid out like four
    sums = (queries + (heads + 1) * 2 * width + 63) // 64 * 64
    units = sums + heads * BYTES * (width // 4)
    excess, keeps, gains, state = units + 4 * heads, units + 8 * heads, units + 12 * heads, units + 16 * heads
    found = state + 8 * heads
    gathered = found + 16
    unrotated = (gathered + 4 * width + 63) // 64 * 64
    sides_at = work, work + 2 * place, place, turned, scores, rounded, spread, queries, sums
    levels = (unrotated + 4 * heads * width + 63) // 64 * 64
    products = work + fast_scratch(heads, width) // 64 * 64
    return Desk(*sides_at, units, excess, keeps, gains, state, found, gathered, unrotated, levels, products)


@jit
def _leave_rows(item, width, bits, desk, joined):
    """Leave the sums of all rows where parts are joined, or join them to what lies there."""
    rows, count, h = item.rows, item.rows.size, 0
    while h < count:
        tile = _tile(count - h)
        for i in range(h, h + tile):
            to, state = place_of(rows, i), floats(desk.state + 8 * i, 2)
            out, m, total = item.out + to * item.out_step, item.m + to * item.step, item.totals + to * item.step
            target = desk.gathered if joined else out
            _gather(desk.sums + h * BYTES * (width // 4), tile, i - h, width, bits, target)
            if not joined:
                floats(m, 1)[0], floats(total, 1)[0] = state[0], state[1]
            elif state[1] != ZERO:
                fold_row((target, ONE, state[0], state[1], width, out, m, total))
        h += tile


@jit
def _limits(rows, r, base, first, last):
    """Of a block's positions those that a row sees among [first, last), the last excluded."""
    position = rows.position + (rows.row + r) // rows.group
    low, high = max(first, position - rows.reach), min(last, position + 1)
    low = max(low - base, 0)
    return low, max(min(high - base, BLOCK), low)


@jit
def _weigh_rows(item, base, start, end, groups, norms, softcap, threshold, unit, desk):
    """Turn all rows' scores of a block into rounded weights."""
    block_top((norms, groups, desk.found))
    most = floats(desk.found, 1)[0]
    for r in range(item.rows.size):
        low, high = _limits(item.rows, r, base, start, end)
        all_seen = low == start - base and high == end - base
        largest, target = most if all_seen else _largest(norms, low, high), desk.rounded + r * 2 * BLOCK
        keep, gain = _weigh(
            desk.scores + r * LINE,
            low,
            high,
            groups,
            norms,
            largest,
            softcap,
            threshold,
            desk.state + 8 * r,
            desk.found,
            target,
        )
        floats(desk.keeps, item.rows.size)[r], floats(desk.gains, item.rows.size)[r] = keep, gain * unit


@jit
def _attend_part(item, keys, values, loops, softcap, threshold, desk):
    """Attend from an item's rows to its positions."""
    rows, cache, count, width, begun = item.rows, item.cache, item.rows.size, item.cache.width, -1
    key_bits, value_bits = WIDE_BITS[keys.bits], WIDE_BITS[values.bits]
    columns, unit = width * value_bits // 32, UNITS[values.bits] / np.float32(np.sqrt(np.float32(width)))
    here, there, place = desk.here, desk.there, desk.place
    planes = 1 if key_bits == 4 else 2
    key_step = planes * LANES * width
    fill(desk.sums, count * LANES * (width // 4), ZERO)
    for r in range(count):
        floats(desk.state + 8 * r, 2)[0], floats(desk.state + 8 * r, 2)[1] = NOTHING, ZERO
    # codes that are widened have been fetched by that
    soon = (
        row_nbytes(cache, keys) if key_bits == keys.bits else 0,
        row_nbytes(cache, values) if value_bits == values.bits else 0,
    )
    origin = item.first // BLOCK * BLOCK
    some = min(origin + BLOCK, item.last) - item.first
    _locate(cache, keys, item.first, item.first - origin, some, here)
    _locate(cache, values, item.first, item.first - origin, some, here + place)
    for base in range(origin, item.last, BLOCK):
        start, end, rest = max(base, item.first), min(base + BLOCK, item.last), min(BLOCK, item.last - base - BLOCK)
        # what is beyond the last position has no weight
        groups = (end - base + WAYS * LANES - 1) // (WAYS * LANES) * WAYS
        _copy_norms(cache, keys, start, start - base, end - start, here)
        _copy_norms(cache, values, start, start - base, end - start, here + place)
        if rest > 0:
            _locate(cache, keys, base + BLOCK, 0, rest, there)
            _locate(cache, values, base + BLOCK, 0, rest, there + place)
        norms, ahead = here + place + 8 * BLOCK, there if rest > 0 else here
        if count > ONE_TILE:
            call_kernel(loops.transpose_keys, (here, groups, width * key_bits // 128, desk.levels, key_step))
        h = 0
        while h < count:
            tile = _tile(count - h)
            if count > ONE_TILE:
                source = desk.levels, key_step, groups, width // 4, here + 8 * BLOCK, desk.queries + h * 2 * width
                target = desk.units + 4 * h, desk.excess + 4 * h, desk.scores + h * LINE, LINE
                call_kernel(loops.transposed_scores, (tile, source, target))
                h += tile
                continue
            source = here, groups, width * key_bits // 128, here + 8 * BLOCK, desk.queries + h * 2 * width
            target = desk.units + 4 * h, desk.excess + 4 * h, desk.scores + h * LINE, LINE
            # the first pass over a block asks for the next one
            nbytes = soon if h == 0 else (0, 0)
            call_kernel(loops.key_scores, (tile, source, target, ahead, nbytes[0], here + place, nbytes[1]))
            h += tile
        if item.centres.table:
            block, last = base // SPAN, (item.last - 1) // SPAN
            begun = meet_centres(item.centres, desk.unrotated, count, rows.room, width, block, last, begun, desk.products)
            # runs begin at whole blocks, so all centres of a block are in one
            add_centres(count, block, (end - base + SPAN - 1) // SPAN, begun, desk.scores, LINE, desk.products)
        _weigh_rows(item, base, start, end, groups, norms, softcap, threshold, unit, desk)
        first, last = _live(count, desk.rounded, groups) if threshold > ZERO else (0, groups)
        if first < last:
            transpose_values((here + place + 8 * LANES * first, last - first, width * value_bits // 128, desk.turned, LINE))
        h = 0
        while h < count:
            tile = _tile(count - h)
            some = max(last - first, 0)
            spread_weights((tile, desk.rounded + h * 2 * BLOCK + LANES * first, BLOCK, some, desk.spread))
            target = desk.keeps + 4 * h, desk.gains + 4 * h, desk.sums + h * BYTES * (width // 4)
            call_kernel(loops.add_values, (tile, desk.turned, LINE, some, columns, desk.spread, target))
            h += tile
        here, there = there, here


@jit
def _lay_queries(step, rows, bits, desk):
    """Lay out the queries of all rows, rounded and, where keys have centres, as they are."""
    _spread_queries(rows, step.width, bits, desk.queries, desk.units, desk.excess, desk.levels)
    if step.centres:
        for r in range(rows.size):
            source = rows.unrotated + 4 * rows.room * place_of(rows, r)
            copy_row(source, rows.room, ONE, desk.unrotated + 4 * rows.room * r, rows.room)


@jit
def attend_rounded(step, b, number, work):
    """Attend from an item's rows to codes."""
    (place, run), width = place_and_run(step, b, number), step.width
    begin, stop = parts_of(step, b, run)
    keys, values = sides(step)
    loops = Loops(step.key_scores, step.transpose_keys, step.transposed_scores, step.add_values)
    rows = item_at(step, b, place, begin).rows
    desk, laid = _lay_out(rows.size, width, work), False
    begin_run(step, b, place, run)
    for part in range(begin, stop):
        item = item_at(step, b, place, part)
        if item.first < item.last:
            # of a short text all may be kept as it is
            if not laid:
                _lay_queries(step, rows, keys.bits, desk)
                laid = True
            _attend_part(item, keys, values, loops, real(step.softcap), real(step.threshold), desk)
            _leave_rows(item, width, WIDE_BITS[values.bits], desk, step.joined)
        elif not step.joined:
            clear_slots(step, b, place, part, part + 1)
