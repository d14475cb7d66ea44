"""One attention call on a quantized KV cache, from its tensors to its kernels.

1. `rotate_queries` rotates and scales the queries, and multiplies them by the scales of calibrated keys.
2. `attend_int8` or `attend_float32` (see `routes`): threads take work items until none is left. Each item writes unnormalised
   sums, highest scores and sums of weights, one slot for each part of the positions.
3. `finish_rows` merges the parts of each row and rotates it back.

`split_work` decides how many items there are; `attend` fills the one structure that all of step 2 reads,
`work_items.AttentionArgs`.
"""

from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from auraflux.ops.attention.cpu.launch_args import flatten, read_args
from auraflux.ops.attention.cpu.page_index import NO_WINDOW, index_of
from auraflux.ops.attention.cpu.row_blocks import ROWS
from auraflux.ops.attention.cpu.row_tiles import PART, close_row, fold_row
from auraflux.ops.simd.jit import (
    LINE,
    Kernel,
    arguments,
    as_float,
    call_kernel,
    empty,
    floats,
    int64s,
    jit,
    real,
    share,
    workspace,
)
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill
from auraflux.ops.turboquant.cpu.attend_float32 import attend_dequantized, attend_full_precision, float32_nbytes
from auraflux.ops.turboquant.cpu.codec import levels_for, scratch_nbytes, threads_for
from auraflux.ops.turboquant.cpu.full_precision import check_full_precision, full_precision_of
from auraflux.ops.turboquant.cpu.int8.attend import attend_codes, int8_nbytes
from auraflux.ops.turboquant.cpu.int8.loops import loops_for
from auraflux.ops.turboquant.cpu.key_calibration import calibration_of, products_nbytes
from auraflux.ops.turboquant.cpu.rotate_rows import rotate_row, rotation_for
from auraflux.ops.turboquant.cpu.work_items import (
    AttentionArgs,
    Loops,
    Partials,
    Queries,
    Scratch,
    StoredRows,
    WorkSplit,
    count_items,
    padded,
    take,
)
from auraflux.ops.turboquant.pages import CodePages

ITEMS_PER_THREAD = 4
SEQUENCES_PER_THREAD = 2  # from here on, one item reads the full-precision rows of all heads of a sequence
FEWEST = 8  # query rows of an item: all of them share each key that is looked up
ONE = np.float32(1)


