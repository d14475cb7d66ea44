"""Sequential scan over a sequence's chunks on Hopper, see `prefill`."""

from typing import Any, NamedTuple

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

from auraflux.ops.delta.cuda.layouts import A64, BF, COL, F32, M64, ROW, ROWS, C, publish

# residual: value minus the state's read at its key times the decay since the chunk's start, for a pair
RESIDUAL = gl.constexpr(
    "{.reg .f32 a,b,c,d; .reg .b32 h; shl.b32 h,$1,16; mov.b32 a,h; and.b32 h,$1,0xffff0000; mov.b32 b,h;"
    "neg.f32 c,$4; neg.f32 d,$5; fma.rn.f32 a,$2,c,a; fma.rn.f32 b,$3,d,b; cvt.rn.bf16x2.f32 $0,b,a;}"
)


class ScanShape(NamedTuple):
    """Compile-time shape: value heads, value heads per key head, whether there is one sequence, and tiles in flight."""

    heads: int
    group: int
    single: bool
    stages: int


class Recurrence(NamedTuple):
    """Decays of chunks, the state that they update, and where sequences begin."""

    gates: Tensor
    state: Tensor
    starts: Tensor


class Memory(NamedTuple):
    """Shared memory of a program.

    Q, K, V, X, P, G  tiles in flight, and decays
    T                 results
    full, empty       barriers
    """

    Q: Any
    K: Any
    V: Any
    X: Any
    P: Any
    G: Any
    T: Any
    full: Any
    empty: Any


@gluon.jit
def _advance(stage, phase, ST: gl.constexpr):
    stage += 1
    phase = gl.where(stage == ST, phase ^ 1, phase)
    return gl.where(stage == ST, 0, stage), phase


@gluon.jit
def _feed(qs, ks, vs, xs, ps, memory, gates, start, end, slot, SHAPE: gl.constexpr):
    HEADS: gl.constexpr = SHAPE.heads
    SHARED: gl.constexpr = SHAPE.group
    ST: gl.constexpr = SHAPE.stages
    full, empty = memory.full, memory.empty
    half, head = gl.program_id(0), gl.program_id(1)
    stage, phase, key_head = 0, 1, head // SHARED
    place = gl.arange(0, 128, gl.BlockedLayout([4], [32], [1], [0]))
    following = gl.load(gates + slot * 128 + place)
    for first in range(start, end, C):
        now, after = following, gl.where(first + C < end, slot + HEADS, slot)
        following = gl.load(gates + after * 128 + place)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), 2 * 64 * 128 * 2 + 3 * 64 * 64 * 2)
        tma.async_copy_global_to_shared(ks, [first, key_head * 128], full.index(stage), memory.K.index(stage))
        tma.async_copy_global_to_shared(vs, [first, head * 128 + half * 64], full.index(stage), memory.V.index(stage))
        tma.async_copy_global_to_shared(qs, [first, key_head * 128], full.index(stage), memory.Q.index(stage))
        tma.async_copy_global_to_shared(xs, [slot * 64, 0], full.index(stage), memory.X.index(stage))
        tma.async_copy_global_to_shared(ps, [slot * 64, 0], full.index(stage), memory.P.index(stage))
        memory.G.index(stage).store(now)
        mbarrier.arrive(full.index(stage))
        stage, phase = _advance(stage, phase, ST)
        slot = after


@gluon.jit
def _state_at(state, head, half, part):
    """Return addresses of a quarter of a head's state [K, V], transposed."""
    row, column = gl.arange(0, 64, ROW), gl.arange(0, 64, COL)
    return state + head.to(gl.int64) * 16384 + (half * 64 + row[:, None] + (part * 64 + column[None, :]) * 128)


@gluon.jit
def _joined(low, high):
    """Concatenate two halves of an operand's columns; only register names change."""
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), [64, 128]), A64)


@gluon.jit
def _put_results(T, results):
    """Store results to shared memory for TMA, after its copy of T's other half."""
    T.permute((1, 0)).store(results)
    fence_async_shared()
    tma.store_wait(0)
    gl.thread_barrier()


@gluon.jit
def _store_last(os, out, T, results, last, end, column, HEADS: gl.constexpr, SINGLE: gl.constexpr):
    _put_results(T, results)
    # TMA drops writes past the tensor's end, which is the last sequence's end
    if SINGLE or last + C <= end:
        tma.async_copy_shared_to_global(os, [last, column], T)
    else:
        token, value = gl.arange(0, 64, gl.SliceLayout(1, ROWS)), gl.arange(0, 64, gl.SliceLayout(0, ROWS))
        at = (last + token).to(gl.int64)[:, None] * (HEADS * 128) + (column + value)[None, :]
        gl.store(out + at, T.load(ROWS), mask=(last + token < end)[:, None] & (value >= 0)[None, :])


