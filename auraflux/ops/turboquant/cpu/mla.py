"""Attention on coded latents: a block of positions is looked up once, and serves the heads of many queries as a small product.

The panels are those of attention on plain latents (`attention.cpu.prefill`); only how a block comes to scratch memory differs.
Positions that are kept as they are make blocks of their own, after the codes of their part.
"""

from typing import NamedTuple

import numpy as np

from auraflux.ops.attention.cpu.decode_tiles import widen_row
from auraflux.ops.attention.cpu.jobs import (
    FIELDS,
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
from auraflux.ops.attention.cpu.prefill import BLOCK, Rows, attend_block, begin, hand_over, keys_for, lay_out, rows_for, turn
from auraflux.ops.attention.cpu.prefill_tiles import TALL
from auraflux.ops.simd.jit import Kernel, arguments, floats, int32s, jit, real
from auraflux.ops.simd.softmax import ZERO, fill
from auraflux.ops.turboquant.cpu.codec import unpack_row
from auraflux.ops.turboquant.cpu.kept_rows import Kept, size_of


class Codes(NamedTuple):
    """What codes need besides the words themselves: addresses of norms and levels, and the bits of a code."""

    norms: int
    book: int
    bits: int


CODES_AT = 8 * FIELDS
OLDEST_AT = CODES_AT + 8 * len(Codes._fields)
NEWEST_AT = OLDEST_AT + 8 * len(Kept._fields)


@jit
def _look_up(keys, codes, first, count, desk):
    """Lay the rotated latents of some positions out, and their rotated keys after them; rows of the last tile are zero."""
    words, step = (keys.width_a * codes.bits + 31) // 32, 4 * desk.key_stride
    for j in range(count):
        row, at = _row_of(keys.table, keys.page, first + j), desk.keys + j * step
        # whole chunks are looked up: what falls behind the latent is written over
        unpack_row(codes.bits, keys.a + 4 * row * words, keys.width_a, codes.book, at)
        latent, norm = floats(at, keys.width_a), floats(codes.norms + 4 * row, 1)[0]
        for d in range(keys.width_a):
            latent[d] *= norm
        _add_key(keys, row, at, desk)
    fill(desk.keys + count * step, TALL * desk.key_stride, ZERO)


@jit
def _widen(keys, kept, b, first, count, desk):
    """The same of positions whose rotated latents are kept as they are."""
    step, table = 4 * desk.key_stride, kept.table + 4 * b * kept.table_width
    for j in range(count):
        row, at = _row_of(table, kept.page, first + j), desk.keys + j * step
        widen_row((kept.element, kept.k + row * keys.width_a * size_of(kept.element), keys.width_a, at))
        _add_key(keys, _row_of(keys.table, keys.page, first + j), at, desk)
    fill(desk.keys + count * step, TALL * desk.key_stride, ZERO)


@jit
def _row_of(table, page, position):
    number = position // page
    return np.int64(int32s(table, number + 1)[number]) * page + position % page


@jit
def _add_key(keys, row, at, desk):
    """Lay a rotated key out after its latent, and zeros after both."""
    source, size = keys.b + row * keys.width_b * size_of(keys.element), keys.width_a + keys.width_b
    widen_row((keys.element, source, keys.width_b, at + 4 * keys.width_a))
    fill(at + 4 * size, desk.key_stride - size, ZERO)


@jit
def _standing(rows, back, reach):
    """The same queries, as if they stood so many positions before their own and saw so far back from there."""
    q, heads = (rows.q, rows.q2, rows.width, rows.width2), (rows.heads, rows.head, rows.group)
    return Rows(*q, *heads, rows.position - back, rows.first, rows.size, reach)


@jit
def _attend_kept(rows, keys, kept, b, first, last, desk):
    for base in range(first // BLOCK * BLOCK, last, BLOCK):
        origin = max(base, first)
        count = min(base + BLOCK, last) - origin
        _widen(keys, kept, b, origin, count, desk)
        attend_block(rows, desk, keys.width_a, origin, count, ZERO)


@jit
def _attend_part(rows, keys, codes, oldest, newest, b, first, last, desk):
    """Attend to positions [first, last) of a part: to codes, then to the first positions, then to the newest."""
    near, far = rows.position + rows.first // rows.group, rows.position + (rows.first + rows.size - 1) // rows.group
    coded, end = _standing(rows, newest.positions, rows.reach), min(last, far + 1 - newest.positions)
    start = max(first, oldest.positions)
    for base in range(start // BLOCK * BLOCK, end, BLOCK):
        origin = max(base, start)
        count = min(base + BLOCK, end) - origin
        _look_up(keys, codes, origin, count, desk)
        attend_block(coded, desk, keys.width_a, origin, count, ZERO)
    _attend_kept(rows, keys, oldest, b, first, min(oldest.positions, last), desk)
    if newest.positions:
        reach = newest.positions - 1
        _attend_kept(_standing(rows, 0, reach), keys, newest, b, max(start, near - reach), last, desk)


@Kernel
def attend_codes(args, job, jobs):
    """Attend with rotated queries to coded latents, and to those that are kept as they are; the results are still rotated."""
    batch, plan = opened(args)
    codes = Codes(*arguments(args + CODES_AT, 3))
    oldest, newest = Kept(*arguments(args + OLDEST_AT, 7)), Kept(*arguments(args + NEWEST_AT, 7))
    item = take(batch, plan, job, 0)
    while item.sequence >= 0:
        where = span(batch, plan, item)
        rows, keys = rows_for(batch, item, where), keys_for(batch, item)
        desk = lay_out(rows, keys.width_a, keys.width_b, keys.joined, batch.value_width, plan.space + job * plan.nbytes)
        turn(rows, real(batch.scale), desk)
        open_rows(batch, plan, item, where, job)
        for part in range(where.begin, where.stop):
            first, last = ends_of(where, part)
            if first >= last:
                skip_part(batch, plan, item, where, part)
                continue
            begin(rows, desk)
            _attend_part(rows, keys, codes, oldest, newest, item.sequence, first, last, desk)
            slot = slot_of(batch, plan, item, where, part)
            hand_over(rows.size, batch.value_width, desk, slot)
            end_part(batch, plan, item, where, job, slot)
        finish(batch, plan, item, where, job)
        item = take(batch, plan, job, item.sequence)
