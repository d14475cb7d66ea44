"""4-bit experts for few tokens on Hopper; the warp-level products are in `hopper.mma_int4_groups`.

A tile of `up_slots` is 16 elements of one pair's hidden vector: 16 rows of gate and 16 of up, each contiguous in memory and
loaded by TMA, or by cp.async where there is none. A program has a few tiles of a token, half of its warps for gate, half for
up; a warp has the same inputs in all tiles. A program of `down_slots` computes 16 elements of a token's result, its warps
sharing the inputs of all slots, so that the sum over slots needs no second pass.

For one token there is about one program of either kernel per multiprocessor, and both fit on it together. The first warp of a
program selects the experts and issues all their copies at once. `up_slots` then lets `down_slots` start (programmatic
dependent launch), whose weights load while the hidden vectors are computed. A shared expert is one more slot, the last, whose
weights are known from the start.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.blocks.dependent_launch import launches_early
from auraflux.ops.hopper.copy import COMMIT, await_bytes, copy_together, expect, init_barriers, tma_copy, wait_ptx
from auraflux.ops.hopper.mma_int4_groups import (
    codes_two,
    load_16,
    pair_16,
    paired,
    put_rows,
    row_products,
    scales_two,
    sum_at,
)
from auraflux.ops.hopper.ptx import LAUNCH, WAIT, WAIT_AND_LAUNCH, from_lane, run, shared
from auraflux.ops.hopper.reduce import count_true
from auraflux.ops.hopper.shared_memory import float_at, long_at, put_float, put_long
from auraflux.ops.moe.cuda.routing.topk import choose, load_scores, weights_of

WARPS = gl.constexpr(16)  # of `up_slots`
BARRIERS = gl.constexpr(128)  # bytes
SOURCES = gl.constexpr(32 * 3 * 8)  # bytes of addresses
HELD = gl.constexpr(3)  # units of codes that a warp of `down_slots` preloads into registers before their inputs are ready


class CpuResults(NamedTuple):
    """State of the last request to the CPU, the number of its last answer, and its results; see `CpuMailbox`."""

    state: Any
    done: Any
    result: Any


class Router(NamedTuple):
    """Scores of the router, their bias, and the scale of the weights; scores are None where experts are given.

    ids  [T, k] experts, where scores weigh them and the kernels' ids are rows of stacks in another order; or None
    cpu  results of experts that have no row; or None
    """

    scores: Any
    bias: Any
    scale: float
    ids: Any = None
    cpu: Any = None


class SlotShape(NamedTuple):
    """Compile-time shape of the kernels.

    width                    inputs: hidden in `up_slots`, inner in `down_slots`
    k, scoring, renormalize  see `Routing`
    experts                  padded to a multiple of 32
    tiles, warps             of a program of `up_slots`, and of `down_slots`
    scored                   experts that have scores, where `Router.ids` are given; otherwise 0
    """

    width: int
    k: int
    experts: int
    scoring: str
    renormalize: bool
    tiles: int
    warps: int
    scored: int = 0


@gluon.jit
def _select_experts(scores, ids, bias, token, tid, experts, last, K: gl.constexpr, E: gl.constexpr, SCORING: gl.constexpr):
    """Return the first warp's scores, and the experts of slots up to `last`: lane n holds that of slot n."""
    found = ()
    if ids is None:
        found = load_scores(scores + token * experts, tid, experts, E)
        NARROW: gl.constexpr = scores.dtype.element_ty == gl.bfloat16
        chosen = choose(found, bias, tid, experts, last, E, SCORING == "sigmoid", NARROW)
    else:
        chosen = gl.load(ids + token * K + gl.minimum(tid % 32, K - 1))
    return found, chosen


@gluon.jit
def _array_address(p, gate, up):
    """Return the address of an expert's array p: codes, scales and biases of gate, then of up."""
    codes = gl.where(p < 3, gate.packed.to(gl.int64), up.packed.to(gl.int64))
    scales = gl.where(p < 3, gate.scales.to(gl.int64), up.scales.to(gl.int64))
    biases = gl.where(p < 3, gate.biases.to(gl.int64), up.biases.to(gl.int64))
    return gl.where(p % 3 == 0, codes, gl.where(p % 3 == 1, scales, biases))


