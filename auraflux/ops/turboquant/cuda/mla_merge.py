"""Before and after attention over coded latents on Hopper: queries are rotated, shares of results merged and rotated back.

Latents that are kept as they are make one more share. Where queries are rotated by a kernel of their own, that makes it; else
the merge does, while shares of codes are still on their way.

Both kernels may begin before the one before them has ended, and let the next begin.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.sizes import power_of_two
from auraflux.ops.hopper.softmax import Parts
from auraflux.ops.turboquant.cuda.hadamard import hadamard
from auraflux.ops.turboquant.cuda.mla_kept import NO_QUESTION, Question, mixed, share_of_kept

KEPT_WARPS = 8  # of a program that rotates a query and attends from it to kept latents
MERGED = 64  # channels of a program that merges: those whose transform is left to it


@triton.jit
def hadamard_rows(
    x, signs, out, asking, parts, slots, D: tl.constexpr, LOW: tl.constexpr, SHAPE: tl.constexpr, KEPT: tl.constexpr
):  # fmt: skip
    """Rotate a row, and where latents are kept leave its share of them in the last slot; grid (rows,)."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)[None, :]
    sign = tl.load(signs + d)
    gdc_wait()
    gdc_launch_dependents()
    if asking is None:
        y = hadamard(tl.load(x + row * D + d).to(tl.float32) * sign, D)
    else:
        m, l, acc, y = share_of_kept(asking, signs, row, D, SHAPE, KEPT)  # noqa: E741
        mean = tl.reshape(mixed(acc * tl.where(l == 0, 0.0, 1.0 / l), tl.arange(0, 8), LOW, D), [1, D])
        at = row * slots + slots - 1
        tl.store(parts.o + at * D + d, mean.to(parts.o.dtype.element_ty))
        tl.store(parts.m + at, m)
        tl.store(parts.l + at, l)
    tl.store(out + row * D + d, y.to(out.dtype.element_ty))


def hadamard_queries(q: Tensor, signs: Tensor, parts: Parts, low: int, question: Question) -> Tensor:
    """Rotate queries, as float16; leave what they find among kept latents in the last slot of parts, for `merge_rotated`.

    low  what the lowest of the three bits of a channel is worth whose transform is done then
    """
    out, width = torch.empty(q.shape, dtype=torch.float16, device=q.device), q.shape[-1]
    given = q, signs, out, question.who, None if question.who is None else parts, parts.m.shape[1]
    sizes = width, low, question.shape, question.kept
    warps = 4 if question.who is None else KEPT_WARPS
    launch(hadamard_rows, (q.numel() // width,))(*given, *sizes, num_warps=warps, launch_pdl=True)
    return out


@triton.jit
def merge_rotated_shares(
    parts, signs, out, asking, splits, D: tl.constexpr, S: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr,
    EARLY: tl.constexpr, SHAPE: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Merge the shares of one head at P channels, of which only the transform over them is left; grid (rows, D / P).

    asking  None, or what attends to kept latents: one more share. Only with EARLY, when they are known to be there
    HALF    how many of these channels are neighbours: all, or half, and the others D / 2 later
    EARLY   let the next kernel begin before the shares are there; nobody else reads those
    """
    SCALE: tl.constexpr = (D // P) ** -0.5
    s, j = tl.arange(0, S), tl.arange(0, P)
    d = tl.program_id(1) * HALF + j % HALF + j // HALF * (D // 2)
    row, line = tl.program_id(0).to(tl.int64) * splits, tl.program_id(0).to(tl.int64)
    sign = tl.load(signs + d)[None, :]
    if EARLY:
        gdc_launch_dependents()
    if asking is not None:
        tl.static_assert(EARLY)
        kept_m, kept_l, acc, _ = share_of_kept(asking, signs, line, D, SHAPE, KEPT)
        kept_o = tl.reshape(mixed(acc, tl.program_id(1) + tl.arange(0, 1), HALF, D), [P])
    gdc_wait()
    if not EARLY:
        gdc_launch_dependents()
    sums = tl.load(parts.l + row + s, mask=s < splits, other=0.0)
    highest = tl.load(parts.m + row + s, mask=s < splits, other=float("-inf"))
    means = tl.load(parts.o + (row + s)[:, None] * D + d[None, :], mask=(s < splits)[:, None], other=0.0).to(tl.float32)
    top = tl.max(tl.where(sums != 0, highest, float("-inf")), 0)
    if asking is not None:
        top = tl.maximum(top, kept_m)
    top = tl.where(top == float("-inf"), 0.0, top)
    # a share without positions has left zeros
    weights = tl.where(sums != 0, tl.exp2(highest - top) * sums, 0.0)
    total, found = tl.sum(weights, 0), tl.sum(weights[:, None] * means, 0)
    if asking is not None:
        scale = tl.exp2(kept_m - top)
        total, found = total + kept_l * scale, found + kept_o * scale
    found = found / tl.where(total == 0, 1.0, total)
    y = hadamard(found[None, :], P) * SCALE * sign
    tl.store(out + line * D + d[None, :], y.to(out.dtype.element_ty))


def merge_rotated(parts: Parts, signs: Tensor, out: Tensor, half: int, early: bool, question: Question = NO_QUESTION) -> None:
    """Merge shares [lines, splits, D], [lines, splits] twice, and that of kept latents, into out [tokens, heads, D]."""
    lines, splits, width = parts[0].shape
    sizes = width, power_of_two(splits), MERGED, half, early, question.shape, question.kept
    given = parts, signs, out, question.who, splits
    launch(merge_rotated_shares, (lines, width // MERGED))(*given, *sizes, num_warps=4, launch_pdl=True)
