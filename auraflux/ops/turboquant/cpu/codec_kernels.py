"""Compiled loops over rows: rotate, encode, decode, and encode into pages. Each is compiled for one width."""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.simd.jit import LINE, Kernel, arguments, floats, int32s, int64s, share
from auraflux.ops.turboquant.codebook import Codebook, _tables, unusual
from auraflux.ops.turboquant.cpu.attend_int8_tiles import ask_for
from auraflux.ops.turboquant.cpu.centres import Vectors, reduce_row, scale_row
from auraflux.ops.turboquant.cpu.codec import BLOCK, CHUNK, encode_block, rotate_row, scratch_nbytes, unpack_row
from auraflux.ops.turboquant.cpu.kept_rows import Kept, keep_row, kept_at, size_of
from auraflux.ops.turboquant.cpu.quantize import search_table
from auraflux.ops.turboquant.rotation import rotation

CPU = torch.device("cpu")


class Turn(NamedTuple):
    """A rotation as kernels take it: addresses for turning and for turning back, and what must stay alive for them."""

    forward: int
    back: int
    held: tuple[Tensor, ...]


@cache
def turn_for(width: int, seed: int) -> Turn:
    turn = rotation(width, seed)
    if turn.signs is not None:
        return Turn(turn.signs.data_ptr(), turn.signs.data_ptr(), (turn.signs,))
    assert turn.matrix is not None
    back = turn.matrix.double().contiguous()
    forward = back.T.contiguous()
    return Turn(forward.data_ptr(), back.data_ptr(), (forward, back))


class Levels(NamedTuple):
    """A codebook as kernels take it: addresses of levels by code, of what finds them, and of the code of each level.

    search   what finds the usual levels; the midpoints, where others are given
    order    0 where others are given: codes are then ranks
    ordered  whether codes are numbered as their levels ascend
    """

    book: int
    search: int
    order: int
    ordered: int


def levels_for(bits: int, width: int, given: Codebook | None = None) -> Levels:
    if (given := unusual(given, width)) is not None:
        return Levels(given.levels.data_ptr(), given.middles.data_ptr(), 0, 1)
    # `codebook` keeps these tensors, and alone knows when they change
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
def build_rotate(width: int, inverse: int) -> Kernel:
    @Kernel
    def rotate_rows(args, job, jobs):
        x, rows, table, y, space, scratch = arguments(args, 6)
        for row in share(rows, job, jobs):
            at = 4 * row * width
            rotate_row(width, inverse, x + at, table, y + at, space + job * scratch)

    return rotate_rows


@cache
def build_encode(width: int) -> Kernel:
    @Kernel
    def encode_rows(args, job, jobs):
        x, rows, turn, bits, book, search, order, ordered, codes, norms, space, scratch = arguments(args, 12)
        levels, words, work = Levels(book, search, order, ordered), (width * bits + 31) // 32, space + job * scratch
        lists, mine = int64s(work, 3 * BLOCK), share(rows, job, jobs)
        for first in range(mine.start, mine.stop, BLOCK):
            count = min(BLOCK, mine.stop - first)
            for r in range(count):
                lists[r] = x + 4 * (first + r) * width
                lists[BLOCK + r], lists[2 * BLOCK + r] = codes + 4 * (first + r) * words, norms + 4 * (first + r)
            encode_block(width, bits, turn, levels, count, work)

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


def append_nbytes(width: int) -> int:
    """What one job needs to append: what encoding takes, then a block's reduced rows, and one scaled, and rotated with its
    sums."""
    return _encode_nbytes(width) + (4 * BLOCK + 16) * width


def _encode_nbytes(width: int) -> int:
    return -(-scratch_nbytes(width) // LINE) * LINE


VECTORS_AT, HEAD_AT = 8 * 12, 8 * (12 + len(Vectors._fields))
RECENT_AT = HEAD_AT + 8 * len(Kept._fields)
SIDES_AT, SIDE = RECENT_AT + 8 * len(Kept._fields), 8


@cache
def build_append(width: int) -> Kernel:
    encoding = _encode_nbytes(width)

    @Kernel
    def append_rows(args, job, jobs):
        """Encode one or two stacks of rows, keys and values, into their pages; where asked for, keep them as they are too."""
        (
            sides, tokens, heads, turn, page, table, table_width, lengths_at, starts_at, sequences, space, scratch,
        ) = arguments(args, 12)  # fmt: skip
        vectors = Vectors(*arguments(args + VECTORS_AT, 5))
        oldest, newest = Kept(*arguments(args + HEAD_AT, 7)), Kept(*arguments(args + RECENT_AT, 7))
        starts, lengths = int32s(starts_at, sequences + 1), int32s(lengths_at, sequences)
        work, mine = space + job * scratch, share(tokens * heads, job, jobs)
        lists, reduced = int64s(work, 3 * BLOCK), work + encoding
        scaled, rotated = reduced + 4 * BLOCK * width, reduced + 4 * (BLOCK + 1) * width
        for side in range(sides):
            x, codes, norms, bits, book, search, order, ordered = arguments(args + SIDES_AT + 8 * SIDE * side, 8)
            levels, words, b = Levels(book, search, order, ordered), (width * bits + 31) // 32, 0
            for first in range(mine.start, mine.stop, BLOCK):
                count = min(BLOCK, mine.stop - first)
                for r in range(count):
                    row, token, head = first + r, (first + r) // heads, (first + r) % heads
                    while starts[b + 1] <= token:
                        b += 1
                    position = np.int64(lengths[b]) - starts[b + 1] + token
                    number = np.int64(int32s(table + 4 * b * table_width, table_width)[position // page])
                    target, source = (number * heads + head) * page + position % page, x + 4 * row * width
                    # what is written to was read by nobody for a step, and stores would wait for it
                    ask_for((codes + 4 * target * words, 4 * words))
                    ask_for((norms + 4 * target, 4))
                    if newest.positions:
                        ask_for((kept_at(newest, side, b, position, heads, head, width), width * size_of(newest.element)))
                    coded, leaves_out = source, side == 0 and vectors.table != 0
                    if leaves_out:
                        coded = reduced + 4 * r * width
                        reduce_row(source, vectors, head, position, width, coded)
                    lists[r], lists[BLOCK + r], lists[2 * BLOCK + r] = coded, codes + 4 * target * words, norms + 4 * target
                    if position < oldest.positions or newest.positions:
                        if leaves_out:
                            scale_row(source, vectors, head, width, scaled)
                            source = scaled
                        rotate_row(width, 0, source, turn, rotated, rotated + 4 * width)
                        if position < oldest.positions:
                            keep_row(oldest, side, b, position, heads, head, rotated, width)
                        if newest.positions:
                            keep_row(newest, side, b, position, heads, head, rotated, width)
                encode_block(width, bits, turn, levels, count, work)

    return append_rows