def split_work(q: Tensor, pages: CodePages, jobs: int) -> tuple[int, int, int]:
    """Return the parts of a row, the items that share them, and the most query rows of an item."""
    parts, rows, runs = -(-pages.capacity // PART), ROWS, 1
    if jobs > 1:
        per_head = q.shape[0] * q.shape[1] // pages.heads
        # fewer rows where key heads and parts alone give too few items
        shares = -(-ITEMS_PER_THREAD * jobs // (pages.heads * parts))
        rows = min(max(-(-per_head // shares // FEWEST) * FEWEST, FEWEST), ROWS)
        items = pages.heads * -(-per_head // rows)
        runs = max(1, min(-(-ITEMS_PER_THREAD * jobs // items), parts))
    return 1 if runs == 1 else parts, runs, rows


def attend(
    kernel: Kernel,
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    queries: tuple[float, int | None, float | None, float],
    split: tuple[int, int, int, int, int],
    partials: Partials,
    jobs: int,
) -> None:
    """Rotate the queries and attend, leaving the partial results of each part.

    queries  scale, window, softcap, threshold
    split    the first fields of `WorkSplit`: block, parts, runs, joined, rows
    """
    scale, window, softcap, threshold = queries
    (tokens, heads, width), wide = q.shape, as_float(q)
    calibration, (sinks, recent) = calibration_of(pages), full_precision_of(pages)
    check_full_precision(pages, starts, tokens, recent.positions - 1)
    # scratch memory: the item counter, the queries (twice where keys are calibrated), what each thread works in
    nbytes, rows_nbytes = scratch_of(width), tokens * heads * padded(width) * 4
    taken = workspace(LINE + rows_nbytes * (1 if pages.calibration is None else 2) + jobs * nbytes)
    rotated = taken + LINE
    unrotated = rotated if pages.calibration is None else rotated + rows_nbytes
    scratch = Scratch(unrotated + rows_nbytes, nbytes)
    source = wide.data_ptr(), tokens * heads, heads, heads // pages.heads, rotation_for(width, pages.seed).forward
    rotators = min(jobs, threads_for(q.numel()))
    build_queries(width)(rotators, *source, float(scale), calibration.scale, rotated, unrotated, *scratch, taken)
    key_book = levels_for(pages.key_bits, width, pages.key_book).book
    value_book = levels_for(pages.value_bits, width, pages.value_book).book
    # a window of 0 leaves out even the position of the query
    reach = NO_WINDOW if window is None else window - 1
    args = AttentionArgs(
        queries=Queries(rotated, unrotated, heads, pages.heads, width, reach, float(softcap or 0.0), float(threshold)),
        pages=index_of(pages, starts),
        keys=StoredRows(pages.key_codes.data_ptr(), pages.key_norms.data_ptr(), key_book, pages.key_bits),
        values=StoredRows(pages.value_codes.data_ptr(), pages.value_norms.data_ptr(), value_book, pages.value_bits),
        calibration=calibration,
        sinks=sinks,
        recent=recent,
        split=WorkSplit(*split, _full_precision_items(pages, jobs), taken),
        partials=partials,
        scratch=scratch,
        loops=Loops(attend_window.address, *(loops_for(pages.key_bits, pages.value_bits) if kernel is attend_int8 else ())),
    )
    kernel(jobs, *flatten(args))


def _full_precision_items(pages: CodePages, jobs: int) -> int:
    """Return how many items of a block of queries read sink tokens and recent window: one for all heads of many sequences."""
    if pages.full_precision is None:
        return 0
    return 1 if len(pages.lengths) >= SEQUENCES_PER_THREAD * jobs else pages.heads


@cache
def scratch_of(width: int) -> int:
    """Return the bytes that a thread works in."""
    room = padded(width)
    int8 = int8_nbytes(ROWS, width) + products_nbytes(ROWS, room)
    nbytes = max(float32_nbytes(room), int8) + scratch_nbytes(width)
    return -(-nbytes // LINE) * LINE


def finish(q: Tensor, pages: CodePages, partials: Partials, sinks: Tensor | None) -> Tensor:
    """Merge the parts of each row with its sink, and rotate the rows back."""
    tokens, heads, width = q.shape
    out, nbytes = empty(tokens, heads, width), scratch_nbytes(width) + 4 * width + LINE
    jobs = threads_for(tokens * heads * partials.slots * width)
    sizes = tokens * heads, heads, 0 if sinks is None else sinks.data_ptr()
    table = rotation_for(width, pages.seed).back
    build_finish(width)(jobs, *partials, *sizes, table, out.data_ptr(), workspace(jobs * nbytes), nbytes)
    return out


@cache
def build_queries(width: int) -> Kernel:
    """Build the kernel that rotates queries of one width."""
    room = (width + 31) // 32 * 32

    @Kernel
    def rotate_queries(args, job, jobs):
        """Rotate and scale rows of queries, padded with zeros to whole chunks.

        factors    [Hkv, width]  address of the scales of keys, or 0: queries are multiplied by them before rotation
        unrotated  [rows, room]  where there are factors: the scaled queries without factors and rotation
        taken      address of the number of items that threads have taken, set to 0
        """
        q, rows, heads, group, table, scale, factors, out, unrotated, space, nbytes, taken = arguments(args, 12)
        factor = real(scale)
        if job == 0:
            int64s(taken, 1)[0] = 0
        for row in share(rows, job, jobs):
            source, work = q + 4 * row * width, space + job * nbytes
            if factors:
                _multiply(source, factors + 4 * (row % heads // group) * width, width, work)
                _pad(source, width, factor, unrotated + 4 * row * room, room)
                source, work = work, work + 4 * room
            rotate_row(width, 0, source, table, out + 4 * row * room, work)
            _pad(out + 4 * row * room, width, factor, out + 4 * row * room, room)

    return rotate_queries


@jit
def _multiply(x_at, y_at, count, out_at):
    x, y, out = floats(x_at, count), floats(y_at, count), floats(out_at, count)
    for d in range(count):
        out[d] = x[d] * y[d]


@jit
def _pad(x_at, width, factor, out_at, room):
    """Multiply a row by a factor, and pad it with zeros."""
    x, out = floats(x_at, width), floats(out_at, room)
    for d in range(width):
        out[d] = x[d] * factor
    for d in range(width, room):
        out[d] = np.float32(0)


@Kernel
def attend_window(args, job, jobs):
    """Attend in float32 to sink tokens and recent window, from the rows of one place."""
    args_at, b, place, work = arguments(args, 4)
    attend_full_precision(read_args(AttentionArgs, args_at), b, place, work)


def _attending(attend_item: Any) -> Kernel:
    """Build the kernel that attends to codes with `attend_item`, and in float32 to sink tokens and recent window."""

    @Kernel
    def attend(args_at, job, jobs):
        args = read_args(AttentionArgs, args_at)
        work, key_heads = args.scratch.address + job * args.scratch.nbytes, args.queries.key_heads
        b, before, number = take(args, 0, 0)
        while b < args.pages.sequences:
            quantized, count = count_items(args, b)
            # the longest items come first
            others = count - quantized
            if number >= others:
                attend_item(args, b, number - others, work)
            elif args.split.full_precision_items == 1:
                for place in range(number * key_heads, (number + 1) * key_heads):
                    call_kernel(args.loops.attend_full_precision, (args_at, b, place, work))
            else:
                call_kernel(args.loops.attend_full_precision, (args_at, b, number, work))
            b, before, number = take(args, b, before)

    return attend


attend_int8, attend_float32 = _attending(attend_codes), _attending(attend_dequantized)


@cache
def build_finish(width: int) -> Kernel:
    """Build the kernel that finishes rows of one width."""

    @Kernel
    def finish_rows(args, job, jobs):
        """Merge the parts of each row and rotate it back."""
        o, m, totals, slots, rows, heads, sinks, table, out, space, nbytes = arguments(args, 11)
        sums = space + job * nbytes
        joined = sums + 8 * width
        state = joined + 4 * width
        for row in share(rows, job, jobs):
            sink = floats(sinks, heads)[row % heads] if sinks else NOTHING
            fill(joined, width, ZERO)
            floats(state, 2)[0], floats(state, 2)[1] = NOTHING, ZERO
            for slot in range(row * slots, row * slots + slots):
                total = floats(totals + 4 * slot, 1)[0]
                if total != ZERO:
                    top = floats(m + 4 * slot, 1)[0]
                    fold_row((o + 4 * slot * width, ONE, top, total, width, joined, state, state + 4))
            close_row((joined, width, state, state + 4, sink, 1))
            rotate_row(width, 1, joined, table, out + 4 * row * width, sums)

    return finish_rows
