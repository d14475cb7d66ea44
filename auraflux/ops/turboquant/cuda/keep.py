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
def reduced(x, calibrated, head, position, d, there, D: tl.constexpr):
    """Take the centre and the scale out of a key [1, P] at a position: float32, rounded once."""
    at, block = head * D + d, calibrated.table + (position // CENTRED).to(tl.int64) * (2 * D) + d
    cosine = tl.load(block, mask=there, other=0.0).to(tl.float64)
    sine = tl.load(block + D, mask=there, other=0.0).to(tl.float64)
    centre = cosine * tl.load(calibrated.along + at, mask=there, other=0.0).to(tl.float64)
    centre += sine * tl.load(calibrated.across + at, mask=there, other=0.0).to(tl.float64)
    inverse = tl.load(calibrated.inverse + at, mask=there, other=0.0).to(tl.float64)
    return ((x.to(tl.float64) - centre) * inverse).to(tl.float32)


@triton.jit
def store_plain(x, plain, sequence, position, head, d, KEYS: tl.constexpr, SHAPE: tl.constexpr, KEPT: tl.constexpr):
    """Keep a rotated key or value [1, P] among the newest rows, and among the first if it is one of them."""
    D: tl.constexpr = SHAPE.width
    if KEPT.newest:
        page, slot = place_of(plain.table, sequence, position, plain.width, plain.pool, KEPT.page)
        rows = plain.k if KEYS else plain.v
        at = rows + ((page * SHAPE.heads + head) * KEPT.page + slot) * D + d
        tl.store(at, x.to(rows.dtype.element_ty), mask=(d < D) & (page >= 0))
    if KEPT.first:  # noqa: SIM102
        if position < KEPT.first:
            page, slot = place_of(plain.head_table, sequence, position, 1, plain.head_pool, KEPT.first)
            rows = plain.head_k if KEYS else plain.head_v
            at = rows + ((page * SHAPE.heads + head) * KEPT.first + slot) * D + d
            tl.store(at, x.to(rows.dtype.element_ty), mask=(d < D) & (page >= 0))


@triton.jit
def reduce_keys(k, out, calibrated, index, SHAPE: tl.constexpr, P: tl.constexpr):
    """Take centres and scales out of the keys of a token; grid (tokens, HEADS)."""
    D: tl.constexpr = SHAPE.width
    _, position = position_of(tl.program_id(0), index, SHAPE.sequences)
    d = tl.arange(0, P)
    at = (tl.program_id(0).to(tl.int64) * SHAPE.heads + tl.program_id(1)) * D + d
    x = tl.load(k + at, mask=d < D, other=0.0)
    y = reduced(x, calibrated, tl.program_id(1), position, d, d < D, D)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def keep_rows(
    k, v, rotation, plain, index, SHAPE: tl.constexpr, KEPT: tl.constexpr, P: tl.constexpr, MATRIX: tl.constexpr
):  # fmt: skip
    """Rotate a key or a value and keep it; grid (tokens, HEADS, 2)."""
    D: tl.constexpr = SHAPE.width
    token, head = tl.program_id(0), tl.program_id(1)
    sequence, position = position_of(token, index, SHAPE.sequences)
    d = tl.arange(0, P)[None, :]
    row = (token.to(tl.int64) * SHAPE.heads + head) * D
    KEYS: tl.constexpr = 0
    if tl.program_id(2) == KEYS:
        store_plain(_rotated(k + row, rotation, d, D, MATRIX), plain, sequence, position, head, d, True, SHAPE, KEPT)
    else:
        store_plain(_rotated(v + row, rotation, d, D, MATRIX), plain, sequence, position, head, d, False, SHAPE, KEPT)


@triton.jit
def _rotated(x, rotation, d, D: tl.constexpr, MATRIX: tl.constexpr):
    if MATRIX:
        one = tl.full([1, 1], 1.0, tl.float64)
        y = rotated_by_matrix(x + tl.zeros([1, 1], tl.int64), one > 0, one, rotation, d, D)
    else:
        y = hadamard(tl.load(x + d).to(tl.float32) * tl.load(rotation + d), D)
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
    """Keep what `without_centres` gave, and values, rotated, where they will be read as they are."""
    plain, (tokens, heads, width) = plain_of(pages), k.shape
    if plain is None or not k.numel():
        return
    rotation, matrix = rotation_for(width, pages.seed, False, k.device)
    padded = max(32, power_of_two(width))
    launch(keep_rows, (tokens, heads, 2))(
        *(k, v, rotation, plain, index_of(pages, starts)),
        SHAPE=shape_of(pages),
        KEPT=kept_of(pages),
        P=padded,
        MATRIX=matrix,
        num_warps=1 if padded <= 256 else 4,
    )
