"""What attention of few tokens on Hopper shares: the positions that a program has, tiles for TMA, and the merge.

Programs of a token and head divide the positions it sees into equal shares of whole tiles. Each leaves the mean of its values,
its largest score, in units of log2(e), and its sum of weights; a second kernel merges them. How many share is decided by what
else there is to do; or, inside `invariant`, by how much the token sees, and the merge has room for the most there can be.

The first kernel lets the second begin when it has waited itself. So the second may let the next begin before it has waited:
what comes next then knows all but the shares to be there, and nobody else reads those. It does where the first asks for less
than it has room for before its own wait: what the next call reads keeps the shares waiting.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.hopper.launch import described, launch
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.hopper.softmax import Parts

TILE = 64  # positions
MOST_SPLITS = 128
# inside `invariant`: positions of a share, unless that makes too many of them
ALIKE_KEYS, ALIKE_SPLITS = 256, 64
WARPS = 4  # of a program that merges
ACROSS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # of what warps tell each other, [4, columns]
LIST = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


class Whole(NamedTuple):
    """Results of programs that have no others to share with, in the place of parts."""

    o: Tensor
    m: None = None
    l: None = None  # noqa: E741


@gluon.constexpr_function
def columns(n):
    """Lay out accumulators of wgmma with n columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def quarters(n):
    """Lay out four rows in every thread, with n columns as accumulators have them."""
    more = [[0, 8 << i] for i in range((n // 8).bit_length() - 1)]
    lanes, warps = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]]
    return gl.DistributedLinearLayout([[1, 0], [2, 0], [0, 1], *more], lanes, warps, [], [4, n])


@gluon.jit
def top_of_columns(x, room, N: gl.constexpr):
    """Find the largest of each column of 64 rows, of which each warp has 16.

    The warps meet once here, and must once more before the next call.
    """
    room.store(gl.max(gl.reshape(x, [4, 16, N]), 1))
    gl.thread_barrier()
    return gl.convert_layout(gl.max(room.load(quarters(N)), 0), gl.SliceLayout(0, columns(N)))


@gluon.jit
def sum_of_columns(x, room, N: gl.constexpr):
    """Sum each column of 64 rows in the same way."""
    room.store(gl.sum(gl.reshape(x, [4, 16, N]), 1))
    gl.thread_barrier()
    return gl.convert_layout(gl.sum(room.load(quarters(N)), 0), gl.SliceLayout(0, columns(N)))


def splits_for(wanted: int, capacity: int, least: int = TILE) -> int:
    """How many programs share the positions of a token: as many as wanted, of `least` positions each, or as it must be."""
    if is_invariant():
        return max(1, min(ALIKE_SPLITS, cdiv(capacity, ALIKE_KEYS)))
    return max(1, min(MOST_SPLITS, wanted, cdiv(capacity, least)))


def keys_each() -> int:
    """Positions of a share, where that is fixed; 0 where it is not."""
    return ALIKE_KEYS if is_invariant() else 0


def merged_at_once(splits: int) -> int:
    """Room for shares in a program that merges."""
    return ALIKE_SPLITS if is_invariant() else power_of_two(splits)


@gluon.jit
def share_of(token, split, splits, window, index, S: gl.constexpr, N: gl.constexpr, EACH: gl.constexpr):
    """Find a token's sequence, and a split's share of what it sees, in tiles of N.

    EACH     positions that a share is to have, so that there may be less than `splits`; 0 for equal shares for all

    returns sequence, first position of the share, first that is seen, end of the share, number of tiles, how many positions
            were there before this step, and how many the token and those before it are
    """
    sequence = token * 0
    if S > 1:
        b = gl.arange(0, S, LIST)
        sequence = gl.sum((gl.load(index.starts + b + 1, mask=b < index.sequences, other=2147483647) <= token).to(gl.int32), 0)
    stop, length = gl.load(index.starts + sequence + 1), gl.load(index.lengths + sequence)
    seen, old = length - stop + token + 1, length - stop + gl.load(index.starts + sequence)
    low = gl.maximum(seen - window, 0)
    if EACH > 0:
        splits = gl.minimum(splits, gl.maximum((seen - low // N * N + EACH - 1) // EACH, 1))
    share = ((seen - low // N * N + N - 1) // N + splits - 1) // splits * N
    begin = low // N * N + split * share
    end = gl.minimum(seen, begin + share)
    count = gl.maximum(end - begin + N - 1, 0) // N
    return sequence, gl.where(count > 0, begin, 0), low, end, count, old, seen


@triton.jit
def merge_shares(parts, sinks, out, heads, splits, D: tl.constexpr, S: tl.constexpr, P: tl.constexpr, EARLY: tl.constexpr):
    """Merge the shares of one head at P channels; grid (tokens * heads, D / P).

    EARLY  let the next kernel begin before the shares are there
    """
    if EARLY:
        gdc_launch_dependents()
    gdc_wait()
    if not EARLY:
        gdc_launch_dependents()
    line, s = tl.program_id(0), tl.arange(0, S)
    row, d = line.to(tl.int64) * splits, tl.program_id(1) * P + tl.arange(0, P)
    sums = tl.load(parts.l + row + s, mask=s < splits, other=0.0)
    highest = tl.load(parts.m + row + s, mask=s < splits, other=float("-inf"))
    # a share without positions has left zeros
    means = tl.load(parts.o + (row + s)[:, None] * D + d[None, :], mask=(s < splits)[:, None], other=0.0).to(tl.float32)
    top = tl.max(tl.where(sums != 0, highest, float("-inf")), 0)
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + line % heads) * 1.4426950408889634
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.where(sums != 0, tl.exp2(highest - top) * sums, 0.0)
    total = tl.sum(weights, 0)
    if sinks is not None:
        total += tl.exp2(sink - top)
    found = tl.sum(weights[:, None] * means, 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + line.to(tl.int64) * D + d, found.to(out.dtype.element_ty))


def merge(parts: Parts, sinks: Tensor | None, out: Tensor, piece: int, early: bool) -> None:
    """Merge shares [lines, splits, D], [lines, splits] twice, into out [tokens, heads, D], `piece` channels a program."""
    lines, splits, width = parts[0].shape
    grid, sizes = (lines, width // piece), (width, merged_at_once(splits), piece, early)
    launch(merge_shares, grid)(parts, sinks, out, out.shape[1], splits, *sizes, num_warps=WARPS, launch_pdl=True)


def room_for(lines: int, splits: int, width: int, dtype: torch.dtype, device: torch.device) -> Parts:
    """Allocate shares [lines, splits, width] in `dtype`, and their largest scores and sums of weights."""
    highest, sums = torch.empty(2, lines, splits, device=device)
    return Parts(torch.empty(lines, splits, width, dtype=dtype, device=device), highest, sums)


@cache
def tile_layout(rows: int, width: int, dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """Lay out a tile in shared memory as TMA writes it and wgmma reads it."""
    return gl.NVMMASharedLayout.get_default_for([rows, width], dtype)


def tiles_of(x: Tensor, rows: int) -> TensorDescriptor:
    """Let TMA bring `rows` rows of 16-bit numbers at a time."""
    flat, dtype = x.view(-1, x.shape[-1]), gl.bfloat16 if x.dtype is torch.bfloat16 else gl.float16
    return described(flat, [rows, flat.shape[1]], tile_layout(rows, flat.shape[1], dtype))