@gluon.jit
def _copy_tiles(ring, table, source, there, tid, H: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr):
    """Copy tiles by cp.async, in a group each: lane 6 n + p of the first warp knows the source of array p of tile n."""
    ROWS: gl.constexpr = 16 * (H // 2)
    LINES: gl.constexpr = 16 * (H // 32)
    put_long(table + tid % 32 * 16, gl.where(there, source, source * 0), tid < 32)
    gl.thread_barrier()
    for n in gl.static_range(TILES):
        for p in gl.static_range(6):
            to = ring + (2 * n + p // 3) * (ROWS + 2 * LINES) + (0 if p % 3 == 0 else ROWS + (p % 3 - 1) * LINES)
            from_all = long_at(table + (6 * n + p) * 16 + tid * 0)
            copy_together(to, from_all, tid, ROWS if p % 3 == 0 else LINES, 32 * WARPS)
        run(COMMIT, tid)


@gluon.jit
def up_slots(
    x, ids, scores, bias, gate, up, shared_gate, shared_up, out, experts, inner, SHAPE: gl.constexpr
):  # fmt: skip
    """Write silu(gate x) * up x, up to TILES tiles of a token; grid (programs, tokens).

    Experts come from `ids`, or, where these are None, from `scores`. Slot K is the shared expert's, if there is one.
    """
    H: gl.constexpr = SHAPE.width
    K: gl.constexpr = SHAPE.k
    E: gl.constexpr = SHAPE.experts
    SCORING: gl.constexpr = SHAPE.scoring
    TILES: gl.constexpr = SHAPE.tiles
    ROW: gl.constexpr = H // 2
    LINE: gl.constexpr = H // 32
    HALF: gl.constexpr = 16 * (ROW + 2 * LINE)
    SETS: gl.constexpr = (H // 256 + 7) // 8
    tid = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    warp, lane = tid // 32, tid % 32
    token, tiles, routed = gl.program_id(1).to(gl.int64), inner // 16, K * (inner // 16)
    count = routed if shared_gate is None else routed + tiles
    begin = gl.program_id(0) * count // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * count // gl.num_programs(0)
    memory, ring = shared(TILES * (2 * HALF + 64 * WARPS) + BARRIERS, tid)
    bars, sums = ring + TILES * 2 * HALF, ring + TILES * 2 * HALF + BARRIERS
    # lane 6 n + p copies array p of tile n
    n, p = lane // 6, lane % 6
    slot, row0 = (begin + n) // tiles, ((begin + n) % tiles * 16).to(gl.int64)
    source = _array_address(p, gate, up)
    if shared_gate is not None:
        source = gl.where(slot == K, _array_address(p, shared_gate, shared_up), source)
    codes, first = p % 3 == 0, p < 3
    size, source = gl.where(codes, 16 * ROW, 16 * LINE), source + row0 * gl.where(codes, ROW, LINE)
    step = gl.where(codes, gl.where(first, gate.step, up.step) * 2, gl.where(first, gate.scale_step, up.scale_step))
    to = ring + n * (2 * HALF) + gl.where(first, 0, HALF) + gl.where(codes, 0, 16 * (ROW - LINE) + p % 3 * 16 * LINE)
    bar, mine = bars + n * 16 + gl.where(first, 0, 8), tid < 6 * TILES
    there = mine & (begin + n < end)
    # through shared memory, because ptxas would otherwise sink them below the wait
    put_long(sums + lane * 16, source, tid < 32)
    put_long(sums + lane * 16 + 8, step.to(gl.int64) * 2, tid < 32)
    if launches_early():
        init_barriers(bars, tid, 2 * TILES)
    if launches_early() and shared_gate is not None:
        expect(bar, lane * 0 + HALF, there & (slot == K) & codes)
        tma_copy(to, source, size, bar, there & (slot == K))
    run(WAIT, lane)
    # issued before the weights, so as not to queue behind them
    xs = ()
    for s in gl.static_range(SETS):
        group = gl.minimum((warp % 8 + s * 8) * 4, H // 64 - 4) + lane // 8
        xs += (load_16(x + token * H + group * 64 + lane % 4 * 16),)  # type: ignore[assignment]
    _, chosen = _select_experts(scores, ids, bias, token, tid, experts, gl.minimum((end - 1) // tiles, K - 1), K, E, SCORING)
    expert = from_lane(chosen, gl.minimum(slot, K - 1))
    good = there & (slot < K) & (expert >= 0) & (expert < experts)
    if launches_early():
        expect(bar, gl.where(good, HALF, 0), mine & codes & ((begin + n >= end) | (slot < K)))
        tma_copy(to, long_at(sums + lane * 16) + expert.to(gl.int64) * long_at(sums + lane * 16 + 8), size, bar, good)
    else:
        chosen_source = long_at(sums + lane * 16) + expert.to(gl.int64) * long_at(sums + lane * 16 + 8)
        if shared_gate is not None:
            chosen_source, good = gl.where(slot == K, source, chosen_source), good | (there & (slot == K))
        _copy_tiles(ring, sums, chosen_source, good, tid, H, TILES, WARPS)
    run(LAUNCH, lane)
    pairs = ()
    for s in gl.static_range(SETS):
        pairs += (pair_16(xs[s]),)  # type: ignore[assignment]
    zero = (tid * 0).to(gl.float32)
    for i in gl.static_range(TILES):
        half = ring + i * (2 * HALF) + warp // 8 * HALF
        if launches_early():
            await_bytes(bars + i * 16 + warp // 8 * 8)
        else:
            run(wait_ptx(TILES - 1 - i), lane)
            gl.thread_barrier()
        total0, total1 = zero, zero
        for s in gl.static_range(SETS):
            group = gl.minimum((warp % 8 + s * 8) * 4, H // 64 - 4)
            words = codes_two(half + group * 32, lane, ROW, 8 * ROW)
            lines = scales_two(half + 16 * ROW + group * 2, lane, LINE, 8 * LINE, 16)
            sum0, sum1 = row_products(words, lines, pairs[s], None, lane, 0)
            if H % 2048:
                live = (warp % 8 + s * 8) * 4 < H // 64
                sum0, sum1 = gl.where(live, sum0, 0.0), gl.where(live, sum1, 0.0)
            total0, total1 = total0 + sum0, total1 + sum1
        put_rows(sums + (i * WARPS + warp) * 64, lane, total0, total1)
    gl.thread_barrier()
    at, here = sums + tid // 16 * (64 * WARPS) + tid % 16 * 4, tid < TILES * 16
    a, b = sum_at(at, here, WARPS // 2), sum_at(at + 32 * WARPS, here, WARPS // 2)
    result = (a / (1.0 + gl.exp(-a)) * b).to(out.dtype.element_ty).to(gl.float32)
    result, place = paired(result, tid % 16)
    at = (token * count + begin + tid // 16) * 16 + place
    gl.store(out + at, result.to(out.dtype.element_ty), here & (begin + tid // 16 < end))
    memory._keep_alive()


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
def _load_epilogue(epilogue, at, token):
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
    scores, bias, scale = router.scores, router.bias, router.scale
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
    found, chosen = _select_experts(scores, ids, bias, token, tid, experts, K - 1, K, E, SCORING)
    _fetch_slots(ring, bar, sums, tid, row0, chosen, down, shared_down, experts, INNER, K, W)
    at = token * hidden + row0 + tid % 16
    if epilogue.residual is not None:
        # complete since before the experts were selected
        residual, more = _load_epilogue(epilogue, at, token)
    if ids is None:
        share = weights_of(found, scores + token * experts, chosen, lane, scale, K, E, SCORING, SHAPE.renormalize)
    elif router.ids is not None:
        expert = gl.load(router.ids + token * K + gl.minimum(lane, K - 1))
        line = scores + token * SHAPE.scored
        share = weights_of(load_scores(line, tid, SHAPE.scored, E), line, expert, lane, scale, K, E, SCORING, SHAPE.renormalize)
    elif weights is not None:
        share = gl.load(weights + token * K + gl.minimum(lane, K - 1))
        share = gl.where((chosen >= 0) & (chosen < experts), share, float("nan"))
    WEIGHTED: gl.constexpr = ids is None or weights is not None or router.ids is not None
    if WEIGHTED:
        put_float(box + lane * 4, share, tid < 32)
    # weights arrive before the hidden vectors: load them into registers meanwhile
    if launches_early():
        await_bytes(bar)
    else:
        run(wait_ptx(0), lane)
        gl.thread_barrier()
    held, xs = (), ()
    for i in gl.static_range(min(MINE, HELD)):
        held += (_unit_at(ring, gl.minimum(warp * MINE + i, SLOTS * PARTS - 1), lane, INNER),)  # type: ignore[assignment]
    run(WAIT_AND_LAUNCH, lane)
    for i in gl.static_range(MINE):
        group = gl.minimum(warp * MINE + i, SLOTS * PARTS - 1) * 4 + lane // 8
        xs += (load_16(x + (token * SLOTS * INNER + group * 64 + lane % 4 * 16)),)  # type: ignore[assignment]
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
    mine = sums + tid % 16 * 4
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
            if router.cpu is not None:
                # without a row nothing was loaded
                part = gl.where(from_lane(chosen, lane * 0 + n) >= 0, part, 0.0)
            result = gl.fma(part, weight, result)
        if router.cpu is not None:
            result = _add_cpu_results(result, router.cpu, box, sums, chosen, token, row0, tid, hidden, K, W)
        if epilogue.residual is not None:
            # rounded and added as in `expert_mlp` and `combine`, bit for bit
            result = residual + result.to(out.dtype.element_ty).to(gl.float32)
            if shared_down is not None:
                mlp = sum_at(mine + K * (64 * SUMS), tid < 16, SUMS)
                result += mlp.to(out.dtype.element_ty).to(gl.float32) * more
            elif epilogue.shared is not None:
                result += more
        gl.store(out + at, result.to(out.dtype.element_ty), tid < 16)
    memory._keep_alive()
