"""Attention of many new tokens on Hopper, in Gluon: 128 rows a program, heads of 64, 128 or 256 channels in 16 bits.

Rows are as in `flash`: the query heads of some tokens that share a key head. One warp asks for keys and values, 64 positions
at a time, by TMA. Two groups of four warps have 64 rows each and take turns at the tensor cores: while one is at
its softmax, the other multiplies. Tiles that some row sees only in part come first and are masked; for the others the next
scores are begun together with the products of the weights before, and softened while those are made.
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
    capped,
    feed,
    keys_of_rows,
    lines_of,
    mix_by_rows,
    rows_of_tile,
    soften,
    tile_near,
)
from auraflux.ops.attention.cuda.prefill_unmasked import attend_one, attend_pairs, attend_whole, scores_of
from auraflux.ops.attention.pages import KVPages
from auraflux.ops.hopper.flash import EVERYTHING, Near
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.pages import index_of
from auraflux.ops.hopper.sizes import power_of_two
from auraflux.ops.hopper.softmax import LOG2E
from auraflux.ops.hopper.split_kv import TILE, columns, tiles_of

ROWS = 128  # of a program
STAGES = {64: 6, 128: 6, 256: 2}  # tiles of keys and of values in flight, by width
# programs, and the positions up to which so many take less time than keys that are split and merged again
UNSPLIT = ((64, 1 << 31), (32, 8192), (16, 2048), (1, 512))


class Scores(NamedTuple):
    """What scores are multiplied by and capped with, and how far back they reach.

    newest  see `Near`; 0 where there is none
    """

    scale: float
    softcap: float
    window: int
    newest: int


class Rows(NamedTuple):
    """The rows of a program, and the keys that they see.

    start, new, length  of their sequence: the first of its new tokens, how many these are, and all of its positions
    first               row of the program
    begin, end          keys that some of them see
    full, edge          keys that all of them see
    parted, tiles       tiles of keys that not all of them see, and all tiles
    near                of these, tiles of keys near to them, see `tile_near`
    pool                pages that there are
    """

    start: Any
    new: Any
    length: Any
    first: Any
    begin: Any
    end: Any
    full: Any
    edge: Any
    parted: Any
    tiles: Any
    near: Any
    pool: Any


@gluon.jit
def _operand(x, D: gl.constexpr):
    """Queries for the tensor core: from registers, or from shared memory where the sums need those."""
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
def _mix(acc, p, V, values, head, first, end, position, window, page, pool, HEADS: gl.constexpr, PAGE: gl.constexpr,
         D: gl.constexpr):  # fmt: skip
    """Add a tile of values by their weights; what is not finite only to the rows that see it."""
    # 0 where all are finite, otherwise NaN
    bad = gl.full([64], 0.0, F32, gl.SliceLayout(1, LINES))
    for c in gl.static_range(D // 64):
        bad += gl.sum(V.slice(c * 64, 64, dim=1).load(LINES).to(F32) * 0.0, 1)
    if gl.sum(bad, 0) != 0.0:
        page = gl.where((page >= 0) & (page < pool), page, 0)
        acc = mix_by_rows(acc, p, values, head, first, end, position, window, page, HEADS, PAGE, D)
    else:
        acc = warpgroup_mma(gl.convert_layout(p.to(V.dtype), gl.DotOperandLayout(0, columns(D), 2)), V, acc)
    return acc


@gluon.jit
def _result(acc, m, l, sinks, head, row, G: gl.constexpr, D: gl.constexpr, DTYPE: gl.constexpr):  # noqa: E741
    """Divide sums by weights, those of the sinks included, and lay them out in lines."""
    sink = gl.full([64], float("-inf"), F32, ROW)
    if sinks is not None:
        sink = gl.load(sinks + head * G + row % G) * LOG2E
    top = gl.maximum(m, sink)
    top = gl.where(top == float("-inf"), 0.0, top)
    kept = gl.exp2(m - top)
    total = l * kept + gl.exp2(sink - top)
    part = gl.convert_layout(gl.where(total == 0.0, 0.0, kept / total), gl.SliceLayout(1, columns(D)))
    return gl.convert_layout((acc * part[:, None]).to(DTYPE), LINES)


@gluon.jit
def _sight(i, position, scores, rows, NEAR: gl.constexpr):
    """Give the latest key that each row sees in the i-th tile, how far back it sees from there, and the end of all keys."""
    if not NEAR:
        return position, scores.window, rows.end
    near = i < rows.near[0]
    latest = position - gl.where(near, 0, scores.newest)
    window = gl.where(near, gl.minimum(scores.newest, scores.window), scores.window - scores.newest)
    return latest, window, gl.where(near, rows.length, rows.end)


@gluon.jit
def _attend(
    q, out, sinks, values, K, V, bars, table, scores, heads, head, rows, G: gl.constexpr, HEADS: gl.constexpr,
    PAGE: gl.constexpr, D: gl.constexpr, ST: gl.constexpr, SOFTCAP: gl.constexpr, NEAR: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    at, live = lines_of(rows.first + PART * 64, rows.start, rows.new, heads, head, G, D)
    x = _operand(gl.load(q + at, mask=live, other=0.0), D)
    row = rows.first + PART * 64 + gl.arange(0, 64, ROW)
    position = rows.length - rows.new + gl.minimum(row // G, rows.new - 1)
    m = gl.full([64], float("-inf"), F32, ROW)
    l = gl.full([64], 0.0, F32, ROW)  # noqa: E741
    acc = gl.full([64, D], 0.0, F32, columns(D))
    stage, phase = 0, 0
    factor = LOG2E if SOFTCAP else scores.scale * LOG2E
    for i in range(rows.parted):
        first, shift = tile_near(i, rows.near, rows.parted, rows.begin, rows.full, rows.edge, NEAR)
        page = gl.load(table + first // PAGE + shift)
        latest, window, end = _sight(i, position, scores, rows, NEAR)
        s = warpgroup_mma_wait(0, deps=[scores_of(x, K, bars, stage, phase)])
        mbarrier.arrive(bars.index(2 * ST + stage))
        key = first + gl.arange(0, 64, KEY)[None, :]
        seen = (key <= latest[:, None]) & (key > latest[:, None] - window) & (page >= 0) & (page < rows.pool)
        # scores of keys beyond the rows.end may be NaN
        s = gl.where(seen, capped(s, scores.scale, scores.softcap, SOFTCAP), float("-inf"))
        p, fade, m, l = soften(s, m, l, factor, D)  # noqa: E741
        p = gl.where(seen, p, 0.0)
        acc = acc * fade[:, None]
        mbarrier.wait(bars.index(ST + stage), phase)
        acc = _mix(acc, p, V.index(stage), values, head, first, end, latest, window, page, rows.pool, HEADS, PAGE, D)
        mbarrier.arrive(bars.index(3 * ST + stage))
        stage, phase = advance(stage, phase, ST)
    whole = rows.tiles - rows.parted
    if D == 128:
        if whole % 2 == 1:
            acc, m, l = attend_one(  # noqa: E741
                x, K, V, bars, acc, m, l, stage, phase, scores.scale, scores.softcap, factor, D, ST, SOFTCAP
            )
            stage, phase = advance(stage, phase, ST)
        if whole > 1:
            acc, m, l = attend_pairs(  # noqa: E741
                x, K, V, bars, acc, m, l, stage, phase, whole, scores.scale, scores.softcap, factor, D, ST, SOFTCAP, PART
            )
    else:
        acc, m, l = attend_whole(  # noqa: E741
            x, K, V, bars, acc, m, l, stage, phase, whole, scores.scale, scores.softcap, factor, D, ST, SOFTCAP
        )
    found = _result(acc, m, l, sinks, head, row, G, D, K.dtype)
    # places found anew, as registers are short in between
    same = gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [rows.first], gl.int32, is_pure=False, pack=1)
    at, live = lines_of(same + PART * 64, rows.start, rows.new, heads, head, G, D)
    gl.store(out + at, found, mask=live)


@gluon.jit(do_not_specialize_on_alignment=["far"])
def prefill_tiles(
    q, keys, values, lines, index, sinks, out, scores, far, heads, G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, S: gl.constexpr, ST: gl.constexpr, SOFTCAP: gl.constexpr, NEAR: gl.constexpr,
):  # fmt: skip
    """Attend from 128 rows to all keys they see; grid (HEADS, tiles).

    far   see `Near`; 0 where there is none
    NEAR  keys near to a row lie elsewhere, see `Near`
    """
    # late tiles of a prompt see most keys: they come first
    head, tile = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1)
    sequence, start, new, length, first_row = rows_of_tile(tile, index, G, S)
    last = length - new + gl.minimum((first_row + 127) // G, new - 1)
    first = length - new + first_row // G
    if NEAR:
        begin, end, full, edge = keys_of_rows(first - scores.newest, last - scores.newest, scores.window - scores.newest)
        nearest = gl.maximum(first - gl.minimum(scores.newest, scores.window) + 1, 0) // 64 * 64
        beside = gl.where(first_row < new * G, (last - nearest + 64) // 64, 0)
        near = (beside, nearest, far - gl.maximum(length - new - scores.newest + 1, 0) // PAGE)
    else:
        begin, end, full, edge = keys_of_rows(first, last, scores.window)
        beside, near = 0, (0, 0, 0)
    # a tile that got no row has nothing to do
    count = gl.where(first_row < new * G, (end - begin + 63) // 64 + beside, 0)
    parted = gl.where(first_row < new * G, count - (edge - full) // 64, 0)
    table = index.table + sequence.to(gl.int64) * index.width
    K = gl.allocate_shared_memory(keys.dtype, [ST, 64, D], keys.layout)
    V = gl.allocate_shared_memory(keys.dtype, [ST, 64, D], values.layout)
    # keys there, values there; keys read, values read, by both groups; the groups' turns
    bars = gl.allocate_shared_memory(gl.int64, [4 * ST + 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4 * ST + 2):
        mbarrier.init(bars.index(i), count=2 if i // (2 * ST) == 1 else 1)
    fence_async_shared()
    gl.thread_barrier()
    rows = Rows(start, new, length, first_row, begin, end, full, edge, parted, count, near, index.pool)
    gl.warp_specialize(
        [
            (_attend, (q, out, sinks, lines, K, V, bars, table, scores, heads, head, rows, G, HEADS, PAGE, D, ST,
                       SOFTCAP, NEAR, 0)),
            (_attend, (q, out, sinks, lines, K, V, bars, table, scores, heads, head, rows, G, HEADS, PAGE, D, ST,
                       SOFTCAP, NEAR, 1)),
            (feed, (keys, values, K, V, bars, table, begin, full, edge, parted, count, near, head, index.pool, HEADS, PAGE, D,
                    ST, NEAR)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def attend_prefill(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    out: Tensor,
    near: Near | None,
) -> None:
    """`attention` into `out`."""
    (tokens, heads, width), (_, key_heads, page, _) = q.shape, pages.k.shape
    sequences, group = len(pages.lengths), heads // key_heads
    grid = key_heads, tokens * group // ROWS + sequences
    newest, far = near or (0, 0)
    launch(prefill_tiles, grid)(
        q, tiles_of(pages.k, TILE), tiles_of(pages.v, TILE), pages.v, index_of(pages, starts), sinks, out,
        Scores(scale, softcap or 1.0, EVERYTHING if window is None else window, newest), far, heads, group, key_heads, width,
        page, power_of_two(sequences), STAGES[width], softcap is not None, near is not None, num_warps=4,
    )  # fmt: skip
