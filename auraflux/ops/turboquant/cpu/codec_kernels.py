"""Compiled loops over rows: rotate, encode, decode, and encode into pages. Each is compiled for one width."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from auraflux.ops.attention.cpu.page_index import page_row
from auraflux.ops.simd.jit import Kernel, arguments, floats, int64s, share
from auraflux.ops.turboquant.codebook import _tables
from auraflux.ops.turboquant.cpu.codec import BLOCK, CHUNK, encode_block, turn_row, unpack_row
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

    ordered  whether codes are numbered as their levels ascend
    """

    book: int
    search: int
    order: int
    ordered: int


def levels_for(bits: int, width: int) -> Levels:
    # `codebook` keeps these tensors, and alone knows when they change
    return _levels(bits, width, _tables(bits, width, CPU))


@cache
def _levels(bits: int, width: int, tables: tuple[Tensor, Tensor, Tensor]) -> Levels:
    book, _, order = tables
    ordered = torch.equal(order, torch.arange(1 << bits))
    return Levels(book.data_ptr(), search_table(bits, width).ctypes.data, order.data_ptr(), int(ordered))


@cache
def build_rotate(width: int, inverse: int) -> Kernel:
    @Kernel
    def rotate_rows(args, job, jobs):
        x, rows, table, y, space, scratch = arguments(args, 6)
        for row in share(rows, job, jobs):
            at = 4 * row * width
            turn_row(width, inverse, x + at, table, y + at, space + job * scratch)

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
            turn_row(width, 1, levels, table, out + 4 * row * width, sums)
            vector, norm = floats(out + 4 * row * width, width), floats(norms, rows)[row]
            for d in range(width):
                vector[d] *= norm

    return decode_rows


@cache
def build_append(width: int) -> Kernel:
    @Kernel
    def append_rows(args, job, jobs):
        """Encode one or two stacks of rows, keys and values, into their pages."""
        (
            sides, tokens, heads, turn, page, table, table_width, lengths, starts, sequences, space, scratch,
        ) = arguments(args, 12)  # fmt: skip
        work, mine = space + job * scratch, share(tokens * heads, job, jobs)
        lists = int64s(work, 3 * BLOCK)
        for side in range(sides):
            x, codes, norms, bits, book, search, order, ordered = arguments(args + 8 * (12 + 8 * side), 8)
            levels, words = Levels(book, search, order, ordered), (width * bits + 31) // 32
            for first in range(mine.start, mine.stop, BLOCK):
                count = min(BLOCK, mine.stop - first)
                for r in range(count):
                    row = first + r
                    number, slot = page_row(row // heads, page, table, table_width, lengths, starts, sequences)
                    target = (number * heads + row % heads) * page + slot
                    lists[r] = x + 4 * row * width
                    lists[BLOCK + r], lists[2 * BLOCK + r] = codes + 4 * target * words, norms + 4 * target
                encode_block(width, bits, turn, levels, count, work)

    return append_rows
