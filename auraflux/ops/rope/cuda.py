"""Rotary position embedding on CUDA: a program turns some heads of one token.

As on CPU the range reduction is done in float64, the one step for which float32 has no digits left; what remains lies within
an eighth of a turn of zero, where float32 polynomials are good to the last bit but one.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops._triton import Build, cdiv, power_of_two, ready

HEADS = 4  # of a program
QUARTER_HIGH = tl.constexpr(1.570796326734125614166)
QUARTER_LOW = tl.constexpr(6.077100506506192e-11)
PER_QUARTER = tl.constexpr(2 / math.pi)


@triton.jit
def _cos_sin(angle):
    """Cosine and sine of a float32 angle, in float32."""
    wide = angle.to(tl.float64)
    quarters = tl.floor(wide * PER_QUARTER + 0.5)
    r = ((wide - quarters * QUARTER_HIGH) - quarters * QUARTER_LOW).to(tl.float32)
    quadrant = quarters.to(tl.int32) & 3
    z = r * r
    s = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * r + r
    c = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    odd = (quadrant & 1) == 1
    cosine, sine = tl.where(odd, s, c), tl.where(odd, c, s)
    return tl.where((quadrant == 1) | (quadrant == 2), -cosine, cosine), tl.where(quadrant >= 2, -sine, sine)


@triton.jit
def _turn(
    x, inv_freq, positions, out, heads, width, half, mscale,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    frequency = tl.load(inv_freq + i, mask=i < half, other=0.0)
    cosine, sine = _cos_sin(tl.load(positions + token).to(tl.float32) * frequency)
    cosine, sine = (cosine * mscale)[None, :], (sine * mscale)[None, :]
    row = (token.to(tl.int64) * heads + head[:, None]) * width
    there = (head < heads)[:, None] & (i < half)[None, :]
    if INTERLEAVED:
        first, second = row + 2 * i[None, :], row + 2 * i[None, :] + 1
    else:
        first, second = row + i[None, :], row + i[None, :] + half
    a, b = tl.load(x + first, mask=there, other=0.0).to(tl.float32), tl.load(x + second, mask=there, other=0.0).to(tl.float32)
    tl.store(out + first, a * cosine - b * sine, mask=there)
    tl.store(out + second, b * cosine + a * sine, mask=there)
    if REST:
        column = 2 * half + tl.arange(0, REST)
        there = (head < heads)[:, None] & (column < width)[None, :]
        tl.store(out + row + column[None, :], tl.load(x + row + column[None, :], mask=there), mask=there)


def rope(x: Tensor, inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False) -> Tensor:
    ready(x)
    out = torch.empty_like(x)
    (tokens, heads, width), half = x.shape, inv_freq.shape[0]
    if x.numel():
        rest = power_of_two(width - 2 * half) if width > 2 * half else 0
        block = min(HEADS, power_of_two(heads))
        sizes = heads, width, half, float(mscale), interleaved, block, power_of_two(max(1, half)), rest
        _turn[(tokens, cdiv(heads, block))](x, inv_freq, positions, out, *sizes, num_warps=2)
    return out


_TYPES = "*bf16 *fp32 *i32 *bf16 i32 i32:16 i32:16 fp32"
KERNELS = [
    Build(_turn, _TYPES, {"INTERLEAVED": False, "HEADS": 4, "HALF": 64, "REST": 0}, hot=True, options={"num_warps": 2}),
    Build(_turn, _TYPES, {"INTERLEAVED": True, "HEADS": 4, "HALF": 32, "REST": 64}, hot=True, options={"num_warps": 2}),
]
