"""Prefill attention by cp.async and mma.sync, in Gluon: 64 rows per program, heads of 64, 128 or 256 channels in 16 bits.

Rows, tiles of keys, masks and recent keys are those of `prefill`. A warp has 16 complete rows: scores, weights and sums stay in
its registers. The next tile of keys and values loads while one is multiplied; programs of the same multiprocessor overlap
products and softmax.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from auraflux.ops.attention.cuda.prefill import PrefillShape, Scores
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
from auraflux.ops.gpu.blocks.flash import NO_WINDOW, RecentKeys
from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.gpu.blocks.softmax import LOG2E
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import power_of_two

ROWS, STAGES = 64, 2
PART = gl.constexpr(32)  # channels of keys, and of queries in shared memory, that a product takes at a time


# of accumulators, and their rows
SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
ROW = gl.constexpr(gl.SliceLayout(1, SUMS.value))
LEFT, RIGHT = (gl.constexpr(gl.DotOperandLayout(n, SUMS.value, 2)) for n in (0, 1))
TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.constexpr_function
def keys_of_tile(width):
    """Return the keys of a tile; with more, wide heads would not fit shared memory and registers."""
    return 64 if width <= 128 else 32


@gluon.constexpr_function
def rows_of_16_bytes(width):
    """Return a layout whose threads have 16 bytes of a row each."""
    lanes = width // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _position(i, rows, N: gl.constexpr, SHAPE: gl.constexpr):
    """Return the first position of the i-th tile of N keys, and the offset of its page from its regular place in the table."""
    j = i // (64 // N)
    first, shift = tile_position(j, rows.recent, rows.masked, rows.begin, rows.full, rows.edge, SHAPE.recent)
    return first + i % (64 // N) * N, shift


@gluon.jit
def _page_at(table, i, rows, N: gl.constexpr, SHAPE: gl.constexpr):
    """Return the page of the i-th tile, or of the last one."""
    first, shift = _position(gl.minimum(i, rows.tiles * (64 // N) - 1), rows, N, SHAPE)
    return gl.load(table + first // SHAPE.page + shift)


@gluon.jit
def _fetch(K, V, pools, i, page, rows, head, SHAPE: gl.constexpr, COPY: gl.constexpr, MASKED: gl.constexpr):
    """Begin copying the i-th tile; keys beyond the end become zeros."""
    PAGE: gl.constexpr = SHAPE.page
    D: gl.constexpr = SHAPE.width
    N: gl.constexpr = K.shape[1]
    keys, values = pools
    if i < rows.tiles * (64 // N):
        first, _ = _position(i, rows, N, SHAPE)
        known = gl.where((page >= 0) & (page < rows.pool), page, 0).to(gl.int64)
        base = ((known * SHAPE.key_heads + head) * PAGE + first % PAGE) * D
        # computed again for every tile to save registers
        line = gl.arange(0, N, gl.SliceLayout(1, COPY))
        line = gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [line], gl.int32, is_pure=False, pack=1)
        at = line[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, COPY))[None, :]
        there = None
        if MASKED:
            end = gl.where(i // (64 // N) < rows.recent[0], rows.length, rows.end) if SHAPE.recent else rows.end
            there = (first + line < end)[:, None]
        async_copy.async_copy_global_to_shared(K.index(i % SHAPE.stages), keys + base + at, mask=there)
        async_copy.async_copy_global_to_shared(V.index(i % SHAPE.stages), values + base + at, mask=there)
    async_copy.commit_group()


@gluon.jit
def _scores(Q, K, D: gl.constexpr):
    """Multiply queries, in shared memory or registers, with keys [N, D]."""
    s = gl.full([Q.shape[0], K.shape[0]], 0.0, F32, SUMS)
    if isinstance(Q, gl.shared_memory_descriptor):
        # queries are read again for other keys: held, they would leave too few registers
        gl.inline_asm_elementwise("mov.b32 $0,0; // $1", "=r,r,~{memory}", [gl.program_id(0)], gl.int32, is_pure=False, pack=1)
        for c in gl.static_range(D // PART):
            x = Q.slice(c * PART, PART, dim=1).load(LEFT)
            k = K.slice(c * PART, PART, dim=1).permute((1, 0)).load(RIGHT)
            s = mma_v2(x, k, s)
    else:
        s = mma_v2(Q, K.permute((1, 0)).load(RIGHT), s)
    return s


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
    N: gl.constexpr = keys_of_tile(SHAPE.width)
    ST: gl.constexpr = SHAPE.stages
    G: gl.constexpr = SHAPE.group
    D: gl.constexpr = SHAPE.width
    PAGE: gl.constexpr = SHAPE.page
    SOFTCAP: gl.constexpr = SHAPE.softcap
    RECENT: gl.constexpr = SHAPE.recent
    COPY: gl.constexpr = rows_of_16_bytes(D)
    keys, values = pools
    # late tiles of a prompt see the most keys: schedule them first
    head, tile = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1)
    sequence, rows = visible_rows(tile, index, scores, far, 64, SHAPE)
    if rows.tiles == 0:
        return
    table = index.table + sequence.to(gl.int64) * index.width
    K = gl.allocate_shared_memory(q.dtype.element_ty, [ST, N, D], TILE)
    V = gl.allocate_shared_memory(q.dtype.element_ty, [ST, N, D], TILE)
    x = gl.load(q + _offsets(rows.first, rows, heads, head, G, D, COPY)[0])
    if D > 128:
        x = gl.allocate_shared_memory(q.dtype.element_ty, [64, D], TILE, x)
    else:
        x = gl.convert_layout(x, LEFT)
    page = _page_at(table, 0, rows, N, SHAPE)
    _fetch(K, V, pools, 0, page, rows, head, SHAPE, COPY, True)
    following = _page_at(table, 1, rows, N, SHAPE)
    row = rows.first + gl.arange(0, 64, ROW)
    position = rows.length - rows.new + gl.minimum(row // G, rows.new - 1)
    m = gl.full([64], float("-inf"), F32, ROW)
    l = gl.full([64], 0.0, F32, ROW)  # noqa: E741
    acc = gl.full([64, D], 0.0, F32, SUMS)
    factor = LOG2E if SOFTCAP else scores.scale * LOG2E
    for i in range(rows.masked * (64 // N)):
        async_copy.wait_group(0)
        gl.thread_barrier()
        _fetch(K, V, pools, i + 1, following, rows, head, SHAPE, COPY, True)
        first, _ = _position(i, rows, N, SHAPE)
        latest, window, end = visible_range(i // (64 // N), position, scores, rows, RECENT)
        s = softcap_log2(_scores(x, K.index(i % ST), D), scores.scale, scores.softcap, SOFTCAP)
        key = first + gl.arange(0, N, gl.SliceLayout(0, SUMS))[None, :]
        seen = (key <= latest[:, None]) & (key > latest[:, None] - window) & (page >= 0) & (page < rows.pool)
        p, rescale, m, l = online_softmax(gl.where(seen, s, float("-inf")), m, l, factor, SUMS)  # noqa: E741
        lines = values + ((gl.maximum(page, 0).to(gl.int64) * SHAPE.key_heads + head) * PAGE + first % PAGE) * D
        acc = _mix_masked(acc * rescale[:, None], p, V.index(i % ST), lines, first, end, latest, window, D, COPY)
        page, following = following, _page_at(table, i + 2, rows, N, SHAPE)
    for i in range(rows.masked * (64 // N), rows.tiles * (64 // N)):
        async_copy.wait_group(0)
        gl.thread_barrier()
        _fetch(K, V, pools, i + 1, following, rows, head, SHAPE, COPY, False)
        s = softcap_log2(_scores(x, K.index(i % ST), D), scores.scale, scores.softcap, SOFTCAP)
        p, rescale, m, l = online_softmax(s, m, l, factor, SUMS)  # noqa: E741
        acc = _mix(acc * rescale[:, None], p, V.index(i % ST))
        following = _page_at(table, i + 2, rows, N, SHAPE)
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
    (tokens, heads, width), (_, key_heads, page, _) = q.shape, pages.k.shape
    sequences, group = len(pages.lengths), heads // key_heads
    newest, far = recent or (0, 0)
    shape = PrefillShape(
        group, key_heads, width, page, power_of_two(sequences), STAGES, softcap is not None, recent is not None
    )
    launch(prefill_mma, (key_heads, tokens * group // ROWS + sequences))(
        q, (pages.k, pages.v), index_of(pages, starts), sinks, out,
        Scores(scale, softcap or 1.0, NO_WINDOW if window is None else window, newest), far, heads, shape, num_warps=4,
    )  # fmt: skip
