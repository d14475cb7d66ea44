"""Attention of one query per sequence: the query heads that share a key head go over its keys together.

An item of work is one key head over a range of positions. Positions come in blocks of BLOCK: score them, update the running
maximum, turn scores into weights, add the weighted values. While keys are scored their values are already being fetched from
memory, and the next block's keys while these are added.
"""

from functools import cache

import numpy as np
import torch

from auraflux.ops.attention.cpu.decode_tiles import LANES, TOKENS, element_of, score_block, size_of, value_block
from auraflux.ops.attention.cpu.jobs import finish, opened, slot_of, span, take
from auraflux.ops.simd.jit import Kernel, floats, int32s, int64s, jit, real
from auraflux.ops.simd.math import exp
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill, softcapped

BLOCK = 64  # at most
CACHE = 32768  # bytes that a block's keys, and its values, may take
WIDE = 4  # vectors of a sum that are kept in registers together


@jit
def head_slots(heads):
    """Heads come in fours, twos and ones; three are padded to four."""
    return heads + 1 if heads % 4 == 3 else heads


@jit
def _vectors(width):
    return (width + LANES - 1) // LANES


@cache
def decode_scratch(heads: int, width: int, value_width: int) -> int:
    """How many floats `decode` needs to work in."""
    vectors = _vectors(width) + _vectors(value_width)
    return head_slots(heads) * (vectors * LANES + BLOCK + 7) + 8 * BLOCK


@jit
def _spread_query(source_at, width, scale, target_at):
    """Lay a scaled query out in vectors; the last ends with the query, and is zero where it overlaps its neighbour."""
    whole = (_vectors(width) - 1) * LANES
    source, target = floats(source_at, width), floats(target_at, whole + LANES)
    for i in range(whole):
        target[i] = source[i] * scale
    for lane in range(LANES):
        place = width - LANES + lane
        target[whole + lane] = source[place] * scale if place >= whole else ZERO


@jit
def _locate(pages, first, count, k, key_nbytes, v, value_nbytes, target):
    """Addresses of the keys and values of positions from `first`; those that fill the block repeat the last."""
    table, size, heads, head = pages
    keys, values = int64s(target, BLOCK), int64s(target + 8 * BLOCK, BLOCK)
    page, slot, row = first // size, first % size, 0
    for j in range(BLOCK):
        if j < count:
            row = (np.int64(int32s(table, page + 1)[page]) * heads + head) * size + slot
            slot += 1
            if slot == size:
                page, slot = page + 1, 0
        keys[j], values[j] = k + row * key_nbytes, v + row * value_nbytes


@jit
def _weigh(scores_at, count, best_at, softcap, state_at):
    """Turn a block's scores of one head into weights; update its (maximum, sum), give the factor for what was summed before."""
    scores, best, state = floats(scores_at, count), floats(best_at, 4), floats(state_at, 2)
    top = max(max(best[0], best[1]), max(best[2], best[3]))
    if softcap > ZERO:
        top = softcapped(top, softcap)
        for j in range(count):
            scores[j] = softcapped(scores[j], softcap)
    before = state[0]
    peak = top if top > before else before
    base = peak if peak > NOTHING else ZERO
    total = ZERO
    for j in range(count):
        weight = exp(scores[j] - base)
        scores[j] = weight
        total += weight
    keep = exp(before - base)
    state[0], state[1] = peak, state[1] * keep + total
    return keep


def _steps(heads):
    """Build the two passes over a block for a number of heads, which must be known when they are compiled."""

    @jit
    def score(like, q, width, keys, count, scores, best, ahead, nbytes):
        vectors = _vectors(width)
        step, line = 4 * vectors * LANES, 4 * BLOCK
        score_block(like, (heads, q, step, keys, count, vectors, width - LANES, scores, line, best, ahead, nbytes))

    @jit
    def add(like, weights, values, width, count, sums, keeps, ahead, nbytes):
        vectors, last = _vectors(width), width - LANES
        whole = vectors - vectors % WIDE
        step, line = 4 * vectors * LANES, 4 * BLOCK
        for first in range(0, whole, WIDE):
            soon = nbytes if first == 0 else 0
            value_block(like, (heads, WIDE, weights, line, values, count, first, last, sums, step, keeps, ahead, soon))
        for first in range(whole, vectors):
            value_block(like, (heads, 1, weights, line, values, count, first, last, sums, step, keeps, ahead, 0))

    return score, add


_score_four, _add_four = _steps(4)
_score_two, _add_two = _steps(2)
_score_one, _add_one = _steps(1)


