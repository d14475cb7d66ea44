"""Attention on coded latents: a block of positions is looked up once, and serves the heads of many queries as a small product.

The panels are those of attention on plain latents (`attention.cpu.prefill`); only how a block comes to scratch memory differs.
"""

from typing import NamedTuple

import numpy as np

from auraflux.ops.attention.cpu.decode_tiles import FLOAT, widen_row
from auraflux.ops.attention.cpu.jobs import FIELDS, finish, opened, slot_of, span, take
from auraflux.ops.attention.cpu.prefill import BLOCK, attend_block, begin, hand_over, keys_for, lay_out, rows_for
from auraflux.ops.attention.cpu.prefill_tiles import TALL
from auraflux.ops.simd.jit import Kernel, arguments, floats, int32s, jit, real
from auraflux.ops.simd.softmax import ZERO, fill
from auraflux.ops.turboquant.cpu.codec import unpack_row


class Codes(NamedTuple):
    """What codes need besides the words themselves: addresses of norms and levels, and the bits of a code."""

    norms: int
    book: int
    bits: int


ALL = FIELDS + len(Codes._fields)


@jit
def _look_up(keys, codes, first, count, desk):
    """Lay the rotated latents of some positions out, and their rotated keys after them; rows of the last tile are zero."""
    words, size = (keys.width_a * codes.bits + 31) // 32, 4 if keys.element == FLOAT else 2
    number, slot, step = first // keys.page, first % keys.page, 4 * desk.key_stride
    for j in range(count):
        row, at = np.int64(int32s(keys.table, number + 1)[number]) * keys.page + slot, desk.keys + j * step
        # whole chunks are looked up: what falls behind the latent is written over
        unpack_row(codes.bits, keys.a + 4 * row * words, keys.width_a, codes.book, at)
        latent, norm = floats(at, keys.width_a), floats(codes.norms + 4 * row, 1)[0]
        for d in range(keys.width_a):
            latent[d] *= norm
        widen_row((keys.element, keys.b + row * keys.width_b * size, keys.width_b, at + 4 * keys.width_a))
        fill(at + 4 * (keys.width_a + keys.width_b), desk.key_stride - keys.width_a - keys.width_b, ZERO)
        slot += 1
        if slot == keys.page:
            number, slot = number + 1, 0
    fill(desk.keys + count * step, TALL * desk.key_stride, ZERO)


@Kernel
def attend_codes(args, job, jobs):
    """Attend with rotated queries to coded latents; the results are still rotated."""
    batch, plan = opened(args)
    codes = Codes(*arguments(args, ALL)[FIELDS:])
    item = take(batch, plan, job, 0)
    while item.sequence >= 0:
        where = span(batch, plan, item)
        rows, keys = rows_for(batch, item, where), keys_for(batch, item)
        desk = lay_out(rows, keys.width_a, keys.width_b, keys.joined, batch.value_width, plan.space + job * plan.nbytes)
        begin(rows, real(batch.scale), desk)
        for origin in range(where.first, where.last, BLOCK):
            count = min(BLOCK, where.last - origin)
            _look_up(keys, codes, origin, count, desk)
            attend_block(rows, desk, batch.value_width, origin, count, ZERO)
        hand_over(rows.size, batch.value_width, desk, slot_of(batch, plan, item))
        finish(batch, plan, item, where)
        item = take(batch, plan, job, item.sequence)
