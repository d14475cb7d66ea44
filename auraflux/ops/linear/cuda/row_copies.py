"""Copies of codes and scales shared by Hopper products of few tokens: from 16 rows of a weight into a warp's shared memory.

A warp requests parts of rows by `cp.async` and is their only reader: no barriers. Rows are padded so that concurrent reads of
its lanes hit different banks.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.blocks.codes import Codes
from auraflux.ops.hopper.copy import copy, copy_ptx
from auraflux.ops.hopper.mma_bits import copy_part_ptx, word_count
from auraflux.ops.hopper.ptx import bf16_at
from auraflux.ops.hopper.shared_memory import short_at, word_at
from auraflux.quant import QTensor

# (bits, group); groups of 32 with 3, 5 or 6 bits do not give each lane full words
SUPPORTED_FORMATS = {(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (64, 128)} | {(4, 32), (8, 32)}


@gluon.constexpr_function
def row_pitch(nbytes, bits, column):
    """Return bytes from row to row: an odd number of the units that four lanes read at once."""
    words = word_count(bits, column)
    unit = 16 * words if bits in (4, 8) else 16
    return (nbytes + unit - 1) // unit // 2 * 2 * unit + unit


@gluon.constexpr_function
def scale_piece(row_nbytes, part_nbytes):
    """Return the largest copy size that divides the scales of a row and of a part; 0 where they are not full words."""
    either = row_nbytes | part_nbytes | 16
    return either & -either if either % 4 == 0 else 0


@gluon.constexpr_function
def scale_pitch(parts, part_nbytes):
    return (parts * part_nbytes + 15) // 32 * 32 + 16


class Product(NamedTuple):
    """One weight of a launch.

    codes  packed codes, scales and biases, in the units that the kernel reads
    out    result; None for the second of two gated weights
    bias   added to the result, or None
    """

    codes: Codes
    out: Tensor | None
    bias: Tensor | None = None


@gluon.jit
def select_weight(program, ends, several):
    """Return the entry of `several` that a program works on, and the program's index within it.

    Programs of the first entry come first; `ends` has the end of each but the last.
    several  tensors or tuples of them, without None, which a function cannot return
    """
    own, before = several[0], 0 * program
    for i in gl.static_range(len(ends)):
        if program >= ends[i]:
            own, before = several[i + 1], ends[i]
    return own, program - before


@gluon.jit
def copy_part(slot, lane, first, second, left, ROW: gl.constexpr, PART: gl.constexpr, PITCH: gl.constexpr):
    """Copy PART bytes of each of 16 rows: eight from `first`, eight from `second`, `left` bytes before their rows' end."""
    LINE: gl.constexpr = min(PART & -PART, 128)
    r, chunk = lane // (LINE // 16), lane % (LINE // 16)
    source0, source1 = (first + (r * ROW + chunk * 16)).to(gl.int64), (second + (r * ROW + chunk * 16)).to(gl.int64)
    if LINE == 32:
        # one instruction copies all rows
        source0 = gl.where(r < 8, source0, source1 - 8 * ROW)
    if ROW % PART:
        left = left - chunk * 16
    args = [slot + (r * PITCH + chunk * 16), source0, source1, left]
    text: gl.constexpr = copy_part_ptx(ROW, PART, PITCH, ROW % PART == 0)
    gl.inline_asm_elementwise(text, "=r,r,l,l,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_scales(
    to, first, second, warp, lane, COUNT: gl.constexpr, W: gl.constexpr,
    ROW: gl.constexpr, PART: gl.constexpr, HELD: gl.constexpr, PITCH: gl.constexpr,
):  # fmt: skip
    """Copy the scales of 16 rows for a warp's COUNT parts, every W-th, to HELD bytes per part and PITCH per row.

    Half of the rows begin at `first`, half at `second`.
    """
    PIECE: gl.constexpr = scale_piece(ROW, PART)
    SIZE: gl.constexpr = PIECE if PIECE else 4
    EACH: gl.constexpr = COUNT * (HELD // SIZE)
    for n in gl.static_range((16 * EACH + 31) // 32):
        e = lane + 32 * n
        row, rest = e // EACH, e % EACH
        i, byte = rest // (HELD // SIZE), rest % (HELD // SIZE) * SIZE
        at = (warp + i * W) * PART + byte
        if PIECE == 0:
            # round down to the word in which the part begins
            at -= row * ROW % 4
        source = gl.where(row < 8, (first + (row * ROW + at)).to(gl.int64), (second + ((row - 8) * ROW + at)).to(gl.int64))
        copy(copy_ptx(SIZE), to + row * PITCH + i * HELD + byte, source, (at < ROW) & (e < 16 * EACH))


@gluon.jit
def _scales_at(at, WHOLE: gl.constexpr, NBYTES: gl.constexpr):
    """Load two or four bytes; where scales are not word-aligned, they may span two words."""
    if WHOLE:
        word = word_at(at) if NBYTES == 4 else short_at(at)
    else:
        text: gl.constexpr = "{.reg .b32 a,b; ld.shared.b32 a,[$1]; ld.shared.b32 b,[$1+4]; shf.r.wrap.b32 $0,a,b,$2;}"
        args = [at - at % 4, at % 4 * 8]
        word = gl.inline_asm_elementwise(text, "=&r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)
    return word


@gluon.jit
def _power_at(word, j: gl.constexpr):
    """Return two to the power of byte j less 127; 255 is NaN."""
    exponent = (word >> (8 * j)) & 255
    bits = gl.where(exponent == 0, 0x00400000, exponent << 23)
    return gl.where(exponent == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def scales_at(at, FURTHER: gl.constexpr, AFFINE: gl.constexpr, WHOLE: gl.constexpr, ONE_GROUP: gl.constexpr):
    """Load the scales of two columns and their biases, FURTHER bytes on; ONE_GROUP: both columns share one group."""
    if AFFINE:
        NBYTES: gl.constexpr = 2 if ONE_GROUP else 4
        scales, biases = _scales_at(at, WHOLE, NBYTES), _scales_at(at + FURTHER, WHOLE, NBYTES)
        s0, b0 = bf16_at(scales, 0), bf16_at(biases, 0)
        if ONE_GROUP:
            s1, b1 = s0, b0
        else:
            s1, b1 = bf16_at(scales, 1), bf16_at(biases, 1)
    else:
        word = _scales_at(at, WHOLE, 2)
        s0, s1, b0, b1 = _power_at(word, 0), _power_at(word, 1), 0.0, 0.0
    return s0, s1, b0, b1


def in_bytes(weight: QTensor) -> Codes:
    """Return codes, scales and biases viewed as bytes."""
    biases = None if weight.biases is None else weight.biases.view(torch.int8)
    return Codes(weight.packed.view(torch.int8), weight.scales.view(torch.int8), biases)


def products_of(
    weights: Sequence[QTensor],
    outs: Sequence[Tensor],
    biases: Sequence[Tensor | None] = (),
    codes: Callable[..., Codes] = in_bytes,
) -> tuple[Product, ...]:
    """Pair weights with their results and biases, if any."""
    return tuple(Product(codes(weight), out, bias) for weight, out, bias in zip_longest(weights, outs, biases[: len(weights)]))
