"""What all attention kernels on CUDA share: which rows a program has, which keys they see, and the running softmax.

The rows of a program are query heads that share a key head, of one token or of several: row r of a sequence is head r % G of
its token r // G. Nobody on the host knows how the tokens fall to sequences, so the grid has room for the worst case: sequence b
begins at tile starts[b] * G // M + b, and tiles that get no row end at once. With few tiles the keys are split too, into equal
shares of what the rows see, and the parts merged by a second kernel. Scores are kept in units of log2(e).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.hopper.device import INTERPRETED, multiprocessors
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.sizes import cdiv, power_of_two

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
EVERYTHING = 1 << 30  # positions; further back than any sequence is long
MOST_SPLITS = 128
PROGRAMS_INTERPRETED = 16  # at a time, where each takes milliseconds and none runs beside another

Parts = tuple[Tensor, Tensor, Tensor]


class Shape(NamedTuple):
    """How one launch is cut: rows of a program, keys at a time, tiles in the grid, splits of the keys, warps, stages."""

    rows: int
    keys: int
    tiles: int
    splits: int
    warps: int
    stages: int


def shape_for(tokens: int, sequences: int, group: int, key_heads: int, widths: tuple[int, int], wide: bool, capacity: int,
              device: torch.device, most: int = 128) -> Shape:  # fmt: skip
    """Cut the work: rows to fill the tensor core, keys to fit shared memory, splits to fill the GPU.

    widths    padded: of what is read of a key, and of a result
    wide      products in float32
    capacity  positions that a sequence has room for
    most      rows that a program may have
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


def narrow(*tensors: Tensor) -> bool:
    """Whether products may be in 16 bits: all operands have the same 16. Triton's interpreter cannot multiply bfloat16."""
    kind = tensors[0].dtype
    if kind is torch.float32 or (INTERPRETED and kind is torch.bfloat16):
        return False
    return all(tensor.dtype is kind for tensor in tensors)


@triton.jit
def rows_of_tile(tile, starts, lengths, sequences, G: tl.constexpr, M: tl.constexpr, S: tl.constexpr):
    """Find a tile's sequence; give it, its first token, new tokens, length, and the first of its rows in the tile."""
    b = tl.arange(0, S)
    start = tl.load(starts + b, mask=b < sequences, other=0)
    first = tl.where(b < sequences, start * G // M + b, 1 << 30)
    sequence = tl.sum((first <= tile).to(tl.int32), 0) - 1
    start = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - start
    return sequence, start, new, tl.load(lengths + sequence), (tile - start * G // M - sequence) * M


@triton.jit
def keys_of_split(first, last, window, block, split, splits, N: tl.constexpr):
    """Give the keys [begin, end) of a split, and those of them [full, edge) that rows at positions [first, last] all see.

    Splits are of `block` positions, or, with 0, equal shares of the keys that some row sees. Both ranges are of whole tiles of
    N from `begin` on, apart from the last.
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
def place_keys(
    table, first, end, head, table_width, pool, HEADS: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Find N keys in the pool: a row, how many rows each lies after it, and whether it is there.

    A table that leads outside the pool is not followed. ALIGNED means that all N keys lie in one page.
    """
    key = first + tl.arange(0, N)
    if ALIGNED:
        page = tl.load(table + first // PAGE, mask=first < table_width * PAGE, other=-1)
        there = (key < end) & (page >= 0) & (page < pool)
        origin = (page.to(tl.int64) * HEADS + head) * PAGE + first % PAGE
        row = tl.arange(0, N)
    else:
        page = tl.load(table + key // PAGE, mask=(key < end) & (key < table_width * PAGE), other=-1)
        there = (page >= 0) & (page < pool)
        origin = tl.cast(0, tl.int64)
        row = (page.to(tl.int64) * HEADS + head) * PAGE + key % PAGE
    return origin, row, there


@triton.jit
def capped(s, softcap, SOFTCAP: tl.constexpr):
    """Squash scores, and bring them to base 2."""
    if SOFTCAP:
        # tanh by one exponential; its absolute error is what counts here
        s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (s / softcap)) + 1.0))
    return s * LOG2E


@triton.jit
def soften(s, m, l):  # noqa: E741
    """Take a tile of scores into the running softmax: weights, what becomes of earlier sums, maximum and sum."""
    top = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s - safe[:, None])
    fade = tl.exp2(m - safe)
    return p, fade, top, l * fade + tl.sum(p, 1)


