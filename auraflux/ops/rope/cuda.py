"""Rotary position embedding on CUDA: a program turns some heads of one token.

As on CPU the range reduction is done in float64, the one step for which float32 has no digits left; what remains lies within
an eighth of a turn of zero, where float32 polynomials are good to the last bit but one.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.hopper.device import ready
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.sizes import cdiv, power_of_two

HEADS = 4  # of a program
QUARTER_HIGH = tl.constexpr(1.570796326734125614166)
QUARTER_LOW = tl.constexpr(6.077100506506192e-11)
PER_QUARTER = tl.constexpr(2 / math.pi)


@triton.jit
def cos_sin(angle):
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
def turn_heads(
    x, weight, inv_freq, positions, out, block, heads, pitch, width, half, mscale, eps,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Turn HEADS heads of a token, `pitch` apart; with a weight, normalise them first."""
    token = tl.program_id(0)
    head = block * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    frequency = tl.load(inv_freq + i, mask=i < half, other=0.0)
    cosine, sine = cos_sin(tl.load(positions + token).to(tl.float32) * frequency)
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
        # rounded as a norm of its own would store them
        kind = out.dtype.element_ty
        a = (a * factor * tl.load(weight + first, mask=there, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        b = (b * factor * tl.load(weight + second, mask=there, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        if REST:
            c = c * factor * tl.load(weight + column, mask=left, other=0.0).to(tl.float32)
    tl.store(out + row + first, a * cosine - b * sine, mask=there)
    tl.store(out + row + second, b * cosine + a * sine, mask=there)
    if REST:
        tl.store(out + row + column, c, mask=left)


@triton.jit
def _turn(
    x, inv_freq, positions, out, heads, width, half, mscale,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    turn_heads(x, None, inv_freq, positions, out, block, heads, width, width, half, mscale, 0.0, INTERLEAVED, HEADS, HALF, REST)


@triton.jit
def _turn_both(
    q, k, q_weight, k_weight, inv_freq, positions, q_out, k_out, q_heads, k_heads, q_blocks, q_pitch, width, half, mscale, eps,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    if block < q_blocks:
        turn_heads(
            q, q_weight, inv_freq, positions, q_out, block, q_heads, q_pitch, width, half, mscale, eps,
            INTERLEAVED, HEADS, HALF, REST,
        )  # fmt: skip
    else:
        block -= q_blocks
        turn_heads(
            k, k_weight, inv_freq, positions, k_out, block, k_heads, width, width, half, mscale, eps,
            INTERLEAVED, HEADS, HALF, REST,
        )  # fmt: skip


def rope(x: Tensor, inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False) -> Tensor:
    ready(x)
    out = torch.empty_like(x)
    (tokens, heads, width), half = x.shape, inv_freq.shape[0]
    if x.numel():
        block = min(HEADS, power_of_two(heads))
        sizes = heads, width, half, float(mscale), interleaved, block, *_blocks(width, half)
        launch(_turn, (tokens, cdiv(heads, block)))(x, inv_freq, positions, out, *sizes, num_warps=2)
    return out


def norm_rope(
    q: Tensor,
    k: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    mscale: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    ready(q)
    q_out, k_out = q.new_empty(q.shape), torch.empty_like(k)
    (tokens, q_heads, width), k_heads, half = q.shape, k.shape[1], inv_freq.shape[0]
    if q.numel():
        block = min(HEADS, power_of_two(max(q_heads, k_heads)))
        q_blocks, k_blocks = cdiv(q_heads, block), cdiv(k_heads, block)
        numbers = q_heads, k_heads, q_blocks, q.stride(1), width, half, float(mscale), float(eps)
        sizes = *numbers, interleaved, block, *_blocks(width, half)
        tensors = q, k, *(norms or (None, None)), inv_freq, positions, q_out, k_out
        launch(_turn_both, (tokens, q_blocks + k_blocks))(*tensors, *sizes, num_warps=2)
    return q_out, k_out


def _blocks(width: int, half: int) -> tuple[int, int]:
    """Channels of the tiles: of one element of each pair, and of what is not turned."""
    return power_of_two(max(1, half)), power_of_two(width - 2 * half) if width > 2 * half else 0
