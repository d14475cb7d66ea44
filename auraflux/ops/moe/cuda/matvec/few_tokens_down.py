"""The second kernel of 4-bit experts for few tokens, after `up_slots` of `few_tokens.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.blocks.dependent_launch import launches_early
from auraflux.ops.hopper.copy import COMMIT, await_bytes, copy_together, expect, init_barriers, tma_copy, wait_ptx
from auraflux.ops.hopper.mma_int4_groups import codes_two, load_16, put_rows, row_products, scales_two, sum_at
from auraflux.ops.hopper.ptx import WAIT_AND_LAUNCH, from_lane, run, shared
from auraflux.ops.hopper.reduce import count_true
from auraflux.ops.hopper.shared_memory import float_at, long_at, put_float, put_long
from auraflux.ops.moe.cuda.matvec.few_tokens import BARRIERS, select_experts
from auraflux.ops.moe.cuda.routing.topk import load_scores, weights_of

SOURCES = gl.constexpr(32 * 3 * 8)  # bytes of addresses
HELD = gl.constexpr(3)  # units of codes that a warp of `down_slots` preloads into registers before their inputs are ready


@gluon.jit
def _copy_slots(ring, table, sources, there, tid, INNER: gl.constexpr, SLOTS: gl.constexpr, W: gl.constexpr):
    """Copy 16 rows of all slots by cp.async: lane n of the first warp knows where slot n's codes, scales and biases are."""
    LINES: gl.constexpr = INNER // 2
    for part in gl.static_range(3):
        put_long(table + (tid % 32 * 3 + part) * 8, gl.where(there, sources[part], sources[part] * 0), tid < 32)
    gl.thread_barrier()
    for n in gl.static_range(SLOTS):
        for part in gl.static_range(3):
            to = ring + n * (9 * INNER) + (0 if part == 0 else 16 * LINES + (part - 1) * LINES)
            from_all = long_at(table + (3 * n + part) * 8 + tid * 0)
            copy_together(to, from_all, tid, 16 * LINES if part == 0 else LINES, 32 * W)
    run(COMMIT, tid)


