"""What keys leave out before they are coded, and rows that are kept as they are: for any number of new tokens.

A step of one token has all of this in `rope_append`; for a prompt it is one pass over keys and one over keys and values, of a
hundred in a layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.pages import index_of, place_of, position_of
from auraflux.ops.hopper.sizes import power_of_two
from auraflux.ops.turboquant.calibration import BLOCK
from auraflux.ops.turboquant.cuda.arguments import calibrated_of, kept_of, plain_of, shape_of
from auraflux.ops.turboquant.cuda.codec import rotated_by_matrix
from auraflux.ops.turboquant.cuda.hadamard import hadamard, rotation_for
from auraflux.ops.turboquant.pages import CodePages

CENTRED = tl.constexpr(BLOCK)


@triton.jit
def centre_of(calibrated, head, position, d, there, D: tl.constexpr):
    """Load the centre of keys at a position, and what they are multiplied by without it: float64."""
    at, block = head * D + d, calibrated.table + (position // CENTRED).to(tl.int64) * (2 * D) + d
    cosine = tl.load(block, mask=there, other=0.0).to(tl.float64)
    sine = tl.load(block + D, mask=there, other=0.0).to(tl.float64)
    centre = cosine * tl.load(calibrated.along + at, mask=there, other=0.0).to(tl.float64)
    centre += sine * tl.load(calibrated.across + at, mask=there, other=0.0).to(tl.float64)
    return centre, tl.load(calibrated.inverse + at, mask=there, other=0.0).to(tl.float64)


@triton.jit
def without_centre(x, centre, inverse):
    """Take the centre and the scale out of a key: float32, rounded once."""
    return ((x.to(tl.float64) - centre) * inverse).to(tl.float32)


@triton.jit
def kept_rows(plain, sequence, position, head, SHAPE: tl.constexpr, KEPT: tl.constexpr):
    """Find a position's row among the newest, and among the first if it is one of them; below 0 where there is none."""
    recent, first = tl.full([], -1, tl.int64), tl.full([], -1, tl.int64)
    if KEPT.newest:
        page, slot = place_of(plain.table, sequence, position, plain.width, plain.pool, KEPT.page)
        recent = tl.where(page >= 0, (page * SHAPE.heads + head) * KEPT.page + slot, -1)
    if KEPT.first:
        page, slot = place_of(plain.head_table, sequence, position, 1, plain.head_pool, KEPT.first)
        first = tl.where(page >= 0, (page * SHAPE.heads + head) * KEPT.first + slot, -1)
    return recent, first


@triton.jit
def store_plain(x, plain, rows, d, KEYS: tl.constexpr, SHAPE: tl.constexpr, KEPT: tl.constexpr):
    """Keep a rotated key or value [1, P] at the rows that `kept_rows` found."""
    D: tl.constexpr = SHAPE.width
    recent, first = rows
    if KEPT.newest:
        to = plain.k if KEYS else plain.v
        tl.store(to + recent * D + d, x.to(to.dtype.element_ty), mask=(d < D) & (recent >= 0))
    if KEPT.first:
        to = plain.head_k if KEYS else plain.head_v
        tl.store(to + first * D + d, x.to(to.dtype.element_ty), mask=(d < D) & (first >= 0))


@triton.jit
def reduce_keys(k, out, calibrated, index, SHAPE: tl.constexpr, P: tl.constexpr):
    """Take centres and scales out of the keys of a token; grid (tokens, HEADS)."""
    D: tl.constexpr = SHAPE.width
    _, position = position_of(tl.program_id(0), index, SHAPE.sequences)
    d = tl.arange(0, P)
    at = (tl.program_id(0).to(tl.int64) * SHAPE.heads + tl.program_id(1)) * D + d
    x = tl.load(k + at, mask=d < D, other=0.0)
    centre, inverse = centre_of(calibrated, tl.program_id(1), position, d, d < D, D)
    y = without_centre(x, centre, inverse)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def keep_rows(
    k, v, inverse, rotation, plain, index, SHAPE: tl.constexpr, KEPT: tl.constexpr, P: tl.constexpr, MATRIX: tl.constexpr
):  # fmt: skip
    """Rotate a key or a value and keep it; grid (tokens, HEADS, 2).

    inverse  [HEADS, D]  what keys are multiplied by first, or None
    """
    D: tl.constexpr = SHAPE.width
    token, head = tl.program_id(0), tl.program_id(1)
    sequence, position = position_of(token, index, SHAPE.sequences)
    d = tl.arange(0, P)[None, :]
    row = (token.to(tl.int64) * SHAPE.heads + head) * D
    rows = kept_rows(plain, sequence, position, head, SHAPE, KEPT)
    KEYS: tl.constexpr = 0
    if tl.program_id(2) == KEYS:
        factor = None if inverse is None else inverse + head * D
        store_plain(_rotated(k + row, factor, rotation, d, D, MATRIX), plain, rows, d, True, SHAPE, KEPT)
    else:
        store_plain(_rotated(v + row, None, rotation, d, D, MATRIX), plain, rows, d, False, SHAPE, KEPT)


@triton.jit
def _rotated(x, factor, rotation, d, D: tl.constexpr, MATRIX: tl.constexpr):
    if MATRIX:
        one = tl.full([1, 1], 1.0, tl.float64)
        y = rotated_by_matrix(x + tl.zeros([1, 1], tl.int64), one > 0, one, rotation, d, D)
    else:
        y = tl.load(x + d).to(tl.float32) * tl.load(rotation + d)
        y = hadamard(y if factor is None else y * tl.load(factor + d), D)
    return y


def without_centres(k: Tensor, pages: CodePages, starts: Tensor, dtype: torch.dtype) -> Tensor:
    """Give what is coded of keys [T, Hkv, D]; the same where nothing is left out."""
    calibrated, (tokens, heads, width) = calibrated_of(pages), k.shape
    if calibrated is None or not k.numel():
        return k
    out = torch.empty(k.shape, dtype=dtype, device=k.device)
    launch(reduce_keys, (tokens, heads))(
        k, out, calibrated, index_of(pages, starts), SHAPE=shape_of(pages), P=power_of_two(width), num_warps=1
    )
    return out


def keep(k: Tensor, v: Tensor, pages: CodePages, starts: Tensor) -> None:
    """Keep keys without their scale, and values, rotated, where they will be read as they are."""
    calibrated, plain, (tokens, heads, width) = calibrated_of(pages), plain_of(pages), k.shape
    if plain is None or not k.numel():
        return
    rotation, matrix = rotation_for(width, pages.seed, False, k.device)
    inverse = None if calibrated is None else calibrated.inverse
    if matrix and inverse is not None:
        k, inverse = k * inverse, None
    padded = max(32, power_of_two(width))
    launch(keep_rows, (tokens, heads, 2))(
        *(k, v, inverse, rotation, plain, index_of(pages, starts)),
        SHAPE=shape_of(pages),
        KEPT=kept_of(pages),
        P=padded,
        MATRIX=matrix,
        num_warps=1 if padded <= 256 else 4,
    )