@triton.jit
def mix(acc, p, v, seen, N: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr):
    """Add values by their weights. On an edge not every row sees every key: 0 times NaN must not reach it."""
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
def leave(out, parts, at, live, acc, m, l, sink, split, splits, D: tl.constexpr, P: tl.constexpr, WHOLE: tl.constexpr):  # noqa: E741
    """Store results where one program saw all keys, otherwise what `merge` needs; parts are (sums, maxima, sums of weights)."""
    d = tl.arange(0, P)
    if WHOLE:
        top = tl.maximum(m, sink)
        top = tl.where(top == float("-inf"), 0.0, top)
        kept = tl.exp2(m - top)
        total = l * kept + tl.exp2(sink - top)
        acc = tl.where((total == 0)[:, None], 0.0, acc * (kept / total)[:, None])
        tl.store(out + at[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
    else:
        o, highest, sums = parts
        at = at * splits + split
        tl.store(o + at[:, None] * D + d[None, :], acc, mask=live[:, None] & (d < D)[None, :])
        tl.store(highest + at, m * LN2, mask=live)
        tl.store(sums + at, l, mask=live)


@triton.jit
def merged_row(o, m, l, row, sink, blocks, d, D: tl.constexpr, S: tl.constexpr, C: tl.constexpr):  # noqa: E741
    """Merge the blocks of one row at coordinates `d`, `sink` being one more block's logit, or -inf: sums, maximum, total."""
    s = tl.arange(0, S)
    l_all = tl.load(l + row * blocks + s, mask=s < blocks, other=0.0)
    m_all = tl.load(m + row * blocks + s, mask=(s < blocks) & (l_all != 0), other=float("-inf"))
    highest = tl.maximum(tl.max(m_all, 0), sink)
    top = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.where(l_all != 0, tl.exp(m_all - top) * l_all, 0.0), 0) + tl.exp(sink - top)
    acc = tl.zeros([d.shape[0]], tl.float32)
    for first in range(0, blocks, C):
        block = first + tl.arange(0, C)
        live = tl.load(l + row * blocks + block, mask=block < blocks, other=0.0) != 0
        high = tl.load(m + row * blocks + block, mask=live, other=float("-inf"))
        at = (row * blocks + block)[:, None] * D + d[None, :]
        values = tl.load(o + at, mask=live[:, None] & (d < D)[None, :], other=0.0)
        acc += tl.sum(tl.where(live, tl.exp(high - top), 0.0)[:, None] * values, 0)
    return acc, highest, total


@triton.jit
def merge(o, m, l, sinks, out, heads, blocks, D: tl.constexpr, P: tl.constexpr, S: tl.constexpr, C: tl.constexpr):  # noqa: E741
    """Merge the blocks of one row; grid (rows, parts of P coordinates)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * P + tl.arange(0, P)
    sink = float("-inf") if sinks is None else tl.load(sinks + row % heads)
    acc, _, total = merged_row(o, m, l, row, sink, blocks, d, D, S, C)
    found = tl.where(total == 0, 0.0, acc / total)
    tl.store(out + row * D + d, found.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def join(
    o,
    m,
    l,  # noqa: E741
    sinks,
    out_o,
    out_m,
    out_l,
    heads,
    blocks,
    D: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
):
    """Merge the blocks of one row into one block; grid (rows, parts of P coordinates)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * P + tl.arange(0, P)
    sink = float("-inf") if sinks is None else tl.load(sinks + row % heads)
    acc, highest, total = merged_row(o, m, l, row, sink, blocks, d, D, S, C)
    tl.store(out_o + row * D + d, acc, mask=d < D)
    tl.store(out_m + row, highest, mask=tl.program_id(1) == 0)
    tl.store(out_l + row, total, mask=tl.program_id(1) == 0)


def launch_merge(parts: Parts, sinks: Tensor | None, out: Tensor | Parts, heads: int) -> None:
    """Merge parts [rows, blocks, D], [rows, blocks], [rows, blocks] into out [rows, D], or into parts of one block."""
    rows, blocks, width = parts[0].shape
    piece = min(64, power_of_two(width))
    sizes = {"D": width, "P": piece, "S": power_of_two(blocks), "C": min(32, power_of_two(blocks))}
    grid = rows, cdiv(width, piece)
    if rows and isinstance(out, tuple):
        launch(join, grid)(*parts, sinks, *out, heads, blocks, **sizes)
    elif rows:
        launch(merge, grid)(*parts, sinks, out, heads, blocks, **sizes)


def parts_like(rows: int, splits: int, width: int, device: torch.device) -> Parts:
    return (
        torch.empty(rows, splits, width, device=device),
        torch.empty(rows, splits, device=device),
        torch.empty(rows, splits, device=device),
    )
