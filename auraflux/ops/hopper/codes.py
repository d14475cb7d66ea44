"""Packed codes of 2 to 8 bits and MXFP4 unpacked inside Triton kernels.

Codes are read in units that are quick to take apart: a word of 2, 4 or 8 bits, or 8, 8 and 4 codes of the continuous stream
of 3, 5 and 6 bits. A unit's code j comes out as a float: 2**BITS + code for the affine formats, whose bits are set beside the
exponent of 2**BITS, one instruction less than a conversion. The offset is taken out where sums of activations are known.
MXFP4 (`AFFINE` is False) comes out as its value over 2**14: its bits are those of a half whose exponent is 14 smaller.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from auraflux.ops._dispatch import Declined
from auraflux.quant import QTensor

UNITS = {2: 16, 3: 8, 4: 8, 5: 8, 6: 4, 8: 4}  # codes that are read together
HALF_SHIFT = tl.constexpr(16384.0)


def check_order(*weights: QTensor) -> None:
    """Decline weights that are in the order of a CPU, and formats that no kernel reads."""
    for weight in weights:
        if weight.only_cpu:
            raise Declined(f"{weight.kind} codes in groups of {weight.group}, which only the CPU's kernels read")
        if weight.lanes != 1:
            raise Declined(f"{weight.lanes} rows of the weight lie side by side, which is the CPU's order")


@triton.jit
def unit_bits(row, unit, there, BITS: tl.constexpr):
    """Load the bits of units; for codes of 5 bits also those from bit 8 on, as 40 do not fit a word.

    row    pointers to the first words of rows, unit their numbers, shapes that broadcast
    """
    if BITS == 2 or BITS == 4 or BITS == 8:
        low = tl.load(row + unit, mask=there, other=0).to(tl.uint32, bitcast=True)
        high = low
    else:
        SIZE: tl.constexpr = 40 if BITS == 5 else 24
        first = unit * SIZE
        shift = (first & 31).to(tl.uint32)
        a = tl.load(row + (first >> 5), mask=there, other=0).to(tl.uint32, bitcast=True)
        # the next word may lie behind the last row where nothing of it is needed
        b = tl.load(row + (first >> 5) + 1, mask=there & (shift + SIZE > 32), other=0).to(tl.uint32, bitcast=True)
        low = (a >> shift) | ((b << 1) << (31 - shift))
        high = (low >> 8) | (((b >> shift) & 255) << 24)
    return low, high


@triton.jit
def raw_code(low, high, j, BITS: tl.constexpr):
    """Give code j of units as an integer."""
    if BITS == 5:
        code = tl.where(j < 6, low >> tl.minimum(5 * j, 27), high >> tl.maximum(5 * j - 8, 0)) & 31
    else:
        code = (low >> (BITS * j)) & ((1 << BITS) - 1)
    return code


@triton.jit
def code_value(low, high, j, BITS: tl.constexpr, AFFINE: tl.constexpr):
    """Give code j of units as float32: 2**BITS + code, or MXFP4's value over 2**14."""
    code = raw_code(low, high, j, BITS)
    if AFFINE:
        value = ((code << (23 - BITS)) | ((127 + BITS) << 23)).to(tl.float32, bitcast=True)
    else:
        half = ((code & 7) << 9) | ((code & 8) << 12)
        value = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def scale_value(scales, at, there, AFFINE: tl.constexpr):
    """Load scales as float32. MXFP4's are exponents: 0 stands for 2**-127, 255 for NaN."""
    if AFFINE:
        scale = tl.load(scales + at, mask=there, other=0.0).to(tl.float32)
    else:
        exponent = tl.load(scales + at, mask=there, other=127).to(tl.uint32)
        bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
        scale = tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def weight_line(scales, biases, at, there, BITS: tl.constexpr, AFFINE: tl.constexpr):
    """Load the slope and the intercept that make weights of `code_value`."""
    scale = scale_value(scales, at, there, AFFINE)
    if AFFINE:
        intercept = tl.load(biases + at, mask=there, other=0.0).to(tl.float32) - scale * (1 << BITS)
    else:
        intercept = tl.zeros_like(scale)
    return scale, intercept


