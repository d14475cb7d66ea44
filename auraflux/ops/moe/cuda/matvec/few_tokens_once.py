"""Both kernels of 4-bit experts for few tokens in one launch, for GPUs that launch kernels one after the other.

The first programs of a token are those of `up_slots`, the others those of `down_slots`. Programs start in the order of their
numbers: the others choose the experts and load codes into registers while the first compute, and wait until all of them are
counted. The last program of a token to leave clears its counters for the next launch.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.copy import COMMIT, COPY8, COPY16, copy, wait_ptx
from auraflux.ops.hopper.mma_int4_groups import codes_two, put_rows, row_products, scales_two
from auraflux.ops.hopper.ptx import run, shared
from auraflux.ops.hopper.shared_memory import long_at, put_long
from auraflux.ops.moe.cuda.matvec.few_tokens import BARRIERS, select_experts, up_nbytes, up_tiles
from auraflux.ops.moe.cuda.matvec.few_tokens_down import (
    SOURCES,
    hidden_of,
    load_epilogue,
    put_shares,
    store_slots,
)

UNIT = gl.constexpr(2304)  # bytes of 16 rows of four groups: codes, scales, biases
COUNTERS = 2  # of a token: programs that have stored hidden vectors, programs that have read them


@gluon.constexpr_function
def once_nbytes(hidden, inner, slots, warps, registers):
    """Return the shared memory of a program; a warp has `registers` of its units of codes in registers."""
    units = slots * (inner // 256)
    copied = max((units + warps - 1) // warps - registers, 0)
    return max(up_nbytes(hidden, 1, warps, False), 128 + 768 + units * 64 + warps * 64 + warps * copied * 2304)


class Buffers(NamedTuple):
    """Hidden vectors between the kernels, and the counters of each token, zero between launches."""

    between: Tensor
    counters: Tensor


@gluon.jit
def _count_up(counter, tid):
    """Count a program, all of whose threads have stored."""
    text: gl.constexpr = (
        "{.reg .pred p; setp.ne.b32 p,$2,0; @p bra DONE; fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [$1],1;"
        "DONE: mov.b32 $0,0;}"
    )
    gl.thread_barrier()
    gl.inline_asm_elementwise(text, "=r,l,r,~{memory}", [counter, tid], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _await_count(counter, wanted, tid):
    """Wait until `wanted` programs are counted."""
    text: gl.constexpr = (
        "{.reg .pred p,q; .reg .b32 n; setp.ne.b32 p,$3,0; @p bra DONE; AGAIN: ld.acquire.gpu.global.u32 n,[$1];"
        "setp.lt.u32 q,n,$2; @q bra AGAIN; DONE: mov.b32 $0,0;}"
    )
    gl.inline_asm_elementwise(text, "=r,l,r,r,~{memory}", [counter, wanted, tid], gl.int32, is_pure=False, pack=1)
    gl.thread_barrier()


@gluon.jit
def _leave(counter, programs, tid):
    """Count a program that waits no more; the last of `programs` clears both counters."""
    text: gl.constexpr = (
        "{.reg .pred p; .reg .b32 n; setp.ne.b32 p,$3,0; @p bra DONE; atom.relaxed.gpu.global.inc.u32 n,[$1+4],$2;"
        "setp.eq.u32 p,n,$2; @p st.relaxed.gpu.global.u32 [$1],0; DONE: mov.b32 $0,0;}"
    )
    gl.inline_asm_elementwise(text, "=r,l,r,r,~{memory}", [counter, programs - 1, tid], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _codes_ptx(offset):
    return f"ld.global.nc.b64 $0,[$2]; ld.global.nc.b64 $1,[$2+{offset}];"


@gluon.jit
def _half_at(at):
    """Load a bf16 of global memory and widen it to float32."""
    text: gl.constexpr = "{.reg .b16 h; .reg .b32 w; ld.global.nc.b16 h,[$1]; cvt.u32.u16 w,h; shl.b32 $0,w,16;}"
    return gl.inline_asm_elementwise(text, "=f,l,~{memory}", [at], gl.float32, is_pure=False, pack=1)


@gluon.jit
def _unit_at(table, unit, lane, INNER: gl.constexpr):
    """Load codes, scales and biases of a unit, four groups of a slot, from global memory, as `codes_two` and `scales_two`."""
    ROW: gl.constexpr = INNER // 2
    LINE: gl.constexpr = INNER // 32
    text: gl.constexpr = _codes_ptx(8 * ROW)
    entry, group, g, t = table + unit // (INNER // 256) * 24, unit % (INNER // 256) * 4, lane // 4, lane % 4
    base, words = long_at(entry) + (g * ROW + group * 32 + t * 8), ()
    for j in gl.static_range(4):
        at = base + (g % 4 ^ j) * 32
        words += gl.inline_asm_elementwise(text, "=l,=l,l,~{memory}", [at], (gl.int64,) * 2, is_pure=False, pack=1)
    more = g * LINE + group * 2 + t * 2
    scales, biases = long_at(entry + 8) + more, long_at(entry + 16) + more
    return words, (_half_at(scales), _half_at(scales + 8 * LINE), _half_at(biases), _half_at(biases + 8 * LINE))


@gluon.jit
def _request_unit(to, table, unit, lane, INNER: gl.constexpr):
    """Copy a unit by cp.async to shared memory: 16 rows of 128 bytes of codes, then of scales, then of biases."""
    ROW: gl.constexpr = INNER // 2
    LINE: gl.constexpr = INNER // 32
    entry, group = table + unit // (INNER // 256) * 24, unit % (INNER // 256) * 4
    codes, row, chunk = long_at(entry) + group * 32, lane // 8, lane % 8
    for n in gl.static_range(4):
        copy(COPY16, to + (row + 4 * n) * 128 + chunk * 16, codes + (row + 4 * n) * ROW + chunk * 16, lane >= 0)
    line = long_at(entry + 8 + lane // 16 * 8) + lane % 16 * LINE + group * 2
    copy(COPY8, to + 2048 + lane * 8, line, lane >= 0)


@gluon.jit
def _copied_unit(at, lane):
    return codes_two(at, lane, 128, 1024), scales_two(at + 2048, lane, 8, 64, 16)


@gluon.jit
def _put_sources(table, tid, row0, chosen, down, shared_down, experts, INNER: gl.constexpr, K: gl.constexpr):
    """Store where 16 rows of each slot begin: codes, scales and biases. Slots without an expert have those of the first one."""
    ROW: gl.constexpr = INNER // 2
    LINE: gl.constexpr = INNER // 32
    lane = tid % 32
    expert = gl.where((chosen >= 0) & (chosen < experts) & (lane < K), chosen, 0).to(gl.int64)
    codes, line = down.packed.to(gl.int64) + expert * down.step * 4, expert * down.scale_step * 2
    slopes, intercepts = down.scales.to(gl.int64) + line, down.biases.to(gl.int64) + line
    if shared_down is not None:
        last = lane == K
        codes = gl.where(last, shared_down.packed.to(gl.int64), codes)
        slopes = gl.where(last, shared_down.scales.to(gl.int64), slopes)
        intercepts = gl.where(last, shared_down.biases.to(gl.int64), intercepts)
    put_long(table + lane * 24, codes + row0 * ROW, tid < 32)
    put_long(table + lane * 24 + 8, slopes + row0 * LINE, tid < 32)
    put_long(table + lane * 24 + 16, intercepts + row0 * LINE, tid < 32)
    gl.thread_barrier()


@gluon.jit
def slots_at_once(
    x, given, router, epilogue, stacks, shared_stacks, buffers, out, sizes, UP: gl.constexpr, DOWN: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute the experts of few tokens; grid (ups + hidden / 16, tokens).

    given                  ids and weights, or None
    stacks, shared_stacks  gate, up and down; those of the shared expert are None without one
    sizes                  experts, inner, hidden, ups: programs of the first kernel
    UP, DOWN               shapes of the kernels that this one replaces
    REGISTERS              units of codes that a warp has in registers; the others are in shared memory
    """
    W: gl.constexpr = DOWN.warps
    experts, inner, _, ups = sizes
    gate, up, down = stacks
    shared_gate, shared_up, shared_down = shared_stacks
    SLOTS: gl.constexpr = DOWN.k if shared_down is None else DOWN.k + 1
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    memory, ring = shared(once_nbytes(UP.width, DOWN.width, SLOTS, W, REGISTERS), tid)
    program, token = gl.program_id(0), gl.program_id(1).to(gl.int64)
    counter = buffers.counters.to(gl.int64) + token * 8 + tid * 0
    if program < ups:
        place = program, ups, token
        choice, shared_pair = (given[0], router.scores, router.bias), (shared_gate, shared_up)
        up_tiles(x, choice, (gate, up), shared_pair, buffers.between, experts, inner, place, ring, tid, UP)
        _count_up(counter, tid)
    else:
        row0 = (program - ups).to(gl.int64) * 16
        down_place = token, row0, tid
        _down_rows(
            given,
            router,
            epilogue,
            (down, shared_down),
            buffers.between,
            out,
            sizes,
            counter,
            down_place,
            ring,
            DOWN,
            REGISTERS,
        )
    memory._keep_alive()


