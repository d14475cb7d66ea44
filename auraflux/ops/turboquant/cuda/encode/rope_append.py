"""Norm, RoPE and encoding of few new tokens in one launch, one head of a token per program."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.blocks.pages import index_of, place_of, position_of
from auraflux.ops.gpu.blocks.rope import Rope, cos_sin
from auraflux.ops.gpu.device import launches_early
from auraflux.ops.gpu.launch import launch
from auraflux.ops.turboquant.cuda.arguments import (
    calibration_tensors,
    full_precision_pages,
    full_precision_shape,
    keys_of,
    shape_of,
    values_of,
)
from auraflux.ops.turboquant.cuda.encode.codec import encoded_and_rotated
from auraflux.ops.turboquant.cuda.encode.full_precision import full_precision_rows, mean_of, store_full_precision, subtract_mean
from auraflux.ops.turboquant.cuda.encode.hadamard import (
    hadamard,
    half_of_pair,
    levels_for,
    rotation_for,
    store_half,
    store_half_units,
    store_words,
)
from auraflux.ops.turboquant.pages import CodePages

MOST_TOKENS = 128  # served in one launch


class Norms(NamedTuple):
    """Weights of the RMS norms of queries and keys, or None, and epsilon."""

    q: Tensor | None
    k: Tensor | None
    eps: float


@triton.jit
def begin_next(EARLY: tl.constexpr):
    """Wait for the previous kernel, which computes q, k and v, and launch the next one."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def rotated_row(
    x, weight, rope, position, half, eps, kind: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Load a head, normalise it where it has a weight, and rotate it: [1, D] float32, rounded to `kind` as if stored."""
    d = tl.arange(0, D)[None, :]
    if INTERLEAVED:
        pair, first, other = d // 2, d % 2 == 0, d ^ 1
    else:
        first = d < half
        pair, other = tl.where(first, d, d - half), tl.where(first, d + half, d - half)
    rotates = d < 2 * half
    other = tl.where(rotates, other, d)
    frequency = tl.load(rope.inv_freq + pair, mask=rotates, other=0.0)
    cosine, sine = cos_sin(position.to(tl.float32) * frequency)
    begin_next(EARLY)
    a, b = tl.load(x + d).to(tl.float32), tl.load(x + other).to(tl.float32)
    if weight is not None:
        factor = 1.0 / tl.sqrt(tl.sum(a * a, 1, keep_dims=True) / D + eps)
        a = (a * factor * tl.load(weight + d).to(tl.float32)).to(kind).to(tl.float32)
        b = (b * factor * tl.load(weight + other).to(tl.float32)).to(kind).to(tl.float32)
    rotated = a * (cosine * rope.mscale) + tl.where(first, -b, b) * (sine * rope.mscale)
    return tl.where(rotates, rotated, a).to(kind).to(tl.float32)


@triton.jit
def rotate_and_append(
    q, k, v, q_out, norms, rope, half, q_pitch, keys, values, signs, index, calibration, full, SHAPE: tl.constexpr,
    FULL: tl.constexpr, Q_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rotate a query, or encode a key or a value; grid (HEADS keys, HEADS values, Q_HEADS queries; tokens).

    calibration  key calibration; None without
    full         pages of full-precision tokens; None without
    EARLY        programmatic dependent launch; positions and pages are older than the previous kernel
    """
    D: tl.constexpr = SHAPE.width
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kind: tl.constexpr = k.dtype.element_ty
    d = tl.arange(0, D)[None, :]
    if head >= 2 * SHAPE.heads:
        row = token * Q_HEADS + head - 2 * SHAPE.heads
        position = tl.load(rope.positions + token)
        y = rotated_row(q + row * q_pitch, norms.q, rope, position, half, norms.eps, kind, D, INTERLEAVED, EARLY)
        tl.store(q_out + row * D + d, y.to(kind))
        return
    sequence, at_position = position_of(tl.program_id(1), index, SHAPE.sequences)
    page, slot = place_of(index.table, sequence, at_position, index.width, index.pool, SHAPE.page)
    there = page + tl.zeros([1], tl.int64) >= 0
    row = (page * SHAPE.heads + head % SHAPE.heads) * SHAPE.page + slot + tl.zeros([1], tl.int64)
    source = (token * SHAPE.heads + head % SHAPE.heads) * D
    # older than the previous kernel, like all that is loaded up to here
    if full is not None:
        rows = full_precision_rows(full, sequence, at_position, head % SHAPE.heads, SHAPE, FULL)
    if head < SHAPE.heads:
        position = tl.load(rope.positions + token)
        if calibration is not None:
            mean, inverse = mean_of(calibration, head, at_position, d, d < D, D)
            # full-precision keys include the mean
            rotated_mean = hadamard((mean * inverse).to(tl.float32) * tl.load(signs + d), D)
        y = rotated_row(k + source, norms.k, rope, position, half, norms.eps, kind, D, INTERLEAVED, EARLY)
        if calibration is not None:
            y = subtract_mean(y, mean, inverse)
        codes, norm, rotated = encoded_and_rotated(y.to(tl.float64), signs, keys.levels, D, SHAPE.key_bits)
        if full is not None:
            with_mean = rotated if calibration is None else rotated + rotated_mean
            store_full_precision(with_mean, full, rows, d, True, SHAPE, FULL)
        store_words(keys.codes, row, there, codes, SHAPE.key_bits, D, (D * SHAPE.key_bits + 31) // 32)
        tl.store(keys.norms + row, norm, mask=there)
        return
    begin_next(EARLY)
    if SHAPE.pairs and SHAPE.value_bits % 3:
        # loaded early, used at the end
        at, mine, shift = half_of_pair(values.codes, row, SHAPE.value_bits, D)
        old = tl.load(at, mask=there, other=0)
    y = tl.load(v + source + d).to(tl.float64)
    codes, norm, rotated = encoded_and_rotated(y, signs, values.levels, D, SHAPE.value_bits)
    if full is not None:
        store_full_precision(rotated, full, rows, d, False, SHAPE, FULL)
    tl.store(values.norms + row, norm, mask=there)
    if not SHAPE.pairs:
        store_words(values.codes, row, there, codes, SHAPE.value_bits, D, (D * SHAPE.value_bits + 31) // 32)
    elif SHAPE.value_bits % 3 == 0:
        store_half_units(values.codes, row, there, codes, SHAPE.value_bits, D)
    else:
        store_half(at, mine, shift, there, old, codes, SHAPE.value_bits, D)


def append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: CodePages,
    starts: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    mscale: float,
    interleaved: bool,
) -> Tensor:
    """Encode keys and values into their pages, and return the rotated queries."""
    tokens, heads, width = k.shape
    q_norm, k_norm = norms or (None, None)
    out, early = q.new_empty(q.shape), launches_early(q.device)
    launch(rotate_and_append, (2 * heads + q.shape[1], tokens))(
        *(q, k, v, out, Norms(q_norm, k_norm, float(eps))),
        *(Rope(inv_freq, positions, float(mscale)), inv_freq.shape[0], q.stride(1)),
        keys_of(pages, levels_for(pages.key_bits, width, k.device)),
        values_of(pages, levels_for(pages.value_bits, width, k.device)),
        rotation_for(width, pages.seed, False, k.device)[0],
        *(index_of(pages, starts), calibration_tensors(pages), full_precision_pages(pages)),
        SHAPE=shape_of(pages),
        FULL=full_precision_shape(pages),
        Q_HEADS=q.shape[1],
        INTERLEAVED=interleaved,
        EARLY=early,
        num_warps=1,
        launch_pdl=early,
    )
    return out