@gluon.jit
def _carry(os, out, memory, state, start, end, head, half, b, SHAPE: gl.constexpr):
    HEADS: gl.constexpr = SHAPE.heads
    SINGLE: gl.constexpr = SHAPE.single
    ST: gl.constexpr = SHAPE.stages
    T, full, empty = memory.T, memory.full, memory.empty
    low = gl.load(_state_at(state, b * HEADS + head, half, 0))
    high = gl.load(_state_at(state, b * HEADS + head, half, 1))
    zero = gl.full([64, 64], 0.0, F32, M64)
    stage, phase, side, before, column = 0, 0, 0, 0, head * 128 + half * 64
    low16, high16, results = low.to(BF), high.to(BF), zero.to(BF)
    for first in range(start, end, C):
        mbarrier.wait(full.index(stage), phase)
        keys, queries, decays = memory.K.index(stage), memory.Q.index(stage), memory.G.index(stage)
        since = decays.slice(64, 64).load(COL)[None, :]
        values = memory.V.index(stage).permute((1, 0)).load(M64)
        x = warpgroup_mma(_joined(low16, high16), keys.permute((1, 0)), zero, use_acc=False, is_async=True)
        # store the previous chunk's results while the first product runs; before the first chunk they go past the tensor's end
        _put_results(T.index(side), results)
        mbarrier.arrive(empty.index(before), pred=first > start)
        tma.async_copy_shared_to_global(os, [gl.where(first > start, first - C, 1 << 30), column], T.index(side))
        before, side = stage, side ^ 1
        x = warpgroup_mma_wait(0, deps=[x])
        # independent products fill the latency between dependent ones
        o = warpgroup_mma(
            gl.convert_layout(low16, A64), queries.slice(0, 64, dim=1).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        residual = gl.inline_asm_elementwise(RESIDUAL, "=r,r,f,f,f,f", [values, x, since], BF, is_pure=True, pack=2)
        residual = gl.convert_layout(residual, A64)
        new = warpgroup_mma(residual, memory.X.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        total = warpgroup_mma(residual, memory.P.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        # decay of the complete chunk
        decay = decays.slice(127, 1).load(COL)[None, :]
        low, high = low * decay, high * decay
        tail = decays.slice(0, 64).load(COL)[None, :]
        new, o = warpgroup_mma_wait(1, deps=[new, o])
        new = gl.convert_layout((new * tail).to(BF), A64)
        low = warpgroup_mma(new, keys.slice(0, 64, dim=1), low, is_async=True)
        high = warpgroup_mma(new, keys.slice(64, 64, dim=1), high, is_async=True)
        o = warpgroup_mma(gl.convert_layout(high16, A64), queries.slice(64, 64, dim=1).permute((1, 0)), o, is_async=True)
        low = warpgroup_mma_wait(2, deps=[low])
        low16 = low.to(BF)
        high = warpgroup_mma_wait(1, deps=[high])
        high16 = high.to(BF)
        since = decays.slice(64, 64).load(COL)[None, :]
        o, total = warpgroup_mma_wait(0, deps=[o, total])
        results = (total + o * since).to(BF)
        stage, phase = _advance(stage, phase, ST)
    _store_last(os, out, T.index(side), results, start + (end - 1 - start) // C * C, end, column, HEADS, SINGLE)
    # an opaque copy: otherwise the compiler holds 64 addresses in registers from the load on
    same = gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [half], gl.int32, is_pure=False, pack=1)
    gl.store(_state_at(state, b * HEADS + head, same, 0), low)
    gl.store(_state_at(state, b * HEADS + head, same, 1), high)
    tma.store_wait(0)


@gluon.jit(do_not_specialize_on_alignment=["tokens"])
def scan_tiles(
    qs, ks, vs, xs, ps, os, out, recurrence, begin, tokens, SHAPE: gl.constexpr,
):  # fmt: skip
    HEADS: gl.constexpr = SHAPE.heads
    ST: gl.constexpr = SHAPE.stages
    half, head, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if SHAPE.single:
        start, end = b * 0 + begin, tokens
    else:
        start, end = gl.load(recurrence.starts + b), gl.minimum(gl.load(recurrence.starts + b + 1), tokens)
    if start >= end:
        return
    slot = (start // C + b) * HEADS + head
    Q = gl.allocate_shared_memory(BF, [ST, 64, 128], qs.layout)
    K = gl.allocate_shared_memory(BF, [ST, 64, 128], ks.layout)
    V = gl.allocate_shared_memory(BF, [ST, 64, 64], vs.layout)
    X = gl.allocate_shared_memory(BF, [ST, 64, 64], xs.layout)
    P = gl.allocate_shared_memory(BF, [ST, 64, 64], ps.layout)
    T = gl.allocate_shared_memory(BF, [2, 64, 64], os.layout)
    G = gl.allocate_shared_memory(F32, [ST, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(ST):
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(empty.index(s), count=1)
    publish()
    memory = Memory(Q, K, V, X, P, G, T, full, empty)
    gl.warp_specialize(
        [
            (_carry, (os, out, memory, recurrence.state, start, end, head, half, b, SHAPE)),
            (_feed, (qs, ks, vs, xs, ps, memory, recurrence.gates, start, end, slot, SHAPE)),
        ],
        [1],
        [24],
    )
