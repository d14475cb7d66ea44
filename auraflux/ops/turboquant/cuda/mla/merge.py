"""Rotation of queries before, and merge of splits after MLA attention over codes on Hopper.

Both kernels use programmatic dependent launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.blocks.softmax import Partials
from auraflux.ops.gpu.launch import launch
from auraflux.ops.hopper.split_kv import merge_capacity
from auraflux.ops.turboquant.cuda.encode.hadamard import hadamard

MERGED = 64  # channels per merging program, which finishes the transform over them


@triton.jit
def hadamard_rows(x, signs, out, D: tl.constexpr):
    """Rotate a row; grid (rows,)."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)[None, :]
    sign = tl.load(signs + d)
    gdc_wait()
    gdc_launch_dependents()
    y = hadamard(tl.load(x + row * D + d).to(tl.float32) * sign, D)
    tl.store(out + row * D + d, y.to(out.dtype.element_ty))


def hadamard_queries(q: Tensor, signs: Tensor) -> Tensor:
    """Rotate queries to float16."""
    out, width = torch.empty(q.shape, dtype=torch.float16, device=q.device), q.shape[-1]
    launch(hadamard_rows, (q.numel() // width,))(q, signs, out, width, num_warps=4, launch_pdl=True)
    return out


@triton.jit
def merge_rotated_shares(
    partials, signs, out, splits, D: tl.constexpr, S: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Merge the splits of one head at P channels, and finish the inverse transform over these; grid (rows, D / P).

    HALF   neighbouring channels among them: all, or half, and the other half D / 2 later, or a quarter, every D / 4
    EARLY  launch the next kernel before the splits are complete; no other kernel reads them
    """
    SCALE: tl.constexpr = (D // P) ** -0.5
    s, j = tl.arange(0, S), tl.arange(0, P)
    d = tl.program_id(1) * HALF + j % HALF + j // HALF * (D // (P // HALF))
    row, line = tl.program_id(0).to(tl.int64) * splits, tl.program_id(0).to(tl.int64)
    sign = tl.load(signs + d)[None, :]
    if EARLY:
        gdc_launch_dependents()
    gdc_wait()
    if not EARLY:
        gdc_launch_dependents()
    sums = tl.load(partials.l + row + s, mask=s < splits, other=0.0)
    highest = tl.load(partials.m + row + s, mask=s < splits, other=float("-inf"))
    means = tl.load(partials.o + (row + s)[:, None] * D + d[None, :], mask=(s < splits)[:, None], other=0.0).to(tl.float32)
    top = tl.max(tl.where(sums != 0, highest, float("-inf")), 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    # an empty split has zero sums
    weights = tl.where(sums != 0, tl.exp2(highest - top) * sums, 0.0)
    total, found = tl.sum(weights, 0), tl.sum(weights[:, None] * means, 0)
    found = found / tl.where(total == 0, 1.0, total)
    y = hadamard(found[None, :], P) * SCALE * sign
    tl.store(out + line * D + d[None, :], y.to(out.dtype.element_ty))


def merge_rotated(partials: Partials, signs: Tensor, out: Tensor, half: int, early: bool) -> None:
    """Merge splits [lines, splits, D], [lines, splits] twice, into out [tokens, heads, D]."""
    lines, splits, width = partials[0].shape
    sizes = width, merge_capacity(splits), MERGED, half, early
    launch(merge_rotated_shares, (lines, width // MERGED))(partials, signs, out, splits, *sizes, num_warps=4, launch_pdl=True)
