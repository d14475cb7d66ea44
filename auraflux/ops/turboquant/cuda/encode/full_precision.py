"""Key calibration before encoding, and storage of full-precision sink and recent tokens, for any number of new tokens.

Decode does both inside `rope_append.py`; prefill needs one pass over keys and one over keys and values, about 1 % of a layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.pages import index_of, place_of, position_of
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import power_of_two
from auraflux.ops.turboquant.calibration import BLOCK
from auraflux.ops.turboquant.cuda.arguments import calibration_tensors, full_precision_pages, full_precision_shape, shape_of
from auraflux.ops.turboquant.cuda.encode.codec import rotated_by_matrix
from auraflux.ops.turboquant.cuda.encode.hadamard import hadamard, rotation_for
from auraflux.ops.turboquant.pages import CodePages

MEAN_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def mean_of(calibration, head, position, d, there, D: tl.constexpr):
    """Load the mean of keys at a position and the inverse scale: float64."""
    at, block = head * D + d, calibration.table + (position // MEAN_BLOCK).to(tl.int64) * (2 * D) + d
    cosine = tl.load(block, mask=there, other=0.0).to(tl.float64)
    sine = tl.load(block + D, mask=there, other=0.0).to(tl.float64)
    mean = cosine * tl.load(calibration.along + at, mask=there, other=0.0).to(tl.float64)
    mean += sine * tl.load(calibration.across + at, mask=there, other=0.0).to(tl.float64)
    return mean, tl.load(calibration.inverse + at, mask=there, other=0.0).to(tl.float64)


@triton.jit
def subtract_mean(x, mean, inverse):
    """Subtract the mean of a key and divide by the scale: float32, rounded once."""
    return ((x.to(tl.float64) - mean) * inverse).to(tl.float32)


@triton.jit
def full_precision_rows(full, sequence, position, head, SHAPE: tl.constexpr, FULL: tl.constexpr):
    """Return a position's row among recent tokens and among sink tokens; -1 where it has none."""
    recent, first = tl.full([], -1, tl.int64), tl.full([], -1, tl.int64)
    if FULL.recent_window:
        page, slot = place_of(full.recent_table, sequence, position, full.recent_width, full.recent_pool, FULL.page)
        recent = tl.where(page >= 0, (page * SHAPE.heads + head) * FULL.page + slot, -1)
    if FULL.sink_tokens:
        page, slot = place_of(full.sink_table, sequence, position, 1, full.sink_pool, FULL.sink_tokens)
        first = tl.where(page >= 0, (page * SHAPE.heads + head) * FULL.sink_tokens + slot, -1)
    return recent, first


@triton.jit
def store_full_precision(x, full, rows, d, KEYS: tl.constexpr, SHAPE: tl.constexpr, FULL: tl.constexpr):
    """Store a rotated key or value [1, P] at the rows of `full_precision_rows`."""
    D: tl.constexpr = SHAPE.width
    recent, first = rows
    if FULL.recent_window:
        to = full.recent_k if KEYS else full.recent_v
        tl.store(to + recent * D + d, x.to(to.dtype.element_ty), mask=(d < D) & (recent >= 0))
    if FULL.sink_tokens:
        to = full.sink_k if KEYS else full.sink_v
        tl.store(to + first * D + d, x.to(to.dtype.element_ty), mask=(d < D) & (first >= 0))


@triton.jit
def calibrate_keys(k, out, calibration, index, SHAPE: tl.constexpr, P: tl.constexpr):
    """Remove mean and scale from the keys of a token; grid (tokens, HEADS)."""
    D: tl.constexpr = SHAPE.width
    _, position = position_of(tl.program_id(0), index, SHAPE.sequences)
    d = tl.arange(0, P)
    at = (tl.program_id(0).to(tl.int64) * SHAPE.heads + tl.program_id(1)) * D + d
    x = tl.load(k + at, mask=d < D, other=0.0)
    mean, inverse = mean_of(calibration, tl.program_id(1), position, d, d < D, D)
    y = subtract_mean(x, mean, inverse)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def store_full_precision_rows(
    k, v, inverse, rotation, full, index, SHAPE: tl.constexpr, FULL: tl.constexpr, P: tl.constexpr, MATRIX: tl.constexpr
):  # fmt: skip
    """Rotate a key or a value and store it in full precision; grid (tokens, HEADS, 2).

    inverse  [HEADS, D]  inverse key scales, or None
    """
    D: tl.constexpr = SHAPE.width
    token, head = tl.program_id(0), tl.program_id(1)
    sequence, position = position_of(token, index, SHAPE.sequences)
    d = tl.arange(0, P)[None, :]
    row = (token.to(tl.int64) * SHAPE.heads + head) * D
    rows = full_precision_rows(full, sequence, position, head, SHAPE, FULL)
    KEYS: tl.constexpr = 0
    if tl.program_id(2) == KEYS:
        factor = None if inverse is None else inverse + head * D
        store_full_precision(_rotated(k + row, factor, rotation, d, D, MATRIX), full, rows, d, True, SHAPE, FULL)
    else:
        store_full_precision(_rotated(v + row, None, rotation, d, D, MATRIX), full, rows, d, False, SHAPE, FULL)


@triton.jit
def _rotated(x, factor, rotation, d, D: tl.constexpr, MATRIX: tl.constexpr):
    if MATRIX:
        one = tl.full([1, 1], 1.0, tl.float64)
        y = rotated_by_matrix(x + tl.zeros([1, 1], tl.int64), one > 0, one, rotation, d, D)
    else:
        y = tl.load(x + d).to(tl.float32) * tl.load(rotation + d)
        y = hadamard(y if factor is None else y * tl.load(factor + d), D)
    return y


def subtract_means(k: Tensor, pages: CodePages, starts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys [T, Hkv, D] without mean and scale, or the same keys without calibration."""
    calibration, (tokens, heads, width) = calibration_tensors(pages), k.shape
    if calibration is None or not k.numel():
        return k
    out = torch.empty(k.shape, dtype=dtype, device=k.device)
    launch(calibrate_keys, (tokens, heads))(
        k, out, calibration, index_of(pages, starts), SHAPE=shape_of(pages), P=power_of_two(width), num_warps=1
    )
    return out


def append_full_precision(k: Tensor, v: Tensor, pages: CodePages, starts: Tensor) -> None:
    """Store rotated keys, divided by their scale, and values as full-precision sink and recent tokens."""
    calibration, full, (tokens, heads, width) = calibration_tensors(pages), full_precision_pages(pages), k.shape
    if full is None or not k.numel():
        return
    rotation, matrix = rotation_for(width, pages.seed, False, k.device)
    inverse = None if calibration is None else calibration.inverse
    if matrix and inverse is not None:
        k, inverse = k * inverse, None
    padded = max(32, power_of_two(width))
    launch(store_full_precision_rows, (tokens, heads, 2))(
        *(k, v, inverse, rotation, full, index_of(pages, starts)),
        SHAPE=shape_of(pages),
        FULL=full_precision_shape(pages),
        P=padded,
        MATRIX=matrix,
        num_warps=1 if padded <= 256 else 4,
    )
