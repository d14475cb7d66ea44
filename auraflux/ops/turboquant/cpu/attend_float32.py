"""Attention in float32: a block of positions is dequantized, or widened, once and serves all query rows."""

import numpy as np

from auraflux.ops.attention.cpu.dtypes import FLOAT, LANES
from auraflux.ops.attention.cpu.row_blocks import (
    ROWS,
    Seen,
    begin_part,
    copy_row,
    lay_rows,
    rows_scratch,
    score_block,
    store_row,
    value_block,
    weigh_block,
)
from auraflux.ops.attention.cpu.row_tiles import BLOCK, COLUMN, KEYS, add_values, add_wide_column, score_rows
from auraflux.ops.simd.jit import Kernel, arguments, floats, jit, real, share
from auraflux.ops.simd.softmax import ZERO, fill
from auraflux.ops.turboquant.cpu.dequantize import level_rows
from auraflux.ops.turboquant.cpu.full_precision import widen_rows
from auraflux.ops.turboquant.cpu.int8.tiles import prefetch_bytes
from auraflux.ops.turboquant.cpu.key_calibration import LINE as PRODUCTS
from auraflux.ops.turboquant.cpu.key_calibration import multiply_means, products_nbytes
from auraflux.ops.turboquant.cpu.work_items import (
    FULL_PRECISION,
    begin_run,
    clear_slots,
    full_precision_items,
    full_precision_rows,
    item_at,
    padded,
    parts_of,
    place_and_run,
    place_of,
    row_nbytes,
    run_of,
)

LINE = 4 * BLOCK
ONE = np.float32(1)


@jit
def float32_nbytes(room):
    """Return the bytes of an item's scratch memory, for rows of `room` floats."""
    return 4 * rows_scratch(room) + 4 * ROWS * room + products_nbytes(ROWS, room) + 128


@jit
def _load_rows(cache, stored, first, count, room, target):
    """Write the rows of some positions as float32."""
    nbytes, j = row_nbytes(cache, stored), 0
    while j < count:
        row, some = run_of(cache, first + j, first + count)
        source, here = stored.codes + row * nbytes, target + 4 * j * room
        if stored.bits == FULL_PRECISION:
            widen_rows(source, stored.book, cache.width, some, here, room)
        else:
            level_rows(stored.bits, source, cache.width, some, stored.book, stored.norms + 4 * row, here, 4 * room)
        j += some


@jit
def _prefetch_rows(cache, stored, first, last):
    """Prefetch the rows of some positions."""
    nbytes = row_nbytes(cache, stored)
    while first < last:
        row, some = run_of(cache, first, last)
        prefetch_bytes((stored.codes + row * nbytes, some * nbytes))
        first += some


@jit
def _seen(rows):
    return Seen(rows.position, rows.row, rows.size, rows.group, rows.reach)


