"""Attention on codes in int8: codes are never dequantized to floats.

Positions come in blocks that begin at multiples of BLOCK. For each block: score its keys, update the running maximum, convert
scores into weights rounded to 14 bits, add the weighted values. Query rows (tokens times the heads that share a key head) go
over a block in tiles of four, two and one; no row depends on the other rows of its tile.
"""

from typing import NamedTuple

import numba
import numpy as np

from auraflux.ops.attention.cpu.row_blocks import copy_row
from auraflux.ops.attention.cpu.row_tiles import fold_row
from auraflux.ops.simd.jit import call_kernel, floats, int32s, int64s, jit
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill
from auraflux.ops.simd.vectors import copy
from auraflux.ops.turboquant.cpu.dequantize import CHUNK
from auraflux.ops.turboquant.cpu.int8.codebook import KEY_UNITS, UNITS, WIDE_BITS, widen_codes
from auraflux.ops.turboquant.cpu.int8.rounding import block_top, largest_norm, live_groups, round_weights, spread_query
from auraflux.ops.turboquant.cpu.int8.tiles import (
    BLOCK,
    BYTES,
    LANES,
    TILES,
    WAYS,
    list_rows,
    prefetch_bytes,
)
from auraflux.ops.turboquant.cpu.int8.value_sums import spread_weights, transpose_values
from auraflux.ops.turboquant.cpu.key_calibration import SPAN, add_means, multiply_means
from auraflux.ops.turboquant.cpu.work_items import (
    begin_run,
    clear_slots,
    item_at,
    parts_of,
    place_and_run,
    place_of,
    row_nbytes,
    run_of,
)

LINE = 4 * BLOCK  # bytes of a row's scores
SIDE = 8 * BLOCK + LINE  # bytes of a block's rows: their addresses, then their norms
ONE = np.float32(1)
THREES = 3 in TILES
# a call would pass the launch arguments word by word, once for each block
inlined = numba.njit(inline="always")
ONE_TILE = 4  # rows; for more, a block's keys are transposed and looked up once


class Buffers(NamedTuple):
    """The scratch memory of an item: addresses.

    here, there  a block's keys and, `side` bytes on, its values; the next block's
    transposed   a block's values
    scores       [rows][BLOCK]
    rounded      [rows][2][BLOCK]  weights
    spread       weights of a tile
    queries      as `spread_query` leaves them
    sums         of all rows
    units, excess, rescales, gains  [rows]
    state        [rows][2]         highest scores, and sums of weights
    found        [4]
    gathered     [width]           a row's sums in the order of coordinates
    unrotated    [rows][width]     queries, where keys are calibrated
    levels       of a block's keys, two bytes each at most
    products     what `multiply_means` works in
    """

    here: int
    there: int
    side: int
    transposed: int
    scores: int
    rounded: int
    spread: int
    queries: int
    sums: int
    units: int
    excess: int
    rescales: int
    gains: int
    state: int
    found: int
    gathered: int
    unrotated: int
    levels: int
    products: int


class Block(NamedTuple):
    """A block of positions, of which an item sees [start, end).

    base    its first position
    groups  of LANES positions that are computed, a multiple of WAYS
    here    address of its keys' rows, and `Buffers.side` on of its values'
    ahead   the same of the keys to prefetch
    """

    base: int
    start: int
    end: int
    groups: int
    here: int
    ahead: int


