"""Attention on codes with many rows of queries: a block of tokens becomes float32 in scratch memory, and panels go over it.

The panels are those of attention to what is not compressed (`attention.cpu.prefill`).
"""

import numpy as np

from auraflux.ops.attention.cpu import prefill
from auraflux.ops.attention.cpu.prefill import BLOCK, attend_block, begin, lay_out
from auraflux.ops.attention.cpu.prefill_tiles import PANEL, TALL
from auraflux.ops.simd.jit import floats, jit
from auraflux.ops.simd.softmax import ZERO, fill
from auraflux.ops.turboquant.cpu.items import place_of, row_nbytes, run_of
from auraflux.ops.turboquant.cpu.levels import level_rows

ONE = np.float32(1)
PanelRows = prefill.Rows


@jit
def _look_up(cache, keys, values, first, count, desk):
    """Lay the keys and values of some positions out; the rows that fill the last tile are zero."""
    key_nbytes, value_nbytes = row_nbytes(cache, keys), row_nbytes(cache, values)
    key_step, value_step, j = 4 * desk.key_stride, 4 * desk.value_stride, 0
    while j < count:
        row, some = run_of(cache, first + j, first + count)
        source, norms = keys.codes + row * key_nbytes, keys.norms + 4 * row
        level_rows(keys.bits, source, cache.width, some, keys.book, norms, desk.keys + j * key_step, key_step)
        source, norms = values.codes + row * value_nbytes, values.norms + 4 * row
        level_rows(values.bits, source, cache.width, some, values.book, norms, desk.values + j * value_step, value_step)
        j += some
    fill(desk.keys + count * key_step, TALL * desk.key_stride, ZERO)


@jit
def attend_many(item, keys, values, softcap, work):
    """Attend from an item's rows, each to the positions it sees."""
    rows, cache, width = item.rows, item.cache, item.cache.width
    # queries are padded like the rows of levels
    queries = rows.q, 0, rows.room, 0
    mine = PanelRows(*queries, rows.heads, 0, rows.group, rows.position, rows.row, rows.size, rows.reach)
    desk = lay_out(mine, rows.room, rows.room, 0, width, work)
    begin(mine, ONE, desk)
    for origin in range(item.first, item.last, BLOCK):
        count = min(BLOCK, item.last - origin)
        _look_up(cache, keys, values, origin, count, desk)
        attend_block(mine, desk, width, origin, count, softcap)
    for r in range(rows.size):
        panel, lane, place = r // PANEL, r % PANEL, place_of(rows, r)
        sums, target = (
            floats(desk.sums + 4 * panel * desk.padded * PANEL, desk.padded * PANEL),
            item.out + place * item.out_step,
        )
        out, state = floats(target, width), desk.state + 12 * panel * PANEL
        for d in range(width):
            out[d] = sums[d * PANEL + lane]
        floats(item.m + place * item.step, 1)[0] = floats(state, PANEL)[lane]
        floats(item.totals + place * item.step, 1)[0] = floats(state + 4 * PANEL, PANEL)[lane]
