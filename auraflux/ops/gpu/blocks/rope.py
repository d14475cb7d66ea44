"""RoPE in Triton: some heads of one token rotated by its position.

As on CPU the range reduction is in float64, the one step that exceeds float32's precision; the remainder lies within an eighth
of a revolution of zero, where float32 polynomials are accurate to the last bit but one.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

QUARTER_HIGH = tl.constexpr(1.570796326734125614166)
QUARTER_LOW = tl.constexpr(6.077100506506192e-11)
PER_QUARTER = tl.constexpr(2 / math.pi)


class Rope(NamedTuple):
    """Arguments of a rotation: frequencies of pairs, position of each token, factor of the result."""

    inv_freq: Tensor
    positions: Tensor
    mscale: float


@triton.jit
def cos_sin(angle):
    """Return cosine and sine of a float32 angle, in float32."""
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
def rotate_heads(
    x, weight, inv_freq, positions, out, block, heads, pitch, width, half, mscale, eps,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, EACH: tl.constexpr = False,
):  # fmt: skip
    """Rotate HEADS heads of a token, at a stride of `pitch`, by its position; with a weight, normalise them first.

    EACH  positions are [T, half], one for each frequency
    """
    token = tl.program_id(0)
    head = block * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    frequency = tl.load(inv_freq + i, mask=i < half, other=0.0)
    if EACH:
        position = tl.load(positions + token.to(tl.int64) * half + i, mask=i < half, other=0)
    else:
        position = tl.load(positions + token)
    cosine, sine = cos_sin(position.to(tl.float32) * frequency)
    cosine, sine = (cosine * mscale)[None, :], (sine * mscale)[None, :]
    head_row = token.to(tl.int64) * heads + head[:, None]
    source, row = head_row * pitch, head_row * width
    there = (head < heads)[:, None] & (i < half)[None, :]
    if INTERLEAVED:
        first, second = 2 * i[None, :], 2 * i[None, :] + 1
    else:
        first, second = i[None, :], i[None, :] + half
    a = tl.load(x + source + first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(x + source + second, mask=there, other=0.0).to(tl.float32)
    if REST:
        column = (2 * half + tl.arange(0, REST))[None, :]
        left = (head < heads)[:, None] & (column < width)
        c = tl.load(x + source + column, mask=left, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(a * a + b * b, 1)
        if REST:
            squares += tl.sum(c * c, 1)
        factor = (1.0 / tl.sqrt(squares / width + eps))[:, None]
        # round as a separate norm kernel would
        kind = out.dtype.element_ty
        a = (a * factor * tl.load(weight + first, mask=there, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        b = (b * factor * tl.load(weight + second, mask=there, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        if REST:
            c = c * factor * tl.load(weight + column, mask=left, other=0.0).to(tl.float32)
    tl.store(out + row + first, a * cosine - b * sine, mask=there)
    tl.store(out + row + second, b * cosine + a * sine, mask=there)
    if REST:
        tl.store(out + row + column, c, mask=left)
