"""Attention on codes in float32: a block of tokens is looked up once and serves all rows of queries."""

import numpy as np

from auraflux.ops.attention.cpu.decode_tiles import FLOAT, LANES
from auraflux.ops.attention.cpu.row_blocks import (
    ROWS,
    Seen,
    begin_part,
    copy_row,
    lay_rows,
    leave_row,
    rows_scratch,
    score_block,
    value_block,
    weigh_block,
)
from auraflux.ops.attention.cpu.row_tiles import BLOCK, COLUMN, KEYS, add_values, add_wide_column, score_rows
from auraflux.ops.simd.jit import Kernel, arguments, floats, jit, real, share
from auraflux.ops.simd.softmax import ZERO, fill
from auraflux.ops.turboquant.cpu.attend_int8_tiles import ask_for
from auraflux.ops.turboquant.cpu.centres import LINE as PRODUCTS
from auraflux.ops.turboquant.cpu.centres import meet_centres, products_nbytes
from auraflux.ops.turboquant.cpu.items import (
    PLAIN,
    begin_run,
    clear_slots,
    item_at,
    padded,
    parts_of,
    place_and_run,
    place_of,
    plain_items,
    plain_sides,
    row_nbytes,
    run_of,
    sides,
)
from auraflux.ops.turboquant.cpu.kept_rows import widen_rows
from auraflux.ops.turboquant.cpu.levels import level_rows

LINE = 4 * BLOCK
ONE = np.float32(1)


@jit
def exact_scratch(room):
    """Bytes to work in, for rows of `room` floats."""
    return 4 * rows_scratch(room) + 4 * ROWS * room + products_nbytes(ROWS, room) + 128


@jit
def _lay(cache, side, first, count, room, target):
    """Lay the rows of some positions out as float32."""
    nbytes, j = row_nbytes(cache, side), 0
    while j < count:
        row, some = run_of(cache, first + j, first + count)
        source, here = side.codes + row * nbytes, target + 4 * j * room
        if side.bits == PLAIN:
            widen_rows(source, side.book, cache.width, some, here, room)
        else:
            level_rows(side.bits, source, cache.width, some, side.book, side.norms + 4 * row, here, 4 * room)
        j += some


@jit
def _ask_for_rows(cache, side, first, last):
    """Prefetch the rows of some positions."""
    nbytes = row_nbytes(cache, side)
    while first < last:
        row, some = run_of(cache, first, last)
        ask_for((side.codes + row * nbytes, some * nbytes))
        first += some


@jit
def _seen(rows):
    return Seen(rows.position, rows.row, rows.size, rows.group, rows.reach)


