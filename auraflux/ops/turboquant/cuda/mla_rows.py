"""Latent attention over codes for many heads on Hopper, in Gluon: 64 heads of one token a program.

Four groups of warps: one decodes tiles, one makes scores and weights, two have half of the results' channels each. A tile's
place is free only after its mixing.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops.hopper.device import multiprocessors
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.pages import index_of
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.hopper.softmax import LOG2E
from auraflux.ops.hopper.split_kv import columns, keys_each, room_for, share_of, splits_for, tiles_of
from auraflux.ops.turboquant.cuda.arguments import Coded
from auraflux.ops.turboquant.cuda.hadamard import rotation_for
from auraflux.ops.turboquant.cuda.mla_kept import kept_latents, kept_shape
from auraflux.ops.turboquant.cuda.mla_lookup import decode, is_kept, page_of, shared_rows, table_for, tile_at
from auraflux.ops.turboquant.cuda.mla_merge import hadamard_queries, merge_rotated
from auraflux.ops.turboquant.pages import LatentCodes

HEADS, LATENT = 64, 512  # of a program, and channels
TILE = 32  # positions
STAGES = 3  # decoded tiles
RINGS = {8: (4, 2), 4: (4, 4)}  # by bits: rows of a piece of codes, and how many pieces a warp has under way
REGISTERS = 128
MIXED = 32  # what the lowest of the three bits of a channel is worth whose transform is done before shares are stored

F16, BF, F32 = gl.constexpr(gl.float16), gl.constexpr(gl.bfloat16), gl.constexpr(gl.float32)
# wider instructions want more registers than the compiler sees
SUMS = gl.constexpr(columns(128))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Source(NamedTuple):
    """What TMA brings: queries, rotated queries and rotated keys."""

    queries: Any
    rotated: Any
    ropes: Any


class Memory(NamedTuple):
    """Shared memory of a program.

    Q, QR   queries and rotated queries
    shared  the table and decoded tiles
    R       rotated keys
    P, F    weights, and what becomes of earlier sums
    tiles   barriers of full tiles, of empty ones
    more    barriers of queries, of rotated keys, of weights made and used
    """

    Q: Any
    QR: Any
    shared: Any
    R: Any
    P: Any
    F: Any
    tiles: Any
    more: Any


@gluon.jit
def _score(
    source, memory, table, norms, parts, scale, unit, begin, end, seen, count, line, at, room, splits, pool,
    PAGE: gl.constexpr, NP: gl.constexpr, ST: gl.constexpr, KEPT: gl.constexpr,
):  # fmt: skip
    """Make the weights of each tile, and at last what the results must be multiplied with."""
    T: gl.constexpr = columns(NP)
    position, row = gl.arange(0, NP, gl.SliceLayout(0, T)), gl.arange(0, 64, gl.SliceLayout(1, T))
    m = gl.full([64], float("-inf"), F32, gl.SliceLayout(1, T))
    l = gl.full([64], 0.0, F32, gl.SliceLayout(1, T))  # noqa: E741
    zero = gl.full([64, NP], 0.0, F32, T)
    page = page_of(table, begin, 0, count, PAGE, NP)
    following = page_of(table, begin, 1, count, PAGE, NP)
    gdc_wait()
    mbarrier.expect(memory.more.index(0), 64 * 576 * 2)
    tma.async_copy_global_to_shared(source.queries, [line, 0], memory.more.index(0), memory.Q)
    tma.async_copy_global_to_shared(source.rotated, [line, 0], memory.more.index(0), memory.QR)
    there = (page >= 0) & (page < pool)
    origin = gl.where(there, page, 0) * PAGE + begin % PAGE
    if count > 0:
        mbarrier.expect(memory.more.index(1), NP * 128)
        tma.async_copy_global_to_shared(source.ropes, [origin, 0], memory.more.index(1), memory.R)
    norm = gl.load(norms + origin.to(gl.int64) + position)
    mbarrier.wait(memory.more.index(0), 0)
    for i in range(count):
        first = begin + i * NP
        left = gl.where(there, end - first, 0)
        tile = tile_at(memory.shared, i, NP, ST)
        mbarrier.wait(memory.tiles.index(i % ST), i // ST % 2)
        c = warpgroup_mma(memory.Q, tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(memory.more.index(1), i % 2)
        s = warpgroup_mma(memory.QR, memory.R.permute((1, 0)), zero, use_acc=False, is_async=True)
        c, s = warpgroup_mma_wait(0, deps=[c, s])
        gl.thread_barrier()
        page, following = following, page_of(table, begin, i + 2, count, PAGE, NP)
        there = (page >= 0) & (page < pool)
        origin = gl.where(there, page, 0) * PAGE + (first + NP) % PAGE
        if i + 1 < count:
            mbarrier.expect(memory.more.index(1), NP * 128)
            tma.async_copy_global_to_shared(source.ropes, [origin, 0], memory.more.index(1), memory.R)
        weight, live = norm * unit, position < left
        if KEPT.first + KEPT.newest > 0:
            weight = gl.where(is_kept(position, first, seen, KEPT), 1.0, weight)
        s = gl.where(live[None, :], (c * weight[None, :] + s) * scale, float("-inf"))
        norm = gl.load(norms + origin.to(gl.int64) + position)
        top = gl.maximum(m, gl.max(s, 1))
        safe = gl.where(top == float("-inf"), 0.0, top)
        p = gl.exp2(s - safe[:, None])
        fade = gl.exp2(m - safe)
        m, l = top, l * fade + gl.sum(p, 1)  # noqa: E741
        mbarrier.wait(memory.more.index(3), (i % 2) ^ 1)
        # norms need not be finite where nothing is seen
        memory.P.store((p * gl.where(live, weight, 0.0)[None, :]).to(F16))
        memory.F.store(fade)
        fence_async_shared()
        mbarrier.arrive(memory.more.index(2))
    mbarrier.wait(memory.more.index(3), (count % 2) ^ 1)
    memory.F.store(gl.where(l == 0.0, 0.0, 1.0 / l))
    mbarrier.arrive(memory.more.index(2))
    gl.store(parts.m + at + row * splits, m, mask=row < room)
    gl.store(parts.l + at + row * splits, l, mask=row < room)


@gluon.jit
def _butterflies(x):
    """Apply the Walsh-Hadamard transform over bits 5 to 7 of a channel, which lie in one thread."""
    for i in gl.static_range(3):
        a, b = gl.split(gl.permute(gl.reshape(x, [64, 4 >> i, 2, 32 << i]), [0, 1, 3, 2]))
        x = gl.reshape(gl.permute(gl.join(a + b, a - b), [0, 1, 3, 2]), [64, 256])
    return gl.convert_layout(x, SUMS, assert_trivial=True)


@gluon.jit
def _mix(memory, out, count, at, room, splits, NP: gl.constexpr, ST: gl.constexpr, HALF: gl.constexpr):
    """Add up half of the channels, and store their means."""
    acc = gl.full([64, 256], 0.0, F32, SUMS)
    for i in range(count):
        tile = tile_at(memory.shared, i, NP, ST)
        mbarrier.wait(memory.tiles.index(i % ST), i // ST % 2)
        mbarrier.wait(memory.more.index(2), i % 2)
        fade = memory.F.load(gl.SliceLayout(1, SUMS))
        acc = warpgroup_mma(memory.P, tile.slice(HALF * 256, 256, dim=1), acc * fade[:, None], is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(memory.more.index(3))
        mbarrier.arrive(memory.tiles.index(ST + i % ST))
    mbarrier.wait(memory.more.index(2), count % 2)
    # queries are done with; their place lets lines be stored whole
    lines = memory.Q.slice(HALF * 256, 256, dim=1)
    lines.store(_butterflies(acc * memory.F.load(gl.SliceLayout(1, SUMS))[:, None]).to(F16))
    gl.thread_barrier()
    row, channel = gl.arange(0, 64, gl.SliceLayout(1, ROWS)), gl.arange(0, 256, gl.SliceLayout(0, ROWS))
    where = at * 512 + HALF * 256 + (row[:, None] * (splits * 512) + channel[None, :])
    gl.store(out + where, lines.load(ROWS), mask=(row < room)[:, None] & (channel >= 0)[None, :])


@gluon.jit
def latent_code_rows(
    queries, rotated, ropes, store, kept, index, parts, scale, unit, heads, splits, PAGE: gl.constexpr, S: gl.constexpr,
    NP: gl.constexpr, BITS: gl.constexpr, RP: gl.constexpr, DEEP: gl.constexpr, ST: gl.constexpr, KEPT: gl.constexpr,
    EACH: gl.constexpr,
):  # fmt: skip
    """64 heads of one token with one share of its positions, NP at a time; grid (tokens * tiles of heads, splits).

    KEPT  which positions are read as they are, see `KeptShape`
    """
    gdc_launch_dependents()
    groups = (heads + 63) // 64
    token, column, split = gl.program_id(0) // groups, gl.program_id(0) % groups * 64, gl.program_id(1)
    share = share_of(token, split, splits, 1 << 30, index, S, NP, EACH)
    sequence, begin, _, end, count, old, seen = share
    table = index.table + sequence.to(gl.int64) * index.width
    line, room = token * heads + column, heads - column
    at = line.to(gl.int64) * splits + split
    # the largest allocation is where shared memory begins, and the table where it begins: look-ups find it there
    shared = gl.allocate_shared_memory(
        gl.int32, [shared_rows(NP, ST, NP // 8, DEEP * 64 * BITS * RP), 1024], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    Q = gl.allocate_shared_memory(F16, [64, 512], queries.layout)
    QR = gl.allocate_shared_memory(BF, [64, 64], rotated.layout)
    R = gl.allocate_shared_memory(BF, [NP, 64], ropes.layout)
    P = gl.allocate_shared_memory(F16, [64, NP], gl.NVMMASharedLayout.get_default_for([64, NP], F16))
    F = gl.allocate_shared_memory(F32, [64], LINE)
    tiles = gl.allocate_shared_memory(gl.int64, [2 * ST, 1], mbarrier.MBarrierLayout())
    more = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * ST):
        mbarrier.init(tiles.index(i), count=1 if i < ST else 2)
    for i in gl.static_range(4):
        mbarrier.init(more.index(i), count=1 if i < 3 else 2)
    fence_async_shared()
    gl.thread_barrier()
    source, memory = Source(queries, rotated, ropes), Memory(Q, QR, shared, R, P, F, tiles, more)
    gl.warp_specialize(
        [
            (_score, (source, memory, table, store.norms, parts, scale, unit, begin, end, seen, count, line, at, room, splits,
                      index.pool, PAGE, NP, ST, KEPT)),
            (_mix, (memory, parts.o, count, at, room, splits, NP, ST, 0)),
            (_mix, (memory, parts.o, count, at, room, splits, NP, ST, 1)),
            (decode, (store.codes, kept, shared, store.levels, tiles, table, sequence, begin, old, seen, count, index.pool,
                      PAGE, NP, BITS, RP, DEEP, ST, NP // 8, KEPT)),
        ],
        [4, 4, 4],
        [160, 160, 80],
    )  # fmt: skip


def attend_code_rows(q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float) -> Tensor:
    """`turboquant_latent_attention` of few tokens and many heads."""
    (tokens, heads, _), (sequences, table_width), page = q_latent.shape, pages.table.shape, pages.pool[1]
    out, programs, device = torch.empty_like(q_latent), tokens * cdiv(heads, HEADS), q_latent.device
    splits = splits_for(multiprocessors(device) // programs, table_width * page, 2 * TILE)
    # rounded once more, which means of many shares do not show
    parts = room_for(tokens * heads, splits, LATENT, torch.float16, device)
    signs, _ = rotation_for(LATENT, pages.seed, False, device)
    launch(latent_code_rows, (programs, splits))(
        tiles_of(hadamard_queries(q_latent, signs), HEADS), tiles_of(q_rope, HEADS), tiles_of(pages.rope, TILE),
        Coded(pages.codes, pages.norms, table_for(pages.bits, LATENT, device, pages.book)), kept_latents(pages),
        index_of(pages, starts), parts, scale * LOG2E.value, LATENT**-0.5, heads, splits, page, power_of_two(sequences), TILE,
        pages.bits, *RINGS[pages.bits], STAGES, kept_shape(pages), keys_each(), num_warps=4, maxnreg=REGISTERS, launch_pdl=True,
    )  # fmt: skip
    merge_rotated(parts, signs, out, MIXED, early=False)
    return out
