"""Attention of many queries per key head: panels of PANEL queries, a query to a lane.

An item of work is up to ROWS queries (tokens times the heads that share a key head) over a range of positions. Queries are
transposed once, coordinates outside and queries inside. Positions come in blocks of BLOCK, widened to float32 in scratch
memory, and each panel goes over the block: scores [position][query], online softmax down the columns, sums
[value coordinate][query]. Latent attention is the same with the latent and the RoPE key side by side as the key, and the latent
again as the value.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from auraflux.ops.attention.cpu.dtypes import FLOAT, widen_row
from auraflux.ops.attention.cpu.panel_tiles import PANEL, TALL, score_panel, value_panel, weigh_panel
from auraflux.ops.attention.cpu.work_items import end_part, ends_of, finish, open_rows, opened, skip_part, slot_of, span, take
from auraflux.ops.simd.jit import Kernel, floats, int32s, jit
from auraflux.ops.simd.math import bits_of_float
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill, softcapped

BLOCK = 96  # whole tiles on every processor
ROWS = 128
NOT_FINITE = np.int32(0x7F800000)


class Rows(NamedTuple):
    """Queries of a work item.

    q, q2          their first coordinates (addresses), and for latent attention the rotated ones
    width, width2  numbers of those; width2 is 0 otherwise
    heads          query heads of a token
    head, group    of which these `group` from `head` on are meant
    position       of the sequence's first new token
    first, size    rows: row r is token r // group, head r % group
    reach          how many positions before its own a query sees
    """

    q: int
    q2: int
    width: int
    width2: int
    heads: int
    head: int
    group: int
    position: int
    first: int
    size: int
    reach: int


class Keys(NamedTuple):
    """Location of a sequence's keys and values.

    table       its row of the page table
    page        tokens in a page
    a, b        keys and values, or latents and rotated keys (addresses)
    heads, head of the cache
    width_a, width_b
    element     the number of their dtype
    joined      1 where a and b together are the key, and a the value
    """

    table: int
    page: int
    a: int
    b: int
    heads: int
    head: int
    width_a: int
    width_b: int
    element: int
    joined: int


class Buffers(NamedTuple):
    """Scratch memory of a work item: addresses, strides in floats, and the rows that sums are padded to."""

    keys: int
    values: int
    key_stride: int
    value_stride: int
    scores: int
    queries: int
    sums: int
    padded: int
    state: int
    lows: int
    highs: int


@jit
def _strides(width_a, width_b, joined):
    """Return the floats from one row of keys, and of values, to the next in scratch memory."""
    a = width_a + width_b if joined else width_a
    # whole vectors and one more: rows at a power-of-two stride would fall into the same cache sets
    a, b = (a + 31) // 16 * 16, (width_b + 31) // 16 * 16
    return a, a if joined else b


@cache
def panel_scratch(width_a: int, width_b: int, joined: int) -> int:
    """Return how many floats `lay_out` divides."""
    key_stride, value_stride = _strides(width_a, width_b, joined)
    blocks = (BLOCK + TALL) * (key_stride + value_stride + PANEL)
    # queries and sums: as wide as a key and a value, which lie in rows of those strides
    return blocks + ROWS * (key_stride + value_stride + TALL + 3) + 2 * PANEL


@jit
def lay_queries(rows, scale, target):
    """Write scaled queries as [panel][coordinate][query]; lanes without one are zero."""
    depth = rows.width + rows.width2
    for r in range((rows.size + PANEL - 1) // PANEL * PANEL):
        panel = floats(target + 4 * (r // PANEL) * depth * PANEL, depth * PANEL)
        lane = r % PANEL
        if r >= rows.size:
            for d in range(depth):
                panel[d * PANEL + lane] = ZERO
            continue
        here = (rows.first + r) // rows.group * rows.heads + rows.head + (rows.first + r) % rows.group
        one, two = floats(rows.q + 4 * here * rows.width, rows.width), floats(rows.q2 + 4 * here * rows.width2, rows.width2)
        for d in range(rows.width):
            panel[d * PANEL + lane] = one[d] * scale
        for d in range(rows.width2):
            panel[(rows.width + d) * PANEL + lane] = two[d] * scale


@jit
def _gather(keys, first, count, a_at, value_at):
    """Copy a block of positions to scratch memory as float32; the rows that fill its last tile are zero."""
    a_stride, b_stride = _strides(keys.width_a, keys.width_b, keys.joined)
    b_at, b_padded = value_at, b_stride
    if keys.joined:
        b_at, b_padded = a_at + 4 * keys.width_a, a_stride - keys.width_a
    size = 4 if keys.element == FLOAT else 2
    number, slot = first // keys.page, first % keys.page
    for j in range(count):
        row = (np.int64(int32s(keys.table, number + 1)[number]) * keys.heads + keys.head) * keys.page + slot
        widen_row((keys.element, keys.a + row * keys.width_a * size, keys.width_a, a_at + 4 * j * a_stride))
        widen_row((keys.element, keys.b + row * keys.width_b * size, keys.width_b, b_at + 4 * j * b_stride))
        fill(b_at + 4 * (j * b_stride + keys.width_b), b_padded - keys.width_b, ZERO)
        slot += 1
        if slot == keys.page:
            number, slot = number + 1, 0
    fill(a_at + 4 * count * a_stride, TALL * a_stride, ZERO)


@jit
def _limits(rows, r):
    """Return the first and last position that a row sees. Lanes without a row take the last one's."""
    high = rows.position + (rows.first + min(r, rows.size - 1)) // rows.group
    return high - rows.reach, high


