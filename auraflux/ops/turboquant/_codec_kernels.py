"""Compiled loops over rows: rotate, encode, decode, and encode into pages. Each is compiled for one width."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from auraflux.ops._jit import Kernel, arguments, floats, int32s, jit, share
from auraflux.ops.turboquant._codec import quantize_row, turn_row, unit_row, unpack_row
from auraflux.ops.turboquant.codebook import _tables
from auraflux.ops.turboquant.rotation import rotation

CPU = torch.device("cpu")


class Turn(NamedTuple):
    """A rotation as kernels take it: addresses for turning and for turning back, and what must stay alive for them."""

    forward: int
    back: int
    held: tuple[Tensor, ...]


@lru_cache
def turn_for(width: int, seed: int) -> Turn:
    turn = rotation(width, seed)
    if turn.signs is not None:
        return Turn(turn.signs.data_ptr(), turn.signs.data_ptr(), (turn.signs,))
    assert turn.matrix is not None
    back = turn.matrix.double().contiguous()
    forward = back.T.contiguous()
    return Turn(forward.data_ptr(), back.data_ptr(), (forward, back))


class Levels(NamedTuple):
    """A codebook as kernels take it: addresses of levels by code, of boundaries, of the code of each level."""

    book: int
    middles: int
    order: int


def levels_for(bits: int, width: int) -> Levels:
    # `codebook` keeps these tensors, and alone knows when they change
    return Levels(*(table.data_ptr() for table in _tables(bits, width, CPU)))


def scratch_nbytes(width: int) -> int:
    """What one job needs: a direction, its rotation, ranks, and sums in float64; rows rounded up to whole chunks."""
    return 20 * (width + 63) // 64 * 64 + 1024


@lru_cache
def build_rotate(width: int, inverse: int) -> Kernel:
    @Kernel
    def rotate_rows(args, job, jobs):
        x, rows, table, y, space, scratch = arguments(args, 6)
        for row in share(rows, job, jobs):
            at = 4 * row * width
            turn_row(width, inverse, x + at, table, y + at, space + job * scratch)

    return rotate_rows


@lru_cache
def build_encode(width: int) -> Kernel:
    room = (width + 31) // 32 * 32

    @Kernel
    def encode_rows(args, job, jobs):
        x, rows, table, bits, book, middles, order, codes, norms, space, scratch = arguments(args, 11)
        words = (width * bits + 31) // 32
        sums = space + job * scratch
        unit, y, ranks = sums + 8 * room, sums + 12 * room, sums + 16 * room
        for row in share(rows, job, jobs):
            length = unit_row(x + 4 * row * width, unit, width)
            turn_row(width, 0, unit, table, y, sums)
            rounded = quantize_row(y, width, bits, book, middles, order, ranks, codes + 4 * row * words)
            floats(norms, rows)[row] = np.float32(length / rounded)

    return encode_rows


@lru_cache
def build_decode(width: int) -> Kernel:
    room = (width + 31) // 32 * 32

    @Kernel
    def decode_rows(args, job, jobs):
        codes, norms, rows, table, bits, book, out, space, scratch = arguments(args, 9)
        words = (width * bits + 31) // 32
        sums = space + job * scratch
        levels = sums + 8 * room
        for row in share(rows, job, jobs):
            unpack_row(bits, codes + 4 * row * words, width, book, levels)
            turn_row(width, 1, levels, table, out + 4 * row * width, sums)
            vector, norm = floats(out + 4 * row * width, width), floats(norms, rows)[row]
            for d in range(width):
                vector[d] *= norm

    return decode_rows


@jit
def page_row(token, starts_at, lengths_at, sequences, table_at, table_width, page):
    """(page, slot) of a new token."""
    starts, lengths = int32s(starts_at, sequences + 1), int32s(lengths_at, sequences)
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= token:
            low = middle
        else:
            high = middle
    position = np.int64(lengths[low]) - starts[low + 1] + token
    return np.int64(int32s(table_at + 4 * low * table_width, table_width)[position // page]), position % page


@lru_cache
def build_append(width: int) -> Kernel:
    room = (width + 31) // 32 * 32

    @Kernel
    def append_rows(args, job, jobs):
        (
            x, tokens, heads, turn, bits, book, middles, order, codes, norms,
            page, table, table_width, lengths, starts, sequences, space, scratch,
        ) = arguments(args, 18)  # fmt: skip
        words = (width * bits + 31) // 32
        sums = space + job * scratch
        unit, y, ranks = sums + 8 * room, sums + 12 * room, sums + 16 * room
        for row in share(tokens * heads, job, jobs):
            number, slot = page_row(row // heads, starts, lengths, sequences, table, table_width, page)
            target = (number * heads + row % heads) * page + slot
            length = unit_row(x + 4 * row * width, unit, width)
            turn_row(width, 0, unit, turn, y, sums)
            rounded = quantize_row(y, width, bits, book, middles, order, ranks, codes + 4 * target * words)
            floats(norms + 4 * target, 1)[0] = np.float32(length / rounded)

    return append_rows