@jit
def _attend_blocks(item, keys, values, softcap, threshold, desk, unrotated):
    """Attend from an item's rows, each to the positions it sees."""
    cache, seen, room, begun = item.cache, _seen(item.rows), desk.room, -1
    products, last = unrotated + 4 * ROWS * room, (item.last - 1) // BLOCK
    for base in range(item.first // BLOCK * BLOCK, item.last, BLOCK):
        start, end, more = max(base, item.first), min(base + BLOCK, item.last), 0
        here = desk.block + 4 * (start - base) * room
        _lay(cache, keys, start, end - start, room, here)
        if item.centres.table and keys.bits != PLAIN:
            begun = meet_centres(item.centres, unrotated, seen.size, room, cache.width, base // BLOCK, last, begun, products)
            more = products + 4 * (base // BLOCK - begun)
        score_block(seen, desk, base, start, end, softcap, threshold, more, PRODUCTS)
        if threshold > ZERO:
            first, end = _live(seen.size, desk.scores, base, start, end)
            start, here = first, desk.block + 4 * (first - base) * room
        _lay(cache, values, start, end - start, room, here)
        value_block(seen, desk, base, start, end)


@jit
def _live(rows, scores, base, start, end):
    """The first and the last position that any row gives a weight, the last excluded."""
    first, last = end, start
    for r in range(rows):
        weights = floats(scores + r * LINE, BLOCK)
        for j in range(start - base, end - base):
            if weights[j] != ZERO:
                first, last = min(first, base + j), max(last, base + j + 1)
    return (first, last) if first < last else (start, start)


@jit
def _begin(item, work):
    """Lay an item's queries out, rotated and not."""
    rows, room = item.rows, item.rows.room
    desk, unrotated = lay_rows(room, work), work + 4 * rows_scratch(room) // 64 * 64
    for r in range(rows.size):
        here, there = 4 * room * place_of(rows, r), 4 * room * r
        copy_row(rows.q + here, room, ONE, desk.queries + there, room)
        if item.centres.table:
            copy_row(rows.unrotated + here, room, ONE, unrotated + there, room)
    return desk, unrotated


@jit
def _leave(item, desk, joined):
    """Leave a part's sums where parts are joined, with highest scores and sums of weights."""
    for r in range(item.rows.size):
        place = place_of(item.rows, r)
        ends = item.m + place * item.step, item.totals + place * item.step
        leave_row(desk, r, item.cache.width, joined, item.out + place * item.out_step, *ends)


@jit
def attend_codes(step, b, number, work):
    """Attend from an item's rows to codes."""
    (place, run), softcap = place_and_run(step, b, number), real(step.softcap)
    begin, stop = parts_of(step, b, run)
    desk, unrotated = _begin(item_at(step, b, place, begin), work)
    begin_run(step, b, place, run)
    for part in range(begin, stop):
        item = item_at(step, b, place, part)
        if item.first < item.last:
            begin_part(desk, item.rows.size)
            _attend_blocks(item, *sides(step), softcap, real(step.threshold), desk, unrotated)
            _leave(item, desk, step.joined)
        elif not step.joined:
            clear_slots(step, b, place, part, part + 1)


@jit
def _can_stay(cache, side, seen, room):
    """Whether plain rows can be met where they lie: as float32, batches of them whole in a page, by queries of one token."""
    whole = KEYS == 1 and cache.page % LANES == 0 and cache.width == room and 4 * room % COLUMN == 0
    return whole and side.book == FLOAT and seen.row // seen.group == (seen.row + seen.size - 1) // seen.group


@jit
def _attend_in_place(item, keys, values, softcap, desk, together):
    """Attend from an item's rows, of one token, to plain rows where they lie: the sums of `_attend_blocks`.

    Scores ask for values and, where heads come together, values for the next head's keys, a few lines at a time: what is asked
    for faster than memory gives it is forgotten.
    """
    cache, seen, step = item.cache, _seen(item.rows), 4 * desk.room
    after = step * cache.page if together and cache.head + 1 < cache.heads else 0
    for base in range(item.first // BLOCK * BLOCK, item.last, BLOCK):
        start, end = max(base, item.first), min(base + BLOCK, item.last)
        for position in range(start // LANES * LANES, end, LANES):
            source = run_of(cache, position, end)[0] * step
            ask_for((values.codes + source, LANES * step))
            scores = desk.scores + 4 * (position - base)
            score_rows(seen.size, desk.queries, step, keys.codes + source, step, 1, scores, LINE)
        weigh_block(seen, desk, base, start, end, softcap, ZERO, 0, 0)
        position = start
        while position < end:
            row, some = run_of(cache, position, end)
            weights, source = desk.scores + 4 * (position - base), row * step
            for column in range(0, step, COLUMN):
                if after:
                    ask_for((keys.codes + source + after + column * some, COLUMN * some))
                here, sums = values.codes + source + column, desk.sums + column
                add_wide_column(seen.size, weights, LINE, here, step, some, sums, step, desk.keeps)
            fill(desk.keeps, seen.size, ONE)
            position += some


@jit
def attend_plain(step, b, place, kept, work):
    """Attend from the rows of one place to what they read as it is: the first positions, then the newest."""
    oldest, newest = plain_items(step, b, place, kept[0], kept[1])
    keys, values = plain_sides(kept[1])
    stays, together = _can_stay(newest.cache, keys, _seen(newest.rows), newest.rows.room), step.plain == 1
    # pages lie apart, and a processor's own prefetching begins anew in each
    if not (stays and together and newest.cache.head):
        _ask_for_rows(newest.cache, keys, newest.first, newest.last)
    if not stays:
        _ask_for_rows(newest.cache, values, newest.first, newest.last)
    desk, unrotated = _begin(oldest, work)
    begin_part(desk, oldest.rows.size)
    _attend_blocks(oldest, *plain_sides(kept[0]), real(step.softcap), ZERO, desk, unrotated)
    if stays:
        _attend_in_place(newest, keys, values, real(step.softcap), desk, together)
    else:
        _attend_blocks(newest, keys, values, real(step.softcap), ZERO, desk, unrotated)
    _leave(oldest, desk, 0)


@Kernel
def sum_values(args, job, jobs):
    """The sums of one head over one part of the tokens, for every head and part."""
    weights, codes, norms_at, book, bits, width, heads, group, tokens, parts, threshold, out, space, scratch = arguments(
        args, 14
    )
    room, words, least = padded(width), (width * bits + 31) // 32, real(threshold)
    levels = space + job * scratch
    sums, scaled = levels + 4 * BLOCK * room, levels + 4 * (BLOCK + ROWS) * room
    keeps = scaled + ROWS * LINE
    ones = keeps + 4 * ROWS
    fill(keeps, ROWS + BLOCK, ONE)
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
                add_values(rows, scaled, LINE, levels, 4 * room, count, sums, 4 * room, keeps)
            for r in range(rows):
                target = floats(out + 4 * ((part * heads + head) * group + first_row + r) * width, width)
                source = floats(sums + 4 * r * room, room)
                for i in range(width):
                    target[i] = source[i]