@triton.jit
def weight_value(value, slope, intercept, AFFINE: tl.constexpr):
    # MXFP4 in two steps: its scale may be 2**127
    """Make weights of `code_value` by slope and intercept."""
    return value * slope + intercept if AFFINE else value * HALF_SHIFT * slope


@triton.jit
def weights_at(packed, scales, biases, row, k, there, K, BITS: tl.constexpr, GROUP: tl.constexpr, AFFINE: tl.constexpr):
    """Load weights in float32 at rows (int64) and columns that broadcast."""
    UNIT: tl.constexpr = 4 if BITS == 6 or BITS == 8 else 16 if BITS == 2 else 8
    low, high = unit_bits(packed + row * (K // 32 * BITS), k // UNIT, there, BITS)
    slope, intercept = weight_line(scales, biases, row * (K // GROUP) + k // GROUP, there, BITS, AFFINE)
    return weight_value(code_value(low, high, k % UNIT, BITS, AFFINE), slope, intercept, AFFINE)


@triton.jit
def weights_tile(
    packed, scales, biases, row, rows, start, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, AFFINE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Load weights [ROWS, BK] from column `start` on, of one group; dense ones where BITS is 0."""
    k = start + tl.arange(0, BK)
    there = (row < rows)[:, None]
    wide = row.to(tl.int64)[:, None]
    if BITS == 0:
        return tl.load(packed + wide * K + k[None, :], mask=there & (k < K)[None, :], other=0.0)
    elif BITS == 2 or BITS == 4 or BITS == 8:  # noqa: RET505
        WORDS: tl.constexpr = BK * BITS // 32
        word = start * BITS // 32 + tl.arange(0, WORDS)
        bits = tl.load(packed + wide * (K // 32 * BITS) + word[None, :], mask=there, other=0).to(tl.uint32, bitcast=True)
        # code j of a word is shifted down by BITS * j: its highest digit first, as the last axis is to count fastest
        bits = tl.join(bits, bits >> 16)
        bits = tl.join(bits, bits >> 8)
        if BITS < 8:
            bits = tl.join(bits, bits >> 4)
        if BITS < 4:
            bits = tl.join(bits, bits >> 2)
        bits = tl.reshape(bits, [row.shape[0], BK])
        slope, intercept = weight_line(scales, biases, wide * (K // GROUP) + start // GROUP, there, BITS, AFFINE)
        return weight_value(code_value(bits, bits, 0, BITS, AFFINE), slope, intercept, AFFINE)
    else:
        return weights_at(packed, scales, biases, wide, k[None, :], there & (k < K)[None, :], K, BITS, GROUP, AFFINE)


@triton.jit
def tokens_tile(x, token, tokens, start, K, BK: tl.constexpr):
    """Load columns of tokens, [BK, TOKENS]."""
    k = start + tl.arange(0, BK)
    return tl.load(x + token[None, :] * K + k[:, None], mask=(token < tokens)[None, :] & (k < K)[:, None], other=0.0)


class Codes(NamedTuple):
    """A weight as kernels take it; where it has no biases, they are None, or scales stand in for them and are not read."""

    packed: torch.Tensor
    scales: torch.Tensor
    biases: torch.Tensor | None


def operands(weight: QTensor) -> Codes:
    """Give a weight's codes; scales stand in for biases that are not there."""
    return Codes(weight.packed, weight.scales, weight.scales if weight.biases is None else weight.biases)


def constants(weight: QTensor) -> dict[str, int | bool]:
    """Give the constants by which kernels tell formats apart."""
    return {"BITS": weight.bits, "GROUP": weight.group, "AFFINE": weight.biases is not None}
