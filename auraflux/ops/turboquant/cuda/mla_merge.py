"""Before and after attention over coded latents on Hopper: queries are rotated, shares of results merged and rotated back.

Both kernels may begin before the one before them has ended, and let the next begin.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.softmax import Parts
from auraflux.ops.hopper.split_kv import merged_at_once
from auraflux.ops.turboquant.cuda.hadamard import hadamard

MERGED = 64  # channels of a program that merges: those whose transform is left to it


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
    """Rotate queries, as float16."""
    out, width = torch.empty(q.shape, dtype=torch.float16, device=q.device), q.shape[-1]
    launch(hadamard_rows, (q.numel() // width,))(q, signs, out, width, num_warps=4, launch_pdl=True)
    return out


@triton.jit
def merge_rotated_shares(
    parts, signs, out, splits, D: tl.constexpr, S: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Merge the shares of one head at P channels, of which only the transform over them is left; grid (rows, D / P).

    HALF   how many of these channels are neighbours: all, or half, and the others D / 2 later
    EARLY  let the next kernel begin before the shares are there; nobody else reads those
    """
    SCALE: tl.constexpr = (D // P) ** -0.5
    s, j = tl.arange(0, S), tl.arange(0, P)
    d = tl.program_id(1) * HALF + j % HALF + j // HALF * (D // 2)
    row, line = tl.program_id(0).to(tl.int64) * splits, tl.program_id(0).to(tl.int64)
    sign = tl.load(signs + d)[None, :]
    if EARLY:
        gdc_launch_dependents()
    gdc_wait()
    if not EARLY:
        gdc_launch_dependents()
    sums = tl.load(parts.l + row + s, mask=s < splits, other=0.0)
    highest = tl.load(parts.m + row + s, mask=s < splits, other=float("-inf"))
    means = tl.load(parts.o + (row + s)[:, None] * D + d[None, :], mask=(s < splits)[:, None], other=0.0).to(tl.float32)
    top = tl.max(tl.where(sums != 0, highest, float("-inf")), 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    # a share without positions has left zeros
    weights = tl.where(sums != 0, tl.exp2(highest - top) * sums, 0.0)
    total, found = tl.sum(weights, 0), tl.sum(weights[:, None] * means, 0)
    found = found / tl.where(total == 0, 1.0, total)
    y = hadamard(found[None, :], P) * SCALE * sign
    tl.store(out + line * D + d[None, :], y.to(out.dtype.element_ty))


def merge_rotated(parts: Parts, signs: Tensor, out: Tensor, half: int, early: bool) -> None:
    """Merge shares [lines, splits, D], [lines, splits] twice, into out [tokens, heads, D]."""
    lines, splits, width = parts[0].shape
    sizes = width, merged_at_once(splits), MERGED, half, early
    launch(merge_rotated_shares, (lines, width // MERGED))(parts, signs, out, splits, *sizes, num_warps=4, launch_pdl=True)
