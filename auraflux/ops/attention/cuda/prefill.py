"""Prefill attention on Hopper, in Gluon: 128 rows per program, heads of 64, 128 or 256 channels in 16 bits.

Rows are as in `flash_paged`: the query heads of some tokens that share a key head. A producer warp loads keys and values, 64
positions at a time, by TMA. Two consumer warpgroups have 64 rows each and alternate on the tensor cores (ping-pong): while one
computes its softmax, the other multiplies. Tiles that some row sees only in part come first and are masked; for the others the
next scores are issued together with the previous tile's weight products, and their softmax overlaps with those.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from auraflux.ops.attention.cuda.prefill_tiles import (
    F32,
    KEY,
    LINES,
    ROW,
    SCORES,
    advance,
    feed,
    lines_of,
    mix_by_rows,
    normalised,
    online_softmax,
    softcap_log2,
    tile_position,
    visible_range,
    visible_rows,
)
from auraflux.ops.attention.cuda.prefill_unmasked import attend_one, attend_pairs, attend_unmasked, scores_of
from auraflux.ops.attention.pages import KVPages
from auraflux.ops.gpu.blocks.flash import NO_WINDOW, RecentKeys
from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.gpu.blocks.softmax import LOG2E
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import power_of_two
from auraflux.ops.hopper.split_kv import TILE, columns, tiles_of

ROWS = 128  # of a program


class Tiling(NamedTuple):
    """Tiles of keys and of values in flight, for heads of at most `width` channels."""

    width: int
    stages: int


# 2048 / 8192 tokens at width 128, H200: 83.4 / 895 to 912 µs; 4 in flight 84.5 / 944
TILINGS = (Tiling(128, 6), Tiling(256, 2))


class Unsplit(NamedTuple):
    """Condition under which tiles over all keys beat split keys with a merge: programs at least, positions at most."""

    programs: int
    positions: int


# µs of split keys / these tiles on an H200, 32/8 heads of 128; the table is in bench/notebook/attention.md
UNSPLIT = (
    Unsplit(64, 1 << 31),  # 16384 positions: 323 / 198
    Unsplit(32, 8192),  # 4096 positions: 77.7 / 57.5; 16384: 196 / 197
    Unsplit(16, 2048),  # 2048 positions: 34.2 / 34.2; 4096: 47.0 / 57.6
    Unsplit(1, 512),  # 1024 positions: 17.9 / 21.1
)


def stages_for(width: int) -> int:
    return next(each.stages for each in TILINGS if width <= each.width)


def most_positions(programs: int) -> int:
    """Return the positions up to which these tiles are faster than split keys with a merge."""
    return next(each.positions for each in UNSPLIT if programs >= each.programs)


class PrefillShape(NamedTuple):
    """Compile-time shape of the kernel.

    group, key_heads, width  query heads per key head, key heads, channels of a head
    page, sequences          tokens per page, sequences rounded up to a power of two
    stages                   tiles of keys and of values in flight
    softcap                  whether scores are capped
    recent                   whether a row's recent keys are in other pages, see `RecentKeys`
    """

    group: int
    key_heads: int
    width: int
    page: int
    sequences: int
    stages: int
    softcap: bool
    recent: bool


class Memory(NamedTuple):
    """Shared memory of a program: tiles of keys and values in flight, and barriers."""

    K: Any
    V: Any
    bars: Any


class Scores(NamedTuple):
    """Scale, softcap and window of scores.

    newest  see `RecentKeys`; 0 without
    """

    scale: float
    softcap: float
    window: int
    newest: int


@gluon.jit
def _operand(x, D: gl.constexpr):
    """Return queries as an MMA operand: in registers, or in shared memory where the accumulators need those."""
    if D > 128:
        X = gl.allocate_shared_memory(x.dtype, [64, D], gl.NVMMASharedLayout.get_default_for([64, D], x.dtype))
        X.store(x)
        fence_async_shared()
        gl.thread_barrier()
        x = X
    else:
        x = gl.convert_layout(x, gl.DotOperandLayout(0, SCORES, 2))
    return x


@gluon.jit
def _mix(acc, p, V, values, head, first, end, position, window, page, pool, SHAPE: gl.constexpr):
    """Accumulate a tile of values by their weights; non-finite values only for the rows that see them."""
    D: gl.constexpr = SHAPE.width
    # 0 where all are finite, otherwise NaN
    bad = gl.full([64], 0.0, F32, gl.SliceLayout(1, LINES))
    for c in gl.static_range(D // 64):
        bad += gl.sum(V.slice(c * 64, 64, dim=1).load(LINES).to(F32) * 0.0, 1)
    if gl.sum(bad, 0) != 0.0:
        page = gl.where((page >= 0) & (page < pool), page, 0)
        lines = values + ((page.to(gl.int64) * SHAPE.key_heads + head) * SHAPE.page + first % SHAPE.page) * D
        acc = mix_by_rows(acc, p, lines, first, end, position, window, D, SCORES, columns(D))
    else:
        acc = warpgroup_mma(gl.convert_layout(p.to(V.dtype), gl.DotOperandLayout(0, columns(D), 2)), V, acc)
    return acc


@gluon.jit
def _attend(q, out, sinks, values, memory, table, scores, heads, head, rows, SHAPE: gl.constexpr, PART: gl.constexpr):
    G: gl.constexpr = SHAPE.group
    PAGE: gl.constexpr = SHAPE.page
    D: gl.constexpr = SHAPE.width
    ST: gl.constexpr = SHAPE.stages
    SOFTCAP: gl.constexpr = SHAPE.softcap
    RECENT: gl.constexpr = SHAPE.recent
    K, V, bars = memory.K, memory.V, memory.bars
    at, live = lines_of(rows.first + PART * 64, rows.start, rows.new, heads, head, G, D)
    x = _operand(gl.load(q + at, mask=live, other=0.0), D)
    row = rows.first + PART * 64 + gl.arange(0, 64, ROW)
    position = rows.length - rows.new + gl.minimum(row // G, rows.new - 1)
    m = gl.full([64], float("-inf"), F32, ROW)
    l = gl.full([64], 0.0, F32, ROW)  # noqa: E741
    acc = gl.full([64, D], 0.0, F32, columns(D))
    stage, phase = 0, 0
    factor = LOG2E if SOFTCAP else scores.scale * LOG2E
    for i in range(rows.masked):
        first, shift = tile_position(i, rows.recent, rows.masked, rows.begin, rows.full, rows.edge, RECENT)
        page = gl.load(table + first // PAGE + shift)
        latest, window, end = visible_range(i, position, scores, rows, RECENT)
        s = warpgroup_mma_wait(0, deps=[scores_of(x, K, bars, stage, phase)])
        mbarrier.arrive(bars.index(2 * ST + stage))
        key = first + gl.arange(0, 64, KEY)[None, :]
        seen = (key <= latest[:, None]) & (key > latest[:, None] - window) & (page >= 0) & (page < rows.pool)
        # scores of keys beyond the end may be NaN
        s = gl.where(seen, softcap_log2(s, scores.scale, scores.softcap, SOFTCAP), float("-inf"))
        p, rescale, m, l = online_softmax(s, m, l, factor, columns(D))  # noqa: E741
        p = gl.where(seen, p, 0.0)
        acc = acc * rescale[:, None]
        mbarrier.wait(bars.index(ST + stage), phase)
        acc = _mix(acc, p, V.index(stage), values, head, first, end, latest, window, page, rows.pool, SHAPE)
        mbarrier.arrive(bars.index(3 * ST + stage))
        stage, phase = advance(stage, phase, ST)
    unmasked = rows.tiles - rows.masked
    if D == 128:
        if unmasked % 2 == 1:
            acc, m, l = attend_one(x, memory, acc, m, l, stage, phase, scores, factor, SHAPE)  # noqa: E741
            stage, phase = advance(stage, phase, ST)
        if unmasked > 1:
            acc, m, l = attend_pairs(  # noqa: E741
                x, memory, acc, m, l, stage, phase, unmasked, scores, factor, SHAPE, PART
            )
    else:
        acc, m, l = attend_unmasked(x, memory, acc, m, l, stage, phase, unmasked, scores, factor, SHAPE)  # noqa: E741
    found = gl.convert_layout(normalised(acc, m, l, sinks, head, row, G, columns(D), K.dtype), LINES)
    # recomputed to save registers
    same = gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [rows.first], gl.int32, is_pure=False, pack=1)
    at, live = lines_of(same + PART * 64, rows.start, rows.new, heads, head, G, D)
    gl.store(out + at, found, mask=live)


@gluon.jit(do_not_specialize_on_alignment=["far"])
def prefill_tiles(
    q, keys, values, lines, index, sinks, out, scores, far, heads, SHAPE: gl.constexpr,
):  # fmt: skip
    """Attend from 128 rows to all keys they see; grid (HEADS, tiles).

    far  see `RecentKeys`; 0 without
    """
    D: gl.constexpr = SHAPE.width
    ST: gl.constexpr = SHAPE.stages
    # late tiles of a prompt see the most keys: schedule them first
    head, tile = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1)
    sequence, rows = visible_rows(tile, index, scores, far, 128, SHAPE)
    table = index.table + sequence.to(gl.int64) * index.width
    K = gl.allocate_shared_memory(keys.dtype, [ST, 64, D], keys.layout)
    V = gl.allocate_shared_memory(keys.dtype, [ST, 64, D], values.layout)
    # keys full, values full; keys read, values read, by both warpgroups; the ping-pong of the warpgroups
    bars = gl.allocate_shared_memory(gl.int64, [4 * ST + 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4 * ST + 2):
        mbarrier.init(bars.index(i), count=2 if i // (2 * ST) == 1 else 1)
    fence_async_shared()
    gl.thread_barrier()
    memory = Memory(K, V, bars)
    gl.warp_specialize(
        [
            (_attend, (q, out, sinks, lines, memory, table, scores, heads, head, rows, SHAPE, 0)),
            (_attend, (q, out, sinks, lines, memory, table, scores, heads, head, rows, SHAPE, 1)),
            (feed, (keys, values, memory, table, rows, head, SHAPE)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


class PrefillLaunch(NamedTuple):
    """Grid of the kernels, and the arguments that follow the tensors."""

    grid: tuple[int, int]
    scores: Scores
    far: Any
    heads: int
    shape: PrefillShape


def prefill_launch(
    q: Tensor, pages: KVPages, scale: float, window: int | None, softcap: float | None, recent: RecentKeys | None, rows: int,
    stages: int,
) -> PrefillLaunch:  # fmt: skip
    """Plan programs of so many rows, with so many tiles in flight."""
    (tokens, heads, width), (_, key_heads, page, _) = q.shape, pages.k.shape
    sequences, group = len(pages.lengths), heads // key_heads
    newest, far = recent or (0, 0)
    scores = Scores(scale, softcap or 1.0, NO_WINDOW if window is None else window, newest)
    shape = PrefillShape(
        group, key_heads, width, page, power_of_two(sequences), stages, softcap is not None, recent is not None
    )
    return PrefillLaunch((key_heads, tokens * group // rows + sequences), scores, far, heads, shape)


def attend_prefill(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    out: Tensor,
    recent: RecentKeys | None,
) -> None:
    """Run `attention` into `out`."""
    plan = prefill_launch(q, pages, scale, window, softcap, recent, ROWS, stages_for(q.shape[2]))
    launch(prefill_tiles, plan.grid)(
        q,
        tiles_of(pages.k, TILE),
        tiles_of(pages.v, TILE),
        pages.v,
        index_of(pages, starts),
        sinks,
        out,
        *plan[1:],
        num_warps=4,
    )
