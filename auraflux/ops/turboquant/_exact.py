"""Attention on codes in float32: a block of tokens is looked up once, and serves all rows of queries that share its head."""

from typing import NamedTuple

import numpy as np

from auraflux.ops._jit import Kernel, arguments, exp, floats, int32s, jit, real, share
from auraflux.ops.attention._softmax import NOTHING, ZERO, fill, softcapped
from auraflux.ops.turboquant._codec import CHUNK, unpack_row
from auraflux.ops.turboquant._tiles import score_tile, value_tile

BLOCK = 64  # tokens looked up together
ROWS = 64  # rows of queries that go over them
LINE = 4 * BLOCK
ONE = np.float32(1)


class Side(NamedTuple):
    """Keys or values: addresses of codes, norms and levels, and the bits of a code."""

    codes: int
    norms: int
    book: int
    bits: int


class Cache(NamedTuple):
    """One sequence's part of a head: its row of the page table, rows in a page, heads, which head, and the width."""

    table: int
    page: int
    heads: int
    head: int
    width: int


class Rows(NamedTuple):
    """Queries of one sequence and key head: row r is head r % group of the token at `position` + r // group.

    q       address of the first token's first head, rows of `room` floats, `heads` of them a token
    row, size  the first of the rows meant, and how many
    reach   how far back a query sees
    """

    q: int
    room: int
    heads: int
    group: int
    position: int
    row: int
    size: int
    reach: int


@jit
def exact_scratch(room):
    """Bytes to work in, for rows of `room` floats."""
    return 4 * (BLOCK * room + 2 * ROWS * room + ROWS * BLOCK + 2 * BLOCK + 3 * ROWS) + 64


@jit
def padded(width):
    return (width + CHUNK - 1) // CHUNK * CHUNK


@jit
def page_slot(cache, position):
    """Which row of the pool holds a position."""
    page = np.int64(int32s(cache.table + 4 * (position // cache.page), 1)[0])
    return (page * cache.heads + cache.head) * cache.page + position % cache.page


@jit
def _look_up(cache, side, first, count, room, levels, norms_at):
    norms, words = floats(norms_at, count), (cache.width * side.bits + 31) // 32
    for j in range(count):
        slot = page_slot(cache, first + j)
        unpack_row(side.bits, side.codes + 4 * slot * words, cache.width, side.book, levels + 4 * j * room)
        norms[j] = floats(side.norms + 4 * slot, 1)[0]


@jit
def _weigh(scores_at, low, high, count, key_norms_at, value_norms_at, softcap, state_at):
    """Turn a row's products into weights of values, zero outside [low, high); give the factor for what was summed before."""
    scores, state = floats(scores_at, count), floats(state_at, 2)
    key_norms, value_norms = floats(key_norms_at, count), floats(value_norms_at, count)
    for j in range(low, high):
        scores[j] *= key_norms[j]
    if softcap > ZERO:
        for j in range(low, high):
            scores[j] = softcapped(scores[j], softcap)
    before = peak = state[0]
    for j in range(low, high):
        # not-a-number stays: once in, no comparison takes it out again
        peak = scores[j] if scores[j] > peak or scores[j] != scores[j] else peak
    base = peak if peak != NOTHING else ZERO
    total = ZERO
    for j in range(low):
        scores[j] = ZERO
    for j in range(low, high):
        weight = exp(scores[j] - base)
        total += weight
        scores[j] = weight * value_norms[j] if weight != ZERO else ZERO
    for j in range(high, count):
        scores[j] = ZERO
    keep = exp(before - base)
    state[0], state[1] = peak, state[1] * keep + total
    return keep


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
def add_values(rows, weights, line, levels, step, count, sums, keeps):
    """Scale the sums of rows by `keeps`, and add the levels of tokens by their weights."""
    r = 0
    while r + 4 <= rows:
        value_tile((4, weights + r * line, line, levels, step, count, sums + r * step, keeps + 4 * r))
        r += 4
    while r < rows:
        value_tile((1, weights + r * line, line, levels, step, count, sums + r * step, keeps + 4 * r))
        r += 1


@jit
def attend_exact(rows, cache, keys, values, softcap, first, last, out, out_step, ends, ends_step, work):
    """Attend from some rows to positions [first, last).

    out   where the sum of the first token's first head goes, the next head's `out_step` bytes on
    ends  addresses of its highest score and its sum of weights, the next head's `ends_step` bytes on
    """
    room, step, group = rows.room, 4 * rows.room, rows.group
    levels = work
    sums, queries = levels + BLOCK * step, levels + (BLOCK + ROWS) * step
    scores = queries + ROWS * step
    key_norms, value_norms = scores + ROWS * LINE, scores + ROWS * LINE + LINE
    state = value_norms + LINE
    keeps = state + 8 * ROWS
    fill(sums, rows.size * room, ZERO)
    for r in range(rows.size):
        floats(state + 8 * r, 2)[0], floats(state + 8 * r, 2)[1] = NOTHING, ZERO
        token, head = (rows.row + r) // group, (rows.row + r) % group
        source, target = floats(rows.q + step * (token * rows.heads + head), room), floats(queries + r * step, room)
        for i in range(room):
            target[i] = source[i]
    for start in range(first, last, BLOCK):
        count = min(BLOCK, last - start)
        _look_up(cache, keys, start, count, room, levels, key_norms)
        _score(rows.size, queries, levels, step, count, scores)
        _look_up(cache, values, start, count, room, levels, value_norms)
        for r in range(rows.size):
            position = rows.position + (rows.row + r) // group
            low, high = max(0, position - rows.reach - start), min(count, position + 1 - start)
            low, high = min(low, count), max(high, 0)
            floats(keeps, rows.size)[r] = _weigh(
                scores + r * LINE, low, high, count, key_norms, value_norms, softcap, state + 8 * r
            )
        add_values(rows.size, scores, LINE, levels, step, count, sums, keeps)
    for r in range(rows.size):
        place = (rows.row + r) // group * rows.heads + (rows.row + r) % group
        source, target = floats(sums + r * step, room), floats(out + place * out_step, cache.width)
        for i in range(cache.width):
            target[i] = source[i]
        floats(ends[0] + place * ends_step, 1)[0] = floats(state + 8 * r, 2)[0]
        floats(ends[1] + place * ends_step, 1)[0] = floats(state + 8 * r, 2)[1]


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
    fill(keeps, ROWS, ONE)
    for item in share(heads * parts, job, jobs):
        head, part = item // parts, item % parts
        for first_row in range(0, group, ROWS):
            rows = min(ROWS, group - first_row)
            fill(sums, rows * room, ZERO)
            for start in range(part * tokens // parts, (part + 1) * tokens // parts, BLOCK):
                count = min(BLOCK, (part + 1) * tokens // parts - start)
                row = head * tokens + start
                norms = floats(norms_at + 4 * row, count)
                for j in range(count):
                    unpack_row(bits, codes + 4 * (row + j) * words, width, book, levels + 4 * j * room)
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