@jit
def _attend_blocks(item, keys, values, softcap, threshold, buffers, unrotated):
    """Attend from an item's rows, each to the positions it sees."""
    cache, seen, room, begun = item.cache, _seen(item.rows), buffers.room, -1
    products, last = unrotated + 4 * ROWS * room, (item.last - 1) // BLOCK
    for base in range(item.first // BLOCK * BLOCK, item.last, BLOCK):
        start, end, more = max(base, item.first), min(base + BLOCK, item.last), 0
        here = buffers.block + 4 * (start - base) * room
        _load_rows(cache, keys, start, end - start, room, here)
        if item.means.table and keys.bits != FULL_PRECISION:
            begun = multiply_means(item.means, unrotated, seen.size, room, cache.width, base // BLOCK, last, begun, products)
            more = products + 4 * (base // BLOCK - begun)
        score_block(seen, buffers, base, start, end, softcap, threshold, more, PRODUCTS)
        if threshold > ZERO:
            first, end = _live(seen.size, buffers.scores, base, start, end)
            start, here = first, buffers.block + 4 * (first - base) * room
        _load_rows(cache, values, start, end - start, room, here)
        value_block(seen, buffers, base, start, end)


@jit
def _live(rows, scores, base, start, end):
    """Return the first and the last position that any row gives a weight, the last excluded."""
    first, last = end, start
    for r in range(rows):
        weights = floats(scores + r * LINE, BLOCK)
        for j in range(start - base, end - base):
            if weights[j] != ZERO:
                first, last = min(first, base + j), max(last, base + j + 1)
    return (first, last) if first < last else (start, start)


@jit
def _begin(item, work):
    """Copy an item's queries to scratch memory, rotated and unrotated."""
    rows, room = item.rows, item.rows.room
    buffers, unrotated = lay_rows(room, work), work + 4 * rows_scratch(room) // 64 * 64
    for r in range(rows.size):
        here, there = 4 * room * place_of(rows, r), 4 * room * r
        copy_row(rows.q + here, room, ONE, buffers.queries + there, room)
        if item.means.table:
            copy_row(rows.unrotated + here, room, ONE, unrotated + there, room)
    return buffers, unrotated


@jit
def _store_rows(item, buffers, joined):
    """Write a part's sums, highest scores and sums of weights to its slot, or merge them into that slot."""
    for r in range(item.rows.size):
        place = place_of(item.rows, r)
        ends = item.m + place * item.step, item.totals + place * item.step
        store_row(buffers, r, item.cache.width, joined, item.out + place * item.out_step, *ends)


@jit
def attend_dequantized(args, b, number, work):
    """Attend from the rows of item `number` of sequence `b` to its codes."""
    (place, run), queries = place_and_run(args, b, number), args.queries
    begin, stop = parts_of(args, b, run)
    buffers, unrotated = _begin(item_at(args, b, place, begin), work)
    begin_run(args, b, place, run)
    for part in range(begin, stop):
        item = item_at(args, b, place, part)
        if item.first < item.last:
            begin_part(buffers, item.rows.size)
            _attend_blocks(item, args.keys, args.values, queries.softcap, queries.threshold, buffers, unrotated)
            _store_rows(item, buffers, args.split.joined)
        elif not args.split.joined:
            clear_slots(args, b, place, part, part + 1)


@jit
def _readable_in_place(cache, stored, seen, room):
    """Return whether rows can be read where they lie: float32, whole batches in a page, queries of one token."""
    whole = KEYS == 1 and cache.page % LANES == 0 and cache.width == room and 4 * room % COLUMN == 0
    return whole and stored.book == FLOAT and seen.row // seen.group == (seen.row + seen.size - 1) // seen.group


@jit
def _attend_in_place(item, keys, values, softcap, buffers, together):
    """Attend from an item's rows, of one token, to float32 rows where they lie, with the sums of `_attend_blocks`.

    Scoring prefetches values and, where one item has all heads, adding values prefetches the next head's keys, a few lines at a
    time: processors drop prefetches that come faster than memory does.
    """
    cache, seen, step = item.cache, _seen(item.rows), 4 * buffers.room
    after = step * cache.page if together and cache.head + 1 < cache.heads else 0
    for base in range(item.first // BLOCK * BLOCK, item.last, BLOCK):
        start, end = max(base, item.first), min(base + BLOCK, item.last)
        for position in range(start // LANES * LANES, end, LANES):
            source = run_of(cache, position, end)[0] * step
            prefetch_bytes((values.codes + source, LANES * step))
            scores = buffers.scores + 4 * (position - base)
            score_rows(seen.size, buffers.queries, step, keys.codes + source, step, 1, scores, LINE)
        weigh_block(seen, buffers, base, start, end, softcap, ZERO, 0, 0)
        position = start
        while position < end:
            row, some = run_of(cache, position, end)
            weights, source = buffers.scores + 4 * (position - base), row * step
            for column in range(0, step, COLUMN):
                if after:
                    prefetch_bytes((keys.codes + source + after + column * some, COLUMN * some))
                here, sums = values.codes + source + column, buffers.sums + column
                add_wide_column(seen.size, weights, LINE, here, step, some, sums, step, buffers.rescales)
            fill(buffers.rescales, seen.size, ONE)
            position += some


@jit
def attend_full_precision(args, b, place, work):
    """Attend from the rows of one place to the sink tokens, then to the recent window."""
    sinks, recent = full_precision_items(args, b, place)
    keys, values = full_precision_rows(args.recent)
    softcap, together = args.queries.softcap, args.split.full_precision_items == 1
    in_place = _readable_in_place(recent.cache, keys, _seen(recent.rows), recent.rows.room)
    # pages are scattered, and a processor's own prefetching begins anew in each
    if not (in_place and together and recent.cache.head):
        _prefetch_rows(recent.cache, keys, recent.first, recent.last)
    if not in_place:
        _prefetch_rows(recent.cache, values, recent.first, recent.last)
    buffers, unrotated = _begin(sinks, work)
    begin_part(buffers, sinks.rows.size)
    sink_keys, sink_values = full_precision_rows(args.sinks)
    _attend_blocks(sinks, sink_keys, sink_values, softcap, ZERO, buffers, unrotated)
    if in_place:
        _attend_in_place(recent, keys, values, softcap, buffers, together)
    else:
        _attend_blocks(recent, keys, values, softcap, ZERO, buffers, unrotated)
    _store_rows(sinks, buffers, 0)


@Kernel
def sum_values(args, job, jobs):
    """Sum weighted values of one head over one part of the tokens, for every head and part."""
    weights, codes, norms_at, book, bits, width, heads, group, tokens, parts, threshold, out, space, scratch = arguments(
        args, 14
    )
    room, words, least = padded(width), (width * bits + 31) // 32, real(threshold)
    levels = space + job * scratch
    sums, scaled = levels + 4 * BLOCK * room, levels + 4 * (BLOCK + ROWS) * room
    rescales = scaled + ROWS * LINE
    ones = rescales + 4 * ROWS
    fill(rescales, ROWS + BLOCK, ONE)
    for item in share(heads * parts, job, jobs):
        head, part = item // parts, item % parts
        for first_row in range(0, group, ROWS):
            rows = min(ROWS, group - first_row)
            fill(sums, rows * room, ZERO)
            for start in range(part * tokens // parts, (part + 1) * tokens // parts, BLOCK):
                count = min(BLOCK, (part + 1) * tokens // parts - start)
                row = head * tokens + start
                norms = floats(norms_at + 4 * row, count)
                level_rows(bits, codes + 4 * row * words, width, count, book, ones, levels, 4 * room)
                for r in range(rows):
                    source = floats(weights + 4 * ((head * group + first_row + r) * tokens + start), count)
                    target = floats(scaled + r * LINE, count)
                    for j in range(count):
                        target[j] = source[j] * norms[j] if source[j] >= least else ZERO
                add_values(rows, scaled, LINE, levels, 4 * room, count, sums, 4 * room, rescales)
            for r in range(rows):
                target = floats(out + 4 * ((part * heads + head) * group + first_row + r) * width, width)
                source = floats(sums + 4 * r * room, room)
                for i in range(width):
                    target[i] = source[i]
