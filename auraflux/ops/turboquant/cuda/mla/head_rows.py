"""MLA decode attention over codes for many heads on Hopper, in Gluon: 64 heads of one token per program.

Four warp-specialized groups: one decodes tiles, one computes scores and softmax weights, two accumulate half of the output
channels each. A tile's buffer is free after both have used it.
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

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.gpu.blocks.softmax import LOG2E
from auraflux.ops.gpu.device import multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.hopper.split_kv import columns, empty_split_partials, invariant_split_keys, split_range, splits_for, tiles_of
from auraflux.ops.turboquant.cuda.arguments import CodeTensors
from auraflux.ops.turboquant.cuda.encode.hadamard import rotation_for
from auraflux.ops.turboquant.cuda.mla.full_precision import full_precision_latent_shape, full_precision_latents
from auraflux.ops.turboquant.cuda.mla.lookup import Config, decode, is_full_precision, page_of, shared_rows, table_for, tile_at
from auraflux.ops.turboquant.cuda.mla.merge import hadamard_queries, merge_rotated
from auraflux.ops.turboquant.pages import LatentCodes

HEADS, LATENT = 64, 512  # heads per program, and channels
TILE = 32  # positions
STAGES = 3  # decoded tiles
REGISTERS = 128
MIXED = 32  # stride of the lowest of the three channel bits whose transform runs before splits are stored

F16, BF, F32 = gl.constexpr(gl.float16), gl.constexpr(gl.bfloat16), gl.constexpr(gl.float32)
# wider instructions need more registers than the compiler accounts for
SUMS = gl.constexpr(columns(128))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Tiling(NamedTuple):
    """Ring of codes of one bit width: rows per chunk, chunks in flight per warp."""

    bits: int
    rows: int
    chunks: int


TILINGS = (Tiling(4, 4, 4), Tiling(8, 4, 2))


def tiling_for(bits: int) -> Tiling:
    return next(each for each in TILINGS if each.bits == bits)


class Source(NamedTuple):
    """TMA descriptors of queries, RoPE queries and RoPE keys."""

    queries: Any
    rotated: Any
    ropes: Any


class Memory(NamedTuple):
    """Shared memory of a program.

    Q, QR     queries and RoPE queries
    shared    the level table and decoded tiles
    R         RoPE keys
    P, F      softmax weights, and factors that rescale earlier sums
    tiles     barriers of full tiles, of empty tiles
    barriers  of queries, of RoPE keys, of weights written and used
    """

    Q: Any
    QR: Any
    shared: Any
    R: Any
    P: Any
    F: Any
    tiles: Any
    barriers: Any


@gluon.jit
def _score(
    source, memory, table, norms, partials, scale, unit, span, dest, pool, CONFIG: gl.constexpr
):  # fmt: skip
    """Compute the softmax weights of each tile, and finally the normalization of the output.

    span  first and last position, tokens of the sequence, number of tiles
    dest  first row of queries, first row of partial results, rows, number of splits
    """
    PAGE: gl.constexpr = CONFIG.page
    NP: gl.constexpr = CONFIG.positions
    ST: gl.constexpr = CONFIG.stages
    FULL: gl.constexpr = CONFIG.full
    begin, end, seen, count = span
    line, at, room, splits = dest
    T: gl.constexpr = columns(NP)
    position, row = gl.arange(0, NP, gl.SliceLayout(0, T)), gl.arange(0, 64, gl.SliceLayout(1, T))
    m = gl.full([64], float("-inf"), F32, gl.SliceLayout(1, T))
    l = gl.full([64], 0.0, F32, gl.SliceLayout(1, T))  # noqa: E741
    zero = gl.full([64, NP], 0.0, F32, T)
    page = page_of(table, begin, 0, count, PAGE, NP)
    following = page_of(table, begin, 1, count, PAGE, NP)
    gdc_wait()
    mbarrier.expect(memory.barriers.index(0), 64 * 576 * 2)
    tma.async_copy_global_to_shared(source.queries, [line, 0], memory.barriers.index(0), memory.Q)
    tma.async_copy_global_to_shared(source.rotated, [line, 0], memory.barriers.index(0), memory.QR)
    there = (page >= 0) & (page < pool)
    origin = gl.where(there, page, 0) * PAGE + begin % PAGE
    if count > 0:
        mbarrier.expect(memory.barriers.index(1), NP * 128)
        tma.async_copy_global_to_shared(source.ropes, [origin, 0], memory.barriers.index(1), memory.R)
    norm = gl.load(norms + origin.to(gl.int64) + position)
    mbarrier.wait(memory.barriers.index(0), 0)
    for i in range(count):
        first = begin + i * NP
        remaining = gl.where(there, end - first, 0)
        tile = tile_at(memory.shared, i, NP, ST)
        mbarrier.wait(memory.tiles.index(i % ST), i // ST % 2)
        c = warpgroup_mma(memory.Q, tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(memory.barriers.index(1), i % 2)
        s = warpgroup_mma(memory.QR, memory.R.permute((1, 0)), zero, use_acc=False, is_async=True)
        c, s = warpgroup_mma_wait(0, deps=[c, s])
        gl.thread_barrier()
        page, following = following, page_of(table, begin, i + 2, count, PAGE, NP)
        there = (page >= 0) & (page < pool)
        origin = gl.where(there, page, 0) * PAGE + (first + NP) % PAGE
        if i + 1 < count:
            mbarrier.expect(memory.barriers.index(1), NP * 128)
            tma.async_copy_global_to_shared(source.ropes, [origin, 0], memory.barriers.index(1), memory.R)
        weight, live = norm * unit, position < remaining
        if FULL.sink_tokens + FULL.recent_window > 0:
            weight = gl.where(is_full_precision(position, first, seen, FULL), 1.0, weight)
        s = gl.where(live[None, :], (c * weight[None, :] + s) * scale, float("-inf"))
        norm = gl.load(norms + origin.to(gl.int64) + position)
        top = gl.maximum(m, gl.max(s, 1))
        safe = gl.where(top == float("-inf"), 0.0, top)
        p = gl.exp2(s - safe[:, None])
        decay = gl.exp2(m - safe)
        m, l = top, l * decay + gl.sum(p, 1)  # noqa: E741
        mbarrier.wait(memory.barriers.index(3), (i % 2) ^ 1)
        # masked tokens may have norms that are not finite
        memory.P.store((p * gl.where(live, weight, 0.0)[None, :]).to(F16))
        memory.F.store(decay)
        fence_async_shared()
        mbarrier.arrive(memory.barriers.index(2))
    mbarrier.wait(memory.barriers.index(3), (count % 2) ^ 1)
    memory.F.store(gl.where(l == 0.0, 0.0, 1.0 / l))
    mbarrier.arrive(memory.barriers.index(2))
    gl.store(partials.m + at + row * splits, m, mask=row < room)
    gl.store(partials.l + at + row * splits, l, mask=row < room)


@gluon.jit
def _butterflies(x):
    """Apply the Walsh-Hadamard transform over channel bits 5 to 7, which lie in one thread."""
    for i in gl.static_range(3):
        a, b = gl.split(gl.permute(gl.reshape(x, [64, 4 >> i, 2, 32 << i]), [0, 1, 3, 2]))
        x = gl.reshape(gl.permute(gl.join(a + b, a - b), [0, 1, 3, 2]), [64, 256])
    return gl.convert_layout(x, SUMS, assert_trivial=True)


@gluon.jit
def _mix(memory, out, count, at, room, splits, NP: gl.constexpr, ST: gl.constexpr, HALF: gl.constexpr):
    """Accumulate half of the output channels, and store the normalized split."""
    acc = gl.full([64, 256], 0.0, F32, SUMS)
    for i in range(count):
        tile = tile_at(memory.shared, i, NP, ST)
        mbarrier.wait(memory.tiles.index(i % ST), i // ST % 2)
        mbarrier.wait(memory.barriers.index(2), i % 2)
        decay = memory.F.load(gl.SliceLayout(1, SUMS))
        acc = warpgroup_mma(memory.P, tile.slice(HALF * 256, 256, dim=1), acc * decay[:, None], is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(memory.barriers.index(3))
        mbarrier.arrive(memory.tiles.index(ST + i % ST))
    mbarrier.wait(memory.barriers.index(2), count % 2)
    # queries are no longer needed: stage the output in their buffer for coalesced stores
    lines = memory.Q.slice(HALF * 256, 256, dim=1)
    lines.store(_butterflies(acc * memory.F.load(gl.SliceLayout(1, SUMS))[:, None]).to(F16))
    gl.thread_barrier()
    row, channel = gl.arange(0, 64, gl.SliceLayout(1, ROWS)), gl.arange(0, 256, gl.SliceLayout(0, ROWS))
    where = at * 512 + HALF * 256 + (row[:, None] * (splits * 512) + channel[None, :])
    gl.store(out + where, lines.load(ROWS), mask=(row < room)[:, None] & (channel >= 0)[None, :])


@gluon.jit
def latent_code_rows(
    queries, rotated, ropes, store, full, index, partials, factors, heads, splits, CONFIG: gl.constexpr
):  # fmt: skip
    """Attend from 64 heads of one token to one split of its positions; grid (tokens * tiles of heads, splits).

    factors  of scores, to base 2; of norms, for levels of N(0, 1)
    """
    NP: gl.constexpr = CONFIG.positions
    ST: gl.constexpr = CONFIG.stages
    scale, unit = factors
    gdc_launch_dependents()
    groups = (heads + 63) // 64
    token, column, split = gl.program_id(0) // groups, gl.program_id(0) % groups * 64, gl.program_id(1)
    sequence, begin, _, end, count, old, seen = split_range(
        token, split, splits, 1 << 30, index, CONFIG.sequences, NP, CONFIG.split_keys
    )
    table = index.table + sequence.to(gl.int64) * index.width
    line, room = token * heads + column, heads - column
    at = line.to(gl.int64) * splits + split
    # the largest allocation starts at the shared-memory base and the table is its first part: the PTX look-ups rely on it
    shared = gl.allocate_shared_memory(
        gl.int32,
        [shared_rows(NP, ST, NP // 8, CONFIG.depth * 64 * CONFIG.bits * CONFIG.rows), 1024],
        gl.SwizzledSharedLayout(1, 1, 1, [0]),
    )
    Q = gl.allocate_shared_memory(F16, [64, 512], queries.layout)
    QR = gl.allocate_shared_memory(BF, [64, 64], rotated.layout)
    R = gl.allocate_shared_memory(BF, [NP, 64], ropes.layout)
    P = gl.allocate_shared_memory(F16, [64, NP], gl.NVMMASharedLayout.get_default_for([64, NP], F16))
    F = gl.allocate_shared_memory(F32, [64], LINE)
    tiles = gl.allocate_shared_memory(gl.int64, [2 * ST, 1], mbarrier.MBarrierLayout())
    barriers = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * ST):
        mbarrier.init(tiles.index(i), count=1 if i < ST else 2)
    for i in gl.static_range(4):
        mbarrier.init(barriers.index(i), count=1 if i < 3 else 2)
    fence_async_shared()
    gl.thread_barrier()
    source, memory = Source(queries, rotated, ropes), Memory(Q, QR, shared, R, P, F, tiles, barriers)
    gl.warp_specialize(
        [
            (_score, (source, memory, table, store.norms, partials, scale, unit, (begin, end, seen, count),
                      (line, at, room, splits), index.pool, CONFIG)),
            (_mix, (memory, partials.o, count, at, room, splits, NP, ST, 0)),
            (_mix, (memory, partials.o, count, at, room, splits, NP, ST, 1)),
            (decode, (store.codes, full, shared, store.levels, tiles, table, sequence, (begin, old, seen, count), index.pool,
                      CONFIG)),
        ],
        [4, 4, 4],
        [160, 160, 80],
    )  # fmt: skip


def attend_code_rows(q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float) -> Tensor:
    """Run `turboquant_latent_attention` for few tokens and many heads."""
    (tokens, heads, _), (sequences, table_width), page = q_latent.shape, pages.table.shape, pages.pool[1]
    out, programs, device = torch.empty_like(q_latent), tokens * cdiv(heads, HEADS), q_latent.device
    splits = splits_for(multiprocessors(device) // programs, table_width * page, 2 * TILE)
    # the extra rounding to float16 is invisible in the mean of many splits
    partials = empty_split_partials(tokens * heads, splits, LATENT, torch.float16, device)
    signs, _ = rotation_for(LATENT, pages.seed, False, device)
    tiling, full = tiling_for(pages.bits), full_precision_latent_shape(pages)
    config = Config(page, power_of_two(sequences), TILE, HEADS, *tiling, STAGES, full, invariant_split_keys())
    launch(latent_code_rows, (programs, splits))(
        tiles_of(hadamard_queries(q_latent, signs), HEADS), tiles_of(q_rope, HEADS), tiles_of(pages.rope, TILE),
        CodeTensors(pages.codes, pages.norms, table_for(pages.bits, LATENT, device, pages.book)), full_precision_latents(pages),
        index_of(pages, starts), partials, (scale * LOG2E.value, LATENT**-0.5), heads, splits, config,
        num_warps=4, maxnreg=REGISTERS, launch_pdl=True,
    )  # fmt: skip
    merge_rotated(partials, signs, out, MIXED, early=False)
    return out
