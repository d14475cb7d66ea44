"""Attention of one query per sequence: the query heads that share a key head go over its keys together.

An item of work is one key head over a run of parts. Positions come in blocks of BLOCK: score them, update the running maximum,
convert scores to weights, add the weighted values. Scoring keys prefetches the later
keys and then their values; adding values prefetches the later ones and then the next block's keys. Sums are those of
`row_tiles`, bit by bit; only keys and values are read where they lie.
"""

from functools import cache

import numpy as np
import torch

from auraflux.ops.attention.cpu.decode_tiles import UNROLLED, score_block, value_block
from auraflux.ops.attention.cpu.dtypes import LANES, element_of, size_of
from auraflux.ops.attention.cpu.row_tiles import BLOCK, KEYS, cap_row, weigh_row
from auraflux.ops.attention.cpu.work_items import (
    end_part,
    ends_of,
    finish,
    open_rows,
    opened,
    skip_part,
    slot_of,
    span,
    take,
)
from auraflux.ops.simd.jit import Kernel, floats, int32s, int64s, jit
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill

ONE = np.float32(1)
# positions by which prefetching is ahead. Two Neoverse-N1 cores need 3.6 ms for 8192 tokens in float32 with 16, 3.7 with
# 32, 4.2 with 64: keys and values drive each other out of the nearest cache
NEAR = BLOCK // 4 if UNROLLED else BLOCK
WIDE = 4  # vectors of a sum that stay in registers together


@jit
def head_slots(heads):
    """Return the heads that tiles of four, two and one compute: three are padded to four."""
    return heads + 1 if heads % 4 == 3 else heads


@jit
def _vectors(width):
    return (width + LANES - 1) // LANES


@cache
def decode_scratch(heads: int, width: int, value_width: int) -> int:
    """Return the floats of scratch memory that `decode` needs."""
    vectors = KEYS * _vectors(width) + _vectors(value_width)
    return head_slots(heads) * (vectors * LANES + BLOCK + 3) + 8 * BLOCK


