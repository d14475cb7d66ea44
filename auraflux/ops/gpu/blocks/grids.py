"""Weights of grid formats (`quant/grids.py`) decoded inside Triton kernels.

A unit is 16 weights, half a chunk: two entries of eight values, or four of four. `grid_words` loads all it needs but the values
of its entries, which are bytes of a table in global memory; that stays in the L1 cache.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from auraflux.ops.gpu.device import INTERPRETED
from auraflux.quant import grids

PTX = tl.constexpr(not INTERPRETED)
# a byte of a word as 2**23 + itself
OCTETS = tl.constexpr(tuple(f"prmt.b32 $0,$1,0x4B000000,{0x7650 + n:#x};" for n in range(4)))
LIFT = 16  # added to the values of IQ1, so that they are bytes without sign, shift included


@cache
def table(kind: str, device: torch.device) -> torch.Tensor:
    """Return the values of entries as bytes: magnitudes, or of IQ1 with a shift of 1 up and plus LIFT."""
    lift = 0 if grids.FORMATS[kind].has_signs else LIFT + 1
    return (grids.table(kind).to(torch.int16) + lift).to(torch.uint8).to(device)


@triton.constexpr_function
def is_grid(form):
    """Return whether a format is a grid."""
    return form in grids.FORMATS


@triton.constexpr_function
def per_entry(form):
    """Return the weights of an entry."""
    return grids.FORMATS[form].per_entry


@triton.constexpr_function
def _grid(form):
    found = grids.FORMATS[form]
    return found.bits, found.halves, found.steps, found.highs, found.group, found.unit


@triton.jit
def _half(halves, at, there):
    return tl.load(halves + at, mask=there, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def grid_words(packed, halves, row, unit, there, K, FORM: tl.constexpr):
    """Load the words of units: entries, signs, high bits of entries, steps, scale. Those that a format lacks stand for others.

    row     of the weight, int64, and unit the numbers of units in it, shapes that broadcast
    """
    GRID: tl.constexpr = _grid(FORM)
    BITS: tl.constexpr = GRID[0]
    chunk, block = unit // 2, unit // 16
    at = row * (K // 32 * BITS) + chunk * BITS
    part = row * (K // 256 * GRID[1]) + block * GRID[1]
    entries = tl.load(packed + at + (unit % 2 if BITS == 3 else 0), mask=there, other=0)
    signs, highs, steps = entries, entries, entries
    if BITS > 1:
        signs = tl.load(packed + at + BITS - 1, mask=there, other=0)
    if FORM == "iq1_m":
        # the scale is in four halves
        quarters = tl.load(halves.to(tl.pointer_type(tl.int64)) + part // 4, mask=there, other=0)
        steps = (quarters >> (16 * (unit // 4 % 4)).to(tl.int64)).to(tl.int32)
        scale = ((quarters >> 12) & 0xF) | ((quarters >> 24) & 0xF0) | ((quarters >> 36) & 0xF00) | ((quarters >> 48) & 0xF000)
        scale = scale.to(tl.int32)
    else:
        scale = _half(halves, part, there)
    if BITS == 1:
        highs = _half(halves, part + GRID[3] + chunk % 8, there)
    elif GRID[3] != 0:
        highs = _half(halves, part + GRID[3] + chunk % 8 // 2, there) >> (chunk % 2 * 8)
    if GRID[2] != 0 and BITS != 1:
        steps = _half(halves, part + GRID[2] + unit % 16 // (GRID[4] // 4), there)
    return entries, signs, highs, steps, scale


@triton.jit
def grid_scale(words, unit, FORM: tl.constexpr):
    """Return the scale of units in float32."""
    _entries, signs, highs, steps, scale = words
    if FORM == "iq2_xxs" or FORM == "iq3_xxs":
        step = signs >> 28
    elif FORM == "iq1_s":
        step = highs >> 12
    elif FORM == "iq1_m":
        step = steps >> (unit % 4 * 3)
    elif FORM == "iq3_s":
        step = steps >> (unit // 2 % 4 * 4)
    else:
        step = steps >> (unit % 4 * 4)
    MASK: tl.constexpr = 7 if FORM == "iq1_s" or FORM == "iq1_m" else 15
    UNIT: tl.constexpr = _grid(FORM)[5]
    return scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * ((step & MASK) * 2 + 1).to(tl.float32) * UNIT


@triton.jit
def _entry(words, unit, n, FORM: tl.constexpr):
    """Return the number of entry `n` of units."""
    entries, signs, highs, _steps, _scale = words
    half = unit % 2
    if FORM == "iq3_xxs":
        number = (entries >> (8 * n)) & 255
    elif FORM == "iq3_s":
        number = ((entries >> (8 * n)) & 255) | (((highs >> (4 * half + n)) & 1) << 8)
    else:
        number = (entries >> (16 * half + 8 * n)) & 255
    if FORM == "iq2_xs":
        number |= ((signs >> (16 * half + 8 * n)) & 1) << 8
    elif FORM == "iq2_s":
        number |= ((highs >> (4 * half + 2 * n)) & 3) << 8
    elif FORM == "iq1_s":
        number |= ((highs >> (6 * half + 3 * n)) & 7) << 8
    elif FORM == "iq1_m":
        number |= ((highs >> (8 * half + 4 * n)) & 7) << 8
    return number


@triton.jit
def _eight_signs(words, unit, n, FORM: tl.constexpr):
    """Return the signs of eight weights, with arbitrary bits above; the eighth makes their number even if it is not stored."""
    _entries, signs, _highs, _steps, _scale = words
    half = unit % 2
    if FORM == "iq2_s" or FORM == "iq3_s":
        found = signs >> (16 * half + 8 * n)
    else:
        found = (signs >> (16 * half + 8 * n + 1 if FORM == "iq2_xs" else 14 * half + 7 * n)) & 127
        odd = found ^ (found >> 4)
        # bit i is the parity of i
        found |= ((0x6996 >> (odd & 15)) & 1) << 7
    return found


@triton.jit
def _lowered(words, unit, n, FORM: tl.constexpr):
    """Return what is subtracted from the values of an entry of IQ1: LIFT, and twice the shift where it is down."""
    _entries, _signs, highs, _steps, _scale = words
    down = highs >> (15 if FORM == "iq1_s" else unit % 2 * 8 + 4 * n + 3)
    return 16.0 + ((down & 1) * 2).to(tl.float32)


@triton.jit
def grid_weights_at(packed, halves, octets, row, k, there, K, FORM: tl.constexpr):
    """Load weights in float32 at rows (int64) and columns that broadcast."""
    EACH: tl.constexpr = per_entry(FORM)
    unit, n = k // 16, k % 16 // EACH
    words = grid_words(packed, halves, row, unit, there, K, FORM)
    value = tl.load(octets + _entry(words, unit, n, FORM) * EACH + k % EACH).to(tl.float32)
    if FORM == "iq1_s" or FORM == "iq1_m":
        value -= _lowered(words, unit, n, FORM)
    else:
        negative = (_eight_signs(words, unit, k % 16 // 8, FORM) >> (k % 8)) & 1
        value = tl.where(negative == 1, -value, value)
    return value * grid_scale(words, unit, FORM)


@triton.jit
def _float(word, n: tl.constexpr):
    """Return a byte of a word as a float."""
    if PTX:
        value = tl.inline_asm_elementwise(OCTETS[n], "=f,r", [word], tl.float32, is_pure=True, pack=1) - 8388608.0
    else:
        value = ((word >> (8 * n)) & 255).to(tl.float32)
    return value


@triton.jit
def _signed(value, signs, n: tl.constexpr):
    """Negate a float where bit `n` is set."""
    flip = (signs << (31 - n)) & -0x80000000
    return (value.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)


@triton.jit
def grid_values(words, unit, octets, FORM: tl.constexpr):
    """Return the 16 values of units, to be multiplied by `grid_scale`."""
    EACH: tl.constexpr = per_entry(FORM)
    four, found = octets.to(tl.pointer_type(tl.int32)), ()
    for n in tl.static_range(16 // EACH):
        at = _entry(words, unit, n, FORM) * (EACH // 4)
        if FORM == "iq1_s" or FORM == "iq1_m":
            lowered = _lowered(words, unit, n, FORM)
        else:
            signs = _eight_signs(words, unit, EACH * n // 8, FORM)
        for i in tl.static_range(EACH // 4):
            word = tl.load(four + at + i)
            for j in tl.static_range(4):
                value = _float(word, j)
                if FORM == "iq1_s" or FORM == "iq1_m":
                    value -= lowered
                else:
                    value = _signed(value, signs, (EACH * n + 4 * i + j) % 8)
                found += (value,)  # type: ignore[assignment]
    return found
