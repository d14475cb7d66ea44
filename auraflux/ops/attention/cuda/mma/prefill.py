"""Prefill attention by cp.async and mma.sync, in Gluon: 64 rows per program, heads of 64, 128 or 256 channels in 16 bits.

Rows, tiles of keys, masks and recent keys are those of `prefill`. A warp has 16 complete rows: scores, weights and sums stay in
its registers. A tile's values load while its keys are multiplied, and the next keys, where there is room, from then on. Up to
128 channels, two programs share a multiprocessor of 100 KB, and overlap products and softmax.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from auraflux.ops.attention.cuda.prefill import prefill_launch
from auraflux.ops.attention.cuda.prefill_tiles import (
    F32,
    mix_by_rows,
    normalised,
    online_softmax,
    softcap_log2,
    tile_position,
    visible_range,
    visible_rows,
)
from auraflux.ops.attention.pages import KVPages
from auraflux.ops.gpu.blocks.flash import RecentKeys
from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.gpu.blocks.softmax import LOG2E
from auraflux.ops.gpu.launch import launch

ROWS = 64
BOTH_AHEAD = gl.constexpr(64)  # channels of a head up to which two tiles of values fit beside two of keys
FULL_REGISTERS = gl.constexpr(256)  # channels of a head whose queries are in shared memory, for which sums take the registers


# of accumulators, and their rows
SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
ROW = gl.constexpr(gl.SliceLayout(1, SUMS.value))
LEFT, RIGHT = (gl.constexpr(gl.DotOperandLayout(n, SUMS.value, 2)) for n in (0, 1))
TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.constexpr_function
def rows_of_16_bytes(width):
    """Return a layout whose threads have 16 bytes of a row each."""
    lanes = width // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _position(i, rows, SHAPE: gl.constexpr):
    return tile_position(i, rows.recent, rows.masked, rows.begin, rows.full, rows.edge, SHAPE.recent)


@gluon.jit
def _page_at(table, i, rows, SHAPE: gl.constexpr):
    """Return the page of the i-th tile, or of the last one."""
    first, shift = _position(gl.minimum(i, rows.tiles - 1), rows, SHAPE)
    return gl.load(table + first // SHAPE.page + shift)


@gluon.jit
def _fetch(to, lines, i, page, rows, head, SHAPE: gl.constexpr, MASKED: gl.constexpr):
    """Begin copying the i-th tile of keys or values; those beyond the end become zeros."""
    PAGE: gl.constexpr = SHAPE.page
    D: gl.constexpr = SHAPE.width
    COPY: gl.constexpr = rows_of_16_bytes(D)
    if i < rows.tiles:
        first, _ = _position(i, rows, SHAPE)
        known = gl.where((page >= 0) & (page < rows.pool), page, 0).to(gl.int64)
        base = ((known * SHAPE.key_heads + head) * PAGE + first % PAGE) * D
        # computed again for every tile to save registers
        line = gl.arange(0, 64, gl.SliceLayout(1, COPY))
        line = gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [line], gl.int32, is_pure=False, pack=1)
        at = line[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, COPY))[None, :]
        there = None
        if MASKED:
            end = gl.where(i < rows.recent[0], rows.length, rows.end) if SHAPE.recent else rows.end
            there = (first + line < end)[:, None]
        async_copy.async_copy_global_to_shared(to, lines + base + at, mask=there)
    async_copy.commit_group()


@gluon.jit
def _begin(K, V, pools, i, page, following, rows, head, SHAPE: gl.constexpr, MASKED: gl.constexpr):
    """Wait for the keys of the i-th tile, and begin copying what there is room for: its values, the next keys and values."""
    async_copy.wait_group(0)
    gl.thread_barrier()
    if SHAPE.width > BOTH_AHEAD:
        _fetch(V.index(0), pools[1], i, page, rows, head, SHAPE, MASKED)
    if SHAPE.stages == 2:
        _fetch(K.index((i + 1) % 2), pools[0], i + 1, following, rows, head, SHAPE, MASKED)
    if SHAPE.width <= BOTH_AHEAD:
        _fetch(V.index((i + 1) % 2), pools[1], i + 1, following, rows, head, SHAPE, MASKED)


@gluon.jit
def _next_keys(K, pools, i, following, rows, head, SHAPE: gl.constexpr, MASKED: gl.constexpr):
    """Begin copying the next keys over those that have been multiplied."""
    if SHAPE.stages == 1:
        gl.thread_barrier()
        _fetch(K.index(0), pools[0], i + 1, following, rows, head, SHAPE, MASKED)


@gluon.jit
def _scores(x, K, D: gl.constexpr):
    s = gl.full([64, 64], 0.0, F32, SUMS)
    if D == FULL_REGISTERS:
        # queries are in shared memory
        for c in gl.static_range(0, D, 64):
            s = mma_v2(x.slice(c, 64, dim=1).load(LEFT), K.slice(c, 64, dim=1).permute((1, 0)).load(RIGHT), s)
    else:
        s = mma_v2(x, K.permute((1, 0)).load(RIGHT), s)
    return s


@gluon.jit
def _await_values(V, i, D: gl.constexpr):
    """Wait for the values of the i-th tile, if they were requested with it; the next keys may be in flight."""
    if D > BOTH_AHEAD:
        async_copy.wait_group(1)
        gl.thread_barrier()
        i = 0
    return V.index(i % 2)


@gluon.jit
def _mix(acc, p, V):
    weights = gl.convert_layout(p.to(V.dtype), LEFT)
    return mma_v2(weights, V.load(RIGHT), acc)


@gluon.jit
def _mix_masked(acc, p, V, lines, first, end, latest, window, D: gl.constexpr, COPY: gl.constexpr):
    """Accumulate a tile of values by their weights; non-finite values only for the rows that see them."""
    # 0 where all are finite, otherwise NaN
    if gl.sum(gl.sum(V.load(COPY).to(F32) * 0.0, 1), 0) != 0.0:
        acc = mix_by_rows(acc, p, lines, first, end, latest, window, D, SUMS, SUMS)
    else:
        acc = _mix(acc, p, V)
    return acc


@gluon.jit
def _queries(q, at, D: gl.constexpr):
    """Return queries as an operand: in registers, or in shared memory where the sums need those."""
    if D == FULL_REGISTERS:
        x = gl.allocate_shared_memory(q.dtype.element_ty, [64, D], TILE)
        x.store(gl.load(q + at))
        gl.thread_barrier()
    else:
        x = gl.convert_layout(gl.load(q + at), LEFT)
    return x


@gluon.jit
def _offsets(first, rows, heads, head, G: gl.constexpr, D: gl.constexpr, COPY: gl.constexpr):
    """Return offsets of a program's rows in queries and results, and which of them exist."""
    r = first + gl.arange(0, 64, gl.SliceLayout(1, COPY))
    at = ((rows.start + gl.minimum(r // G, rows.new - 1)).to(gl.int64) * heads + head * G + r % G)[:, None] * D
    return at + gl.arange(0, D, gl.SliceLayout(0, COPY))[None, :], (r < rows.new * G)[:, None] & (at >= 0)


@gluon.jit(do_not_specialize_on_alignment=["far"])
def prefill_mma(
    q, pools, index, sinks, out, scores, far, heads, SHAPE: gl.constexpr
):  # fmt: skip
    """Attend from 64 rows to all keys they see; grid (HEADS, tiles).

    far  see `RecentKeys`; 0 without
    """
    ST: gl.constexpr = SHAPE.stages
    G: gl.constexpr = SHAPE.group
    D: gl.constexpr = SHAPE.width
    PAGE: gl.constexpr = SHAPE.page
    SOFTCAP: gl.constexpr = SHAPE.softcap
    RECENT: gl.constexpr = SHAPE.recent
    COPY: gl.constexpr = rows_of_16_bytes(D)
    # late tiles of a prompt see the most keys: schedule them first
    head, tile = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1)
    sequence, rows = visible_rows(tile, index, scores, far, 64, SHAPE)
    if rows.tiles == 0:
        return
    table = index.table + sequence.to(gl.int64) * index.width
    # before the tiles have memory, which it needs for its layout
    x = _queries(q, _offsets(rows.first, rows, heads, head, G, D, COPY)[0], D)
    K = gl.allocate_shared_memory(q.dtype.element_ty, [ST, 64, D], TILE)
    V = gl.allocate_shared_memory(q.dtype.element_ty, [2 if D <= BOTH_AHEAD else 1, 64, D], TILE)
    page = _page_at(table, 0, rows, SHAPE)
    _fetch(K.index(0), pools[0], 0, page, rows, head, SHAPE, True)
    if D <= BOTH_AHEAD:
        _fetch(V.index(0), pools[1], 0, page, rows, head, SHAPE, True)
    following = _page_at(table, 1, rows, SHAPE)
    row = rows.first + gl.arange(0, 64, ROW)
    position = rows.length - rows.new + gl.minimum(row // G, rows.new - 1)
    m = gl.full([64], float("-inf"), F32, ROW)
    l = gl.full([64], 0.0, F32, ROW)  # noqa: E741
    acc = gl.full([64, D], 0.0, F32, SUMS)
    factor = LOG2E if SOFTCAP else scores.scale * LOG2E
    for i in range(rows.masked):
        _begin(K, V, pools, i, page, following, rows, head, SHAPE, True)
        first, _ = _position(i, rows, SHAPE)
        latest, window, end = visible_range(i, position, scores, rows, RECENT)
        s = _scores(x, K.index(i % ST), D)
        _next_keys(K, pools, i, following, rows, head, SHAPE, True)
        s = softcap_log2(s, scores.scale, scores.softcap, SOFTCAP)
        key = first + gl.arange(0, 64, gl.SliceLayout(0, SUMS))[None, :]
        seen = (key <= latest[:, None]) & (key > latest[:, None] - window) & (page >= 0) & (page < rows.pool)
        p, rescale, m, l = online_softmax(gl.where(seen, s, float("-inf")), m, l, factor, SUMS)  # noqa: E741
        lines = pools[1] + ((gl.maximum(page, 0).to(gl.int64) * SHAPE.key_heads + head) * PAGE + first % PAGE) * D
        values = _await_values(V, i, D)
        acc = _mix_masked(acc * rescale[:, None], p, values, lines, first, end, latest, window, D, COPY)
        page, following = following, _page_at(table, i + 2, rows, SHAPE)
    for i in range(rows.masked, rows.tiles):
        _begin(K, V, pools, i, page, following, rows, head, SHAPE, False)
        s = _scores(x, K.index(i % ST), D)
        _next_keys(K, pools, i, following, rows, head, SHAPE, False)
        s = softcap_log2(s, scores.scale, scores.softcap, SOFTCAP)
        p, rescale, m, l = online_softmax(s, m, l, factor, SUMS)  # noqa: E741
        acc = _mix(acc * rescale[:, None], p, _await_values(V, i, D))
        page, following = following, _page_at(table, i + 2, rows, SHAPE)
    found = gl.convert_layout(normalised(acc, m, l, sinks, head, row, G, SUMS, q.dtype.element_ty), COPY)
    # recomputed to save registers
    same = gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [rows.first], gl.int32, is_pure=False, pack=1)
    offsets, live = _offsets(same, rows, heads, head, G, D, COPY)
    gl.store(out + offsets, found, mask=live)


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
    stages = 1 if q.shape[2] == FULL_REGISTERS.value else 2
    plan = prefill_launch(q, pages, scale, window, softcap, recent, ROWS, stages)
    launch(prefill_mma, plan.grid)(q, (pages.k, pages.v), index_of(pages, starts), sinks, out, *plan[1:], num_warps=4)
