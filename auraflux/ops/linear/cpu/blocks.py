"""Blocks of a weight's rows times tokens: few tokens straight from the codes, many over unpacked rows.

Where activations are interleaved to panels (see `panels`), tokens come in tiles.
"""

from typing import NamedTuple

import numba

from auraflux.ops.linear.cpu.forms import BLOCK
from auraflux.ops.linear.cpu.microkernels import rows_times_tokens
from auraflux.ops.linear.cpu.panels import SMALL, gather_tile, rows_times_tile
from auraflux.ops.linear.cpu.unpack import unpack_rows, widen_scales
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import halves, int32s, jit, octets

WIDEST = ISA.tokens  # tokens in one pass over a block of rows, unpacked first
FEW = 4  # tokens in one pass straight from the codes
TWO, FOUR = SMALL
IN_PAIRS = ISA.by_pair  # the widest tiles are multiplied by unpacked rows only
UNPACK_FROM = 16  # tokens from which unpacking a block first pays off


class Span(NamedTuple):
    """Neighbouring blocks of rows: addresses of the first one's codes, scales, biases, unpacked rows and results.

    steps  bytes to the next block's codes, to its scales or biases, to its unpacked rows
    wide   addresses of the scales and biases of unpacked rows, original or widened, and bytes to the next block's
    size   how many blocks
    """

    codes: int
    scales: int
    biases: int
    unpacked: int
    out: int
    steps: tuple[int, int, int]
    wide: tuple[int, int, int]
    size: int


@jit
def transpose(source, target, first, rows, count):
    """Interleave BLOCK rows of `count` elements; rows past the end repeat the last one."""
    for lane in range(BLOCK):
        start = count * min(first + lane, rows - 1)
        for i in range(count):
            target[i * BLOCK + lane] = source[start + i]


@jit
def transpose_scales(source, target, first, rows, count, nbytes):
    if nbytes == 1:
        transpose(octets(source, rows * count), octets(target, BLOCK * count), first, rows, count)
    elif nbytes == 2:
        transpose(halves(source, rows * count), halves(target, BLOCK * count), first, rows, count)
    else:
        transpose(int32s(source, rows * count), int32s(target, BLOCK * count), first, rows, count)


@numba.njit(inline="always")
def _unpack(form, words, span, groups):
    code_step, scale_step, unpacked_step = span.steps
    scales, biases, wide_step = span.wide
    for i in range(span.size):
        codes, some = span.codes + i * code_step, span.scales + i * scale_step
        unpack_rows((form, codes, some, groups, span.unpacked + i * unpacked_step))
        if words:
            widen_scales((form, codes, some, groups, scales + i * wide_step, biases + i * wide_step))


@numba.njit(inline="always")
def _few(form, span, acts, index, left, groups, out, out_stride):
    """Multiply blocks of rows with tokens, directly from the codes."""
    code_step, scale_step, _ = span.steps
    for i in range(span.size):
        packed = (span.codes + i * code_step, span.scales + i * scale_step, span.biases + i * scale_step)
        to, which, rest = out + 4 * BLOCK * i, index, left
        while rest >= FEW:
            rows_times_tokens((form, FEW, 0, packed, acts, which, groups, to, out_stride))
            which, to, rest = which + 8 * FEW, to + FEW * out_stride, rest - FEW
        while rest > 0:
            rows_times_tokens((form, 1, 0, packed, acts, which, groups, to, out_stride))
            which, to, rest = which + 8, to + out_stride, rest - 1


@numba.njit(inline="always")
def multiply_blocks(form, words, span, acts, panel, index, left, groups, out_stride):
    """Multiply blocks of rows with all their tokens: many tokens in the widest tiles, over unpacked rows.

    acts  addresses and stride of the prepared activations
    """
    scales, biases, wide_step = span.wide
    out, unpacked_step = span.out, span.steps[2]
    if left >= UNPACK_FROM:
        _unpack(form, words, span, groups)
        while left >= WIDEST:
            for i in range(span.size):
                unpacked = (span.unpacked + i * unpacked_step, scales + i * wide_step, biases + i * wide_step)
                rows_times_tokens((form, WIDEST, 1, unpacked, acts, index, groups, out + 4 * BLOCK * i, out_stride))
            index, out, left = index + 8 * WIDEST, out + WIDEST * out_stride, left - WIDEST
    _few(form, span, acts, index, left, groups, out, out_stride)


@numba.njit(inline="always")
def multiply_blocks_by_panel(form, words, whole, span, acts, panel, index, left, groups, out_stride):
    """Multiply blocks of rows with interleaved tokens, unless there is one.

    whole  several tokens always make tiles of the widest size, see `gather_panel`
    panel  address of the first tile, bytes from one to the next, and how many there are
    """
    scales, biases, wide_step = span.wide
    tile, tile_step, tiles = panel
    if tiles <= 1 and (left <= 1 if whole else not (IN_PAIRS and left > FOUR)):
        _blocks_by_tile(form, words, span, acts, tile, index, left, groups, out_stride)
        return
    _unpack(form, words, span, groups)
    for t in range(tiles):
        for i in range(span.size):
            unpacked = (span.unpacked + i * span.steps[2], scales + i * wide_step, biases + i * wide_step)
            to = span.out + 4 * BLOCK * i + t * WIDEST * out_stride
            last = min(left - t * WIDEST, WIDEST) - 1
            rows_times_tile((form, WIDEST, 1, unpacked, tile + t * tile_step, groups, to, out_stride, last))


@numba.njit(inline="always")
def _blocks_by_tile(form, words, span, acts, tile, index, tokens, groups, out_stride):
    """Multiply blocks of rows with one token, or the tokens of one tile, directly from the codes."""
    code_step, scale_step, _ = span.steps
    for i in range(span.size):
        codes, scales, biases = span.codes + i * code_step, span.scales + i * scale_step, span.biases + i * scale_step
        to = span.out + 4 * BLOCK * i
        if tokens == 1:
            rows_times_tokens((form, 1, 0, (codes, scales, biases), acts, index, groups, to, out_stride))
            continue
        if words:
            wide_scales, wide_biases, wide_step = span.wide
            widen_scales((form, codes, scales, groups, wide_scales + i * wide_step, wide_biases + i * wide_step))
            scales, biases = wide_scales + i * wide_step, wide_biases + i * wide_step
        packed = (codes, scales, biases)
        if tokens <= TWO:
            rows_times_tile((form, TWO, 0, packed, tile, groups, to, out_stride, tokens - 1))
        elif tokens <= FOUR:
            rows_times_tile((form, FOUR, 0, packed, tile, groups, to, out_stride, tokens - 1))
        elif not IN_PAIRS:
            rows_times_tile((form, WIDEST, 0, packed, tile, groups, to, out_stride, tokens - 1))


@numba.njit(inline="always")
def gather_panel(form, whole, panel, acts, index, left, groups):
    """Fill the tiles; a single tile may be smaller, unless it must be `whole`, and one token needs none."""
    tile, tile_step, tiles = panel
    if not whole and 1 < left <= TWO:
        gather_tile((form, TWO, acts, index, groups, tile, left - 1))
    elif not whole and TWO < left <= FOUR:
        gather_tile((form, FOUR, acts, index, groups, tile, left - 1))
    elif left > 1:
        for t in range(tiles):
            last = min(left - WIDEST * t, WIDEST) - 1
            gather_tile((form, WIDEST, acts, index + 8 * WIDEST * t, groups, tile + t * tile_step, last))
