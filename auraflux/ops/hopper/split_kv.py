"""Split-KV attention of few tokens on Hopper: the range of a split, tiles for TMA, and the merge.

Programs of a token and head split the positions it sees into equal ranges of full tiles. Each stores the mean of its values,
its largest score, in units of log2(e), and its sum of weights; a second kernel merges them. The number of splits depends on how
much other work there is; inside `invariant`, on how much the token sees, and the merge has room for the most there can be.

The first kernel launches the second once it has waited itself. So the second may launch the next before it has waited: whatever
the next reads early is complete except the partials, which only the merge reads. EARLY does so where the first kernel requests
less than fits before its own wait: otherwise loads of the next call would delay the merge.
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

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.blocks.softmax import Partials
from auraflux.ops.gpu.launch import launch, tensor_descriptor
from auraflux.ops.gpu.sizes import cdiv, power_of_two

TILE = 64  # positions
MOST_SPLITS = 128
# inside `invariant`: positions per split, and the most splits
INVARIANT_KEYS, INVARIANT_SPLITS = 256, 64
WARPS = 4  # per program of the merge
ACROSS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # of values exchanged between warps, [4, columns]
LIST = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


class SingleSplit(NamedTuple):
    """Results of programs without other splits, in place of `Partials`."""

    o: Tensor
    m: None = None
    l: None = None  # noqa: E741


@gluon.constexpr_function
def columns(n):
    """Return the layout of wgmma accumulators with n columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def quarters(n):
    """Return the layout with four rows in every thread, and n columns as in accumulators."""
    more = [[0, 8 << i] for i in range((n // 8).bit_length() - 1)]
    lanes, warps = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]]
    return gl.DistributedLinearLayout([[1, 0], [2, 0], [0, 1], *more], lanes, warps, [], [4, n])


@gluon.jit
def top_of_columns(x, room, N: gl.constexpr):
    """Return the maximum of each column of 64 rows, of which each warp has 16.

    The warps synchronise once here, and must once more before the next call.
    """
    room.store(gl.max(gl.reshape(x, [4, 16, N]), 1))
    gl.thread_barrier()
    return gl.convert_layout(gl.max(room.load(quarters(N)), 0), gl.SliceLayout(0, columns(N)))


@gluon.jit
def sum_of_columns(x, room, N: gl.constexpr):
    """Return the sum of each column of 64 rows, synchronising as `top_of_columns` does."""
    room.store(gl.sum(gl.reshape(x, [4, 16, N]), 1))
    gl.thread_barrier()
    return gl.convert_layout(gl.sum(room.load(quarters(N)), 0), gl.SliceLayout(0, columns(N)))


def splits_for(wanted: int, capacity: int, least: int = TILE) -> int:
    """Return the number of splits of a token: `wanted`, of `least` positions each, or the fixed number inside `invariant`."""
    if is_invariant():
        return max(1, min(INVARIANT_SPLITS, cdiv(capacity, INVARIANT_KEYS)))
    return max(1, min(MOST_SPLITS, wanted, cdiv(capacity, least)))


def invariant_split_keys() -> int:
    """Return the positions per split inside `invariant`; 0 outside."""
    return INVARIANT_KEYS if is_invariant() else 0


def merge_capacity(splits: int) -> int:
    """Return the splits that a program of the merge has room for."""
    return INVARIANT_SPLITS if is_invariant() else power_of_two(splits)


@gluon.jit
def split_range(
    token, split, splits, window, index, S: gl.constexpr, N: gl.constexpr, EACH: gl.constexpr, NW: gl.constexpr = 4
):  # fmt: skip
    """Return a token's sequence and the range of positions of a split, in tiles of N.

    EACH     positions per split, so that there may be fewer than `splits`; 0 for equal ranges
    NW       warps of the program

    returns sequence, first position of the split, first visible position, end of the split, number of tiles, positions
            before this step, and positions up to and including the token
    """
    sequence = token * 0
    if S > 1:
        b = gl.arange(0, S, gl.BlockedLayout([1], [32], [NW], [0]))
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
def merge_splits(parts, sinks, out, heads, splits, D: tl.constexpr, S: tl.constexpr, P: tl.constexpr, EARLY: tl.constexpr):
    """Merge the splits of one head at P channels; grid (tokens * heads, D / P).

    EARLY  launch the next kernel before the partials are complete
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
    # a split without positions has stored zeros
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


def merge(parts: Partials, sinks: Tensor | None, out: Tensor, piece: int, early: bool) -> None:
    """Merge partials [lines, splits, D], [lines, splits] twice, into out [tokens, heads, D], `piece` channels per program."""
    lines, splits, width = parts[0].shape
    grid, sizes = (lines, width // piece), (width, merge_capacity(splits), piece, early)
    launch(merge_splits, grid)(parts, sinks, out, out.shape[1], splits, *sizes, num_warps=WARPS, launch_pdl=True)


def empty_split_partials(lines: int, splits: int, width: int, dtype: torch.dtype, device: torch.device) -> Partials:
    """Allocate partials [lines, splits, width] in `dtype`, and their largest scores and sums of weights."""
    highest, sums = torch.empty(2, lines, splits, device=device)
    return Partials(torch.empty(lines, splits, width, dtype=dtype, device=device), highest, sums)


@cache
def tile_layout(rows: int, width: int, dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a tile for TMA and wgmma."""
    return gl.NVMMASharedLayout.get_default_for([rows, width], dtype)


def tiles_of(x: Tensor, rows: int) -> TensorDescriptor:
    """Return a TMA descriptor for `rows` rows of 16-bit numbers at a time."""
    flat, dtype = x.view(-1, x.shape[-1]), gl.bfloat16 if x.dtype is torch.bfloat16 else gl.float16
    return tensor_descriptor(flat, [rows, flat.shape[1]], tile_layout(rows, flat.shape[1], dtype))
