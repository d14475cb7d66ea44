"""Attention on codes in float32, of few rows of queries: a block of tokens is looked up once and serves all of them."""

from typing import NamedTuple

import numpy as np

from auraflux.ops.simd.jit import Kernel, arguments, floats, jit, real, share
from auraflux.ops.simd.math import exp
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill, softcapped
from auraflux.ops.turboquant.cpu.centres import add_centres, products_nbytes
from auraflux.ops.turboquant.cpu.exact_tiles import add_values, score_rows
from auraflux.ops.turboquant.cpu.items import (
    PLAIN,
    ROWS,
    begin_at,
    clear_plain,
    item_at,
    joins_plain,
    padded,
    place_of,
    plain_items,
    plain_sides,
    row_nbytes,
    run_of,
    sides,
)
from auraflux.ops.turboquant.cpu.kept_rows import widen_rows
from auraflux.ops.turboquant.cpu.levels import level_rows

BLOCK = 64  # tokens looked up together
LINE = 4 * BLOCK
ONE = np.float32(1)


class Desk(NamedTuple):
    """What an item is worked on with: addresses.

    levels             [BLOCK][room]  of a block's keys, then of its values
    sums               [ROWS][room]
    queries, unturned  [ROWS][room]   the latter where keys have centres
    scores             [ROWS][BLOCK]
    norms              [2][BLOCK]     of values; and ones
    state              [ROWS][2]      highest scores, and sums of weights
    keeps              [ROWS]         factors that sums are still to be multiplied with
    products           what `add_centres` works in
    """

    levels: int
    sums: int
    queries: int
    unturned: int
    scores: int
    norms: int
    state: int
    keeps: int
    products: int


@jit
def exact_scratch(room):
    """Bytes to work in, for rows of `room` floats."""
    floats_ = BLOCK * room + 3 * ROWS * room + ROWS * BLOCK + 3 * BLOCK + 3 * ROWS
    return 4 * floats_ + products_nbytes(ROWS, room) + 128


