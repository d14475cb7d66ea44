"""Walking a sequence's chunks with the memory on Hopper, see `prefill`."""

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

# a value less what the memory gives for its key, times the decay since the chunk's start: a pair of each
LESS = gl.constexpr(
    "{.reg .f32 a,b,c,d; .reg .b32 h; shl.b32 h,$1,16; mov.b32 a,h; and.b32 h,$1,0xffff0000; mov.b32 b,h;"
    "neg.f32 c,$4; neg.f32 d,$5; fma.rn.f32 a,$2,c,a; fma.rn.f32 b,$3,d,b; cvt.rn.bf16x2.f32 $0,b,a;}"
)


@gluon.jit
def _advance(stage, phase, ST: gl.constexpr):
    stage += 1
    phase = gl.where(stage == ST, phase ^ 1, phase)
    return gl.where(stage == ST, 0, stage), phase


@gluon.jit
def _feed(
    qs, ks, vs, xs, ps, Q, K, V, X, P, G, full, empty, gates, start, end, slot,
    HEADS: gl.constexpr, SHARED: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    half, head = gl.program_id(0), gl.program_id(1)
    stage, phase, key_head = 0, 1, head // SHARED
    place = gl.arange(0, 128, gl.BlockedLayout([4], [32], [1], [0]))
    following = gl.load(gates + slot * 128 + place)
    for first in range(start, end, C):
        now, after = following, gl.where(first + C < end, slot + HEADS, slot)
        following = gl.load(gates + after * 128 + place)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), 2 * 64 * 128 * 2 + 3 * 64 * 64 * 2)
        tma.async_copy_global_to_shared(ks, [first, key_head * 128], full.index(stage), K.index(stage))
        tma.async_copy_global_to_shared(vs, [first, head * 128 + half * 64], full.index(stage), V.index(stage))
        tma.async_copy_global_to_shared(qs, [first, key_head * 128], full.index(stage), Q.index(stage))
        tma.async_copy_global_to_shared(xs, [slot * 64, 0], full.index(stage), X.index(stage))
        tma.async_copy_global_to_shared(ps, [slot * 64, 0], full.index(stage), P.index(stage))
        G.index(stage).store(now)
        mbarrier.arrive(full.index(stage))
        stage, phase = _advance(stage, phase, ST)
        slot = after


@gluon.jit
def _memory(state, head, half, part):
    """A quarter of a head's memory [K, V], transposed."""
    row, column = gl.arange(0, 64, ROW), gl.arange(0, 64, COL)
    return state + head.to(gl.int64) * 16384 + (half * 64 + row[:, None] + (part * 64 + column[None, :]) * 128)


@gluon.jit
def _joined(low, high):
    """Two halves of an operand's columns side by side; only names of registers change."""
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), [64, 128]), A64)


@gluon.jit
def _leave(T, results):
    """Put results where TMA finds them, when it is done with those of the other half of T."""
    T.permute((1, 0)).store(results)
    fence_async_shared()
    tma.store_wait(0)
    gl.thread_barrier()


@gluon.jit
def _leave_last(os, out, T, results, last, end, column, HEADS: gl.constexpr, SINGLE: gl.constexpr):
    _leave(T, results)
    # what is past the last sequence's end is past the tensor's, where TMA writes nothing
    if SINGLE or last + C <= end:
        tma.async_copy_shared_to_global(os, [last, column], T)
    else:
        token, value = gl.arange(0, 64, gl.SliceLayout(1, ROWS)), gl.arange(0, 64, gl.SliceLayout(0, ROWS))
        at = (last + token).to(gl.int64)[:, None] * (HEADS * 128) + (column + value)[None, :]
        gl.store(out + at, T.load(ROWS), mask=(last + token < end)[:, None] & (value >= 0)[None, :])


@gluon.jit
def _carry(
    os, out, Q, K, V, X, P, G, T, full, empty, state, start, end, head, half, b,
    HEADS: gl.constexpr, SINGLE: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    low = gl.load(_memory(state, b * HEADS + head, half, 0))
    high = gl.load(_memory(state, b * HEADS + head, half, 1))
    zero = gl.full([64, 64], 0.0, F32, M64)
    stage, phase, side, before, column = 0, 0, 0, 0, head * 128 + half * 64
    low16, high16, results = low.to(BF), high.to(BF), zero.to(BF)
    for first in range(start, end, C):
        mbarrier.wait(full.index(stage), phase)
        keys, queries, decays = K.index(stage), Q.index(stage), G.index(stage)
        since = decays.slice(64, 64).load(COL)[None, :]
        values = V.index(stage).permute((1, 0)).load(M64)
        x = warpgroup_mma(_joined(low16, high16), keys.permute((1, 0)), zero, use_acc=False, is_async=True)
        # results of the chunk before, while the first product runs; before the first chunk they go past the tensor's end
        _leave(T.index(side), results)
        mbarrier.arrive(empty.index(before), pred=first > start)
        tma.async_copy_shared_to_global(os, [gl.where(first > start, first - C, 1 << 30), column], T.index(side))
        before, side = stage, side ^ 1
        x = warpgroup_mma_wait(0, deps=[x])
        # products that nothing waits for fill the time between those that wait for each other
        o = warpgroup_mma(
            gl.convert_layout(low16, A64), queries.slice(0, 64, dim=1).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        missing = gl.inline_asm_elementwise(LESS, "=r,r,f,f,f,f", [values, x, since], BF, is_pure=True, pack=2)
        missing = gl.convert_layout(missing, A64)
        new = warpgroup_mma(missing, X.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        total = warpgroup_mma(missing, P.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        # since the chunk's start, of its last token
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
    _leave_last(os, out, T.index(side), results, start + (end - 1 - start) // C * C, end, column, HEADS, SINGLE)
    # a copy of a number that the compiler cannot see through: else it keeps 64 addresses in registers from the load on
    same = gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [half], gl.int32, is_pure=False, pack=1)
    gl.store(_memory(state, b * HEADS + head, same, 0), low)
    gl.store(_memory(state, b * HEADS + head, same, 1), high)
    tma.store_wait(0)


@gluon.jit(do_not_specialize_on_alignment=["tokens"])
def scan_tiles(
    qs, ks, vs, xs, ps, os, out, gates, state, starts, begin, tokens,
    HEADS: gl.constexpr, SHARED: gl.constexpr, SINGLE: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    half, head, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if SINGLE:
        start, end = b * 0 + begin, tokens
    else:
        start, end = gl.load(starts + b), gl.minimum(gl.load(starts + b + 1), tokens)
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
    gl.warp_specialize(
        [
            (_carry, (os, out, Q, K, V, X, P, G, T, full, empty, state, start, end, head, half, b, HEADS, SINGLE, ST)),
            (_feed, (qs, ks, vs, xs, ps, Q, K, V, X, P, G, full, empty, gates, start, end, slot, HEADS, SHARED, ST)),
        ],
        [1],
        [24],
    )