@jit
def _spread_query(source_at, width, scale, target_at):
    """Lay a scaled query out in vectors of four coordinates over and over, as keys meet them.

    The last LANES coordinates end with the query, and are zero where they overlap their neighbours.
    """
    whole = (_vectors(width) - 1) * LANES
    source, target = floats(source_at, width), floats(target_at, KEYS * (whole + LANES))
    for i in range(whole + LANES):
        place = i if i < whole else width - LANES + i - whole
        value = source[place] * scale if i < whole or place >= whole else ZERO
        for key in range(KEYS):
            target[i // 4 * LANES + 4 * key + i % 4] = value


@jit
def _locate(pages, first, offset, count, k, key_nbytes, v, value_nbytes, target):
    """List the addresses of keys and values of `count` positions from `first` on, `offset` into their block.

    Entries before repeat the first, those after the last.
    """
    table, size, heads, head = pages
    keys, values = int64s(target, BLOCK), int64s(target + 8 * BLOCK, BLOCK)
    end, j = offset + count, offset
    while j < end:
        page, slot = (first + j - offset) // size, (first + j - offset) % size
        row = (np.int64(int32s(table, page + 1)[page]) * heads + head) * size + slot
        some = min(size - slot, end - j)
        for i in range(some):
            keys[j + i], values[j + i] = k + (row + i) * key_nbytes, v + (row + i) * value_nbytes
        j += some
    for i in range(offset):
        keys[i], values[i] = keys[offset], values[offset]
    for i in range(end, BLOCK):
        keys[i], values[i] = keys[end - 1], values[end - 1]


def _steps(heads):
    """Build the two passes over a block for a number of heads, which must be known when they are compiled."""

    @jit
    def score(like, q, width, keys, batches, scores, ahead, nbytes):
        vectors = _vectors(width)
        step, line = 4 * KEYS * vectors * LANES, 4 * BLOCK
        score_block(like, (heads, q, step, keys, batches, vectors, width - LANES, scores, line, ahead, nbytes))

    @jit
    def add(like, weights, values, width, count, sums, rescales, ahead, nbytes):
        vectors, last = _vectors(width), width - LANES
        whole = vectors - vectors % WIDE
        step, line = 4 * vectors * LANES, 4 * BLOCK
        for first in range(0, whole, WIDE):
            soon, rows = (0, ahead + 8 * (NEAR * first // whole)) if UNROLLED else (nbytes if first == 0 else 0, ahead)
            value_block(like, (heads, WIDE, weights, line, values, count, first, last, sums, step, rescales, rows, soon))
        for first in range(whole, vectors):
            value_block(like, (heads, 1, weights, line, values, count, first, last, sums, step, rescales, ahead, 0))

    return score, add


_score_four, _add_four = _steps(4)
_score_two, _add_two = _steps(2)
_score_one, _add_one = _steps(1)


@jit
def _score(like, heads, q, width, keys, batches, scores, ahead, nbytes):
    """Score all heads; the first pass prefetches the next rows."""
    step, line, h = 4 * KEYS * _vectors(width) * LANES, 4 * BLOCK, 0
    while h + 4 <= heads:
        _score_four(like, q + h * step, width, keys, batches, scores + h * line, ahead, nbytes)
        nbytes, h = 0, h + 4
    if h + 2 <= heads:
        _score_two(like, q + h * step, width, keys, batches, scores + h * line, ahead, nbytes)
        nbytes, h = 0, h + 2
    if h < heads:
        _score_one(like, q + h * step, width, keys, batches, scores + h * line, ahead, nbytes)


@jit
def _add(like, heads, weights, values, width, count, sums, rescales, ahead, nbytes):
    """Add weighted values to the sums of all heads; the first pass prefetches the next rows."""
    step, line, h = 4 * _vectors(width) * LANES, 4 * BLOCK, 0
    while h + 4 <= heads:
        _add_four(like, weights + h * line, values, width, count, sums + h * step, rescales + 4 * h, ahead, nbytes)
        nbytes, h = 0, h + 4
    if h + 2 <= heads:
        _add_two(like, weights + h * line, values, width, count, sums + h * step, rescales + 4 * h, ahead, nbytes)
        nbytes, h = 0, h + 2
    if h < heads:
        _add_one(like, weights + h * line, values, width, count, sums + h * step, rescales + 4 * h, ahead, nbytes)


@jit
def _store_rows(heads, width, sums, state_at, slot):
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
def _decode(like, batch, heads, pages, first, last, beyond, slot, work):
    """Attend to positions [first, last) of a part; prefetch the next part, which ends at `beyond`.

    slot  [heads, value_width]  sums, then the maxima, then the sums of weights
    """
    slots, line, softcap = head_slots(heads), 4 * BLOCK, batch.softcap
    k, v, width, value_width = batch.a, batch.b, batch.width, batch.value_width
    key_nbytes, value_nbytes = width * size_of(like), value_width * size_of(like)
    # addresses of a block's keys and values, then the next block's
    here, there = work, work + 16 * BLOCK
    queries = there + 16 * BLOCK
    sums, rescales, state = _places(slots, width, value_width, queries)
    scores = sums + 4 * slots * _vectors(value_width) * LANES
    fill(sums, slots * _vectors(value_width) * LANES, ZERO)
    for h in range(slots):
        floats(state + 8 * h, 2)[0], floats(state + 8 * h, 2)[1] = NOTHING, ZERO
    base = first // BLOCK * BLOCK
    _locate(pages, first, first - base, min(base + BLOCK, last) - first, k, key_nbytes, v, value_nbytes, here)
    for origin in range(base, last, BLOCK):
        start, count = max(origin, first), min(origin + BLOCK, last) - max(origin, first)
        rest, offset = min(BLOCK, beyond - origin - BLOCK), start - origin
        values, batches = here + 8 * BLOCK, (offset + count + LANES - 1) // LANES
        _score(like, slots, queries, width, here, batches, scores, here + 8 * NEAR, value_nbytes)
        for h in range(slots):
            row, rescale = scores + h * line, rescales + 4 * h
            floats(rescale, 1)[0] = ONE
            if softcap > ZERO:
                cap_row((row, ZERO, softcap))
            weigh_row((row, offset, offset + count, offset, offset + count, ZERO, ZERO, state + 8 * h, rescale))
        if rest > 0:
            _locate(pages, origin + BLOCK, 0, rest, k, key_nbytes, v, value_nbytes, there)
        soon = key_nbytes if rest > 0 else 0
        for near in range(0, BLOCK, NEAR):
            low, high = max(offset, near), min(offset + count, near + NEAR)
            ahead = values + 8 * (near + NEAR) if near + NEAR < BLOCK else there
            if low < high:
                _add(like, slots, scores + 4 * low, values + 8 * low, value_width, high - low, sums, rescales, ahead, soon)
                fill(rescales, slots, ONE)
        here, there = there, here
    _store_rows(heads, value_width, sums, state, slot)


@jit
def _places(slots, width, value_width, queries):
    """Return the addresses of sums, factors and states."""
    sums = queries + 4 * KEYS * slots * _vectors(width) * LANES
    rescales = sums + 4 * slots * (_vectors(value_width) * LANES + BLOCK)
    return sums, rescales, rescales + 4 * slots


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
            work = plan.space + job * plan.nbytes
            _begin(q, plan.rows, batch.width, batch.scale, work + 32 * BLOCK)
            open_rows(batch, plan, item, where, job)
            for part in range(where.begin, where.stop):
                first, last = ends_of(where, part)
                if first >= last:
                    skip_part(batch, plan, item, where, part)
                    continue
                slot = slot_of(batch, plan, item, where, part)
                beyond = ends_of(where, part + 1)[1] if part + 1 < where.stop else last
                _decode(like, batch, plan.rows, pages, first, last, beyond, slot, work)
                end_part(batch, plan, item, where, job, slot)
            finish(batch, plan, item, where, job)
            item = take(batch, plan, job, item.sequence)

    return decode


@jit
def _begin(q, heads, width, scale, queries):
    """Lay the queries of all heads out."""
    step = 4 * KEYS * _vectors(width) * LANES
    fill(queries, step // 4 * head_slots(heads), ZERO)
    for h in range(heads):
        _spread_query(q + 4 * h * width, width, scale, queries + h * step)