@jit
def _score(like, heads, q, width, keys, count, scores, best, ahead, nbytes):
    """Score all heads; the first pass asks for what is needed next."""
    step, line, h = 4 * _vectors(width) * LANES, 4 * BLOCK, 0
    while h + 4 <= heads:
        _score_four(like, q + h * step, width, keys, count, scores + h * line, best + 16 * h, ahead, nbytes)
        nbytes, h = 0, h + 4
    if h + 2 <= heads:
        _score_two(like, q + h * step, width, keys, count, scores + h * line, best + 16 * h, ahead, nbytes)
        nbytes, h = 0, h + 2
    if h < heads:
        _score_one(like, q + h * step, width, keys, count, scores + h * line, best + 16 * h, ahead, nbytes)


@jit
def _add(like, heads, weights, values, width, count, sums, keeps, ahead, nbytes):
    """Add weighted values to the sums of all heads; the first pass asks for what is needed next."""
    step, line, h = 4 * _vectors(width) * LANES, 4 * BLOCK, 0
    while h + 4 <= heads:
        _add_four(like, weights + h * line, values, width, count, sums + h * step, keeps + 4 * h, ahead, nbytes)
        nbytes, h = 0, h + 4
    if h + 2 <= heads:
        _add_two(like, weights + h * line, values, width, count, sums + h * step, keeps + 4 * h, ahead, nbytes)
        nbytes, h = 0, h + 2
    if h < heads:
        _add_one(like, weights + h * line, values, width, count, sums + h * step, keeps + 4 * h, ahead, nbytes)


@jit
def _hand_over(heads, width, sums, state_at, slot):
    whole = (_vectors(width) - 1) * LANES
    state, ends = floats(state_at, 2 * heads), floats(slot + 4 * heads * width, 2 * heads)
    for h in range(heads):
        source, target = floats(sums + 4 * h * (whole + LANES), whole + LANES), floats(slot + 4 * h * width, width)
        for i in range(whole):
            target[i] = source[i]
        for lane in range(LANES):
            target[width - LANES + lane] = source[whole + lane]
        ends[h], ends[heads + h] = state[2 * h], state[2 * h + 1]


@jit
def _decode(like, q, heads, pages, k, v, width, value_width, first, last, scale, softcap, slot, work):
    """Attend over positions [first, last).

    q     [heads, width]        float32
    slot  [heads, value_width]  sums, then the maxima, then the sums of weights
    """
    slots, line = head_slots(heads), 4 * BLOCK
    key_nbytes, value_nbytes = width * size_of(like), value_width * size_of(like)
    # addresses of a block's keys and values, then the next block's
    here, there = work, work + 16 * BLOCK
    queries = there + 16 * BLOCK
    sums = queries + 4 * slots * _vectors(width) * LANES
    scores = sums + 4 * slots * _vectors(value_width) * LANES
    best = scores + slots * line
    keeps = best + 16 * slots
    state = keeps + 4 * slots
    fill(queries, (state - queries) // 4 + 2 * slots, ZERO)
    for h in range(slots):
        floats(state + 8 * h, 1)[0] = NOTHING
    for h in range(heads):
        _spread_query(q + 4 * h * width, width, scale, queries + 4 * h * _vectors(width) * LANES)
    # every four heads go over the block again, and find it in the first-level cache
    block = min(BLOCK, max(16, CACHE // (4 * max(key_nbytes, value_nbytes)) * 4))
    _locate(pages, first, min(block, last - first), k, key_nbytes, v, value_nbytes, here)
    for start in range(first, last, block):
        count, rest = min(block, last - start), min(block, last - start - block)
        whole = (count + TOKENS - 1) // TOKENS * TOKENS
        values = here + 8 * BLOCK
        _score(like, slots, queries, width, here, whole, scores, best, values, value_nbytes)
        for h in range(slots):
            floats(keeps, slots)[h] = _weigh(scores + h * line, count, best + 16 * h, softcap, state + 8 * h)
        if rest > 0:
            _locate(pages, start + block, rest, k, key_nbytes, v, value_nbytes, there)
        _add(like, slots, scores, values, value_width, count, sums, keeps, there, key_nbytes if rest > 0 else 0)
        here, there = there, here
    _hand_over(heads, value_width, sums, state, slot)


@cache
def decode_kernel(dtype: torch.dtype) -> Kernel:
    """Build the attention of one query per head, for caches of one dtype; a block of queries is all heads of a key head."""
    like = element_of(dtype)

    @Kernel
    def decode(args, job, jobs):
        batch, plan = opened(args)
        item = take(batch, plan, job, 0)
        while item.sequence >= 0:
            where = span(batch, plan, item)
            q = batch.q + 4 * (where.start * batch.heads + item.head * plan.rows) * batch.width
            pages = batch.table + 4 * item.sequence * batch.table_width, batch.page, batch.key_heads, item.head
            cache = pages, batch.a, batch.b, batch.width, batch.value_width, where.first, where.last
            slot, work = slot_of(batch, plan, item), plan.space + job * plan.nbytes
            _decode(like, q, plan.rows, *cache, real(batch.scale), real(batch.softcap), slot, work)
            finish(batch, plan, item, where)
            item = take(batch, plan, job, item.sequence)

    return decode
