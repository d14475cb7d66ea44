"""Packed codes unpacked inside Triton kernels: 2 to 8 bits, MXFP4, and the formats that have levels and no biases.

Kernels know a format by its bits, its group and its kind (`FORM`, see `QTensor.kind`). A code is unpacked to a float32, and
`weight_value` makes the weight of it: affine codes unchanged, centred ones less their centre, IQ4's as their levels; MXFP4's
and NVFP4's as level / 2**14 and FP8's as value / 2**8, whose bits are those of a half with a smaller exponent. No code is NaN:
`quant/fp8.py` refuses FP8 weights that contain it.

Grids (`grids.py`) have no codes of their own; their table takes the place of biases.

`weights_at` reads any code of any row; `dot_codes.py` reads 16 at a time with fewer instructions.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from auraflux.ops._dispatch import Declined
from auraflux.ops.gpu.blocks import grids
from auraflux.ops.gpu.blocks.grids import grid_weights_at, is_grid
from auraflux.quant import QTensor, levels


def check_order(*weights: QTensor) -> None:
    """Decline weights that are in the row order of the CPU kernels."""
    for weight in weights:
        if weight.lanes != 1:
            raise Declined(f"{weight.lanes} rows of the weight are interleaved, as CPU kernels need them")


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
        # the next word may be past the last row where none of its bits are needed
        b = tl.load(row + (first >> 5) + 1, mask=there & (shift + SIZE > 32), other=0).to(tl.uint32, bitcast=True)
        low = (a >> shift) | ((b << 1) << (31 - shift))
        high = (low >> 8) | (((b >> shift) & 255) << 24)
    return low, high


@triton.jit
def raw_code(low, high, j, BITS: tl.constexpr):
    """Return code j of units as an integer."""
    if BITS == 5:
        code = tl.where(j < 6, low >> tl.minimum(5 * j, 27), high >> tl.maximum(5 * j - 8, 0)) & 31
    else:
        code = (low >> (BITS * j)) & ((1 << BITS) - 1)
    return code


@triton.constexpr_function
def centre_of(bits, form):
    """Return the centre subtracted from centred codes; 0 for other formats."""
    return 2.0 ** (bits - 1) if form == "centred" else 0.0


@triton.jit
def half_value(bits):
    """Return 16 bits reinterpreted as a half, as float32."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def value_of(code, table, BITS: tl.constexpr, FORM: tl.constexpr):
    """Return the float of a code, an integer without higher bits."""
    if FORM == "iq4":
        value = tl.load(table + code)
    elif FORM == "fp8":
        value = half_value(((code & 127) << 7) | ((code & 128) << 8))
    elif FORM == "mxfp4" or FORM == "nvfp4":
        value = half_value(((code & 7) << 9) | ((code & 8) << 12))
    else:
        value = ((code << (23 - BITS)) | ((127 + BITS) << 23)).to(tl.float32, bitcast=True) - (
            2.0**BITS + centre_of(BITS, FORM)
        )
    return value


@triton.jit
def scale_value(scales, at, there, FORM: tl.constexpr):
    """Load scales as float32. MXFP4's are exponents: 0 stands for 2**-127, 255 for NaN."""
    if FORM == "mxfp4":
        exponent = tl.load(scales + at, mask=there, other=127).to(tl.uint32)
        bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
        scale = tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + at, mask=there, other=0.0).to(tl.float32)
    return scale


@triton.constexpr_function
def shift_of(form):
    """Return the factor to apply to the float of a code."""
    return {"mxfp4": 2.0**14, "nvfp4": 2.0**14, "fp8": 2.0**8}.get(form, 1.0)


@triton.jit
def bias_value(biases, at, there, FORM: tl.constexpr):
    """Load biases as float32; 0 for formats without."""
    return tl.load(biases + at, mask=there, other=0.0).to(tl.float32) if FORM == "affine" else 0.0


@triton.jit
def weight_value(value, scale, bias, FORM: tl.constexpr):
    """Return the weight of a code's float; rounded once where scale * code fits float32, as in GGUF blocks."""
    # in two steps: MXFP4's scale may be 2**127
    return value * shift_of(FORM) * scale + bias


@triton.jit
def weights_at(packed, scales, biases, row, k, there, K, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr):
    """Load weights in float32 at rows (int64) and columns that broadcast."""
    if is_grid(FORM):
        weights = grid_weights_at(packed, scales, biases, row, k, there, K, FORM)
    else:
        UNIT: tl.constexpr = 4 if BITS == 6 or BITS == 8 else 16 if BITS == 2 else 8
        low, high = unit_bits(packed + row * (K // 32 * BITS), k // UNIT, there, BITS)
        at = row * (K // GROUP) + k // GROUP
        scale, bias = scale_value(scales, at, there, FORM), bias_value(biases, at, there, FORM)
        weights = weight_value(value_of(raw_code(low, high, k % UNIT, BITS), biases, BITS, FORM), scale, bias, FORM)
    return weights


class Codes(NamedTuple):
    """Operands of a weight; without biases, `biases` is None or a placeholder, see `operands`."""

    packed: torch.Tensor
    scales: torch.Tensor
    biases: torch.Tensor | None


@cache
def _table(kind: str, device: torch.device) -> torch.Tensor:
    return levels.levels(kind, 4, device)


def operands(weight: QTensor) -> Codes:
    """Return a weight's operands; without biases, a table of levels or the scales, which are not read, take their place."""
    if weight.biases is not None:
        return Codes(weight.packed, weight.scales, weight.biases)
    if weight.grid is not None:
        return Codes(weight.packed, weight.scales, grids.table(weight.kind, weight.device))
    return Codes(weight.packed, weight.scales, _table("iq4", weight.device) if form_of(weight) == "iq4" else weight.scales)


def constants(weight: QTensor) -> dict[str, int | str]:
    """Return the constants that identify a format to kernels."""
    return {"BITS": weight.bits, "GROUP": weight.group, "FORM": form_of(weight)}


def form_of(weight: QTensor) -> str:
    """Return what kernels call the weight's kind: they load scales of any dtype."""
    return "iq4" if weight.kind == "iq4_nl" else weight.kind
