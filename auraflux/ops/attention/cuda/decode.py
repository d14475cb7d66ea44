"""Decode attention on Hopper, in Gluon: the query heads of one token that share a key head are MMA columns, in 16 bits.

Everything is computed transposed: 64 positions are rows of the score MMA, and value channels rows of the output MMA, so that
no tensor-core row is idle however few the heads are, and the kernel is memory-bound. A producer warp loads keys and values by
TMA, several tiles ahead; those of earlier steps before the preceding kernel has ended.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from auraflux.ops.attention.pages import KVPages
from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.blocks.flash import NO_WINDOW
from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.gpu.blocks.softmax import LOG2E
from auraflux.ops.gpu.device import multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import power_of_two
from auraflux.ops.hopper.split_kv import (
    ACROSS,
    TILE,
    SingleSplit,
    columns,
    empty_split_partials,
    invariant_split_keys,
    merge,
    split_range,
    splits_for,
    sum_of_columns,
    tiles_of,
    top_of_columns,
)

MOST_COLUMNS = 32
MERGED = 64  # channels of a program that merges
F32 = gl.float32
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


class Tiling(NamedTuple):
    """Tiling of heads of one width.

    width      channels of a head
    programs   per multiprocessor
    stages     tiles in flight
    before     how many of them are loaded before the wait
    registers  per thread, few enough that merging programs fit on the same multiprocessor
    """

    width: int
    programs: int
    stages: int
    before: int
    registers: int


TILINGS = (
    Tiling(64, 2, 6, 6, 96),
    # 32768 positions, H200: 33.2 µs; all three tiles before the wait 34.4, one 34.6; before early launches 1 x 6 tiles took
    # 41.0, 2 x 3 38.6 and 3 x 2 39.6
    Tiling(128, 2, 3, 2, 96),
    Tiling(256, 1, 3, 3, 168),
)


def tiling_for(width: int) -> Tiling:
    return next(each for each in TILINGS if each.width == width)


class DecodeShape(NamedTuple):
    """Compile-time shape of the kernel.

    group, key_heads, width  query heads per key head, key heads, channels of a head
    page, sequences          tokens per page, sequences rounded up to a power of two
    columns                  query heads, padded
    stages, before           tiles in flight, and how many of them are loaded before `gdc_wait`
    softcap                  whether scores are capped
    split_keys               see `invariant_split_keys`
    """

    group: int
    key_heads: int
    width: int
    page: int
    sequences: int
    columns: int
    stages: int
    before: int
    softcap: bool
    split_keys: int


class Memory(NamedTuple):
    """Shared memory of a program.

    Q, K, V  queries, and tiles of keys and values in flight
    P        weights
    X        exchange between warps
    bars     barriers of keys full, of values full, of tiles read, and of queries
    """

    Q: Any
    K: Any
    V: Any
    P: Any
    X: Any
    bars: Any


@gluon.jit
def _feed(queries, keys, values, memory, table, begin, old, count, line, head, pool, SHAPE: gl.constexpr):
    HEADS: gl.constexpr = SHAPE.key_heads
    PAGE: gl.constexpr = SHAPE.page
    D: gl.constexpr = SHAPE.width
    N: gl.constexpr = SHAPE.columns
    ST: gl.constexpr = SHAPE.stages
    BEFORE: gl.constexpr = SHAPE.before
    waited = False
    following = gl.load(table + begin // PAGE)
    for i in range(count):
        first, page = begin + i * 64, following
        following = gl.load(table + (begin + gl.minimum(i + 1, count - 1) * 64) // PAGE)
        row = (gl.where((page >= 0) & (page < pool), page, 0) * HEADS + head) * PAGE + first % PAGE
        if (not waited) & ((first + 64 > old) | (i == BEFORE)):
            # queries and the newest keys may come from the preceding kernel; its end is seen when pending loads are complete
            gdc_wait()
            gdc_launch_dependents()
            waited = True
            mbarrier.expect(memory.bars.index(3 * ST), N * D * 2)
            tma.async_copy_global_to_shared(queries, [line, 0], memory.bars.index(3 * ST), memory.Q)
        mbarrier.wait(memory.bars.index(2 * ST + i % ST), (i // ST % 2) ^ 1)
        mbarrier.expect(memory.bars.index(i % ST), 64 * D * 2)
        tma.async_copy_global_to_shared(keys, [row, 0], memory.bars.index(i % ST), memory.K.index(i % ST))
        mbarrier.expect(memory.bars.index(ST + i % ST), 64 * D * 2)
        tma.async_copy_global_to_shared(values, [row, 0], memory.bars.index(ST + i % ST), memory.V.index(i % ST))
    if not waited:
        gdc_wait()
        gdc_launch_dependents()
        mbarrier.expect(memory.bars.index(3 * ST), N * D * 2)
        tma.async_copy_global_to_shared(queries, [line, 0], memory.bars.index(3 * ST), memory.Q)


@gluon.jit
def _clear(V, low, high, D: gl.constexpr):
    """Zero positions that are not visible, so that a weight of 0 times them is 0."""
    row = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    seen = (row >= low) & (row < high)
    for part in gl.static_range(D // 64):
        some = V.slice(part * 64, 64, dim=1)
        some.store(gl.where(seen[:, None], some.load(ROWS), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _attend(memory, table, sinks, parts, scale, softcap, seen, line, head, share, pool, SHAPE: gl.constexpr):
    G: gl.constexpr = SHAPE.group
    PAGE: gl.constexpr = SHAPE.page
    D: gl.constexpr = SHAPE.width
    N: gl.constexpr = SHAPE.columns
    ST: gl.constexpr = SHAPE.stages
    begin, low, end, count = seen
    split, splits = share
    T: gl.constexpr = columns(N)
    DTYPE: gl.constexpr = memory.K.dtype
    position, query = gl.arange(0, 64, gl.SliceLayout(1, T)), gl.arange(0, N, gl.SliceLayout(0, T))
    m = gl.full([N], float("-inf"), F32, gl.SliceLayout(0, T))
    l = gl.full([64, N], 0.0, F32, T)  # noqa: E741
    acc = gl.full([D, N], 0.0, F32, T)
    zero = gl.full([64, N], 0.0, F32, T)
    following = gl.load(table + begin // PAGE)
    gdc_wait()
    mbarrier.wait(memory.bars.index(3 * ST), 0)
    for i in range(count):
        first, stage, phase = begin + i * 64, i % ST, i // ST % 2
        page, following = following, gl.load(table + (begin + gl.minimum(i + 1, count - 1) * 64) // PAGE)
        till = gl.where((page >= 0) & (page < pool), end - first, 0)
        mbarrier.wait(memory.bars.index(stage), phase)
        s = warpgroup_mma(memory.K.index(stage), memory.Q.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s]) * scale
        if SHAPE.softcap:
            # tanh by one exponential; only its absolute error matters here
            s = softcap * (1.0 - 2.0 / (gl.exp(2.0 * (s / softcap)) + 1.0))
        s = gl.where(((position < till) & (first + position >= low))[:, None], s * LOG2E, float("-inf"))
        top = gl.maximum(m, top_of_columns(s, memory.X, N))
        safe = gl.where(top == float("-inf"), 0.0, top)
        p = gl.exp2(s - safe[None, :])
        fade = gl.exp2(m - safe)
        m, l = top, l * fade[None, :] + p  # noqa: E741
        memory.P.permute((1, 0)).store(p.to(DTYPE))
        mbarrier.wait(memory.bars.index(ST + stage), phase)
        if (till < 64) | (first < low):
            _clear(memory.V.index(stage), low - first, till, D)
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(memory.V.index(stage).permute((1, 0)), memory.P.permute((1, 0)), acc * fade[None, :], is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(memory.bars.index(2 * ST + stage))
    total, channel, inside = sum_of_columns(l, memory.X, N), gl.arange(0, D, gl.SliceLayout(1, T)), query < G
    at = line.to(gl.int64) * splits + split
    if parts.m is not None:
        gl.store(parts.m + at + query * splits, m, mask=inside)
        gl.store(parts.l + at + query * splits, total, mask=inside)
    if sinks is not None:
        sink = gl.load(sinks + head * G + query, mask=inside, other=0.0) * LOG2E
        total += gl.exp2(sink - gl.where(m == float("-inf"), sink, m))
    part = gl.where(total == 0.0, 0.0, 1.0 / total)
    where = at * D + (query[None, :] * (splits * D) + channel[:, None])
    gl.store(
        parts.o + where, (acc * part[None, :]).to(parts.o.dtype.element_ty), mask=inside[None, :] & (channel >= 0)[:, None]
    )


@gluon.jit
def decode_columns(
    queries, keys, values, index, sinks, parts, scale, softcap, window, heads, splits, SHAPE: gl.constexpr,
):  # fmt: skip
    """Attend from G heads of one token, N columns, to one split of their visible positions; grid (tokens * HEADS, splits)."""
    G: gl.constexpr = SHAPE.group
    HEADS: gl.constexpr = SHAPE.key_heads
    D: gl.constexpr = SHAPE.width
    N: gl.constexpr = SHAPE.columns
    ST: gl.constexpr = SHAPE.stages
    token, head, split = gl.program_id(0) // HEADS, gl.program_id(0) % HEADS, gl.program_id(1)
    share = split_range(token, split, splits, window, index, SHAPE.sequences, 64, SHAPE.split_keys)
    sequence, begin, low, end, count, old, _ = share
    table = index.table + sequence.to(gl.int64) * index.width
    Q = gl.allocate_shared_memory(keys.dtype, [N, D], queries.layout)
    K = gl.allocate_shared_memory(keys.dtype, [ST, 64, D], keys.layout)
    V = gl.allocate_shared_memory(keys.dtype, [ST, 64, D], values.layout)
    P = gl.allocate_shared_memory(keys.dtype, [N, 64], gl.NVMMASharedLayout.get_default_for([N, 64], keys.dtype))
    X = gl.allocate_shared_memory(F32, [4, N], ACROSS)
    bars = gl.allocate_shared_memory(gl.int64, [3 * ST + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3 * ST + 1):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    line, memory = token * heads + head * G, Memory(Q, K, V, P, X, bars)
    gl.warp_specialize(
        [
            (_attend, (memory, table, sinks, parts, scale, softcap, (begin, low, end, count), line, head, (split, splits),
                       index.pool, SHAPE)),
            (_feed, (queries, keys, values, memory, table, begin, old, count, line, head, index.pool, SHAPE)),
        ],
        [1],
        [56],
    )  # fmt: skip


def attend_decode(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    out: Tensor,
) -> None:
    """Run `attention` into `out`."""
    (tokens, heads, width), (_, key_heads, page, _) = q.shape, pages.k.shape
    (sequences, table_width), group = pages.table.shape, heads // key_heads
    programs, tiling = tokens * key_heads, tiling_for(width)
    stages, before = tiling.stages, tiling.before
    splits, fixed = (
        splits_for(tiling.programs * multiprocessors(q.device) // programs, table_width * page),
        invariant_split_keys(),
    )
    parts = None if splits == 1 and not fixed else empty_split_partials(tokens * heads, splits, width, torch.float32, q.device)
    n, seen = max(8, power_of_two(group)), NO_WINDOW if window is None else window
    launch(decode_columns, (programs, splits))(
        tiles_of(q, n), tiles_of(pages.k, TILE), tiles_of(pages.v, TILE), index_of(pages, starts),
        sinks if parts is None else None, parts or SingleSplit(out), scale, softcap or 1.0, seen, heads, splits,
        DecodeShape(group, key_heads, width, page, power_of_two(sequences), n, stages, before, softcap is not None, fixed),
        num_warps=4, maxnreg=tiling.registers, launch_pdl=True,
    )  # fmt: skip
    if parts is not None:
        merge(parts, sinks, out, MERGED, before < stages)
