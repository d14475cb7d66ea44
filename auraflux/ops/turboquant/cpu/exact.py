"""Attention on codes in float32, of few rows of queries: a block of tokens is looked up once and serves all of them."""

import numpy as np

from auraflux.ops.simd.jit import Kernel, arguments, floats, jit, real, share
from auraflux.ops.simd.math import exp
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill, softcapped
from auraflux.ops.turboquant.cpu.exact_tiles import score_tile, value_tile
from auraflux.ops.turboquant.cpu.items import ROWS, padded, place_of, row_nbytes, run_of
from auraflux.ops.turboquant.cpu.levels import level_rows

BLOCK = 64  # tokens looked up together
LINE = 4 * BLOCK
ONE = np.float32(1)


@jit
def exact_scratch(room):
    """Bytes to work in, for rows of `room` floats."""
    return 4 * (BLOCK * room + 2 * ROWS * room + ROWS * BLOCK + 3 * BLOCK + 3 * ROWS) + 64


@jit
def _look_up(cache, side, first, count, norms, room, levels):
    """The levels of a block's tokens; those whose norms are asked for are left without them."""
    nbytes, j = row_nbytes(cache, side), 0
    while j < count:
        row, some = run_of(cache, first + j, first + count)
        source, factors, target = side.codes + row * nbytes, side.norms + 4 * row, levels + 4 * j * room
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
def _score(rows, q, levels, step, count, scores):
    r, quads = 0, (count + 3) // 4
    while r + 4 <= rows:
        score_tile((4, q + r * step, levels, step, quads, scores + r * LINE, LINE))
        r += 4
    while r < rows:
        score_tile((1, q + r * step, levels, step, quads, scores + r * LINE, LINE))
        r += 1


@jit
def _add_values(rows, weights, line, levels, step, count, sums, keeps):
    """Scale the sums of rows by `keeps`, and add the levels of tokens by their weights."""
    r = 0
    while r + 4 <= rows:
        value_tile((4, weights + r * line, line, levels, step, count, sums + r * step, keeps + 4 * r))
        r += 4
    while r < rows:
        value_tile((1, weights + r * line, line, levels, step, count, sums + r * step, keeps + 4 * r))
        r += 1


@jit
def attend_few(item, keys, values, softcap, threshold, work):
    """Attend from an item's rows, each to the positions it sees."""
    rows, cache, room, step = item.rows, item.cache, item.rows.room, 4 * item.rows.room
    levels = work
    sums, queries = levels + BLOCK * step, levels + (BLOCK + ROWS) * step
    scores = queries + ROWS * step
    norms, state = scores + ROWS * LINE, scores + ROWS * LINE + 2 * LINE
    keeps = state + 8 * ROWS
    fill(sums, rows.size * room, ZERO)
    fill(norms + LINE, BLOCK, ONE)
    fill(keeps, rows.size, ONE)
    for r in range(rows.size):
        floats(state + 8 * r, 2)[0], floats(state + 8 * r, 2)[1] = NOTHING, ZERO
        source, target = floats(rows.q + step * place_of(rows, r), room), floats(queries + r * step, room)
        for i in range(room):
            target[i] = source[i]
    for start in range(item.first, item.last, BLOCK):
        count = min(BLOCK, item.last - start)
        _look_up(cache, keys, start, count, 0, room, levels)
        _score(rows.size, queries, levels, step, count, scores)
        for r in range(rows.size):
            position = rows.position + (rows.row + r) // rows.group
            low, high = max(0, position - rows.reach - start), min(count, position + 1 - start)
            low, high = min(low, count), max(high, 0)
            keep = _weigh(scores + r * LINE, low, high, count, softcap, threshold, state + 8 * r)
            floats(keeps, rows.size)[r] *= keep
        first, last = _live(rows.size, scores, count) if threshold > ZERO else (0, count)
        if first < last:
            _look_up(cache, values, start + first, last - first, norms, room, levels)
            for r in range(rows.size):
                _scale(scores + r * LINE + 4 * first, last - first, norms)
            _add_values(rows.size, scores + 4 * first, LINE, levels, step, last - first, sums, keeps)
            fill(keeps, rows.size, ONE)
    for r in range(rows.size):
        place, keep = place_of(rows, r), floats(keeps, rows.size)[r]
        source, target = floats(sums + r * step, room), floats(item.out + place * item.out_step, cache.width)
        for i in range(cache.width):
            target[i] = source[i] * keep
        floats(item.m + place * item.step, 1)[0] = floats(state + 8 * r, 2)[0]
        floats(item.totals + place * item.step, 1)[0] = floats(state + 8 * r, 2)[1]


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
                _add_values(rows, scaled, LINE, levels, 4 * room, count, sums, keeps)
            for r in range(rows):
                target = floats(out + 4 * ((part * heads + head) * group + first_row + r) * width, width)
                source = floats(sums + 4 * r * room, room)
                for i in range(width):
                    target[i] = source[i]
