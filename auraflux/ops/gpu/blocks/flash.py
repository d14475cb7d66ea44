"""Flash attention in Triton: rows of a program, keys they see, and stores of results.

The rows of a program are query heads that share a key head, of one token or of several: row r of a sequence is head r % G of
its token r // G. The host does not know how tokens are distributed over sequences, so the grid covers the worst case: sequence
b begins at tile starts[b] * G // M + b, and tiles without rows exit at once. With few tiles the keys are split too, into equal
ranges of what the rows see, and the partial results merged by a second kernel. The softmax is in `softmax.py`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.softmax import LN2
from auraflux.ops.gpu.device import INTERPRETED, multiprocessors
from auraflux.ops.gpu.sizes import cdiv, power_of_two

NO_WINDOW = 1 << 30  # positions; longer than any sequence
MOST_SPLITS = 128
PROGRAMS_INTERPRETED = 16  # in the interpreter, where programs take milliseconds each and run one after the other


class RecentKeys(NamedTuple):
    """Keys less than `newest` positions back from a query are in other pages than older ones.

    far  offset of the older keys' pages in each row of the table; the first has the oldest such position of the first query
    """

    newest: int
    far: int


class Shape(NamedTuple):
    """Tiling of one launch: rows per program, keys per tile, tiles in the grid, splits of the keys, warps, stages."""

    rows: int
    keys: int
    tiles: int
    splits: int
    warps: int
    stages: int


def shape_for(tokens: int, sequences: int, group: int, key_heads: int, widths: tuple[int, int], wide: bool, capacity: int,
              device: torch.device, most: int = 128) -> Shape:  # fmt: skip
    """Choose the tiling: rows to fill the tensor core, keys to fit shared memory, splits to fill the GPU.

    widths    padded: of a key, and of a result
    wide      products in float32
    capacity  positions that a sequence has room for
    most      rows per program, at most
    """
    read, result = widths
    most = min(32 if wide else most, max(16, (4096 if wide else 16384) // result))
    rows = min(most, max(16, power_of_two(cdiv(tokens * group, max(1, sequences)))))
    keys = min(64, max(16, (8192 if wide else 24576) // read // 16 * 16))
    keys = power_of_two(keys + 1) // 2
    tiles = tokens * group // rows + sequences
    programs = PROGRAMS_INTERPRETED if INTERPRETED else 4 * multiprocessors(device)
    wanted = cdiv(programs, tiles * key_heads)
    splits = max(1, min(wanted, MOST_SPLITS, cdiv(capacity, 2 * keys)))
    warps = 8 if rows > 32 or result > 256 else 4
    return Shape(rows, keys, tiles, splits, warps, 2 if wide or read > 256 else 3)


def fits_half_precision(*tensors: Tensor) -> bool:
    """Return whether products may be in 16 bits: all operands share one 16-bit dtype, which the interpreter can multiply."""
    kind = tensors[0].dtype
    if kind is torch.float32 or (INTERPRETED and kind is torch.bfloat16):
        return False
    return all(tensor.dtype is kind for tensor in tensors)


@triton.jit
def rows_of_tile(tile, index, G: tl.constexpr, M: tl.constexpr, S: tl.constexpr):
    """Return a tile's sequence, its first token, new tokens, length, and the first of its rows in the tile."""
    b = tl.arange(0, S)
    start = tl.load(index.starts + b, mask=b < index.sequences, other=0)
    first = tl.where(b < index.sequences, start * G // M + b, 1 << 30)
    sequence = tl.sum((first <= tile).to(tl.int32), 0) - 1
    start = tl.load(index.starts + sequence)
    new = tl.load(index.starts + sequence + 1) - start
    return sequence, start, new, tl.load(index.lengths + sequence), (tile - start * G // M - sequence) * M


@triton.jit
def keys_of_split(first, last, window, block, split, splits, N: tl.constexpr):
    """Return the keys [begin, end) of a split, and those of them [full, edge) that rows at positions [first, last] all see.

    Splits have `block` positions or, with 0, equal ranges of the keys that some row sees. Both ranges are multiples of N from
    `begin` on, except the last.
    """
    low = tl.maximum(0, first - window + 1)
    high = last + 1
    low = low // N * N
    if block == 0:
        share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), N), splits) * N
        begin = low + split * share
        end = tl.minimum(high, begin + share)
    else:
        begin = tl.maximum(low, split * block)
        end = tl.minimum(high, (split + 1) * block)
    end = tl.maximum(end, begin)
    full = begin + tl.cdiv(tl.maximum(last - window + 1 - begin, 0), N) * N
    edge = begin + tl.maximum(tl.minimum(first + 1, end) - begin, 0) // N * N
    return begin, end, full, tl.maximum(full, edge)


@triton.jit
def load_rows(base, row, there, D: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr):
    """Load rows of D elements as [rows, P], zeros where not `there`."""
    d = tl.arange(0, P)
    x = tl.load(base + row[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
    return x.to(tl.float32) if WIDE else x


@triton.jit
def accumulate_values(acc, p, v, seen, N: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr):
    """Add values by their weights; on an edge not every row sees every key, and 0 times NaN must not reach it."""
    if EDGE:
        # 0 where all are finite, otherwise NaN
        if tl.sum(tl.sum(v.to(tl.float32) * 0.0, 0), 0) != 0.0:
            for i in range(N):
                here = tl.arange(0, N) == i
                row = tl.sum(tl.where(here[:, None], v.to(tl.float32), 0.0), 0)
                weight = tl.sum(tl.where(here[None, :], p, 0.0), 1)
                sees = tl.sum((here[None, :] & seen).to(tl.int32), 1) > 0
                acc += tl.where(sees[:, None], weight[:, None] * row[None, :], 0.0)
        else:
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc


@triton.jit
def store_result(out, parts, at, live, acc, m, l, sink, split, splits, D: tl.constexpr, P: tl.constexpr, WHOLE: tl.constexpr):  # noqa: E741
    """Store results where one program saw all keys, otherwise the partials for `merge`."""
    d = tl.arange(0, P)
    if WHOLE:
        top = tl.maximum(m, sink)
        top = tl.where(top == float("-inf"), 0.0, top)
        scale = tl.exp2(m - top)
        total = l * scale + tl.exp2(sink - top)
        acc = tl.where((total == 0)[:, None], 0.0, acc * (scale / total)[:, None])
        tl.store(out + at[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
    else:
        at = at * splits + split
        tl.store(parts.o + at[:, None] * D + d[None, :], acc, mask=live[:, None] & (d < D)[None, :])
        tl.store(parts.m + at, m * LN2, mask=live)
        tl.store(parts.l + at, l, mask=live)
