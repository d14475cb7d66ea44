"""Latent attention of few heads and few tokens on Hopper, in Gluon: the heads of one token are MMA columns, in bf16.

Everything is computed transposed: latents of 64 positions are rows of the score MMA and, transposed, of the output MMA, so
that no tensor-core row is idle however few the heads are, and the kernel is memory-bound. A producer warp loads latents by
TMA, those of earlier steps before the preceding kernel has ended.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from auraflux.ops.attention.cuda.mla_tma import LatentShape, clear, feed
from auraflux.ops.attention.pages import LatentPages
from auraflux.ops.gpu.blocks.dependent_launch import gdc_wait
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
LATENT = 512
STAGES = 2
MERGED = 64  # channels of a program that merges
BF, F32 = gl.bfloat16, gl.float32
PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0,0;")


class Tiling(NamedTuple):
    """Tiling of query heads, padded to columns.

    columns    of a program, at most
    registers  per thread, few enough that merging programs fit on the same multiprocessor
    before     tiles loaded before the wait
    """

    columns: int
    registers: int
    before: int


TILINGS = (
    # 32768 positions, 16 heads, H200: 14.0 µs; both tiles before the wait 16.0, none 15.1
    Tiling(16, 128, 1),
    # 32 heads: 19.3 µs; 21.0 if the next call begins before the merge's wait
    Tiling(32, 216, 2),
)


def tiling_for(columns: int) -> Tiling:
    return next(each for each in TILINGS if columns <= each.columns)


class Memory(NamedTuple):
    """Shared memory of a program.

    Q, QR  queries and rotated queries
    K, R   tiles of latents and of rotated keys in flight
    P      weights
    X      exchange between warps
    bars   barriers of tiles full and empty, and of queries
    """

    Q: Any
    QR: Any
    K: Any
    R: Any
    P: Any
    X: Any
    bars: Any


@gluon.jit
def _prefetch(line):
    """Prefetch 128 bytes into the L2 cache."""
    gl.inline_asm_elementwise(PREFETCH, "=r,l,~{memory}", [line.to(gl.int64)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _attend(memory, table, parts, scale, seen, token, heads, split, splits, pool, SHAPE: gl.constexpr):
    PAGE: gl.constexpr = SHAPE.page
    N: gl.constexpr = SHAPE.heads
    ST: gl.constexpr = SHAPE.stages
    begin, end, count = seen
    T: gl.constexpr = columns(N)
    position, head = gl.arange(0, 64, gl.SliceLayout(1, T)), gl.arange(0, N, gl.SliceLayout(0, T))
    m = gl.full([N], float("-inf"), F32, gl.SliceLayout(0, T))
    l = gl.full([64, N], 0.0, F32, T)  # noqa: E741
    acc = gl.full([512, N], 0.0, F32, T)
    zero = gl.full([64, N], 0.0, F32, T)
    following = gl.load(table + begin // PAGE)
    gdc_wait()
    mbarrier.wait(memory.bars.index(2 * ST), 0)
    for i in range(count):
        first, tile = begin + i * 64, memory.K.index(i % ST)
        page, following = following, gl.load(table + (begin + gl.minimum(i + 1, count - 1) * 64) // PAGE)
        left = gl.where((page >= 0) & (page < pool), end - first, 0)
        mbarrier.wait(memory.bars.index(i % ST), i // ST % 2)
        if left < 64:
            clear(tile, left, 64)
        s = warpgroup_mma(tile, memory.Q.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(memory.R.index(i % ST), memory.QR.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        s = gl.where((position < left)[:, None], s * scale, float("-inf"))
        top = gl.maximum(m, top_of_columns(s, memory.X, N))
        safe = gl.where(top == float("-inf"), 0.0, top)
        p = gl.exp2(s - safe[None, :])
        fade = gl.exp2(m - safe)
        m, l = top, l * fade[None, :] + p  # noqa: E741
        memory.P.permute((1, 0)).store(p.to(BF))
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(tile.permute((1, 0)), memory.P.permute((1, 0)), acc * fade[None, :], is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(memory.bars.index(ST + i % ST))
    total, channel, inside = sum_of_columns(l, memory.X, N), gl.arange(0, 512, gl.SliceLayout(1, T)), head < heads
    at = token.to(gl.int64) * heads * splits + split
    if parts.m is not None:
        gl.store(parts.m + at + head * splits, m, mask=inside)
        gl.store(parts.l + at + head * splits, total, mask=inside)
    part = gl.where(total == 0.0, 0.0, 1.0 / total)
    where = at * 512 + (head[None, :] * (splits * 512) + channel[:, None])
    gl.store(
        parts.o + where, (acc * part[None, :]).to(parts.o.dtype.element_ty), mask=inside[None, :] & (channel >= 0)[:, None]
    )


@gluon.jit
def latent_columns(queries, rotated, latents, ropes, q_latent, q_rope, index, parts, scale, heads, splits, SHAPE: gl.constexpr):
    """Attend from all heads of one token, at most N, to one split of its positions; grid (tokens, splits).

    q_latent, q_rope  the queries again: all programs prefetch them to L2 while they wait for the preceding kernel
    """
    N: gl.constexpr = SHAPE.heads
    ST: gl.constexpr = SHAPE.stages
    token, split = gl.program_id(0), gl.program_id(1)
    _prefetch(q_latent + (token * heads + split // 8 % heads) * 512 + split % 8 * 64)
    _prefetch(q_rope + (token * heads + split % heads) * 64)
    share = split_range(token, split, splits, 1 << 30, index, SHAPE.sequences, 64, SHAPE.split_keys)
    sequence, begin, _, end, count, old, _ = share
    table = index.table + sequence.to(gl.int64) * index.width
    Q = gl.allocate_shared_memory(BF, [N, 512], queries.layout)
    QR = gl.allocate_shared_memory(BF, [N, 64], rotated.layout)
    K = gl.allocate_shared_memory(BF, [ST, 64, 512], latents.layout)
    R = gl.allocate_shared_memory(BF, [ST, 64, 64], ropes.layout)
    P = gl.allocate_shared_memory(BF, [N, 64], rotated.layout)
    X = gl.allocate_shared_memory(F32, [4, N], ACROSS)
    bars = gl.allocate_shared_memory(gl.int64, [2 * ST + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * ST + 1):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    memory = Memory(Q, QR, K, R, P, X, bars)
    gl.warp_specialize(
        [
            (_attend, (memory, table, parts, scale, (begin, end, count), token, heads, split, splits, index.pool, SHAPE)),
            (feed, (queries, rotated, latents, ropes, memory, table, begin, old, count, token * heads, index.pool, SHAPE)),
        ],
        [1],
        [56],
    )  # fmt: skip


def attend_columns(
    q_latent: Tensor,
    q_rope: Tensor,
    pages: LatentPages,
    starts: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Run `latent_attention` of few heads into `out`."""
    (tokens, heads, _), (sequences, table_width), page = q_latent.shape, pages.table.shape, pages.pool[1]
    splits, fixed = splits_for(multiprocessors(out.device) // tokens, table_width * page), invariant_split_keys()
    parts = (
        None if splits == 1 and not fixed else empty_split_partials(tokens * heads, splits, LATENT, torch.float32, out.device)
    )
    n = max(8, power_of_two(heads))
    _, registers, before = tiling_for(n)
    launch(latent_columns, (tokens, splits))(
        tiles_of(q_latent, n), tiles_of(q_rope, n), tiles_of(pages.latent, TILE), tiles_of(pages.rope, TILE),
        q_latent, q_rope, index_of(pages, starts), parts or SingleSplit(out), scale * LOG2E.value, heads, splits,
        LatentShape(page, power_of_two(sequences), n, TILE, STAGES, before, fixed),
        num_warps=4, maxnreg=registers, launch_pdl=True,
    )  # fmt: skip
    if parts is not None:
        merge(parts, None, out, MERGED, before < STAGES)
