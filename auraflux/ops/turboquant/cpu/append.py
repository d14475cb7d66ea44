"""Append new keys and values to the cache: encode rows into pages, and copy them to sink tokens and recent window."""

from functools import cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from auraflux.ops.attention.cpu.launch_args import flatten, read_args
from auraflux.ops.attention.cpu.page_index import PageIndex, index_of
from auraflux.ops.simd.jit import (
    LINE,
    Kernel,
    as_float,
    int32s,
    int64s,
    share,
    workspace,
)
from auraflux.ops.turboquant.codebook import Codebook
from auraflux.ops.turboquant.cpu.codec import BLOCK, Levels, encode_block, levels_for, scratch_nbytes, threads_for
from auraflux.ops.turboquant.cpu.full_precision import NO_ROWS, FullPrecision, row_address, size_of, store_row
from auraflux.ops.turboquant.cpu.int8.tiles import prefetch_bytes
from auraflux.ops.turboquant.cpu.key_calibration import NOT_CALIBRATED, KeyCalibration, normalize_row, unscale_row
from auraflux.ops.turboquant.cpu.rotate_rows import rotate_row, rotation_for
from auraflux.ops.turboquant.pages import CodePages, LatentCodes, RowCodes

PARALLEL_FROM = 1 << 10  # coordinates; below this, waking the threads costs more than the work


def _encode_nbytes(width: int) -> int:
    return -(-scratch_nbytes(width) // LINE) * LINE


class NewRows(NamedTuple):
    """New tokens, the address of their rotation, scratch memory, and its bytes per thread; `sides`: 2 for keys and values."""

    sides: int
    tokens: int
    heads: int
    rotation: int
    scratch: int
    nbytes: int


class NewSide(NamedTuple):
    """New keys or values: addresses of their rows and of the pools of codes and norms, their bits, and `Levels`."""

    x: int
    codes: int
    norms: int
    bits: int
    book: int
    search: int
    order: int
    ordered: int


class AppendArgs(NamedTuple):
    """The launch arguments of an append."""

    new: NewRows
    pages: PageIndex
    calibration: KeyCalibration
    sinks: FullPrecision
    recent: FullPrecision
    keys: NewSide
    values: NewSide


Side = tuple[Tensor, Tensor, Tensor, int, Codebook | None]


def launch_append(
    sides: list[Side],
    pages: CodePages | LatentCodes | RowCodes,
    starts: Tensor,
    calibration: KeyCalibration = NOT_CALIBRATED,
    full_precision: tuple[FullPrecision, FullPrecision] = (NO_ROWS, NO_ROWS),
) -> None:
    """Encode new rows into pages, and copy them to sink tokens and recent window.

    sides  of keys and values, or of keys alone: new rows [tokens, (heads,) width], codes, norms, bits, given levels
    """
    first = sides[0][0]
    tokens, width, heads = first.shape[0], first.shape[-1], first.shape[1] if first.dim() == 3 else 1
    jobs, nbytes = threads_for(len(sides) * first.numel(), PARALLEL_FROM), _append_nbytes(width)
    rows = [as_float(x) for x, *_ in sides]
    new = [
        NewSide(x.data_ptr(), codes.data_ptr(), norms.data_ptr(), bits, *levels_for(bits, width, book))
        for x, (_, codes, norms, bits, book) in zip(rows, sides, strict=True)
    ]
    args = AppendArgs(
        NewRows(len(sides), tokens, heads, rotation_for(width, pages.seed).forward, workspace(jobs * nbytes), nbytes),
        index_of(pages, starts),
        calibration,
        *full_precision,
        keys=new[0],
        # where there are keys alone, the kernel does not look at values
        values=new[-1],
    )
    build_append(width)(jobs, *flatten(args))


def _append_nbytes(width: int) -> int:
    """Return the bytes of a thread: encoding, a block's normalized rows, an unscaled row, a rotated row with its sums."""
    return _encode_nbytes(width) + (4 * BLOCK + 16) * width


@cache
def build_append(width: int) -> Kernel:
    """Build the kernel that appends rows of one width."""
    encoding = _encode_nbytes(width)

    @Kernel
    def append_rows(args_at, job, jobs):
        """Encode new keys and values into their pages, and copy them to sink tokens and recent window."""
        args = read_args(AppendArgs, args_at)
        new, index, sinks, recent, heads = args.new, args.pages, args.sinks, args.recent, args.new.heads
        starts, lengths = int32s(index.starts, index.sequences + 1), int32s(index.lengths, index.sequences)
        work, mine = new.scratch + job * new.nbytes, share(new.tokens * heads, job, jobs)
        lists, normalized = int64s(work, 3 * BLOCK), work + encoding
        unscaled, rotated = normalized + 4 * BLOCK * width, normalized + 4 * (BLOCK + 1) * width
        for side in range(new.sides):
            rows = args.keys if side == 0 else args.values
            levels, words, b = Levels(rows.book, rows.search, rows.order, rows.ordered), (width * rows.bits + 31) // 32, 0
            for first in range(mine.start, mine.stop, BLOCK):
                count = min(BLOCK, mine.stop - first)
                for r in range(count):
                    row, token, head = first + r, (first + r) // heads, (first + r) % heads
                    while starts[b + 1] <= token:
                        b += 1
                    position = np.int64(lengths[b]) - starts[b + 1] + token
                    page = int32s(index.table + 4 * b * index.table_width, index.table_width)[position // index.page]
                    target = (np.int64(page) * heads + head) * index.page + position % index.page
                    source, codes, norm = rows.x + 4 * row * width, rows.codes + 4 * target * words, rows.norms + 4 * target
                    # nothing has read these lines for a step, and stores would wait for them
                    prefetch_bytes((codes, 4 * words))
                    prefetch_bytes((norm, 4))
                    if recent.positions:
                        prefetch_bytes(
                            (row_address(recent, side, b, position, heads, head, width), width * size_of(recent.element))
                        )
                    encoded, calibrated = source, side == 0 and args.calibration.table != 0
                    if calibrated:
                        encoded = normalized + 4 * r * width
                        normalize_row(source, args.calibration, head, position, width, encoded)
                    lists[r], lists[BLOCK + r], lists[2 * BLOCK + r] = encoded, codes, norm
                    if position < sinks.positions or recent.positions:
                        if calibrated:
                            unscale_row(source, args.calibration, head, width, unscaled)
                            source = unscaled
                        rotate_row(width, 0, source, new.rotation, rotated, rotated + 4 * width)
                        if position < sinks.positions:
                            store_row(sinks, side, b, position, heads, head, rotated, width)
                        if recent.positions:
                            store_row(recent, side, b, position, heads, head, rotated, width)
                encode_block(width, rows.bits, new.rotation, levels, count, work)

    return append_rows
