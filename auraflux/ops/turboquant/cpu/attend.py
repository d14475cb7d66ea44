"""The kernels of attention on codes: queries are rotated, items of work attended to, their parts joined and rotated back.

Jobs take the next item when they are done with one. Every item leaves its unnormalised sums, highest scores and sums of
weights.
"""

from functools import cache
from typing import Any

import numpy as np

from auraflux.ops.attention.cpu.row_tiles import close_row, fold_row
from auraflux.ops.simd.jit import Kernel, arguments, call_kernel, floats, int64s, jit, real, share
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill
from auraflux.ops.turboquant.cpu.attend_int8 import attend_rounded
from auraflux.ops.turboquant.cpu.codec import rotate_row
from auraflux.ops.turboquant.cpu.exact import attend_codes, attend_plain
from auraflux.ops.turboquant.cpu.items import count_items, kept_pages, opened, take

ONE = np.float32(1)


@cache
def build_queries(width: int) -> Kernel:
    room = (width + 31) // 32 * 32

    @Kernel
    def queries(args, job, jobs):
        """Rotate and scale rows of queries, filled up with zeros to whole chunks.

        factors   [Hkv, width]  address of the scales of keys, or 0: queries are multiplied with them before they are rotated
        unrotated  [rows, room]  is then left as `out` is, but not rotated and without them
        taken     address of the number of items that are taken: none yet
        """
        q, rows, heads, group, table, scale, factors, out, unrotated, space, scratch, taken = arguments(args, 12)
        factor = real(scale)
        if job == 0:
            int64s(taken, 1)[0] = 0
        for row in share(rows, job, jobs):
            source, work = q + 4 * row * width, space + job * scratch
            if factors:
                _multiply(source, factors + 4 * (row % heads // group) * width, width, work)
                _pad(source, width, factor, unrotated + 4 * row * room, room)
                source, work = work, work + 4 * room
            rotate_row(width, 0, source, table, out + 4 * row * room, work)
            _pad(out + 4 * row * room, width, factor, out + 4 * row * room, room)

    return queries


@jit
def _multiply(x_at, y_at, count, out_at):
    x, y, out = floats(x_at, count), floats(y_at, count), floats(out_at, count)
    for d in range(count):
        out[d] = x[d] * y[d]


@jit
def _pad(x_at, width, factor, out_at, room):
    """Multiply a row by a factor, and fill it up with zeros."""
    x, out = floats(x_at, width), floats(out_at, room)
    for d in range(width):
        out[d] = x[d] * factor
    for d in range(width, room):
        out[d] = np.float32(0)


@Kernel
def attend_kept(args, job, jobs):
    """Attend in float32 to what is kept as it is, from the rows of one place of a step."""
    step_at, b, place, work = arguments(args, 4)
    attend_plain(opened(step_at), b, place, kept_pages(step_at), work)


def _attending(attend_to_codes: Any) -> Kernel:
    """Make the kernel that attends to codes in one way, and in float32 to what is kept as it is."""

    @Kernel
    def attend(args, job, jobs):
        step = opened(args)
        work = step.space + job * step.scratch
        b, before, number = take(step, 0, 0)
        while b < step.sequences:
            coded, count = count_items(step, b)
            # what takes longest comes first
            plain = count - coded
            if number >= plain:
                attend_to_codes(step, b, number - plain, work)
            elif step.plain == 1:
                for place in range(number * step.key_heads, (number + 1) * step.key_heads):
                    call_kernel(step.attend_kept, (args, b, place, work))
            else:
                call_kernel(step.attend_kept, (args, b, number, work))
            b, before, number = take(step, b, before)

    return attend


attend_int8, attend_float32 = _attending(attend_rounded), _attending(attend_codes)


@cache
def build_finish(width: int) -> Kernel:
    @Kernel
    def finish_rows(args, job, jobs):
        """Join the parts of each row and rotate it back."""
        o, m, totals, rows, heads, parts, sinks, table, out, space, scratch = arguments(args, 11)
        sums = space + job * scratch
        joined = sums + 8 * width
        state = joined + 4 * width
        for row in share(rows, job, jobs):
            sink = floats(sinks, heads)[row % heads] if sinks else NOTHING
            fill(joined, width, ZERO)
            floats(state, 2)[0], floats(state, 2)[1] = NOTHING, ZERO
            for part in range(row * parts, row * parts + parts):
                share_of = floats(totals + 4 * part, 1)[0]
                if share_of != ZERO:
                    top = floats(m + 4 * part, 1)[0]
                    fold_row((o + 4 * part * width, ONE, top, share_of, width, joined, state, state + 4))
            close_row((joined, width, state, state + 4, sink, 1))
            rotate_row(width, 1, joined, table, out + 4 * row * width, sums)

    return finish_rows