@gluon.jit
def _fetch_slots(
    ring, bar, box, tid, row0, chosen, down, shared_down, experts, INNER: gl.constexpr, K: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Copy 16 rows of all slots, with codes, scales and biases: lane n knows, and by TMA copies, slot n's."""
    ROW: gl.constexpr = INNER // 2
    LINE: gl.constexpr = INNER // 32
    SLOT: gl.constexpr = 16 * (ROW + 2 * LINE)
    lane = tid % 32
    there = (chosen >= 0) & (chosen < experts) & (lane < K)
    expert = gl.where(there, chosen, 0).to(gl.int64)
    codes, line = down.packed.to(gl.int64) + expert * down.step * 4, expert * down.scale_step * 2
    slopes, intercepts = down.scales.to(gl.int64) + line, down.biases.to(gl.int64) + line
    if shared_down is not None:
        last = lane == K
        there, codes = there | last, gl.where(last, shared_down.packed.to(gl.int64), codes)
        slopes = gl.where(last, shared_down.scales.to(gl.int64), slopes)
        intercepts = gl.where(last, shared_down.biases.to(gl.int64), intercepts)
    if launches_early():
        expect(bar, count_true(there) * SLOT, tid == 0)
        to, there, some = ring + lane * SLOT, there & (tid < 32), lane * 0 + 16 * LINE
        tma_copy(to, codes + row0 * ROW, lane * 0 + 16 * ROW, bar, there)
        tma_copy(to + 16 * ROW, slopes + row0 * LINE, some, bar, there)
        tma_copy(to + 16 * (ROW + LINE), intercepts + row0 * LINE, some, bar, there)
    else:
        sources = codes + row0 * ROW, slopes + row0 * LINE, intercepts + row0 * LINE
        _copy_slots(ring, box, sources, there, tid, INNER, K if shared_down is None else K + 1, W)


@gluon.jit
def _unit_at(ring, unit, lane, INNER: gl.constexpr):
    """Load codes, scales and biases of a unit: four groups of a slot."""
    base, group = ring + unit // (INNER // 256) * (9 * INNER), unit % (INNER // 256) * 4
    codes = codes_two(base + group * 32, lane, INNER // 2, 4 * INNER)
    return codes, scales_two(base + 8 * INNER + group * 2, lane, INNER // 32, INNER // 4, 16)


@gluon.jit
def hidden_of(x, token, warp, lane, SHAPE: gl.constexpr, SLOTS: gl.constexpr):
    """Load the hidden vectors of a warp's units."""
    INNER: gl.constexpr = SHAPE.width
    UNITS: gl.constexpr = SLOTS * (INNER // 256)
    MINE: gl.constexpr = (UNITS + SHAPE.warps - 1) // SHAPE.warps
    xs = ()
    for i in gl.static_range(MINE):
        group = gl.minimum(warp * MINE + i, UNITS - 1) * 4 + lane // 8
        xs += (load_16(x + (token * SLOTS * INNER + group * 64 + lane % 4 * 16)),)  # type: ignore[assignment]
    return xs


@gluon.jit
def load_epilogue(epilogue, at, token):
    """Return the residual stream, and the shared expert's output or, where that is computed here, its factor."""
    residual = gl.load(epilogue.residual + at).to(gl.float32)
    more = residual * 0.0 + 1.0
    if epilogue.shared is not None:
        more = gl.load(epilogue.shared + at).to(gl.float32)
    if epilogue.gate is not None:
        more *= 1.0 / (1.0 + gl.exp(-gl.load(epilogue.gate + token).to(gl.float32)))
    return residual, more


@gluon.jit
def _await_answer(cpu, number, tid):
    """Let the first thread wait until the CPU has answered a request.

    Only one program polls host memory, since polls of many would delay the experts that are fetched; it tells the others.
    """
    ask_host: gl.constexpr = (
        "{.reg .pred p,q; .reg .b32 n; setp.ne.b32 p,$4,0; @p bra DONE; AGAIN: ld.acquire.sys.global.u32 n,[$1];"
        "setp.eq.u32 q,n,$3; @!q bra AGAIN; st.release.gpu.global.u32 [$2],n; DONE: mov.b32 $0,0;}"
    )
    ask_program: gl.constexpr = (
        "{.reg .pred p,q; .reg .b32 n; setp.ne.b32 p,$3,0; @p bra DONE; AGAIN: ld.acquire.gpu.global.u32 n,[$1];"
        "setp.eq.u32 q,n,$2; @q bra DONE; nanosleep.u32 100; bra AGAIN; DONE: mov.b32 $0,0;}"
    )
    done, seen = cpu.done.to(gl.int64) + tid * 0, cpu.state.to(gl.int64) + 8 + tid * 0
    if gl.program_id(0) + gl.program_id(1) == 0:
        gl.inline_asm_elementwise(ask_host, "=r,l,l,r,r,~{memory}", [done, seen, number, tid], gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise(ask_program, "=r,l,r,r,~{memory}", [seen, number, tid], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _add_cpu_results(
    result, cpu, box, sums, chosen, token, row0, tid, hidden, K: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Add the weighted outputs of a token's experts that the CPU computed, in the order of the slots."""
    count = gl.load(cpu.state + 1)
    if count > 0:
        _await_answer(cpu, tid * 0 + gl.load(cpu.state), tid)
        # the sums of the slots have been read
        gl.thread_barrier()
        for start in range(0, count, 2 * W):
            i = start + tid // 16
            pair = gl.load(cpu.state + 3 + i, mask=i < count, other=-1)
            mine = (i < count) & (pair // K == token)
            value = gl.load(cpu.result + i * hidden + row0 + tid % 16, mask=mine, other=0.0, volatile=True)
            put_float(sums + pair % K * 64 + tid % 16 * 4, value, mine)
        gl.thread_barrier()
        for n in gl.static_range(K):
            mine = (tid < 16) & (from_lane(chosen, tid * 0 + n) < 0)
            value, weight = float_at(sums + n * 64 + tid % 16 * 4, mine), float_at(box + n * 4 + tid * 0, mine)
            result = gl.where(mine, gl.fma(value, weight, result), result)
    return result


@gluon.jit
def down_slots(
    x, ids, weights, router, epilogue, down, shared_down, out, experts, hidden, SHAPE: gl.constexpr
):  # fmt: skip
    """Write 16 elements of a token's results; units of four groups of all slots are split among W warps.

    Experts and their weights come from `ids` and `weights`, or, where `ids` are None, from `router`, or the weights alone,
    where `router.ids` are given. The result is the weighted sum plus the epilogue; with ids and without weights each slot's
    result. Where `shared_down` is given, the shared expert's result, of slot K, replaces `epilogue.shared`.
    """
    INNER: gl.constexpr = SHAPE.width
    K: gl.constexpr = SHAPE.k
    E: gl.constexpr = SHAPE.experts
    SCORING: gl.constexpr = SHAPE.scoring
    W: gl.constexpr = SHAPE.warps
    scores, bias = router.scores, router.bias
    SLOT: gl.constexpr = 9 * INNER
    PARTS: gl.constexpr = INNER // 256
    SLOTS: gl.constexpr = K if shared_down is None else K + 1
    MINE: gl.constexpr = (SLOTS * PARTS + W - 1) // W
    # sums per slot: a warp that has a complete slot adds them up itself
    SUMS: gl.constexpr = 1 if MINE == PARTS else PARTS
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    token, row0 = gl.program_id(1).to(gl.int64), gl.program_id(0).to(gl.int64) * 16
    # without TMA the sources of copies have the place of the sums
    ADDED: gl.constexpr = MINE * W * 64 if launches_early() else max(MINE * W * 64, SOURCES)
    memory, ring = shared(SLOTS * SLOT + 2 * BARRIERS + ADDED, tid)
    bar, box, sums = ring + SLOTS * SLOT, ring + SLOTS * SLOT + BARRIERS, ring + SLOTS * SLOT + 2 * BARRIERS
    if launches_early():
        init_barriers(bar, tid, 1)
    found, chosen = select_experts(scores, ids, bias, token, tid, experts, K - 1, K, E, SCORING)
    _fetch_slots(ring, bar, sums, tid, row0, chosen, down, shared_down, experts, INNER, K, W)
    at = token * hidden + row0 + tid % 16
    added = ()
    if epilogue.residual is not None:
        # complete since before the experts were selected
        added = load_epilogue(epilogue, at, token)
    put_shares(box, found, chosen, ids, weights, router, token, tid, experts, SHAPE)
    held, xs = (), ()
    # weights arrive before the hidden vectors: load them into registers meanwhile
    if launches_early():
        await_bytes(bar)
    else:
        xs = hidden_of(x, token, warp, lane, SHAPE, SLOTS)
        run(wait_ptx(0), lane)
        gl.thread_barrier()
    for i in gl.static_range(min(MINE, HELD)):
        held += (_unit_at(ring, gl.minimum(warp * MINE + i, SLOTS * PARTS - 1), lane, INNER),)  # type: ignore[assignment]
    run(WAIT_AND_LAUNCH, lane)
    if launches_early():
        xs = hidden_of(x, token, warp, lane, SHAPE, SLOTS)
    result = (tid * 0).to(gl.float32)
    total0, total1 = result, result
    for i in gl.static_range(MINE):
        unit = held[i] if i < HELD else _unit_at(ring, gl.minimum(warp * MINE + i, SLOTS * PARTS - 1), lane, INNER)
        sum0, sum1 = row_products(unit[0], unit[1], xs[i], None, lane, 0)
        if SUMS == 1:
            total0, total1 = total0 + sum0, total1 + sum1
        else:
            put_rows(sums + (warp * MINE + i) * 64, lane, sum0, sum1)
    if SUMS == 1:
        put_rows(sums + warp * 64, lane, total0, total1)
    gl.thread_barrier()
    WEIGHTED: gl.constexpr = ids is None or weights is not None or router.ids is not None
    found, place = (sums, box, chosen, added), (token, row0, tid)
    store_slots(found, router.cpu, epilogue, shared_down, out, experts, hidden, place, WEIGHTED, SHAPE)
    memory._keep_alive()


@gluon.jit
def put_shares(box, found, chosen, ids, weights, router, token, tid, experts, SHAPE: gl.constexpr):
    """Store the weights of a token's slots in shared memory, if slots are weighed."""
    K: gl.constexpr = SHAPE.k
    E: gl.constexpr = SHAPE.experts
    SCORING: gl.constexpr = SHAPE.scoring
    scores, scale, lane = router.scores, router.scale, tid % 32
    if ids is None:
        share = weights_of(found, scores + token * experts, chosen, lane, scale, K, E, SCORING, SHAPE.renormalize)
    elif router.ids is not None:
        expert = gl.load(router.ids + token * K + gl.minimum(lane, K - 1))
        line = scores + token * SHAPE.scored
        share = weights_of(load_scores(line, tid, SHAPE.scored, E), line, expert, lane, scale, K, E, SCORING, SHAPE.renormalize)
    elif weights is not None:
        share = gl.load(weights + token * K + gl.minimum(lane, K - 1))
        share = gl.where((chosen >= 0) & (chosen < experts), share, float("nan"))
    if ids is None or weights is not None or router.ids is not None:
        put_float(box + lane * 4, share, tid < 32)


@gluon.jit
def store_slots(
    found, cpu, epilogue, shared_down, out, experts, hidden, place, WEIGHTED: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Add up the sums of each slot, and the slots by their weights, and store 16 elements of a token's results.

    found  addresses of the sums and of the weights, the experts, and what `load_epilogue` returned
    place  token, first row, thread
    """
    sums, box, chosen, added = found
    token, row0, tid = place
    INNER: gl.constexpr = SHAPE.width
    K: gl.constexpr = SHAPE.k
    W: gl.constexpr = SHAPE.warps
    PARTS: gl.constexpr = INNER // 256
    SLOTS: gl.constexpr = K if shared_down is None else K + 1
    SUMS: gl.constexpr = 1 if (SLOTS * PARTS + W - 1) // W == PARTS else PARTS
    at, mine, lane = token * hidden + row0 + tid % 16, sums + tid % 16 * 4, tid % 32
    result = (tid * 0).to(gl.float32)
    if not WEIGHTED:
        for i in gl.static_range((K + 2 * W - 1) // (2 * W)):
            slot = tid // 16 + i * 2 * W
            expert = from_lane(chosen, gl.minimum(slot, K - 1))
            there = (slot < K) & (expert >= 0) & (expert < experts)
            value = sum_at(mine + slot * (64 * SUMS), slot < K, SUMS)
            gl.store(out + (token * K + slot) * hidden + row0 + tid % 16, value, there)
    else:
        for n in gl.static_range(K):
            weight, part = float_at(box + n * 4, tid < 16), sum_at(mine + n * (64 * SUMS), tid < 16, SUMS)
            if cpu is not None:
                # without a row nothing was loaded
                part = gl.where(from_lane(chosen, lane * 0 + n) >= 0, part, 0.0)
            result = gl.fma(part, weight, result)
        if cpu is not None:
            result = _add_cpu_results(result, cpu, box, sums, chosen, token, row0, tid, hidden, K, W)
        if epilogue.residual is not None:
            residual, more = added
            # rounded and added as in `expert_mlp` and `combine`, bit for bit
            result = residual + result.to(out.dtype.element_ty).to(gl.float32)
            if shared_down is not None:
                mlp = sum_at(mine + K * (64 * SUMS), tid < 16, SUMS)
                result += mlp.to(out.dtype.element_ty).to(gl.float32) * more
            elif epilogue.shared is not None:
                result += more
        gl.store(out + at, result.to(out.dtype.element_ty), tid < 16)
