"""Walking a sequence's chunks with the memory on Hopper, see `_cuda_hopper`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from auraflux.ops.delta._cuda_tiles import A64, A128, BF, COL, F32, M64, M128, ROWS, C, publish


@gluon.jit
def _advance(stage, phase, ST: gl.constexpr):
    stage += 1
    phase = gl.where(stage == ST, phase ^ 1, phase)
    return gl.where(stage == ST, 0, stage), phase


@gluon.jit
def _feed(
    qs, ks, ws, us, ps, Q, K, W, U, P, G, full, empty, gates, start, end, slot, head, half,
    HEADS: gl.constexpr, SHARED: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    gdc_wait()
    stage, phase, key_head = 0, 1, head // SHARED
    place = gl.arange(0, 128, gl.BlockedLayout([4], [32], [1], [0]))
    following = gl.load(gates + slot * 192 + place)
    for first in range(start, end, C):
        now = following
        following = gl.load(gates + gl.where(first + C < end, slot + HEADS, slot) * 192 + place)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), 3 * 64 * 128 * 2 + 2 * 64 * 64 * 2)
        tma.async_copy_global_to_shared(ws, [slot * 64, 0], full.index(stage), W.index(stage))
        tma.async_copy_global_to_shared(qs, [first, key_head * 128], full.index(stage), Q.index(stage))
        tma.async_copy_global_to_shared(us, [slot * 64, half * 64], full.index(stage), U.index(stage))
        tma.async_copy_global_to_shared(ks, [first, key_head * 128], full.index(stage), K.index(stage))
        tma.async_copy_global_to_shared(ps, [slot * 64, 0], full.index(stage), P.index(stage))
        G.index(stage).store(now)
        mbarrier.arrive(full.index(stage))
        stage, phase = _advance(stage, phase, ST)
        slot += HEADS


@gluon.jit
def _memory(state, head, half):
    """Half of a head's memory [K, V], transposed."""
    row, column = gl.arange(0, 64, gl.SliceLayout(1, M128)), gl.arange(0, 128, gl.SliceLayout(0, M128))
    return state + head.to(gl.int64) * 16384 + (half * 64 + row[:, None] + column[None, :] * 128)


@gluon.jit
def _carry(
    os, out, Q, K, W, U, P, G, T, full, empty, gates, state, start, end, slot, head, half, b,
    HEADS: gl.constexpr, SINGLE: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    S = gl.load(_memory(state, b * HEADS + head, half))
    gdc_wait()
    zero = gl.full([64, 64], 0.0, F32, M64)
    decay = gl.load(gates + slot * 192 + 128)
    stage, phase = 0, 0
    token, value = gl.arange(0, 64, gl.SliceLayout(1, ROWS)), gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    operand = gl.convert_layout(S.to(BF), A64)
    for first in range(start, end, C):
        tma.store_wait(0)
        gl.thread_barrier()
        mbarrier.wait(full.index(stage), phase)
        x = warpgroup_mma(operand, W.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        S = S * decay
        new = warpgroup_mma_wait(0, deps=[x])
        o = warpgroup_mma(operand, Q.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        # loaded after the wait: ptxas would move the sum before it
        new = new + U.index(stage).permute((1, 0)).load(M64).to(F32)
        decayed = gl.convert_layout((new * G.index(stage).slice(0, 64).load(COL)[None, :]).to(BF), A128)
        changed = warpgroup_mma(decayed, K.index(stage), S, is_async=True)
        slot = gl.where(first + C < end, slot + HEADS, slot)
        new16 = gl.convert_layout(new.to(BF), A64)
        read = warpgroup_mma_wait(1, deps=[o])
        read = read * G.index(stage).slice(64, 64).load(COL)[None, :]
        total = warpgroup_mma(new16, P.index(stage).permute((1, 0)), read, is_async=True)
        decay = gl.load(gates + slot * 192 + 128)
        S = warpgroup_mma_wait(1, deps=[changed])
        operand = gl.convert_layout(S.to(BF), A64)
        total = warpgroup_mma_wait(0, deps=[total])
        T.permute((1, 0)).store(total.to(BF))
        publish()
        # what is past the last sequence's end is past the tensor's, where the copy engine writes nothing
        if SINGLE or first + C <= end:
            tma.async_copy_shared_to_global(os, [first, head * 128 + half * 64], T)
        else:
            at = (first + token).to(gl.int64)[:, None] * (HEADS * 128) + (head * 128 + half * 64 + value)[None, :]
            gl.store(out + at, T.load(ROWS), mask=(first + token < end)[:, None] & (value >= 0)[None, :])
        mbarrier.arrive(empty.index(stage))
        stage, phase = _advance(stage, phase, ST)
    # a copy of a number that the compiler cannot see through: else it keeps 64 addresses in registers from the load on
    same = gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [half], gl.int32, is_pure=False, pack=1)
    gl.store(_memory(state, b * HEADS + head, same), S)
    tma.store_wait(0)


@gluon.jit
def scan_tiles(
    qs, ks, ws, us, ps, os, out, gates, state, starts, begin, tokens,
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
    W = gl.allocate_shared_memory(BF, [ST, 64, 128], ws.layout)
    U = gl.allocate_shared_memory(BF, [ST, 64, 64], us.layout)
    P = gl.allocate_shared_memory(BF, [ST, 64, 64], ps.layout)
    T = gl.allocate_shared_memory(BF, [64, 64], os.layout)
    G = gl.allocate_shared_memory(F32, [ST, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(ST):
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(empty.index(s), count=1)
    publish()
    gl.warp_specialize(
        [
            (
                _carry,
                (os, out, Q, K, W, U, P, G, T, full, empty, gates, state, start, end, slot, head, half, b, HEADS, SINGLE, ST),
            ),
            (
                _feed,
                (qs, ks, ws, us, ps, Q, K, W, U, P, G, full, empty, gates, start, end, slot, head, half, HEADS, SHARED, ST),
            ),
        ],
        [1],
        [24],
    )
