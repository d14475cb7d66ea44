"""Attention on codes with many rows of queries: a block of tokens becomes float32 in scratch memory, and panels go over it.

The panels are those of attention to what is not compressed (`attention.cpu.prefill`). Products with centres are coordinates of
queries there: each key has a one at the product of the block it lies in, and zeros at the others.
"""

from typing import NamedTuple

import numpy as np

from auraflux.ops.attention.cpu import prefill
from auraflux.ops.attention.cpu.prefill import BLOCK, ROWS, _turn_queries, attend_block, begin, lay_out, panel_scratch
from auraflux.ops.attention.cpu.prefill_tiles import PANEL, TALL, score_panel
from auraflux.ops.simd.jit import floats, jit, real
from auraflux.ops.simd.softmax import ZERO, fill
from auraflux.ops.turboquant.cpu.centres import SPAN, lay_centres
from auraflux.ops.turboquant.cpu.items import (
    PLAIN,
    begin_at,
    clear_plain,
    item_at,
    joins_plain,
    place_of,
    plain_items,
    plain_sides,
    row_nbytes,
    run_of,
    sides,
)
from auraflux.ops.turboquant.cpu.kept_rows import widen_rows
from auraflux.ops.turboquant.cpu.levels import level_rows

ONE = np.float32(1)
WHOLE = 32  # blocks of positions begin at multiples of this
CROSSED = (BLOCK - WHOLE) // SPAN + 1  # blocks with a centre that BLOCK positions may then lie in
PANELS = -(-ROWS // PANEL)
PanelRows = prefill.Rows


class Products(NamedTuple):
    """What panels need for centres: addresses.

    queries   [panels][room][PANEL]  not rotated
    centres   [TALL][room + 16]      of a run of blocks
    products  [panels][TALL][PANEL]  of these
    """

    queries: int
    centres: int
    products: int


def many_scratch(room: int) -> int:
    """How many floats to work in, for rows of `room` floats."""
    return panel_scratch(room + CROSSED, room, 0) + PANELS * PANEL * (room + TALL) + TALL * (room + 16)


@jit
def _lay_rows(cache, side, first, count, target, stride):
    """Write the rows of some positions as float32, `stride` floats apart."""
    nbytes, j = row_nbytes(cache, side), 0
    while j < count:
        row, some = run_of(cache, first + j, first + count)
        source, norms, here = side.codes + row * nbytes, side.norms + 4 * row, target + 4 * j * stride
        if side.bits == PLAIN:
            widen_rows(source, side.book, cache.width, some, here, stride)
        else:
            level_rows(side.bits, source, cache.width, some, side.book, norms, here, 4 * stride)
        j += some


@jit
def _mark_blocks(origin, count, keys, stride):
    """Give each key a one for the block that it lies in, and zeros for the others that are crossed."""
    for i in range(CROSSED):
        first, last = (origin // SPAN + i) * SPAN - origin, (origin // SPAN + i + 1) * SPAN - origin
        for j in range(count):
            floats(keys + 4 * (j * stride + i), 1)[0] = ONE if first <= j < last else ZERO


@jit
def _meet_centres(item, mine, desk, met, origin, count, begun):
    """Make the products of the blocks that positions lie in coordinates of the queries.

    begun  the first block of the run whose products are there, -1 for none; returns the same after the call
    """
    panels, room, block, last = (mine.size + PANEL - 1) // PANEL, mine.width, origin // SPAN, (origin + count - 1) // SPAN
    if begun < 0 or last >= begun + TALL:
        begun = block
        some = min(TALL, (item.last - 1) // SPAN - begun + 1)
        at, width = 8 * begun * item.cache.width, item.cache.width
        lay_centres((item.centres.along, item.centres.across, item.centres.table + at, width, some, met.centres, 4 * room + 64))
        for panel in range(panels):
            queries, products = met.queries + 4 * panel * room * PANEL, met.products + 4 * panel * TALL * PANEL
            score_panel((met.centres, 4 * (room + 16), queries, room, products))
    for panel in range(panels):
        queries = desk.queries + 4 * panel * (room + CROSSED) * PANEL + 4 * room * PANEL
        for i in range(CROSSED):
            source = floats(met.products + 4 * (panel * TALL + block + i - begun) * PANEL, PANEL)
            target = floats(queries + 4 * i * PANEL, PANEL)
            for lane in range(PANEL):
                target[lane] = source[lane] if block + i <= last else ZERO
    return begun


@jit
def _panel_rows(item):
    """An item's rows, with room for what centres add."""
    rows, more = item.rows, CROSSED if item.centres.table else 0
    # those coordinates are written later: anything may be read for them first
    queries = rows.q, rows.q, rows.room, more
    return PanelRows(*queries, rows.heads, 0, rows.group, rows.position, rows.row, rows.size, rows.reach)


@jit
def _begin(item, work):
    rows, mine = item.rows, _panel_rows(item)
    desk = lay_out(mine, rows.room + mine.width2, rows.room, 0, item.cache.width, work)
    begin(mine, ONE, desk)
    queries = (desk.highs + 4 * PANEL + 63) // 64 * 64
    centres = queries + 4 * PANELS * PANEL * rows.room
    met = Products(queries, centres, centres + 4 * TALL * (rows.room + 16))
    if item.centres.table:
        fill(centres, TALL * (rows.room + 16), ZERO)
        unturned = rows.unturned, 0, rows.room, 0
        _turn_queries(PanelRows(*unturned, rows.heads, 0, rows.group, 0, rows.row, rows.size, 0), ONE, queries)
    return desk, met


@jit
def _attend_blocks(item, keys, values, softcap, desk, met):
    """Attend from an item's rows, each to the positions it sees."""
    cache, mine, begun = item.cache, _panel_rows(item), -1
    for base in range(begin_at(item, WHOLE), item.last, BLOCK):
        origin = max(base, item.first)
        count = min(base + BLOCK, item.last) - origin
        _lay_rows(cache, keys, origin, count, desk.keys, desk.key_stride)
        _lay_rows(cache, values, origin, count, desk.values, desk.value_stride)
        # the rows that fill the last tile
        fill(desk.keys + 4 * count * desk.key_stride, TALL * desk.key_stride, ZERO)
        # plain rows have zeros for what centres add
        if item.centres.table and keys.bits != PLAIN:
            _mark_blocks(origin, count, desk.keys + 4 * mine.width, desk.key_stride)
            begun = _meet_centres(item, mine, desk, met, origin, count, begun)
        attend_block(mine, desk, cache.width, origin, count, softcap)


@jit
def _leave(item, desk):
    """Leave sums where parts are joined, with highest scores and sums of weights."""
    rows, width = item.rows, item.cache.width
    for r in range(rows.size):
        panel, lane, place = r // PANEL, r % PANEL, place_of(rows, r)
        sums = floats(desk.sums + 4 * panel * desk.padded * PANEL, desk.padded * PANEL)
        out, state = floats(item.out + place * item.out_step, width), desk.state + 12 * panel * PANEL
        for d in range(width):
            out[d] = sums[d * PANEL + lane]
        floats(item.m + place * item.step, 1)[0] = floats(state, PANEL)[lane]
        floats(item.totals + place * item.step, 1)[0] = floats(state + 4 * PANEL, PANEL)[lane]


@jit
def _attend_plain(step, b, place, kept, softcap, desk, met):
    """Attend from the rows of one place to what they read as it is."""
    oldest, newest = plain_items(step, b, place, kept[0], kept[1])
    _attend_blocks(oldest, *plain_sides(kept[0]), softcap, desk, met)
    _attend_blocks(newest, *plain_sides(kept[1]), softcap, desk, met)


@jit
def attend_many(step, b, number, kept, work):
    """Attend from an item's rows to codes, and after the last of these to plain rows."""
    item, softcap = item_at(step, b, number), real(step.softcap)
    desk, met = _begin(item, work)
    _attend_blocks(item, *sides(step), softcap, desk, met)
    if joins_plain(step, number):
        _attend_plain(step, b, number // step.parts, kept, softcap, desk, met)
        clear_plain(step, item)
    _leave(item, desk)


@jit
def attend_many_plain(step, b, place, kept, work):
    """Attend from the rows of one place to plain rows alone."""
    item = plain_items(step, b, place, kept[0], kept[1])[0]
    desk, met = _begin(item, work)
    _attend_plain(step, b, place, kept, real(step.softcap), desk, met)
    _leave(item, desk)
