"""Residual add, RMS norm and small dense weights (router scores) on CUDA in one launch.

Every program computes the norm for itself: a row is a few kilobytes in the cache, and a launch costs more. Weights are loaded
before `griddepcontrol.wait`, the token after it: the gap between launches is hidden behind the previous kernel.
"""

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.device import launches_early
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import power_of_two

WIDEST = 8192  # inputs that fit a program's registers


@triton.jit
def normed_rows(
    x, delta, norm, h, total, weight, weight1, out, out1, rows, width, eps, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply the normalised sum by one row of a dense weight, or of a second one after it; grid (rows, tokens).

    EARLY  programmatic dependent launch
    """
    row, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, count = row == 0, rows
    if weight1 is not None:  # noqa: SIM102 - the first is decided when the kernel is compiled
        if row >= rows:
            weight, out, row, count = weight1, out1, row - rows, tl.num_programs(0) - rows
    k, line = tl.arange(0, WIDTH), token * width
    there = k < width
    mine = tl.load(weight + row.to(tl.int64) * width + k, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(norm + k, mask=there, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    wide = tl.load(x + line + k, mask=there, other=0.0).to(tl.float32)
    if delta is not None:
        # round as a stored sum would be
        narrow = (wide + tl.load(delta + line + k, mask=there, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + line + k, narrow, mask=there & first)
        wide = narrow.to(tl.float32)
    unit = (wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)) * scale).to(h.dtype.element_ty)
    tl.store(h + line + k, unit, mask=there & first)
    tl.store(out + token * count + row, tl.sum(unit.to(tl.float32) * mine, 0))


def multiply(
    x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, weights: list[Tensor]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the normalised tokens, the sums x + delta, and the products with one or two weights."""
    h, total = x.new_empty(x.shape), x if delta is None else x.new_empty(x.shape)
    width, counts = x.shape[-1], [weight.shape[0] for weight in weights]
    outs = [x.new_empty(x.shape[0], count) for count in counts]
    second = (weights[1], outs[1]) if len(weights) == 2 else (None, None)
    tensors = x, delta, norm, h, total, weights[0], second[0], outs[0], second[1]
    early = launches_early(x.device)
    sizes = counts[0], width, float(eps), power_of_two(width), early
    launch(normed_rows, (sum(counts), x.shape[0]))(*tensors, *sizes, num_warps=4, launch_pdl=early)
    return h, total, outs
