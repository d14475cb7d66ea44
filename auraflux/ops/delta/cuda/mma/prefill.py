"""Chunked delta rule over a prompt by cp.async and mma.sync, for heads of 128 channels in bf16; the algebra of `prefill`.

`chunk_mma` leaves X and P of every chunk. `scan_mma` walks a sequence's chunks with a quarter of a value head's state, in the
accumulators of four warps. Keys, queries, X and P are left operands, of which a warp reads 16 rows; the state, what it lacks
of the values and the values it learns are right operands, which go through shared memory. Two stages of tiles are in flight;
queries and P have one, refilled as soon as they are used.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from auraflux.ops.delta.cuda.inverse import DIAGONAL, JOIN16, JOIN32, PAIRS, ROUNDED, exp2
from auraflux.ops.delta.cuda.layouts import BF, F32, HF, ROWS, C
from auraflux.ops.delta.cuda.prefill import segments_for, sequence_at, store_gates
from auraflux.ops.delta.cuda.scan import ScanShape
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.gpu.streams import side_stream

# accumulators of four warps, 16 rows each; operands from registers and from shared memory; rows and columns
ACC = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, ACC.value, 2))
ROW, COL = gl.constexpr(gl.SliceLayout(1, ACC.value)), gl.constexpr(gl.SliceLayout(0, ACC.value))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # rows of 128 elements, 16 bytes a thread
NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))  # rows of 32 elements
TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
SLIM = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))  # of 32 elements
LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _copy_tile(to, source, stride, live, LAYOUT: gl.constexpr):
    """Begin copying 64 rows that are `stride` elements apart; rows from `live` on become zeros."""
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, to.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(to, source + row * stride + column, mask=row < live)


@gluon.jit
def _inverse(a, As, Xs, Ys):
    """Return (I - a)⁻¹ of a strictly lower triangular a, as `inverse` does by wgmma."""
    zero = gl.full([64, 64], 0.0, F32, ACC)
    x = gl.inline_asm_elementwise(DIAGONAL, PAIRS, [a], HF, is_pure=True, pack=32)
    As.store(a)
    Xs.store(x)
    gl.thread_barrier()
    y = mma_v2(gl.convert_layout(x, LEFT), As.load(RIGHT), zero)
    y = gl.inline_asm_elementwise(JOIN16, ROUNDED, [y], HF, is_pure=True, pack=32)
    joined = mma_v2(gl.convert_layout(y, LEFT), Xs.load(RIGHT), x.to(F32))
    half = joined.to(HF)
    Ys.store(half)
    y = mma_v2(gl.convert_layout(half, LEFT), As.load(RIGHT), zero)
    y = gl.inline_asm_elementwise(JOIN32, ROUNDED, [y], HF, is_pure=True, pack=32)
    gl.thread_barrier()
    return mma_v2(gl.convert_layout(y, LEFT), Ys.load(RIGHT), joined)


@gluon.jit
def _store_tile(to, tile, x):
    """Store a tile [64, 64] through shared memory, 16 bytes a thread."""
    tile.store(x)
    gl.thread_barrier()
    row, column = gl.arange(0, 64, gl.SliceLayout(1, ROWS)), gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    gl.store(to + row[:, None] * 64 + column[None, :], tile.load(ROWS))


@gluon.jit(do_not_specialize_on_alignment=["begin", "tokens"])
def chunk_mma(tokens_in, made, starts, sequences, begin, tokens, SHAPE: gl.constexpr):
    """Compute X, P and the decays of a chunk; grid (heads, chunks)."""
    HEADS: gl.constexpr = SHAPE.heads
    KEYS: gl.constexpr = HEADS // SHAPE.group * 128
    head, place = gl.program_id(0), gl.program_id(1)
    if SHAPE.single:
        place += begin // C
        first, end = place * C, tokens
    else:
        b = sequence_at(place, starts, sequences)
        start, end = gl.load(starts + b), gl.minimum(gl.load(starts + b + 1), tokens)
        first = start + (place - start // C - b) * C
    if first >= end:
        return
    q, k, decay, beta = tokens_in
    xs, ps, gates = made
    wide = gl.allocate_shared_memory(BF, [2, 64, 128], TILE)
    line = gl.allocate_shared_memory(F32, [2, 64], LINES)
    # these reuse the memory of keys and queries
    halves, tiles = wide._reinterpret(HF, [4, 64, 64], TILE), wide._reinterpret(BF, [4, 64, 64], TILE)
    K, Q = wide.index(0), wide.index(1)
    at = first.to(gl.int64) * KEYS + head // SHAPE.group * 128
    _copy_tile(K, k + at, KEYS, end - first, WIDE)
    _copy_tile(Q, q + at, KEYS, end - first, WIDE)
    async_copy.commit_group()
    slot = (place * HEADS + head).to(gl.int64)
    store_gates(decay, beta, gates + slot * 128, line, first.to(gl.int64) * HEADS + head, end - first, HEADS)
    async_copy.wait_group(0)
    gl.thread_barrier()
    i, j = gl.arange(0, 64, ROW), gl.arange(0, 64, COL)
    between = line.index(0).load(ROW)[:, None] - line.index(0).load(COL)[None, :]
    between = exp2(gl.where(i[:, None] >= j[None, :], between, -1e30))
    qk, kk = gl.full([64, 64], 0.0, F32, ACC), gl.full([64, 64], 0.0, F32, ACC)
    for c in gl.static_range(0, 128, 32):
        key = K.slice(c, 32, dim=1).permute((1, 0)).load(RIGHT)
        qk = mma_v2(Q.slice(c, 32, dim=1).load(LEFT), key, qk)
        kk = mma_v2(K.slice(c, 32, dim=1).load(LEFT), key, kk)
    a = (kk * -line.index(1).load(ROW)[:, None] * between).to(HF)
    p = (qk * between).to(BF)
    gl.thread_barrier()
    P, X = tiles.index(3), tiles.index(0)
    P.store(p)
    x = _inverse(a, halves.index(0), halves.index(1), halves.index(2))
    _store_tile(xs + slot * 4096, X, (x * line.index(1).load(COL)[None, :]).to(BF))
    px = mma_v2(P.load(LEFT), X.load(RIGHT), gl.full([64, 64], 0.0, F32, ACC))
    _store_tile(ps + slot * 4096, tiles.index(1), px.to(BF))


@gluon.jit
def _fetch(tokens, made, tiles, head, part, first, end, slot, stage, SHAPE: gl.constexpr):
    """Begin copying a chunk's keys, values, X and decays."""
    HEADS: gl.constexpr = SHAPE.heads
    KEYS: gl.constexpr = HEADS // SHAPE.group * 128
    _, k, v = tokens
    xs, _, gates = made
    K, V, X, G = tiles
    if first < end:
        at = first.to(gl.int64)
        _copy_tile(K.index(stage), k + at * KEYS + head // SHAPE.group * 128, KEYS, end - first, WIDE)
        _copy_tile(V.index(stage), v + at * (HEADS * 128) + head * 128 + part * 32, HEADS * 128, end - first, NARROW)
        _copy_tile(X.index(stage), xs + slot * 4096, 64, 64, ROWS)
        line = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
        async_copy.async_copy_global_to_shared(G.index(stage), gates + slot * 128 + line)
    async_copy.commit_group()


@gluon.jit
def _fetch_queries(q, Q, head, first, end, SHAPE: gl.constexpr):
    KEYS: gl.constexpr = SHAPE.heads // SHAPE.group * 128
    if first < end:
        _copy_tile(Q, q + first.to(gl.int64) * KEYS + head // SHAPE.group * 128, KEYS, end - first, WIDE)
    async_copy.commit_group()


@gluon.jit
def _fetch_products(ps, P, slot, there):
    if there:
        _copy_tile(P, ps + slot * 4096, 64, 64, ROWS)
    async_copy.commit_group()


@gluon.jit
def _state_at(state, head, part):
    """Return addresses of a quarter of the columns of a head's state [K, V]."""
    row, column = gl.arange(0, 128, ROW), gl.arange(0, 32, COL)
    return state + head.to(gl.int64) * 16384 + (row[:, None] * 128 + (part * 32 + column)[None, :])


@gluon.jit(do_not_specialize_on_alignment=["begin", "tokens"])
def scan_mma(tokens_in, made, out, state, starts, begin, tokens, SHAPE: gl.constexpr):
    """Walk a sequence's chunks; grid (4, heads, sequences)."""
    HEADS: gl.constexpr = SHAPE.heads
    part, head, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if SHAPE.single:
        start, end = b * 0 + begin, tokens
    else:
        start, end = gl.load(starts + b), gl.minimum(gl.load(starts + b + 1), tokens)
    if start >= end:
        return
    slot = ((start // C + b) * HEADS + head).to(gl.int64)
    Q, P = gl.allocate_shared_memory(BF, [64, 128], TILE), gl.allocate_shared_memory(BF, [64, 64], TILE)
    K = gl.allocate_shared_memory(BF, [2, 64, 128], TILE)
    V = gl.allocate_shared_memory(BF, [2, 64, 32], SLIM)
    X = gl.allocate_shared_memory(BF, [2, 64, 64], TILE)
    G = gl.allocate_shared_memory(F32, [2, 128], LINES)
    # operands that all warps read: the state, what it lacks of the values, the values it learns
    S = gl.allocate_shared_memory(BF, [128, 32], SLIM)
    R, N = gl.allocate_shared_memory(BF, [64, 32], SLIM), gl.allocate_shared_memory(BF, [64, 32], SLIM)
    tiles = K, V, X, G
    _fetch(tokens_in, made, tiles, head, part, start, end, slot, 0, SHAPE)
    _fetch_queries(tokens_in[0], Q, head, start, end, SHAPE)
    _fetch_products(made[1], P, slot, start < end)
    s = gl.load(_state_at(state, b * HEADS + head, part))
    stage = 0
    for first in range(start, end, C):
        S.store(s.to(BF))
        # all but P
        async_copy.wait_group(1)
        gl.thread_barrier()
        slot += HEADS
        _fetch(tokens_in, made, tiles, head, part, first + C, end, slot, 1 - stage, SHAPE)
        read, o = gl.full([64, 32], 0.0, F32, ACC), gl.full([64, 32], 0.0, F32, ACC)
        # products by turns: the sums of one alone would wait for each other
        for c in gl.static_range(0, 128, 32):
            s16 = S.slice(c, 32).load(RIGHT)
            read = mma_v2(K.index(stage).slice(c, 32, dim=1).load(LEFT), s16, read)
            o = mma_v2(Q.slice(c, 32, dim=1).load(LEFT), s16, o)
        since = G.index(stage).slice(64, 64).load(ROW)[:, None]
        R.store((V.index(stage).load(ACC).to(F32) - read * since).to(BF))
        async_copy.wait_group(1)
        gl.thread_barrier()
        _fetch_queries(tokens_in[0], Q, head, first + C, end, SHAPE)
        new, o = gl.full([64, 32], 0.0, F32, ACC), o * since
        for c in gl.static_range(0, 64, 32):
            residual = R.slice(c, 32).load(RIGHT)
            new = mma_v2(X.index(stage).slice(c, 32, dim=1).load(LEFT), residual, new)
            o = mma_v2(P.slice(c, 32, dim=1).load(LEFT), residual, o)
        N.store((new * G.index(stage).slice(0, 64).load(ROW)[:, None]).to(BF))
        # results take the place of the values, which their warps have read
        T = V.index(stage)
        T.store(o.to(BF))
        gl.thread_barrier()
        _fetch_products(made[1], P, slot, first + C < end)
        # decay of the complete chunk
        s = s * G.index(stage).slice(127, 1).load(COL)[None, :]
        s = mma_v2(K.index(stage).permute((1, 0)).load(LEFT), N.load(RIGHT), s)
        row, column = gl.arange(0, 64, gl.SliceLayout(1, NARROW)), gl.arange(0, 32, gl.SliceLayout(0, NARROW))
        at = (first + row).to(gl.int64)[:, None] * (HEADS * 128) + (head * 128 + part * 32 + column)[None, :]
        gl.store(out + at, T.load(NARROW), mask=(first + row < end)[:, None] & (column >= 0)[None, :])
        stage = 1 - stage
    # an opaque copy: otherwise the compiler holds the addresses in registers from the load on
    same = gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [part], gl.int32, is_pure=False, pack=1)
    gl.store(_state_at(state, b * HEADS + head, same), s)


def prefill_mma(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor, out: Tensor
) -> None:
    """Run `gated_delta_prefill` into `out`."""
    (batch, heads), tokens, shared = state.shape[:2], v.shape[0], state.shape[1] // q.shape[1]
    slots, single = tokens // C.value + batch, batch == 1
    x, p = (v.new_empty(slots * heads * C.value, C.value) for _ in range(2))
    made = x, p, torch.empty(slots * heads * 128, dtype=torch.float32, device=v.device)
    segments = segments_for(tokens, heads, v.device) if single else 1
    size = cdiv(cdiv(tokens, C.value), segments) * C.value
    shape = ScanShape(heads, shared, single, 2)
    side = side_stream(v.device, segments > 1)
    for begin in range(0, tokens, size):
        end = min(tokens, begin + size)
        launch(chunk_mma, (heads, cdiv(end - begin, C.value) if single else slots))(
            (q, k, decay, beta), made, starts, batch, begin, end, shape, num_warps=4
        )
        with side:
            launch(scan_mma, (4, heads, batch))((q, k, v), made, out, state, starts, begin, end, shape, num_warps=4)
    side.join()