@gluon.jit
def _down_rows(
    given, router, epilogue, stacks, between, out, sizes, counter, place, ring, SHAPE: gl.constexpr, REGISTERS: gl.constexpr
):  # fmt: skip
    """Compute 16 elements of a token's results, as `down_slots` does, once all of the first kernel are counted.

    stacks  down, and that of the shared expert
    place   token, first row, thread
    """
    ids, weights = given
    down, shared_down = stacks
    experts, _, hidden, ups = sizes
    token, row0, tid = place
    INNER: gl.constexpr = SHAPE.width
    K: gl.constexpr = SHAPE.k
    W: gl.constexpr = SHAPE.warps
    SLOTS: gl.constexpr = K if shared_down is None else K + 1
    UNITS: gl.constexpr = SLOTS * (INNER // 256)
    MINE: gl.constexpr = (UNITS + W - 1) // W
    SUMS: gl.constexpr = 1 if MINE == INNER // 256 else INNER // 256
    box, table, sums = ring, ring + BARRIERS, ring + BARRIERS + SOURCES
    warp, lane = tid // 32, tid % 32
    E: gl.constexpr = SHAPE.experts
    SCORING: gl.constexpr = SHAPE.scoring
    found, chosen = select_experts(router.scores, ids, router.bias, token, tid, experts, K - 1, K, E, SCORING)
    _put_sources(table, tid, row0, chosen, down, shared_down, experts, INNER, K)
    held, ahead = (), sums + UNITS * 64 + W * 64 + warp * (max(MINE - REGISTERS, 0) * UNIT)
    for i in gl.static_range(REGISTERS, MINE):
        _request_unit(ahead + (i - REGISTERS) * UNIT, table, gl.minimum(warp * MINE + i, UNITS - 1), lane, INNER)
    run(COMMIT, lane)
    for i in gl.static_range(min(MINE, REGISTERS)):
        held += (_unit_at(table, gl.minimum(warp * MINE + i, UNITS - 1), lane, INNER),)  # type: ignore[assignment]
    added = ()
    if epilogue.residual is not None:
        added = load_epilogue(epilogue, token * hidden + row0 + tid % 16, token)
    put_shares(box, found, chosen, ids, weights, router, token, tid, experts, SHAPE)
    _await_count(counter, ups, tid)
    _leave(counter, hidden // 16, tid)
    run(wait_ptx(0), lane)
    xs = hidden_of(between, token, warp, lane, SHAPE, SLOTS)
    total0 = (tid * 0).to(gl.float32)
    total1 = total0
    for i in gl.static_range(MINE):
        unit = held[i] if i < REGISTERS else _copied_unit(ahead + (i - REGISTERS) * UNIT, lane)
        sum0, sum1 = row_products(unit[0], unit[1], xs[i], None, lane, 0)
        if SUMS == 1:
            total0, total1 = total0 + sum0, total1 + sum1
        else:
            put_rows(sums + (warp * MINE + i) * 64, lane, sum0, sum1)
    if SUMS == 1:
        put_rows(sums + warp * 64, lane, total0, total1)
    gl.thread_barrier()
    WEIGHTED: gl.constexpr = ids is None or weights is not None or router.ids is not None
    slots = sums, box, chosen, added
    store_slots(slots, None, epilogue, shared_down, out, experts, hidden, place, WEIGHTED, SHAPE)