@jit
def int8_nbytes(rows, width):
    """Return the bytes of an item's scratch memory, without `Buffers.products`."""
    places = 4 * (SIDE + BLOCK * width)
    blocks = places + BLOCK * width + rows * (LINE + 2 * BLOCK + 20) + 8 * BYTES * (BLOCK // LANES)
    sums = (rows + 1) * 2 * width + rows * BYTES * (width // 4)
    return blocks + sums + 4 * width + 4 * rows * width + 2 * BLOCK * width + 1024


@jit
def _lay_out(rows, width, work):
    """Divide the scratch memory at `work`."""
    side = SIDE + BLOCK * width
    transposed = work + 4 * side
    scores = transposed + BLOCK * width
    rounded = scores + rows * LINE
    spread = rounded + rows * 2 * BLOCK
    queries = spread + 8 * BYTES * (BLOCK // LANES)
    # three queries are laid out like four
    sums = (queries + (rows + 1) * 2 * width + 63) // 64 * 64
    units = sums + rows * BYTES * (width // 4)
    excess, rescales, gains, state = units + 4 * rows, units + 8 * rows, units + 12 * rows, units + 16 * rows
    found = state + 8 * rows
    gathered = found + 16
    unrotated = (gathered + 4 * width + 63) // 64 * 64
    blocks = work, work + 2 * side, side, transposed, scores, rounded, spread, queries, sums
    levels = (unrotated + 4 * rows * width + 63) // 64 * 64
    products = work + int8_nbytes(rows, width) // 64 * 64
    return Buffers(*blocks, units, excess, rescales, gains, state, found, gathered, unrotated, levels, products)


@jit
def attend_codes(args, b, number, work):
    """Attend from the rows of item `number` of sequence `b` to its codes."""
    (place, run), width = place_and_run(args, b, number), args.queries.width
    begin, stop = parts_of(args, b, run)
    rows = item_at(args, b, place, begin).rows
    buffers, laid = _lay_out(rows.size, width, work), False
    begin_run(args, b, place, run)
    for part in range(begin, stop):
        item = item_at(args, b, place, part)
        if item.first < item.last:
            # a short sequence may have no codes to read, only sink tokens and recent window
            if not laid:
                _round_queries(rows, width, args.keys.bits, args.calibration.table, buffers)
                laid = True
            _attend_part(args, item, buffers)
            _store_rows(item, width, WIDE_BITS[args.values.bits], buffers, args.split.joined)
        elif not args.split.joined:
            clear_slots(args, b, place, part, part + 1)


@jit
def _tile(left):
    """Return how many of the rows that are left the next tile takes."""
    return 4 if left >= 4 else left if left < 3 or THREES else 2


@jit
def _round_queries(rows, width, bits, calibrated, buffers):
    """Round the queries of all rows and lay them out; where keys are calibrated, lay the unrotated ones out too."""
    count, root, h = rows.size, np.float32(np.sqrt(np.float32(width))), 0
    while h < count:
        tile = _tile(count - h)
        for i in range(h, h + tile):
            q, target = rows.q + 4 * rows.room * place_of(rows, i), buffers.queries + h * 2 * width
            # the levels of keys come later: their memory serves to round in
            worth, over = spread_query(q, width, WIDE_BITS[bits], 4 if tile == 3 else tile, i - h, target, buffers.levels)
            floats(buffers.units, count)[i], int32s(buffers.excess, count)[i] = worth * KEY_UNITS[bits] / root, over
        h += tile
    if calibrated:
        for r in range(count):
            source = rows.unrotated + 4 * rows.room * place_of(rows, r)
            copy_row(source, rows.room, ONE, buffers.unrotated + 4 * rows.room * r, rows.room)


@jit
def _attend_part(args, item, buffers):
    """Attend from an item's rows to its positions, block by block; the next block's rows are prefetched meanwhile."""
    keys, values, cache, count = args.keys, args.values, item.cache, item.rows.size
    softcap, threshold, begun = args.queries.softcap, args.queries.threshold, -1
    here, there, side = buffers.here, buffers.there, buffers.side
    unit = UNITS[values.bits] / np.float32(np.sqrt(np.float32(cache.width)))
    fill(buffers.sums, count * LANES * (cache.width // 4), ZERO)
    for r in range(count):
        floats(buffers.state + 8 * r, 2)[0], floats(buffers.state + 8 * r, 2)[1] = NOTHING, ZERO
    origin = item.first // BLOCK * BLOCK
    some = min(origin + BLOCK, item.last) - item.first
    _locate(cache, keys, item.first, item.first - origin, some, here)
    _locate(cache, values, item.first, item.first - origin, some, here + side)
    for base in range(origin, item.last, BLOCK):
        start, end, rest = max(base, item.first), min(base + BLOCK, item.last), min(BLOCK, item.last - base - BLOCK)
        # positions past the last one have no weight
        groups = (end - base + WAYS * LANES - 1) // (WAYS * LANES) * WAYS
        _copy_norms(cache, keys, start, start - base, end - start, here)
        _copy_norms(cache, values, start, start - base, end - start, here + side)
        if rest > 0:
            _locate(cache, keys, base + BLOCK, 0, rest, there)
            _locate(cache, values, base + BLOCK, 0, rest, there + side)
        block = Block(base, start, end, groups, here, there if rest > 0 else here)
        _score_keys(args, item, block, buffers)
        if item.means.table:
            begun = _add_means(item, block, begun, buffers)
        _weigh_rows(item, block, softcap, threshold, unit, buffers)
        _add_values(args, item, block, threshold, buffers)
        here, there = there, here


@jit
def _locate(cache, stored, first, offset, count, target):
    """List the addresses of the rows of `count` positions from `first` on, `offset` into their block; prefetch their norms.

    Entries before repeat the first row, those after the last. Narrow codes are widened.
    """
    wide, nbytes, widened, j = WIDE_BITS[stored.bits], row_nbytes(cache, stored), target + SIDE, offset
    step, end = cache.width * wide // 8, offset + count
    while j < end:
        row, some = run_of(cache, first + j - offset, first + count)
        source = stored.codes + row * nbytes
        prefetch_bytes((stored.norms + 4 * row, 4 * some))
        if wide > stored.bits:
            place = widened + j * step
            widen_codes((stored.bits, source, some * (cache.width // CHUNK), place))
            source = place
        list_rows((source, step, some, target + 8 * j))
        j += some
    rows = int64s(target, BLOCK)
    list_rows((rows[offset], 0, offset, target))
    list_rows((rows[end - 1], 0, BLOCK - end, target + 8 * end))


@jit
def _copy_norms(cache, stored, first, offset, count, target):
    """Copy the norms of a block's rows; 0 for positions before and after."""
    norms, j, end = target + 8 * BLOCK, offset, offset + count
    fill(norms, offset, ZERO)
    while j < end:
        row, some = run_of(cache, first + j - offset, first + count)
        copy((stored.norms + 4 * row, 4 * some, norms + 4 * j))
        j += some
    fill(norms + 4 * end, BLOCK - end, ZERO)


@inlined
def _score_keys(args, item, block, buffers):
    """Score all rows against a block's keys; the first pass over the block prefetches its values and the next block's keys."""
    keys, values, cache, count, width = args.keys, args.values, item.cache, item.rows.size, item.cache.width
    here, groups, key_bits = block.here, block.groups, WIDE_BITS[keys.bits]
    quads, key_step, h = width * key_bits // 128, (1 if key_bits == 4 else 2) * LANES * width, 0
    # widening has fetched narrow codes already
    key_nbytes = row_nbytes(cache, keys) if key_bits == keys.bits else 0
    value_nbytes = row_nbytes(cache, values) if WIDE_BITS[values.bits] == values.bits else 0
    if count > ONE_TILE:
        call_kernel(args.loops.transpose_keys, (here, groups, quads, buffers.levels, key_step))
    while h < count:
        tile = _tile(count - h)
        norms, queries = here + 8 * BLOCK, buffers.queries + h * 2 * width
        target = buffers.units + 4 * h, buffers.excess + 4 * h, buffers.scores + h * LINE, LINE
        if count > ONE_TILE:
            source = buffers.levels, key_step, groups, width // 4, norms, queries
            call_kernel(args.loops.transposed_scores, (tile, source, target))
        else:
            nbytes = (key_nbytes, value_nbytes) if h == 0 else (0, 0)
            source, soon = (here, groups, quads, norms, queries), (block.ahead, nbytes[0], here + buffers.side, nbytes[1])
            call_kernel(args.loops.key_scores, (tile, source, target, soon))
        h += tile


@inlined
def _add_means(item, block, begun, buffers):
    """Add the queries' products with the means of keys to a block's scores; return `begun` for the next block."""
    count, first, last = item.rows.size, block.base // SPAN, (item.last - 1) // SPAN
    products, room, width = buffers.products, item.rows.room, item.cache.width
    begun = multiply_means(item.means, buffers.unrotated, count, room, width, first, last, begun, products)
    # runs begin at whole blocks, so all means of a block are in one run
    add_means(count, first, (block.end - block.base + SPAN - 1) // SPAN, begun, buffers.scores, LINE, products)
    return begun


@jit
def _limits(rows, r, block):
    """Return which of a block's positions a row sees among [start, end), the last excluded."""
    position = rows.position + (rows.row + r) // rows.group
    low, high = max(block.start, position - rows.reach), min(block.end, position + 1)
    low = max(low - block.base, 0)
    return low, max(min(high - block.base, BLOCK), low)


@jit
def _weigh_rows(item, block, softcap, threshold, unit, buffers):
    """Convert all rows' scores of a block into rounded weights."""
    rows, groups, norms = item.rows, block.groups, block.here + buffers.side + 8 * BLOCK
    block_top((norms, groups, buffers.found))
    most = floats(buffers.found, 1)[0]
    for r in range(rows.size):
        low, high = _limits(rows, r, block)
        all_seen = low == block.start - block.base and high == block.end - block.base
        largest, target = most if all_seen else largest_norm(norms, low, high), buffers.rounded + r * 2 * BLOCK
        scores, state = buffers.scores + r * LINE, buffers.state + 8 * r
        scale, gain = round_weights(scores, low, high, groups, norms, largest, softcap, threshold, state, buffers.found, target)
        floats(buffers.rescales, rows.size)[r], floats(buffers.gains, rows.size)[r] = scale, gain * unit


@inlined
def _add_values(args, item, block, threshold, buffers):
    """Scale the sums of all rows, and add a block's weighted values."""
    count, width, bits = item.rows.size, item.cache.width, WIDE_BITS[args.values.bits]
    first, last = live_groups(count, buffers.rounded, block.groups) if threshold > ZERO else (0, block.groups)
    if first < last:
        rows = block.here + buffers.side + 8 * LANES * first
        transpose_values((rows, last - first, width * bits // 128, buffers.transposed, LINE))
    h = 0
    while h < count:
        tile = _tile(count - h)
        some = max(last - first, 0)
        spread_weights((tile, buffers.rounded + h * 2 * BLOCK + LANES * first, BLOCK, some, buffers.spread))
        target = buffers.rescales + 4 * h, buffers.gains + 4 * h, buffers.sums + h * BYTES * (width // 4)
        source = buffers.transposed, LINE, some, width * bits // 32, buffers.spread
        call_kernel(args.loops.add_values, (tile, source, target))
        h += tile


@jit
def _gather(sums_at, tile, h, width, bits, out_at):
    """Add up the quarters of sums, and put the coordinates that shared a byte in order."""
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
def _store_rows(item, width, bits, buffers, joined):
    """Write the sums of all rows to the part's slot, or merge them into that slot."""
    rows, count, h = item.rows, item.rows.size, 0
    while h < count:
        tile = _tile(count - h)
        for i in range(h, h + tile):
            to, state = place_of(rows, i), floats(buffers.state + 8 * i, 2)
            out, m, total = item.out + to * item.out_step, item.m + to * item.step, item.totals + to * item.step
            target = buffers.gathered if joined else out
            _gather(buffers.sums + h * BYTES * (width // 4), tile, i - h, width, bits, target)
            if not joined:
                floats(m, 1)[0], floats(total, 1)[0] = state[0], state[1]
            elif state[1] != ZERO:
                fold_row((target, ONE, state[0], state[1], width, out, m, total))
        h += tile
