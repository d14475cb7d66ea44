"""Rotary position embedding on CPU: cosines and sines once per token, then every head of it.

Angles grow to hundreds of thousands of radians, too large for range reduction in float32: that one step is done in float64.
The reduced angle is at most pi/4, where float32 polynomials are accurate to the last bit but one.
"""

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.norm.cpu import rms_norm
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import (
    Kernel,
    arguments,
    as_float,
    empty,
    floats,
    int32s,
    int64s,
    jit,
    like,
    real,
    share,
    strict,
    threads,
)

# elements; below this, waking the threads costs more than the work
PARALLEL_FROM = 1 << 12 if ISA.lanes == 4 else 1 << 16

# pi/2 as high + low: high has 33 bits, so that its product with a quadrant count below 2**20 is exact
QUARTER_HIGH, QUARTER_LOW, PER_QUARTER = 1.570796326734125614166, 6.077100506506192e-11, 2 / np.pi
ONE, HALF = np.float32(1), np.float32(0.5)
S0, S1, S2 = np.float32(-1.9515295891e-4), np.float32(8.3321608736e-3), np.float32(-1.6666654611e-1)
C0, C1, C2 = np.float32(2.443315711809948e-5), np.float32(-1.388731625493765e-3), np.float32(4.166664568298827e-2)


# allow contraction only: reassociation would merge the two steps of the range reduction. Explicit, because a function without
# fast-math flags inherits those of the first caller that compiles it.
@strict
def _cos_sin(angle):
    """Return cosine and sine of a float32 angle, in float32."""
    wide = np.float64(angle)
    quarters = np.floor(wide * PER_QUARTER + 0.5)
    r = np.float32((wide - quarters * QUARTER_HIGH) - quarters * QUARTER_LOW)
    quadrant = np.float32(quarters - 4.0 * np.floor(quarters * 0.25))
    z = r * r
    s = ((S0 * z + S1) * z + S2) * z * r + r
    c = ((C0 * z + C1) * z + C2) * z * z - HALF * z + ONE
    odd = (quadrant == np.float32(1)) | (quadrant == np.float32(3))
    cosine, sine = (s, c) if odd else (c, s)
    cosine = -cosine if (quadrant == np.float32(1)) | (quadrant == np.float32(2)) else cosine
    sine = -sine if quadrant >= np.float32(2) else sine
    return cosine, sine


@jit
def _rotate(x, cosine, sine, out, half):
    for i in range(half):
        out[i] = x[i] * cosine[i] - x[i + half] * sine[i]
    for i in range(half):
        out[i + half] = x[i + half] * cosine[i] + x[i] * sine[i]


@jit
def _rotate_interleaved(x, cosine, sine, out, half):
    for i in range(half):
        a, b = x[2 * i], x[2 * i + 1]
        out[2 * i] = a * cosine[i] - b * sine[i]
        out[2 * i + 1] = b * cosine[i] + a * sine[i]


@jit
def _position(positions, long, token):
    return int64s(positions, token + 1)[token] if long else np.int64(int32s(positions, token + 1)[token])


@Kernel
def _tokens(args, job, jobs):
    x_at, positions, long, each, inv_freq_at, interleaved, out_at, tokens, heads, width, half, mscale = arguments(args, 12)
    inv_freq, size = floats(inv_freq_at, half), real(mscale)
    cosine, sine = np.empty(half, np.float32), np.empty(half, np.float32)
    for token in share(tokens, job, jobs):
        where = np.float32(_position(positions, long, token * half if each else token))
        for i in range(half):
            if each:
                where = np.float32(_position(positions, long, token * half + i))
            c, s = _cos_sin(where * inv_freq[i])
            cosine[i], sine[i] = c * size, s * size
        for head in range(token * heads, (token + 1) * heads):
            x, out = floats(x_at + 4 * head * width, width), floats(out_at + 4 * head * width, width)
            if interleaved:
                _rotate_interleaved(x, cosine, sine, out, half)
            else:
                _rotate(x, cosine, sine, out, half)
            for i in range(2 * half, width):
                out[i] = x[i]


def rope(x: Tensor, inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False) -> Tensor:
    wide = as_float(x)
    out = empty(*wide.shape)
    jobs = threads() if x.numel() >= PARALLEL_FROM else 1
    places = positions.data_ptr(), positions.dtype is torch.int64, positions.dim() == 2
    read = wide.data_ptr(), *places, inv_freq.data_ptr(), interleaved
    _tokens(jobs, *read, out.data_ptr(), *x.shape, inv_freq.shape[0], float(mscale))
    return like(out, x)


@Kernel
def _grow(args, job, jobs):
    q_at, positions, long, out_at, tokens, row, span, ahead, slope = arguments(args, 9)
    for token in share(tokens, job, jobs):
        q, out = floats(q_at + 4 * token * row, row), floats(out_at + 4 * token * row, row)
        whole = (_position(positions, long, token) + ahead) // span
        size = ONE + real(slope) * np.float32(np.log(1.0 + np.float64(whole)))
        for i in range(row):
            out[i] = q[i] * size


def grow_queries(q: Tensor, positions: Tensor, slope: float, span: int, ahead: int = 0) -> Tensor:
    wide = as_float(q.contiguous())
    out = torch.empty_like(wide)
    jobs = threads() if q.numel() >= PARALLEL_FROM else 1
    read = wide.data_ptr(), positions.data_ptr(), positions.dtype is torch.int64
    _grow(jobs, *read, out.data_ptr(), q.shape[0], q.shape[1] * q.shape[2], span, ahead, float(slope))
    return like(out, q)


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
    q = q.contiguous()
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    return rope(q, inv_freq, positions, mscale, interleaved), rope(k, inv_freq, positions, mscale, interleaved)
