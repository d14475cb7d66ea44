"""Attention of many queries per key head: up to ROWS rows of queries (tokens times the heads that share a key head) go over
blocks of positions that are widened to float32 in scratch memory (`row_blocks`)."""

from functools import cache

import numpy as np

from auraflux.ops.attention.cpu.dtypes import FLOAT, LANES, widen_row
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
)
from auraflux.ops.attention.cpu.row_tiles import BLOCK
from auraflux.ops.attention.cpu.work_items import end_part, ends_of, finish, open_rows, opened, skip_part, slot_of, span, take
from auraflux.ops.simd.jit import Kernel, int32s, jit
from auraflux.ops.simd.softmax import ZERO, fill


@jit
def _room(width, value_width):
    return (max(width, value_width) + LANES - 1) // LANES * LANES


@cache
def prefill_scratch(width: int, value_width: int) -> int:
    """Return how many floats `attend_rows` works in."""
    return rows_scratch(_room(width, value_width))


@jit
def _gather(pages, first, count, pool, width, element, target, room):
    """Copy the rows of some positions as float32, and zeros after each."""
    table, page, heads, head = pages
    size, number, slot = 4 if element == FLOAT else 2, first // page, first % page
    for j in range(count):
        row, here = (np.int64(int32s(table, number + 1)[number]) * heads + head) * page + slot, target + 4 * j * room
        widen_row((element, pool + row * width * size, width, here))
        fill(here + 4 * width, room - width, ZERO)
        slot += 1
        if slot == page:
            number, slot = number + 1, 0


@jit
def _begin(batch, item, where, seen, buffers):
    """Lay the queries out."""
    for r in range(seen.size):
        row = seen.row + r
        place = (where.start + row // seen.group) * batch.heads + item.head * seen.group + row % seen.group
        source = batch.q + 4 * place * batch.width
        copy_row(source, batch.width, batch.scale, buffers.queries + 4 * r * buffers.room, buffers.room)


@jit
def _attend(batch, pages, seen, first, last, buffers):
    """Attend to positions [first, last) of a part."""
    begin_part(buffers, seen.size)
    for base in range(first // BLOCK * BLOCK, last, BLOCK):
        start, end = max(base, first), min(base + BLOCK, last)
        here = buffers.block + 4 * (start - base) * buffers.room
        _gather(pages, start, end - start, batch.a, batch.width, batch.element, here, buffers.room)
        score_block(seen, buffers, base, start, end, batch.softcap, ZERO, 0, 0)
        _gather(pages, start, end - start, batch.b, batch.value_width, batch.element, here, buffers.room)
        value_block(seen, buffers, base, start, end)


@Kernel
def attend_rows(args, job, jobs):
    """Attend for many queries per key head, to caches of any dtype."""
    batch, plan = opened(args)
    item, group = take(batch, plan, job, 0), batch.heads // batch.key_heads
    while item.sequence >= 0:
        where = span(batch, plan, item)
        seen = Seen(where.position, where.row, where.end - where.row, group, batch.reach)
        buffers = lay_rows(_room(batch.width, batch.value_width), plan.space + job * plan.nbytes)
        pages = batch.table + 4 * item.sequence * batch.table_width, batch.page, batch.key_heads, item.head
        _begin(batch, item, where, seen, buffers)
        open_rows(batch, plan, item, where, job)
        for part in range(where.begin, where.stop):
            first, last = ends_of(where, part)
            if first >= last:
                skip_part(batch, plan, item, where, part)
                continue
            _attend(batch, pages, seen, first, last, buffers)
            slot = slot_of(batch, plan, item, where, part)
            for r in range(seen.size):
                ends = slot + 4 * (ROWS * batch.value_width + r)
                store_row(buffers, r, batch.value_width, False, slot + 4 * r * batch.value_width, ends, ends + 4 * ROWS)
            end_part(batch, plan, item, where, job, slot)
        finish(batch, plan, item, where, job)
        item = take(batch, plan, job, item.sequence)
