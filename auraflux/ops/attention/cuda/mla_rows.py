"""Latent attention of many heads on Hopper, in Gluon: 64 heads of one token per program, in bf16.

Latents are loaded by TMA once, and serve as keys, then as values. One warpgroup computes scores and weights; two others have
half of the output channels each, and accumulate one tile while the first computes the scores of the next. Weights and the
rescaling of earlier sums are exchanged through shared memory.
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

from auraflux.ops.attention.cuda.mla_tma import ROWS, LatentShape, clear, feed
from auraflux.ops.attention.pages import LatentPages
from auraflux.ops.gpu.blocks.dependent_launch import gdc_wait
from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.gpu.blocks.softmax import LOG2E
from auraflux.ops.gpu.device import multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.hopper.split_kv import (
    TILE,
    SingleSplit,
    columns,
    empty_split_partials,
    invariant_split_keys,
    merge,
    split_range,
    splits_for,
    tiles_of,
)

HEADS, LATENT, ROPE = 64, 512, 64  # of a program, and channels
STAGES = 2
MERGED = 128  # channels of a program that merges
BF, F32 = gl.bfloat16, gl.float32
# wider instructions need more registers than the compiler has
SUMS = gl.constexpr(columns(128))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Memory(NamedTuple):
    """Shared memory of a program.

    Q, QR  queries and rotated queries
    K, R   tiles of latents and of rotated keys in flight
    P, F   weights, and the rescaling of earlier sums
    bars   barriers of tiles full and empty, of queries, of weights ready and used
    """

    Q: Any
    QR: Any
    K: Any
    R: Any
    P: Any
    F: Any
    bars: Any


@gluon.jit
def _score(memory, table, parts, scale, begin, end, count, at, room, splits, pool, SHAPE: gl.constexpr):
    """Compute the weights of each tile, and finally the normalisation of the results."""
    PAGE: gl.constexpr = SHAPE.page
    N: gl.constexpr = SHAPE.positions
    ST: gl.constexpr = SHAPE.stages
    T: gl.constexpr = columns(N)
    position, row = gl.arange(0, N, gl.SliceLayout(0, T)), gl.arange(0, 64, gl.SliceLayout(1, T))
    m = gl.full([64], float("-inf"), F32, gl.SliceLayout(1, T))
    l = gl.full([64], 0.0, F32, gl.SliceLayout(1, T))  # noqa: E741
    zero = gl.full([64, N], 0.0, F32, T)
    following = gl.load(table + begin // PAGE)
    gdc_wait()
    mbarrier.wait(memory.bars.index(2 * ST), 0)
    for i in range(count):
        first, tile = begin + i * N, memory.K.index(i % ST)
        page, following = following, gl.load(table + (begin + gl.minimum(i + 1, count - 1) * N) // PAGE)
        left = gl.where((page >= 0) & (page < pool), end - first, 0)
        mbarrier.wait(memory.bars.index(i % ST), i // ST % 2)
        if left < N:
            clear(tile, left, N)
        s = warpgroup_mma(memory.Q, tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(memory.QR, memory.R.index(i % ST).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        s = gl.where((position < left)[None, :], s * scale, float("-inf"))
        top = gl.maximum(m, gl.max(s, 1))
        safe = gl.where(top == float("-inf"), 0.0, top)
        p = gl.exp2(s - safe[:, None])
        fade = gl.exp2(m - safe)
        m, l = top, l * fade + gl.sum(p, 1)  # noqa: E741
        mbarrier.wait(memory.bars.index(2 * ST + 2), (i % 2) ^ 1)
        memory.P.store(p.to(BF))
        memory.F.store(fade)
        fence_async_shared()
        mbarrier.arrive(memory.bars.index(2 * ST + 1))
    mbarrier.wait(memory.bars.index(2 * ST + 2), (count % 2) ^ 1)
    memory.F.store(gl.where(l == 0.0, 0.0, 1.0 / l))
    mbarrier.arrive(memory.bars.index(2 * ST + 1))
    if parts.m is not None:
        gl.store(parts.m + at + row * splits, m, mask=row < room)
        gl.store(parts.l + at + row * splits, l, mask=row < room)


@gluon.jit
def _mix(memory, out, count, at, room, splits, ST: gl.constexpr, HALF: gl.constexpr):
    """Accumulate half of the channels, and store the normalised results."""
    acc = gl.full([64, 256], 0.0, F32, SUMS)
    for i in range(count):
        mbarrier.wait(memory.bars.index(i % ST), i // ST % 2)
        mbarrier.wait(memory.bars.index(2 * ST + 1), i % 2)
        fade = memory.F.load(gl.SliceLayout(1, SUMS))
        acc = warpgroup_mma(memory.P, memory.K.index(i % ST).slice(HALF * 256, 256, dim=1), acc * fade[:, None], is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(memory.bars.index(2 * ST + 2))
        mbarrier.arrive(memory.bars.index(ST + i % ST))
    mbarrier.wait(memory.bars.index(2 * ST + 1), count % 2)
    # reuses the memory of the queries for coalesced stores
    lines = memory.Q.slice(HALF * 256, 256, dim=1)
    lines.store((acc * memory.F.load(gl.SliceLayout(1, SUMS))[:, None]).to(BF))
    gl.thread_barrier()
    row, channel = gl.arange(0, 64, gl.SliceLayout(1, ROWS)), gl.arange(0, 256, gl.SliceLayout(0, ROWS))
    where = at * 512 + HALF * 256 + (row[:, None] * (splits * 512) + channel[None, :])
    gl.store(out + where, lines.load(ROWS), mask=(row < room)[:, None] & (channel >= 0)[None, :])


@gluon.jit
def latent_rows(queries, rotated, latents, ropes, index, parts, scale, heads, splits, SHAPE: gl.constexpr):
    """Attend from 64 heads of one token to one split of its positions; grid (tokens * head tiles, splits)."""
    N: gl.constexpr = SHAPE.positions
    ST: gl.constexpr = SHAPE.stages
    tiles = (heads + 63) // 64
    token, first, split = gl.program_id(0) // tiles, gl.program_id(0) % tiles * 64, gl.program_id(1)
    share = split_range(token, split, splits, 1 << 30, index, SHAPE.sequences, N, SHAPE.split_keys)
    sequence, begin, _, end, count, old, _ = share
    line, room = token * heads + first, heads - first
    at = line.to(gl.int64) * splits + split
    table = index.table + sequence.to(gl.int64) * index.width
    Q = gl.allocate_shared_memory(BF, [64, 512], queries.layout)
    QR = gl.allocate_shared_memory(BF, [64, 64], rotated.layout)
    K = gl.allocate_shared_memory(BF, [ST, N, 512], latents.layout)
    R = gl.allocate_shared_memory(BF, [ST, N, 64], ropes.layout)
    P = gl.allocate_shared_memory(BF, [64, N], gl.NVMMASharedLayout.get_default_for([64, N], BF))
    F = gl.allocate_shared_memory(F32, [64], LINE)
    bars = gl.allocate_shared_memory(gl.int64, [2 * ST + 3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * ST + 3):
        mbarrier.init(bars.index(i), count=2 if (i >= ST and i < 2 * ST) or i == 2 * ST + 2 else 1)
    fence_async_shared()
    gl.thread_barrier()
    memory = Memory(Q, QR, K, R, P, F, bars)
    gl.warp_specialize(
        [
            (_score, (memory, table, parts, scale, begin, end, count, at, room, splits, index.pool, SHAPE)),
            (_mix, (memory, parts.o, count, at, room, splits, ST, 0)),
            (_mix, (memory, parts.o, count, at, room, splits, ST, 1)),
            (feed, (queries, rotated, latents, ropes, memory, table, begin, old, count, line, index.pool, SHAPE)),
        ],
        [4, 4, 1],
        [184, 184, 40],
    )  # fmt: skip


def attend_rows(
    q_latent: Tensor,
    q_rope: Tensor,
    pages: LatentPages,
    starts: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Run `latent_attention` of many heads into `out`."""
    (tokens, heads, _), (sequences, table_width), page = q_latent.shape, pages.table.shape, pages.pool[1]
    tiles = tokens * cdiv(heads, HEADS)
    splits, fixed = splits_for(multiprocessors(out.device) // tiles, table_width * page), invariant_split_keys()
    # bf16 partials: the additional rounding is below that of the result
    parts = (
        None if splits == 1 and not fixed else empty_split_partials(tokens * heads, splits, LATENT, torch.bfloat16, out.device)
    )
    launch(latent_rows, (tiles, splits))(
        tiles_of(q_latent, HEADS), tiles_of(q_rope, HEADS), tiles_of(pages.latent, TILE), tiles_of(pages.rope, TILE),
        index_of(pages, starts), parts or SingleSplit(out), scale * LOG2E.value, heads, splits,
        LatentShape(page, power_of_two(sequences), HEADS, TILE, STAGES, STAGES, fixed), num_warps=4, launch_pdl=True,
    )  # fmt: skip
    if parts is not None:
        merge(parts, None, out, MERGED, False)
