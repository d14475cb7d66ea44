"""Four-bit experts for few tokens on Hopper: how a warp multiplies codes is in `linear._nibbles`.

A program of `up_slots` makes 16 elements of one pair's hidden vector: half of its warps share out the inputs of gate, the rest
those of up. One of `down_slots` makes 16 elements of a token's result, its warps sharing out the slots, so that the sum over
slots is taken where the products are. Inputs go in quads, four groups of 64, and a warp multiplies two quads at a time, each of
its eight columns with an x of its own.

The experts are known when the kernel that chose them is done. `up_slots` waits for it and lets `down_slots` start at once,
which then requests its weights while the hidden vectors are still being made. A shared expert is one more slot, the last,
whose weights are known from the start.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.linear._nibbles import (
    AWAIT,
    COMMIT,
    COPY8,
    SYNC,
    X_GLOBAL,
    copy,
    copy_codes,
    load_x,
    put,
    run,
    shared,
    sum_x,
    wait_ptx,
)
from auraflux.ops.moe._cuda_choose import choose, from_lane, load_scores, weights_of
from auraflux.ops.moe._cuda_quads import copy_quad, down_of, expert_of, float_at, made, put_rows, scaled, sum_quad, sum_runs

X_REGISTERS = gl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,l,l")
BOX = gl.constexpr(256)  # bytes: chosen experts and their weights


@gluon.jit
def up_slots(
    x, ids, scores, bias, gate, gate_scales, gate_biases, gate_step, gate_scale_step,
    up, up_scales, up_biases, up_step, up_scale_step,
    own_gate, own_gate_scales, own_gate_biases, own_up, own_up_scales, own_up_biases, out, experts, inner,
    H: gl.constexpr, K: gl.constexpr, E: gl.constexpr, SCORING: gl.constexpr, W: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """silu(gate x) * up x of one pair (token, slot), 16 elements. Half of the W warps take gate, the others up.

    Experts come from `ids`, or, where these are None, from `scores`. Slot K is the shared expert's, if there is one.
    """
    QUADS: gl.constexpr = H // 256
    V: gl.constexpr = W // 2
    MINE: gl.constexpr = (QUADS + 2 * V - 1) // (2 * V)
    PITCH: gl.constexpr = 16 * MINE
    PER: gl.constexpr = D * 2048 + 32 * PITCH
    SLOTS: gl.constexpr = K if own_gate is None else K + 1
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane, first = tid // 32 % V, tid % 32, tid < 32 * V
    g, t = lane // 4, lane % 4
    pair, row0 = gl.program_id(1), gl.program_id(0).to(gl.int64) * 16
    token, slot = (pair // SLOTS).to(gl.int64), pair % SLOTS
    memory, ring = shared(PER * W + BOX, tid)
    base = ring + tid // 32 * PER
    scales = base + D * 2048
    # what does not depend on the expert is made before it is known
    codes = gl.where(first, gate.to(gl.int64), up.to(gl.int64))
    slopes = gl.where(first, gate_scales.to(gl.int64), up_scales.to(gl.int64))
    intercepts = gl.where(first, gate_biases.to(gl.int64), up_biases.to(gl.int64))
    if own_gate is not None:  # noqa: SIM102 - decided when the kernel is compiled
        if slot == K:
            codes = gl.where(first, own_gate.to(gl.int64), own_up.to(gl.int64))
            slopes = gl.where(first, own_gate_scales.to(gl.int64), own_up_scales.to(gl.int64))
            intercepts = gl.where(first, own_gate_biases.to(gl.int64), own_up_biases.to(gl.int64))
    codes = made(codes + (row0 * (H // 2) + (warp * 256 + lane // 8 * (H // 2) + lane % 8 * 16)))
    ats = ()
    for n in gl.static_range(MINE):
        e = lane + 32 * n
        quad = (warp + e % (2 * MINE) // 2 * V) * 2 + e % 2
        ats += (made((row0 + e // (2 * MINE)) * (QUADS * 8) + quad * 8),)  # type: ignore[assignment]
    slopes, intercepts = made(slopes), made(intercepts)
    step = made(gl.where(first, gate_step, up_step).to(gl.int64) * 4)
    line = made(gl.where(first, gate_scale_step, up_scale_step).to(gl.int64) * 2)
    expert = lane * 0
    if slot < K:
        run(AWAIT, lane)
        if ids is None:
            found = load_scores(scores + token * experts, lane, experts, E)
            NARROW: gl.constexpr = scores.dtype.element_ty == gl.bfloat16
            chosen = choose(found, bias, tid, ring + PER * W, experts, slot, E, SCORING == "sigmoid", NARROW)
            expert = from_lane(chosen, lane * 0 + slot)
        else:
            expert = lane * 0 + gl.load(ids + token * K + slot)
    good = (expert >= 0) & (expert < experts)
    expert = gl.where(good, expert, 0).to(gl.int64)
    codes += expert * step
    slopes, intercepts = slopes + expert * line, intercepts + expert * line
    for d in gl.static_range(D):
        there = good & ((warp + d // 2 * V) * 2 + d % 2 < QUADS)
        copy_quad(base + d * 2048, lane, codes + (d // 2 * V * 256 + d % 2 * 128), there, H)
        if d == 0:
            for n in gl.static_range(MINE):
                e = lane + 32 * n
                there = good & ((warp + e % (2 * MINE) // 2 * V) * 2 + e % 2 < QUADS)
                copy(COPY8, scales + e * 8, slopes + ats[n], there)
                copy(COPY8, scales + e * 8 + 16 * PITCH, intercepts + ats[n], there)
        run(COMMIT, lane)
    # for a shared expert the first time
    run(AWAIT, lane)
    xs = ()
    for i in gl.static_range(MINE):
        column = gl.minimum((warp + i * V) * 512 + g * 64, H - 64) + t * 16
        x_at = (x + token * H + column).to(gl.int64)
        xs += (load_x(X_GLOBAL, X_REGISTERS, x_at, x_at + 16),)  # type: ignore[assignment]
    # keeps ptxas from waiting for codes before it asks for x
    gl.thread_barrier()
    zero = (tid * 0).to(gl.float32)
    total0, total1 = zero, zero
    mine = g * 128 + ((t // 2) ^ (g % 2)) * 16 + (t % 2) * 8 + (g // 2) * 32
    for i in gl.static_range(MINE):
        X = sum_x(xs[i])
        live = (warp + i * V) * 2 + t // 2 < QUADS
        r = (zero, zero, zero, zero)
        for h in gl.static_range(2):
            place = base + (2 * i + h) % D * 2048
            run(wait_ptx(D - 1), lane)
            r = sum_quad(place, xs[i], t, mine, h, r)
            if 2 * i + h + D < 2 * MINE:
                run(SYNC, lane)
                ahead = (2 * i + h + D) // 2 * V
                source = codes + (ahead * 256 + (h + D) % 2 * 128)
                copy_quad(place, lane, source, good & ((warp + ahead) * 2 + (h + D) % 2 < QUADS), H)
            run(COMMIT, lane)
        sum0, sum1 = scaled(scales + g * PITCH + i * 16 + t * 4, PITCH, r, X)
        total0, total1 = total0 + gl.where(live, sum0, 0.0), total1 + gl.where(live, sum1, 0.0)
    gl.thread_barrier()
    put_rows(ring + tid // 32 * 64, lane, total0, total1)
    gl.thread_barrier()
    a, b = zero, zero
    for n in gl.static_range(V):
        at = ring + n * 64 + tid % 16 * 4
        a, b = a + float_at(at, tid < 16), b + float_at(at + V * 64, tid < 16)
    result = a / (1.0 + gl.exp(-a)) * b
    gl.store(out + pair.to(gl.int64) * inner + row0 + tid, result.to(out.dtype.element_ty), tid < 16)
    memory._keep_alive()


@gluon.jit
def down_slots(
    x, ids, weights, scores, bias, scale, residual, beside, beside_gate, down, down_scales, down_biases, step, scale_step,
    own, own_scales, own_biases, out, experts, hidden,
    INNER: gl.constexpr, K: gl.constexpr, E: gl.constexpr, SCORING: gl.constexpr,
    RENORMALIZE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """16 elements of a token's results. Runs of two quads of all slots go to warps in turn, whose codes are all in flight.

    Experts and their weights come from `ids` and `weights`, or, where `ids` are None, from `scores`. The result is the weighted
    sum, added to `residual` and to `beside` where they are given; with ids and without weights each slot's for itself. Where
    `own` is given, the shared expert's result, of slot K, is in the place of `beside`.
    """
    QUADS: gl.constexpr = INNER // 256
    RUNS: gl.constexpr = (QUADS + 1) // 2
    SLOTS: gl.constexpr = K if own is None else K + 1
    MINE: gl.constexpr = (SLOTS * RUNS + W - 1) // W
    D: gl.constexpr = 2 * MINE
    PITCH: gl.constexpr = 16 * MINE
    PER: gl.constexpr = D * 2048 + 32 * PITCH
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    token, row0 = gl.program_id(1).to(gl.int64), gl.program_id(0).to(gl.int64) * 16
    memory, ring = shared(PER * W + BOX, tid)
    base = ring + warp * PER
    scales = base + D * 2048
    if ids is None:
        found = load_scores(scores + token * experts, lane, experts, E)
        NARROW: gl.constexpr = scores.dtype.element_ty == gl.bfloat16
        chosen = choose(found, bias, tid, ring + PER * W, experts, K - 1, E, SCORING == "sigmoid", NARROW)
    else:
        chosen = gl.load(ids + token * K + gl.minimum(lane, K - 1))
    for d in gl.static_range(D):
        piece = warp + d // 2 * W
        quad = piece % RUNS * 2 + d % 2
        there, codes, _, _ = down_of(
            piece // RUNS, chosen, down, down_scales, down_biases, step, scale_step, own, own_scales, own_biases, experts, K
        )
        copy_codes(base + d * 2048, lane, codes + row0 * (INNER // 2) + quad * 128, there & (quad < QUADS), INNER, 16)
        if d == 0:
            for n in gl.static_range(MINE):
                e = lane + 32 * n
                part = warp + e % (2 * MINE) // 2 * W
                four = part % RUNS * 2 + e % 2
                there, _, slopes, intercepts = down_of(
                    part // RUNS,
                    chosen,
                    down,
                    down_scales,
                    down_biases,
                    step,
                    scale_step,
                    own,
                    own_scales,
                    own_biases,
                    experts,
                    K,
                )
                at = (row0 + e // (2 * MINE)) * (QUADS * 4) + four * 4
                copy(COPY8, scales + e * 8, slopes + at, there & (four < QUADS))
                copy(COPY8, scales + 16 * PITCH + e * 8, intercepts + at, there & (four < QUADS))
        run(COMMIT, lane)
    at = token * hidden + row0 + tid % 16
    if residual is not None:
        # there since before the experts were chosen
        kept = gl.load(residual + at).to(gl.float32)
        more = kept * 0.0 + 1.0
        if beside is not None:
            more = gl.load(beside + at).to(gl.float32)
        if beside_gate is not None:
            more *= 1.0 / (1.0 + gl.exp(-gl.load(beside_gate + token).to(gl.float32)))
    if ids is None:
        share = weights_of(found, scores + token * experts, chosen, lane, scale, K, E, SCORING, RENORMALIZE)
    elif weights is not None:
        share = gl.load(weights + token * K + gl.minimum(lane, K - 1))
        share = gl.where((chosen >= 0) & (chosen < experts), share, float("nan"))
    if ids is None or weights is not None:
        # made before the wait, as it is stored
        put(ring + PER * W + BOX // 2 + lane % (BOX // 8) * 4, share)
    run(AWAIT, lane)
    xs = ()
    for i in gl.static_range(MINE):
        piece = gl.minimum(warp + i * W, SLOTS * RUNS - 1)
        column = gl.minimum(piece % RUNS * 512 + g * 64, INNER - 64) + t * 16
        x_at = (x + (token * SLOTS + piece // RUNS) * INNER + column).to(gl.int64)
        xs += (load_x(X_GLOBAL, X_REGISTERS, x_at, x_at + 16),)  # type: ignore[assignment]
    # keeps ptxas from waiting for codes before it asks for x
    gl.thread_barrier()
    mine = g * 128 + ((t // 2) ^ (g % 2)) * 16 + (t % 2) * 8 + (g // 2) * 32
    zero = (tid * 0).to(gl.float32)
    totals = ()
    for i in gl.static_range(MINE):
        X = sum_x(xs[i])
        r = (zero, zero, zero, zero)
        for h in gl.static_range(2):
            run(wait_ptx(D - 1), lane)
            r = sum_quad(base + (2 * i + h) * 2048, xs[i], t, mine, h, r)
            run(COMMIT, lane)
        sum0, sum1 = scaled(scales + g * PITCH + i * 16 + t * 4, PITCH, r, X)
        live = (warp + i * W) % RUNS * 2 + t // 2 < QUADS
        totals += (gl.where(live, sum0, 0.0), gl.where(live, sum1, 0.0))  # type: ignore[assignment]
    gl.thread_barrier()
    for n in gl.static_range(MINE):
        put_rows(ring + (warp + n * W) * 64, lane, totals[2 * n], totals[2 * n + 1])
    gl.thread_barrier()
    if ids is not None and weights is None:
        for n in gl.static_range((K + 2 * W - 1) // (2 * W)):
            slot = tid // 16 + n * 2 * W
            there, _ = expert_of(chosen, slot, experts, K)
            value = sum_runs(ring + slot * (64 * RUNS) + tid % 16 * 4, slot < K, RUNS)
            gl.store(out + (token * K + slot) * hidden + row0 + tid % 16, value, there)
    else:
        result = zero
        for n in gl.static_range(K):
            weight = float_at(ring + PER * W + BOX // 2 + n * 4, tid < 16)
            result = gl.fma(sum_runs(ring + n * (64 * RUNS) + tid % 16 * 4, tid < 16, RUNS), weight, result)
        if residual is not None:
            # rounded and added as `expert_mlp` and `combine` would, to the bit
            result = kept + result.to(out.dtype.element_ty).to(gl.float32)
            if own is not None:
                mlp = sum_runs(ring + K * (64 * RUNS) + tid % 16 * 4, tid < 16, RUNS)
                result += mlp.to(out.dtype.element_ty).to(gl.float32) * more
            elif beside is not None:
                result += more
        gl.store(out + at, result.to(out.dtype.element_ty), tid < 16)
    memory._keep_alive()
