"""Online softmax of attention in Triton, and the merge of partial results of several programs.

Scores are in units of log2(e), so that exponentials are powers of two. A partial softmax over some of the keys is a sum of
values, the largest score and a sum of weights.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Partials(NamedTuple):
    """Partial softmaxes over some of the keys.

    o  [rows, parts, D]  values summed by their weights
    m  [rows, parts]     largest score
    l  [rows, parts]     sum of weights
    """

    o: Tensor
    m: Tensor
    l: Tensor  # noqa: E741


@triton.jit
def softcap_log2(s, softcap, SOFTCAP: tl.constexpr):
    """Apply the soft cap to scores, and convert them to base 2."""
    if SOFTCAP:
        # tanh by one exponential; its absolute error is what matters here
        s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (s / softcap)) + 1.0))
    return s * LOG2E


@triton.jit
def online_softmax(s, m, l):  # noqa: E741
    """Add a tile of scores to the online softmax; return weights, the factor of earlier sums, maximum and sum."""
    top = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s - safe[:, None])
    fade = tl.exp2(m - safe)
    return p, fade, top, l * fade + tl.sum(p, 1)


@triton.jit
def merged_row(parts, row, sink, blocks, d, D: tl.constexpr, S: tl.constexpr, C: tl.constexpr):
    """Merge the blocks of one row at coordinates `d`, with `sink` as the logit of one more, or -inf.

    Return sums, maximum, total.
    """
    s = tl.arange(0, S)
    l_all = tl.load(parts.l + row * blocks + s, mask=s < blocks, other=0.0)
    m_all = tl.load(parts.m + row * blocks + s, mask=(s < blocks) & (l_all != 0), other=float("-inf"))
    highest = tl.maximum(tl.max(m_all, 0), sink)
    top = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.where(l_all != 0, tl.exp(m_all - top) * l_all, 0.0), 0) + tl.exp(sink - top)
    acc = tl.zeros([d.shape[0]], tl.float32)
    for first in range(0, blocks, C):
        block = first + tl.arange(0, C)
        live = tl.load(parts.l + row * blocks + block, mask=block < blocks, other=0.0) != 0
        high = tl.load(parts.m + row * blocks + block, mask=live, other=float("-inf"))
        at = (row * blocks + block)[:, None] * D + d[None, :]
        values = tl.load(parts.o + at, mask=live[:, None] & (d < D)[None, :], other=0.0)
        acc += tl.sum(tl.where(live, tl.exp(high - top), 0.0)[:, None] * values, 0)
    return acc, highest, total


@triton.jit
def merge(parts, sinks, out, heads, blocks, D: tl.constexpr, P: tl.constexpr, S: tl.constexpr, C: tl.constexpr):
    """Merge the blocks of one row; grid (rows, tiles of P coordinates)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * P + tl.arange(0, P)
    sink = float("-inf") if sinks is None else tl.load(sinks + row % heads)
    acc, _, total = merged_row(parts, row, sink, blocks, d, D, S, C)
    found = tl.where(total == 0, 0.0, acc / total)
    tl.store(out + row * D + d, found.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def join(parts, sinks, out, heads, blocks, D: tl.constexpr, P: tl.constexpr, S: tl.constexpr, C: tl.constexpr):
    """Merge the blocks of one row into one block; grid (rows, tiles of P coordinates)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * P + tl.arange(0, P)
    sink = float("-inf") if sinks is None else tl.load(sinks + row % heads)
    acc, highest, total = merged_row(parts, row, sink, blocks, d, D, S, C)
    tl.store(out.o + row * D + d, acc, mask=d < D)
    tl.store(out.m + row, highest, mask=tl.program_id(1) == 0)
    tl.store(out.l + row, total, mask=tl.program_id(1) == 0)


def launch_merge(parts: Partials, sinks: Tensor | None, out: Tensor | Partials, heads: int) -> None:
    """Merge partials [rows, blocks, D], [rows, blocks], [rows, blocks] into out [rows, D], or into partials of one block."""
    rows, blocks, width = parts[0].shape
    piece = min(64, power_of_two(width))
    sizes = {"D": width, "P": piece, "S": power_of_two(blocks), "C": min(32, power_of_two(blocks))}
    grid = rows, cdiv(width, piece)
    if rows and isinstance(out, tuple):
        launch(join, grid)(parts, sinks, out, heads, blocks, **sizes)
    elif rows:
        launch(merge, grid)(parts, sinks, out, heads, blocks, **sizes)


def empty_partials(rows: int, splits: int, width: int, device: torch.device) -> Partials:
    """Allocate partials [rows, splits, width], [rows, splits] twice."""
    return Partials(
        torch.empty(rows, splits, width, device=device),
        torch.empty(rows, splits, device=device),
        torch.empty(rows, splits, device=device),
    )