@jit
def _weigh(scores_at, first, last, softcap, state, masked, rows, panel, origin, lows_at, highs_at):
    """Convert a panel's scores [first, last) into weights; state: its maxima, sums of weights and factors for earlier sums."""
    if softcap > ZERO:
        scores = floats(scores_at, last * PANEL)
        for i in range(first * PANEL, last * PANEL):
            scores[i] = softcapped(scores[i], softcap)
    totals, rescale = state + 4 * PANEL, state + 8 * PANEL
    if masked:
        lows, highs = int32s(lows_at, PANEL), int32s(highs_at, PANEL)
        for lane in range(PANEL):
            low, high = _limits(rows, panel * PANEL + lane)
            lows[lane], highs[lane] = max(low - origin, 0), min(high - origin, BLOCK)
        weigh_panel((1, scores_at, first, last, state, totals, rescale, lows_at, highs_at))
    else:
        weigh_panel((0, scores_at, first, last, state, totals, rescale, lows_at, highs_at))


@jit
def _all_finite(values_at, stride, count, width):
    largest = np.int32(0)
    for t in range(count):
        row = floats(values_at + 4 * t * stride, width)
        for d in range(width):
            largest = max(largest, bits_of_float(row[d]) & NOT_FINITE)
    return largest < NOT_FINITE


@jit
def _add_seen(values_at, stride, width, weights_at, first, last, rescale_at, sums_at, rows, panel, origin):
    """Add weighted values one by one, only to queries that see them: 0 * NaN would be NaN."""
    rescale = floats(rescale_at, PANEL)
    for lane in range(PANEL):
        low, high = _limits(rows, panel * PANEL + lane)
        sums, weights = floats(sums_at, width * PANEL), floats(weights_at, last * PANEL)
        for d in range(width):
            sums[d * PANEL + lane] *= rescale[lane]
        for t in range(max(first, low - origin), min(last, high - origin + 1)):
            value = floats(values_at + 4 * t * stride, width)
            for d in range(width):
                sums[d * PANEL + lane] += weights[t * PANEL + lane] * value[d]


@jit
def lay_out(rows, width_a, width_b, joined, value_width, work):
    """Divide the scratch memory at `work`."""
    depth, panels = rows.width + rows.width2, (rows.size + PANEL - 1) // PANEL
    key_stride, value_stride = _strides(width_a, width_b, joined)
    padded = (value_width + TALL - 1) // TALL * TALL
    keys = work + 4 * (BLOCK + TALL) * PANEL
    values = keys if joined else keys + 4 * (BLOCK + TALL) * key_stride
    queries = values + 4 * (BLOCK + TALL) * value_stride
    sums = queries + 4 * panels * depth * PANEL
    state = sums + 4 * panels * padded * PANEL
    lows = state + 12 * panels * PANEL
    return Buffers(keys, values, key_stride, value_stride, work, queries, sums, padded, state, lows, lows + 4 * PANEL)


@jit
def begin(rows, buffers):
    """Clear the sums."""
    panels = (rows.size + PANEL - 1) // PANEL
    fill(buffers.sums, panels * (buffers.padded + 3) * PANEL, ZERO)
    for panel in range(panels):
        fill(buffers.state + 12 * panel * PANEL, PANEL, NOTHING)


