"""Rows of vectors to codes and back: the kernels that encode and decode, one build per width.

Codes must equal those of the reference to the last bit, so these functions keep the order of its float32 operations: they are
compiled without reassociation, except for sums in float64, which give the same float32 in any order.
"""

from functools import cache
from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from auraflux.ops.simd.jit import (
    Kernel,
    arguments,
    doubles,
    floats,
    int64s,
    share,
    threads,
)
from auraflux.ops.simd.softmax import fill
from auraflux.ops.turboquant.codebook import Codebook, _tables, explicit_codebook
from auraflux.ops.turboquant.cpu.dequantize import unpack_row
from auraflux.ops.turboquant.cpu.quantize import CHUNK, quantize_row, search_table
from auraflux.ops.turboquant.cpu.rotate_rows import length_row, matrix_row, rotate_row, unit_hadamard_row, unit_row

BLOCK = 8  # rows encoded together
PARALLEL_FROM = 1 << 12  # coordinates; below this, waking the threads costs more than the work
CPU = torch.device("cpu")
NOT_A_NUMBER = np.float32(np.nan)


def threads_for(coordinates: int, enough: int = PARALLEL_FROM) -> int:
    """Return the number of threads that repay for a number of coordinates."""
    return threads() if coordinates >= enough else 1


def scratch_nbytes(width: int) -> int:
    """Return the scratch bytes of a thread: lists of a block's rows, and the rows in whole chunks, one of them in float64."""
    return 4 * (BLOCK + 3) * (width + CHUNK) + 64 * BLOCK


@numba.njit(inline="always")
def encode_block(width, bits, rotation, levels, count, work):
    """Encode up to BLOCK rows; `width` is known when this is compiled.

    Step by step for all of them: each row is a chain of long latencies, and the processor works on several at once.
    work  three lists [BLOCK] of addresses, of rows, their codes and their norms; then memory to work in
    """
    room = (width + CHUNK - 1) // CHUNK * CHUNK
    rows, codes, norms = int64s(work, BLOCK), int64s(work + 8 * BLOCK, BLOCK), int64s(work + 16 * BLOCK, BLOCK)
    lengths_at, totals_at, words = work + 24 * BLOCK, work + 32 * BLOCK, work + 40 * BLOCK
    y, unit = work + 64 * BLOCK, work + 64 * BLOCK + 4 * BLOCK * room
    lengths, totals = doubles(lengths_at, BLOCK), doubles(totals_at, BLOCK)
    if width & (width - 1):
        for r in range(count):
            lengths[r] = unit_row(rows[r], unit, width)
            matrix_row(unit, rotation, y + 4 * r * room, width, unit + 4 * room)
    else:
        for r in range(count):
            length_row((width, rows[r], lengths_at + 8 * r))
        for r in range(count):
            unit_hadamard_row((width, rows[r], lengths_at + 8 * r, rotation, y + 4 * r * room))
    for r in range(count):
        if not lengths[r] < np.inf:
            # of one sign, which quantizing looks at
            fill(y + 4 * r * room, width, NOT_A_NUMBER)
    for r in range(count):
        quantize_row(y + 4 * r * room, width, bits, levels, codes[r], totals_at + 8 * r, words)
    for r in range(count):
        # all levels of a row may be 0 where they are given
        floats(norms[r], 1)[0] = np.float32(lengths[r] / np.sqrt(totals[r]) if totals[r] != 0 else lengths[r] * 0)


class Levels(NamedTuple):
    """A codebook as kernels take it: addresses of its levels by code, of a search table, and of the code of each level.

    search   the search table of the default levels; the midpoints of given ones
    order    0 for given levels: codes are then ranks
    ordered  1 where codes are numbered as their levels ascend
    """

    book: int
    search: int
    order: int
    ordered: int


def levels_for(bits: int, width: int, given: Codebook | None = None) -> Levels:
    """Return the codebook of a number of bits."""
    if (given := explicit_codebook(given, width)) is not None:
        return Levels(given.levels.data_ptr(), given.middles.data_ptr(), 0, 1)
    # `codebook` caches these tensors and replaces them when they change
    tables = _tables(bits, width, CPU)
    known = _known.get((bits, width))
    if known is None or known[0] is not tables:
        book, _, order = tables
        ordered = torch.equal(order, torch.arange(1 << bits))
        found = Levels(book.data_ptr(), search_table(bits, width).ctypes.data, order.data_ptr(), int(ordered))
        known = _known[bits, width] = tables, found
    return known[1]


_known: dict[tuple[int, int], tuple[tuple[Tensor, Tensor, Tensor], Levels]] = {}


@cache
def build_encode(width: int) -> Kernel:
    @Kernel
    def encode_rows(args, job, jobs):
        x, rows, table, bits, book, search, order, ordered, codes, norms, space, scratch = arguments(args, 12)
        levels, words, work = Levels(book, search, order, ordered), (width * bits + 31) // 32, space + job * scratch
        lists, mine = int64s(work, 3 * BLOCK), share(rows, job, jobs)
        for first in range(mine.start, mine.stop, BLOCK):
            count = min(BLOCK, mine.stop - first)
            for r in range(count):
                lists[r] = x + 4 * (first + r) * width
                lists[BLOCK + r], lists[2 * BLOCK + r] = codes + 4 * (first + r) * words, norms + 4 * (first + r)
            encode_block(width, bits, table, levels, count, work)

    return encode_rows


@cache
def build_decode(width: int) -> Kernel:
    room = (width + CHUNK - 1) // CHUNK * CHUNK

    @Kernel
    def decode_rows(args, job, jobs):
        codes, norms, rows, table, bits, book, out, space, scratch = arguments(args, 9)
        words = (width * bits + 31) // 32
        sums = space + job * scratch
        levels = sums + 8 * room
        for row in share(rows, job, jobs):
            unpack_row(bits, codes + 4 * row * words, width, book, levels)
            rotate_row(width, 1, levels, table, out + 4 * row * width, sums)
            vector, norm = floats(out + 4 * row * width, width), floats(norms, rows)[row]
            for d in range(width):
                vector[d] *= norm

    return decode_rows
