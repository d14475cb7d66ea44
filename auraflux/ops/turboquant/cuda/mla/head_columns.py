"""MLA decode attention over codes of 4 and 8 bits on Hopper, in Gluon: the heads of one token are columns of a product.

As for uncompressed latents (`attention.cuda.mla_columns`), everything is computed transposed. Eight producer warps decode: they
write levels as float16 to shared memory, where the tensor cores read them twice, for scores and for the output. Four consumer
warps multiply, and rotate the queries while the first codes are in flight. Norms multiply scores and softmax weights.
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
from auraflux.ops.hopper.split_kv import (
    ACROSS,
    TILE,
    columns,
    empty_split_partials,
    invariant_split_keys,
    split_range,
    splits_for,
    sum_of_columns,
    tiles_of,
    top_of_columns,
)
from auraflux.ops.turboquant.cuda.arguments import CodeTensors
from auraflux.ops.turboquant.cuda.encode.hadamard import rotation_for
from auraflux.ops.turboquant.cuda.mla.full_precision import full_precision_latent_shape, full_precision_latents
from auraflux.ops.turboquant.cuda.mla.lookup import (
    LEVELS,
    Config,
    decode,
    is_full_precision,
    page_of,
    shared_rows,
    table_for,
    tile_at,
)
from auraflux.ops.turboquant.cuda.mla.merge import MERGED, merge_rotated
from auraflux.ops.turboquant.pages import LatentCodes

LATENT, ROPE = 512, 64
BITS = (4, 8)
MOST_TOKENS = 2  # per sequence on average
MOST_COLUMNS = 32
STAGES = 2  # decoded tiles
F16, BF, F32 = gl.constexpr(gl.float16), gl.constexpr(gl.bfloat16), gl.constexpr(gl.float32)


class Tiling(NamedTuple):
    """Tiling of query heads, padded to columns, over codes of one bit width.

    columns, bits  of a program, of a code
    rows, chunks   rows per chunk of codes, chunks in flight per warp
    registers      per thread, few enough that merge programs can be resident at the same time
    """

    columns: int
    bits: int
    rows: int
    chunks: int
    registers: int


TILINGS = (
    Tiling(8, 4, 4, 4, 104),
    Tiling(8, 8, 4, 2, 104),
    Tiling(16, 4, 4, 4, 112),
    Tiling(16, 8, 4, 2, 112),
    Tiling(32, 4, 4, 2, 136),
    Tiling(32, 8, 2, 2, 136),
)


def tiling_for(columns: int, bits: int) -> Tiling:
    return next(each for each in TILINGS if (each.columns, each.bits) == (columns, bits))


class Source(NamedTuple):
    """Inputs in global memory: queries with the signs of their rotation, TMA descriptors of RoPE queries and keys."""

    queries: Any
    signs: Any
    rotated: Any
    ropes: Any


class Memory(NamedTuple):
    """Shared memory of a program.

    Q, QR     queries and RoPE queries
    shared    the level table and decoded tiles
    R         RoPE keys
    P         softmax weights
    X         cross-warp reductions
    tiles     barriers of full tiles, of empty tiles
    barriers  of queries and of RoPE keys
    """

    Q: Any
    QR: Any
    shared: Any
    R: Any
    P: Any
    X: Any
    tiles: Any
    barriers: Any


@gluon.jit
def _butterflies(x, N: gl.constexpr, T: gl.constexpr):
    """Apply the Walsh-Hadamard transform over the upper three channel bits, which lie in one thread."""
    for i in gl.static_range(3):
        a, b = gl.split(gl.permute(gl.reshape(x, [4 >> i, 2, 64 << i, N]), [0, 2, 3, 1]))
        x = gl.reshape(gl.permute(gl.join(a + b, a - b), [0, 3, 1, 2]), [512, N])
    return gl.convert_layout(x, T, assert_trivial=True)


@gluon.constexpr_function
def _upper_bits(rows):
    """Return the layout of rows of 512 channels with the lowest and the upper five channel bits in one thread."""
    regs = [[0, 1], *([0, 16 << i] for i in range(5)), *([16 << i, 0] for i in range(rows.bit_length() - 5))]
    warps = [[4, 0], [8 if rows > 8 else 0, 0]]
    return gl.DistributedLinearLayout(regs, [[0, 2], [0, 4], [0, 8], [1, 0], [2, 0]], warps, [], [rows, 512])


@gluon.jit
def _hadamard(x, FROM: gl.constexpr, TO: gl.constexpr):
    """Apply the Walsh-Hadamard transform, without its factor, over channel bits that lie in one thread."""
    N: gl.constexpr = x.shape[0]
    for i in gl.static_range(FROM, TO):
        a, b = gl.split(gl.permute(gl.reshape(x, [N, 256 >> i, 2, 1 << i]), [0, 1, 3, 2]))
        x = gl.reshape(gl.permute(gl.join(a + b, a - b), [0, 1, 3, 2]), [N, 512])
    return x


@gluon.jit
def _load_queries(queries, signs, line, room, N: gl.constexpr):
    """Load N rows of queries, of which `room` exist, and the signs of the rotation."""
    A: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0])
    row, channel = gl.arange(0, N, gl.SliceLayout(1, A)), gl.arange(0, 512, gl.SliceLayout(0, A))
    sign = gl.load(signs + channel)
    gdc_wait()
    gdc_launch_dependents()
    at = (line + row).to(gl.int64)[:, None] * 512 + channel[None, :]
    return gl.load(queries + at, mask=(row < room)[:, None] & (channel >= 0)[None, :], other=0.0), sign


@gluon.jit
def _hadamard_queries(x, sign, Q, N: gl.constexpr):
    """Rotate N rows of queries to float16 in shared memory."""
    Q.store((_hadamard(x.to(F32) * sign[None, :], 0, 4) * 0.25).to(F16))
    gl.thread_barrier()
    x = _hadamard(Q.load(_upper_bits(N)).to(F32), 4, 9) * (4 * 512**-0.5)
    gl.thread_barrier()
    Q.store(x.to(F16))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _attend(
    source, memory, table, norms, partials, scale, unit, span, dest, pool, CONFIG: gl.constexpr
):  # fmt: skip
    """Attend to decoded tiles, and load RoPE keys.

    span  first and last position, tokens of the sequence, number of tiles
    dest  first row, rows, split, number of splits
    """
    PAGE: gl.constexpr = CONFIG.page
    N: gl.constexpr = CONFIG.heads
    ST: gl.constexpr = CONFIG.stages
    FULL: gl.constexpr = CONFIG.full
    begin, end, seen, count = span
    line, room, split, splits = dest
    T: gl.constexpr = columns(N)
    position, head = gl.arange(0, 64, gl.SliceLayout(1, T)), gl.arange(0, N, gl.SliceLayout(0, T))
    x, sign = _load_queries(source.queries, source.signs, line, room, N)
    mbarrier.expect(memory.barriers.index(0), N * 128)
    tma.async_copy_global_to_shared(source.rotated, [line, 0], memory.barriers.index(0), memory.QR)
    m = gl.full([N], float("-inf"), F32, gl.SliceLayout(0, T))
    l = gl.full([64, N], 0.0, F32, T)  # noqa: E741
    acc = gl.full([512, N], 0.0, F32, T)
    zero = gl.full([64, N], 0.0, F32, T)
    page = page_of(table, begin, 0, count, PAGE, 64)
    following = page_of(table, begin, 1, count, PAGE, 64)
    there = (page >= 0) & (page < pool)
    origin = gl.where(there, page, 0) * PAGE + begin % PAGE
    if count > 0:
        mbarrier.expect(memory.barriers.index(1), 64 * 128)
        tma.async_copy_global_to_shared(source.ropes, [origin, 0], memory.barriers.index(1), memory.R)
    norm = gl.load(norms + origin.to(gl.int64) + position)
    _hadamard_queries(x, sign, memory.Q, N)
    mbarrier.wait(memory.barriers.index(0), 0)
    for i in range(count):
        first = begin + i * 64
        remaining = gl.where(there, end - first, 0)
        page, following = following, page_of(table, begin, i + 2, count, PAGE, 64)
        there = (page >= 0) & (page < pool)
        origin = gl.where(there, page, 0) * PAGE + (first + 64) % PAGE
        tile = tile_at(memory.shared, i, 64, ST)
        mbarrier.wait(memory.barriers.index(1), i % 2)
        s = warpgroup_mma(memory.R, memory.QR.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(memory.tiles.index(i % ST), i // ST % 2)
        c = warpgroup_mma(tile, memory.Q.permute((1, 0)), zero, use_acc=False, is_async=True)
        c, s = warpgroup_mma_wait(0, deps=[c, s])
        # all warps have read the RoPE keys: their buffer may be overwritten
        gl.thread_barrier()
        if i + 1 < count:
            mbarrier.expect(memory.barriers.index(1), 64 * 128)
            tma.async_copy_global_to_shared(source.ropes, [origin, 0], memory.barriers.index(1), memory.R)
        weight, live = norm * unit, position < remaining
        if FULL.sink_tokens + FULL.recent_window > 0:
            weight = gl.where(is_full_precision(position, first, seen, FULL), 1.0, weight)
        s = gl.where(live[:, None], (c * weight[:, None] + s) * scale, float("-inf"))
        norm = gl.load(norms + origin.to(gl.int64) + position)
        top = gl.maximum(m, top_of_columns(s, memory.X, N))
        safe = gl.where(top == float("-inf"), 0.0, top)
        p = gl.exp2(s - safe[None, :])
        decay = gl.exp2(m - safe)
        m, l = top, l * decay[None, :] + p  # noqa: E741
        # masked tokens may have norms that are not finite
        memory.P.permute((1, 0)).store((p * gl.where(live, weight, 0.0)[:, None]).to(F16))
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(tile.permute((1, 0)), memory.P.permute((1, 0)), acc * decay[None, :], is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(memory.tiles.index(ST + i % ST))
    total, channel, inside = sum_of_columns(l, memory.X, N), gl.arange(0, 512, gl.SliceLayout(1, T)), head < room
    at = line.to(gl.int64) * splits + split
    gl.store(partials.m + at + head * splits, m, mask=inside)
    gl.store(partials.l + at + head * splits, total, mask=inside)
    part = gl.where(total == 0.0, 0.0, 1.0 / total)
    acc = _butterflies(acc * part[None, :], N, T)
    where = at * 512 + (head[None, :] * (splits * 512) + channel[:, None])
    gl.store(partials.o + where, acc, mask=inside[None, :] & (channel >= 0)[:, None])


@gluon.jit
def latent_code_columns(
    queries, signs, rotated, ropes, store, full, index, partials, factors, heads, splits, CONFIG: gl.constexpr
):  # fmt: skip
    """Attend from N heads of one token to one split of its positions; grid (tokens * tiles of heads, splits).

    factors  of scores, to base 2; of norms, for levels of N(0, 1)
    """
    N: gl.constexpr = CONFIG.heads
    ST: gl.constexpr = CONFIG.stages
    scale, unit = factors
    groups = (heads + N - 1) // N
    token, column, split = gl.program_id(0) // groups, gl.program_id(0) % groups * N, gl.program_id(1)
    sequence, begin, _, end, count, old, seen = split_range(
        token, split, splits, 1 << 30, index, CONFIG.sequences, 64, CONFIG.split_keys
    )
    table = index.table + sequence.to(gl.int64) * index.width
    line, room = token * heads + column, heads - column
    # the largest allocation starts at the shared-memory base and the table is its first part: the PTX look-ups rely on it
    shared = gl.allocate_shared_memory(
        gl.int32,
        [shared_rows(64, ST, 8, CONFIG.depth * 64 * CONFIG.bits * CONFIG.rows), 1024],
        gl.SwizzledSharedLayout(1, 1, 1, [0]),
    )
    Q = gl.allocate_shared_memory(F16, [N, 512], LEVELS)
    QR = gl.allocate_shared_memory(BF, [N, 64], rotated.layout)
    R = gl.allocate_shared_memory(BF, [64, 64], ropes.layout)
    P = gl.allocate_shared_memory(F16, [N, 64], rotated.layout)
    X = gl.allocate_shared_memory(F32, [4, N], ACROSS)
    tiles = gl.allocate_shared_memory(gl.int64, [2 * ST, 1], mbarrier.MBarrierLayout())
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * ST):
        mbarrier.init(tiles.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(barriers.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    source, memory = Source(queries, signs, rotated, ropes), Memory(Q, QR, shared, R, P, X, tiles, barriers)
    gl.warp_specialize(
        [
            (_attend, (source, memory, table, store.norms, partials, scale, unit, (begin, end, seen, count),
                       (line, room, split, splits), index.pool, CONFIG)),
            (decode, (store.codes, full, shared, store.levels, tiles, table, sequence, (begin, old, seen, count), index.pool,
                      CONFIG)),
        ],
        [8],
        [80],
    )  # fmt: skip


def attend_code_columns(q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float) -> Tensor:
    """Run `turboquant_latent_attention` for few tokens and few heads."""
    (tokens, heads, _), (sequences, table_width), page = q_latent.shape, pages.table.shape, pages.pool[1]
    n, out = min(MOST_COLUMNS, max(8, power_of_two(heads))), torch.empty_like(q_latent)
    programs, device = tokens * cdiv(heads, n), out.device
    splits = splits_for(multiprocessors(device) // programs, table_width * page)
    partials = empty_split_partials(tokens * heads, splits, LATENT, torch.float32, device)
    signs, _ = rotation_for(LATENT, pages.seed, False, device)
    tiling, full = tiling_for(n, pages.bits), full_precision_latent_shape(pages)
    config = Config(
        page, power_of_two(sequences), TILE, n, pages.bits, tiling.rows, tiling.chunks, STAGES, full, invariant_split_keys()
    )
    launch(latent_code_columns, (programs, splits))(
        q_latent, signs, tiles_of(q_rope, n), tiles_of(pages.rope, TILE),
        CodeTensors(pages.codes, pages.norms, table_for(pages.bits, LATENT, device, pages.book)), full_precision_latents(pages),
        index_of(pages, starts), partials, (scale * LOG2E.value, LATENT**-0.5), heads, splits, config,
        num_warps=4, maxnreg=tiling.registers, launch_pdl=True,
    )  # fmt: skip
    merge_rotated(partials, signs, out, MERGED, early=True)
    return out