@jit
def attend_block(rows, buffers, value_width, origin, count, softcap):
    """Attend to those of the `count` positions from `origin` on, whose keys and values are laid out, that each row sees."""
    depth, key_step, value_step = rows.width + rows.width2, 4 * buffers.key_stride, 4 * buffers.value_stride
    for panel in range((rows.size + PANEL - 1) // PANEL):
        low, high = _limits(rows, panel * PANEL)
        low_end, high_end = _limits(rows, panel * PANEL + PANEL - 1)
        first, last = max(low - origin, 0), min(high_end - origin + 1, count)
        if first >= last:
            continue
        here = buffers.queries + 4 * panel * depth * PANEL
        for t in range(first, last, TALL):
            score_panel((buffers.keys + t * key_step, key_step, here, depth, buffers.scores + 4 * t * PANEL))
        masked = high < origin + last - 1 or low_end > origin + first
        state = buffers.state + 12 * panel * PANEL
        _weigh(buffers.scores, first, last, softcap, state, masked, rows, panel, origin, buffers.lows, buffers.highs)
        rescale = state + 8 * PANEL
        here, start = buffers.sums + 4 * panel * buffers.padded * PANEL, buffers.values + first * value_step
        if masked and not _all_finite(start, buffers.value_stride, last - first, value_width):
            seen = buffers.scores, first, last, rescale, here
            _add_seen(buffers.values, buffers.value_stride, value_width, *seen, rows, panel, origin)
            continue
        weights = buffers.scores + 4 * first * PANEL
        for d in range(0, value_width, TALL):
            value_panel((start + 4 * d, value_step, weights, last - first, rescale, here + 4 * d * PANEL))


@jit
def store_rows(count, width, buffers, slot):
    """Write sums [ROWS, width], then the maxima, then the sums of weights to `slot`."""
    ends = floats(slot + 4 * ROWS * width, 2 * ROWS)
    for r in range(count):
        panel, lane = r // PANEL, r % PANEL
        source = floats(buffers.sums + 4 * panel * buffers.padded * PANEL, buffers.padded * PANEL)
        target, state = floats(slot + 4 * r * width, width), buffers.state + 12 * panel * PANEL
        for d in range(width):
            target[d] = source[d * PANEL + lane]
        ends[r], ends[ROWS + r] = floats(state, PANEL)[lane], floats(state + 4 * PANEL, PANEL)[lane]


@jit
def rows_for(batch, item, where):
    """Return the queries of an item."""
    group, before = batch.heads // batch.key_heads, 4 * where.start * batch.heads
    q, q2, head = batch.q + before * batch.width, batch.q2 + before * batch.width2, item.head * group
    widths, size = (batch.width, batch.width2), where.end - where.row
    return Rows(q, q2, *widths, batch.heads, head, group, where.position, where.row, size, batch.reach)


@jit
def keys_for(batch, item):
    """Return the keys and values of an item."""
    table = batch.table + 4 * item.sequence * batch.table_width
    pools = batch.a, batch.b, batch.key_heads, item.head, batch.width_a, batch.width_b, batch.element
    return Keys(table, batch.page, *pools, np.int64(batch.width2 > 0))


@Kernel
def attend_panels(args, job, jobs):
    """Attend for many queries per key head, to caches of any dtype."""
    batch, plan = opened(args)
    item = take(batch, plan, job, 0)
    while item.sequence >= 0:
        where = span(batch, plan, item)
        rows, keys = rows_for(batch, item, where), keys_for(batch, item)
        work = plan.space + job * plan.nbytes
        buffers = lay_out(rows, keys.width_a, keys.width_b, keys.joined, batch.value_width, work)
        lay_queries(rows, batch.scale, buffers.queries)
        open_rows(batch, plan, item, where, job)
        for part in range(where.begin, where.stop):
            first, last = ends_of(where, part)
            if first >= last:
                skip_part(batch, plan, item, where, part)
                continue
            begin(rows, buffers)
            for base in range(first // BLOCK * BLOCK, last, BLOCK):
                origin = max(base, first)
                count = min(base + BLOCK, last) - origin
                _gather(keys, origin, count, buffers.keys, buffers.values)
                attend_block(rows, buffers, batch.value_width, origin, count, batch.softcap)
            slot = slot_of(batch, plan, item, where, part)
            store_rows(rows.size, batch.value_width, buffers, slot)
            end_part(batch, plan, item, where, job, slot)
        finish(batch, plan, item, where, job)
        item = take(batch, plan, job, item.sequence)