@jit
def _lay_out(room, work):
    row = 4 * ROWS * room
    sums = work + 4 * BLOCK * room
    scores = sums + 3 * row
    norms = scores + ROWS * LINE
    state = norms + 2 * LINE
    keeps = state + 8 * ROWS
    return Desk(work, sums, sums + row, sums + 2 * row, scores, norms, state, keeps, (keeps + 4 * ROWS + 63) // 64 * 64)


@jit
def _look_up(cache, side, first, count, norms, room, levels):
    """The levels of a block's tokens, or these as they are; levels whose norms are asked for are left without them."""
    nbytes, j = row_nbytes(cache, side), 0
    while j < count:
        row, some = run_of(cache, first + j, first + count)
        source, factors, target = side.codes + row * nbytes, side.norms + 4 * row, levels + 4 * j * room
        if side.bits == PLAIN:
            widen_rows(source, side.book, cache.width, some, target, room)
        else:
            if norms:
                given, asked = floats(factors, some), floats(norms + 4 * j, some)
                for i in range(some):
                    asked[i] = given[i]
                factors = norms + LINE
            level_rows(side.bits, source, cache.width, some, side.book, factors, target, 4 * room)
        j += some


@jit
def _weigh(scores_at, low, high, count, softcap, threshold, state_at):
    """Turn a row's scores into weights, zero outside [low, high); give the factor for what was summed before.

    Weights below their share become zero too, but count in the sum.
    """
    scores, state = floats(scores_at, count), floats(state_at, 2)
    if softcap > ZERO:
        for j in range(low, high):
            scores[j] = softcapped(scores[j], softcap)
    before, top = state[0], NOTHING
    for j in range(low, high):
        # not-a-number stays: once in, no comparison takes it out again
        top = scores[j] if scores[j] > top or scores[j] != scores[j] else top
    peak = top if top > before or top != top else before
    base = peak if peak != NOTHING else ZERO
    keep, total = exp(before - base), ZERO
    # the sum of all weights will be no less than what is known of it here
    least = threshold * (state[1] * keep + exp(top - base))
    for j in range(low):
        scores[j] = ZERO
    for j in range(low, high):
        weight = exp(scores[j] - base)
        total += weight
        scores[j] = ZERO if weight < least else weight
    for j in range(high, count):
        scores[j] = ZERO
    state[0], state[1] = peak, state[1] * keep + total
    return keep


@jit
def _scale(scores_at, count, norms_at):
    scores, norms = floats(scores_at, count), floats(norms_at, count)
    for j in range(count):
        # 0 times not-a-number: a value without weight must not be seen
        scores[j] = scores[j] * norms[j] if scores[j] != ZERO else ZERO


@jit
def _seen(rows, r, start, count):
    """The first and the last of a block's positions that a row sees, the last excluded."""
    position = rows.position + (rows.row + r) // rows.group
    return min(max(0, position - rows.reach - start), count), max(min(count, position + 1 - start), 0)


@jit
def _add_seen(rows, desk, step, start, count):
    """Add values token by token, to the queries that see them: 0 times not-a-number is not 0."""
    r = 0
    while r < rows.size:
        some = min(rows.group - (rows.row + r) % rows.group, rows.size - r)
        low, high = _seen(rows, r, start, count)
        levels, weights = desk.levels + low * step, desk.scores + r * LINE + 4 * low
        add_values(some, weights, LINE, levels, step, max(high - low, 0), desk.sums + r * step, desk.keeps + 4 * r)
        r += some


@jit
def _attend_blocks(item, keys, values, softcap, threshold, desk):
    """Attend from an item's rows, each to the positions it sees."""
    rows, cache, room, step, begun = item.rows, item.cache, item.rows.room, 4 * item.rows.room, -1
    for base in range(begin_at(item, BLOCK), item.last, BLOCK):
        start = max(base, item.first)
        count = min(base + BLOCK, item.last) - start
        _look_up(cache, keys, start, count, 0, room, desk.levels)
        score_rows(rows.size, desk.queries, desk.levels, step, count, desk.scores, LINE)
        if item.centres.table and keys.bits != PLAIN:
            met = item.centres, desk.unturned, rows.size, room, cache.width
            begun = add_centres(*met, start, count, item.last, begun, desk.scores, LINE, desk.products)
        for r in range(rows.size):
            low, high = _seen(rows, r, start, count)
            keep = _weigh(desk.scores + r * LINE, low, high, count, softcap, threshold, desk.state + 8 * r)
            floats(desk.keeps, rows.size)[r] *= keep
        first, last = _live(rows.size, desk.scores, count) if threshold > ZERO else (0, count)
        if first < last:
            _look_up(cache, values, start + first, last - first, desk.norms, room, desk.levels)
            if values.bits == PLAIN:
                _add_seen(rows, desk, step, start, count)
            else:
                for r in range(rows.size):
                    _scale(desk.scores + r * LINE + 4 * first, last - first, desk.norms)
                weights = desk.scores + 4 * first
                add_values(rows.size, weights, LINE, desk.levels, step, last - first, desk.sums, desk.keeps)
            fill(desk.keeps, rows.size, ONE)


@jit
def _begin(item, work):
    """Lay an item's queries out, and begin with nothing seen."""
    rows, room, step = item.rows, item.rows.room, 4 * item.rows.room
    desk = _lay_out(room, work)
    fill(desk.sums, rows.size * room, ZERO)
    fill(desk.norms + LINE, BLOCK, ONE)
    fill(desk.keeps, rows.size, ONE)
    for r in range(rows.size):
        state, here, there = floats(desk.state + 8 * r, 2), step * place_of(rows, r), r * step
        state[0], state[1] = NOTHING, ZERO
        _copy(rows.q + here, room, desk.queries + there)
        if item.centres.table:
            _copy(rows.unturned + here, room, desk.unturned + there)
    return desk


@jit
def _copy(source_at, count, target_at):
    source, target = floats(source_at, count), floats(target_at, count)
    for i in range(count):
        target[i] = source[i]


@jit
def _leave(item, desk):
    """Leave sums where parts are joined, with highest scores and sums of weights."""
    rows, width, step = item.rows, item.cache.width, 4 * item.rows.room
    for r in range(rows.size):
        place, keep, state = place_of(rows, r), floats(desk.keeps, rows.size)[r], floats(desk.state + 8 * r, 2)
        source, target = floats(desk.sums + r * step, width), floats(item.out + place * item.out_step, width)
        for i in range(width):
            target[i] = source[i] * keep
        floats(item.m + place * item.step, 1)[0], floats(item.totals + place * item.step, 1)[0] = state[0], state[1]


@jit
def _attend_plain(step, b, place, kept, softcap, desk):
    """Attend from the rows of one place to what they read as it is."""
    oldest, newest = plain_items(step, b, place, kept[0], kept[1])
    _attend_blocks(oldest, *plain_sides(kept[0]), softcap, ZERO, desk)
    _attend_blocks(newest, *plain_sides(kept[1]), softcap, ZERO, desk)


@jit
def attend_few(step, b, number, kept, work):
    """Attend from an item's rows to codes, and after the last of these to plain rows."""
    item, softcap = item_at(step, b, number), real(step.softcap)
    desk = _begin(item, work)
    _attend_blocks(item, *sides(step), softcap, real(step.threshold), desk)
    if joins_plain(step, number):
        _attend_plain(step, b, number // step.parts, kept, softcap, desk)
        clear_plain(step, item)
    _leave(item, desk)


@jit
def attend_few_plain(step, b, place, kept, work):
    """Attend from the rows of one place to plain rows alone."""
    item = plain_items(step, b, place, kept[0], kept[1])[0]
    desk = _begin(item, work)
    _attend_plain(step, b, place, kept, real(step.softcap), desk)
    _leave(item, desk)


@jit
def _live(rows, scores, count):
    """The first and the last token that any row gives a weight, the last excluded."""
    first, last = count, 0
    for r in range(rows):
        weights = floats(scores + r * LINE, count)
        for j in range(count):
            if weights[j] != ZERO:
                first, last = min(first, j), max(last, j + 1)
    return first, last


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
                add_values(rows, scaled, LINE, levels, 4 * room, count, sums, keeps)
            for r in range(rows):
                target = floats(out + 4 * ((part * heads + head) * group + first_row + r) * width, width)
                source = floats(sums + 4 * r * room, room)
                for i in range(width):
                    target[i] = source[i]
