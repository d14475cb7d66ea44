"""The kernels of attention on codes: queries are rotated, items of work attended to, their parts joined and rotated back.

Jobs take items in turn. Every item leaves its unnormalised sums, highest scores and sums of weights.
"""

from functools import cache

import numpy as np

from auraflux.ops.simd.jit import Kernel, arguments, floats, real, share
from auraflux.ops.simd.softmax import NOTHING, merge_row
from auraflux.ops.turboquant.cpu.attend_int8 import attend_fast
from auraflux.ops.turboquant.cpu.codec import turn_row
from auraflux.ops.turboquant.cpu.exact import attend_few
from auraflux.ops.turboquant.cpu.items import count_items, item_at, opened, sides
from auraflux.ops.turboquant.cpu.prefill import attend_many


@cache
def build_queries(width: int) -> Kernel:
    room = (width + 31) // 32 * 32

    @Kernel
    def queries(args, job, jobs):
        """Rotate and scale rows of queries, filled up with zeros to whole chunks."""
        q, rows, table, scale, out, space, scratch = arguments(args, 7)
        for row in share(rows, job, jobs):
            turn_row(width, 0, q + 4 * row * width, table, out + 4 * row * room, space + job * scratch)
            turned, factor = floats(out + 4 * row * room, room), real(scale)
            for d in range(width):
                turned[d] *= factor
            for d in range(width, room):
                turned[d] = np.float32(0)

    return queries


@Kernel
def attend_one_by_one(args, job, jobs):
    """Attend for sequences with one new token, on rounded levels, queries and weights."""
    step, before = opened(args), 0
    keys, values = sides(step)
    for b in range(step.sequences):
        count = count_items(step, b)
        for number in range((job - before) % jobs, count, jobs):
            item, work = item_at(step, b, number), step.space + job * step.scratch
            attend_fast(item, keys, values, real(step.softcap), real(step.threshold), work)
        before += count


@Kernel
def attend_few_rows(args, job, jobs):
    """Attend in float32 for sequences with few new tokens."""
    step, before = opened(args), 0
    keys, values = sides(step)
    for b in range(step.sequences):
        count = count_items(step, b)
        for number in range((job - before) % jobs, count, jobs):
            item, work = item_at(step, b, number), step.space + job * step.scratch
            attend_few(item, keys, values, real(step.softcap), real(step.threshold), work)
        before += count


@Kernel
def attend_many_rows(args, job, jobs):
    """Attend in float32 for sequences with many new tokens. Every value is read: some query gives it weight."""
    step, before = opened(args), 0
    keys, values = sides(step)
    for b in range(step.sequences):
        count = count_items(step, b)
        for number in range((job - before) % jobs, count, jobs):
            attend_many(item_at(step, b, number), keys, values, real(step.softcap), step.space + job * step.scratch)
        before += count


@cache
def build_finish(width: int) -> Kernel:
    @Kernel
    def finish_rows(args, job, jobs):
        """Join the parts of each row and rotate it back."""
        o, m, totals, rows, heads, parts, sinks, table, out, space, scratch = arguments(args, 11)
        sums = space + job * scratch
        joined = sums + 8 * width
        for row in share(rows, job, jobs):
            sink = floats(sinks, heads)[row % heads] if sinks else NOTHING
            ends = 4 * row * parts
            merge_row(o + ends * width, 4 * width, m + ends, totals + ends, 4, parts, width, sink, joined)
            turn_row(width, 1, joined, table, out + 4 * row * width, sums)

    return finish_rows
