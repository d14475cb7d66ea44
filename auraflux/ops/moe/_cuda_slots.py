"""Four-bit experts for few tokens on Hopper: how a warp multiplies codes is in `linear._nibbles`.

A program of `up_slots` makes 16 elements of one pair's hidden vector, its warps sharing out the inputs of gate and up. One of
`down_slots` makes 16 elements of a token's result, a warp for each slot, so that the sum over slots is taken where the products
are. Inputs go in quads, four groups of 64, and a warp multiplies two quads at a time, each of its eight columns with an x of
its own.

The experts are known when the kernel that chose them is done. `up_slots` waits for it and lets `down_slots` start at once,
which then requests its weights while the hidden vectors are still being made.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.linear._nibbles import (
    AWAIT,
    COMMIT,
    COPY8,
    SYNC,
    X_GLOBAL,
    bf16_at,
    codes_at,
    copy,
    copy_codes,
    group_sums,
    load_x,
    put,
    run,
    shared,
    sum_x,
    wait_ptx,
    word_at,
)
from auraflux.ops.moe._cuda_choose import choose, from_lane, load_scores, weights_of

X_REGISTERS = gl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,l,l")
FOUR_SUM = gl.constexpr("{.reg .f32 a,b,c,d; ld.shared.v4.f32 {a,b,c,d},[$1]; add.f32 a,a,b; add.f32 c,c,d; add.f32 $0,a,c;}")


@gluon.jit
def _four_sum(at):
    return gl.inline_asm_elementwise(FOUR_SUM, "=f,r,~{memory}", [at], gl.float32, is_pure=False, pack=1)


@gluon.jit
def code_bytes(pointer):
    return pointer.to(gl.pointer_type(gl.int8), bitcast=True)


@gluon.jit
def _sum_quads(slot, x, X, t, mine, h: gl.constexpr, r):
    """Σ code x of a quad's four groups, kept by the lanes whose columns are theirs."""
    ws = ()
    for j in gl.static_range(4):
        ws += (codes_at(slot + (mine ^ (32 * j))),)  # type: ignore[assignment]
    r0, r1, r2, r3 = r
    for j in gl.static_range(4):
        c = group_sums(ws[j], x, X, 1)
        keep = t == 2 * h + j // 2
        if j % 2 == 0:
            r0, r2 = gl.where(keep, c[0], r0), gl.where(keep, c[2], r2)
        else:
            r1, r3 = gl.where(keep, c[1], r1), gl.where(keep, c[3], r3)
    return r0, r1, r2, r3


@gluon.jit
def _scaled(at, PITCH: gl.constexpr, r, X):
    """Rows g and g + 8 of two groups, from their sums of codes and of x."""
    s0, s1, b0, b1 = word_at(at), word_at(at + 8 * PITCH), word_at(at + 16 * PITCH), word_at(at + 24 * PITCH)
    sum0 = bf16_at(s0, 0) * r[0] + bf16_at(s0, 1) * r[1] + bf16_at(b0, 0) * X[0] + bf16_at(b0, 1) * X[1]
    sum1 = bf16_at(s1, 0) * r[2] + bf16_at(s1, 1) * r[3] + bf16_at(b1, 0) * X[0] + bf16_at(b1, 1) * X[1]
    return sum0, sum1


@gluon.jit
def _expert_of(chosen, slot, experts, K: gl.constexpr):
    """Whether a slot has an expert that is there, and which; lane n knows that of slot n."""
    expert = from_lane(chosen, gl.minimum(slot, K - 1))
    return (slot < K) & (expert >= 0) & (expert < experts), gl.minimum(gl.maximum(expert, 0), experts - 1).to(gl.int64)


@gluon.jit
def up_slots(
    x, ids, scores, bias, gate, gate_scales, gate_biases, gate_step, gate_scale_step,
    up, up_scales, up_biases, up_step, up_scale_step, out, experts, inner,
    H: gl.constexpr, K: gl.constexpr, E: gl.constexpr, SCORING: gl.constexpr, W: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """silu(gate x) * up x of one pair (token, slot), 16 elements. Warp v takes runs v, v + W, ... of two quads of both.

    Experts come from `ids`, or, where these are None, from `scores`.
    """
    QUADS: gl.constexpr = H // 256
    MINE: gl.constexpr = (QUADS + 2 * W - 1) // (2 * W)
    PITCH: gl.constexpr = 16 * MINE
    PER: gl.constexpr = D * 2048 + 64 * PITCH
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    pair, row0 = gl.program_id(1), gl.program_id(0).to(gl.int64) * 16
    memory, ring = shared(PER * W, tid)
    base = ring + warp * PER
    scales = base + D * 2048
    run(AWAIT, lane)
    if ids is None:
        found = load_scores(scores + (pair // K).to(gl.int64) * experts, lane, experts, E)
    xs = ()
    for i in gl.static_range(MINE):
        column = gl.minimum((warp + i * W) * 512 + g * 64, H - 64) + t * 16
        x_at = (x + (pair // K).to(gl.int64) * H + column).to(gl.int64)
        xs += (load_x(X_GLOBAL, X_REGISTERS, x_at, x_at + 16),)  # type: ignore[assignment]
    if ids is None:
        chosen = choose(found, bias, lane, experts, pair % K, E, SCORING == "sigmoid")
    else:
        chosen = gl.load(ids + (pair - pair % K) + gl.minimum(lane, K - 1))
    good, expert = _expert_of(chosen, lane * 0 + pair % K, experts, K)
    gates = code_bytes(gate) + expert * gate_step * 4 + row0 * (H // 2) + warp * 256
    ups = code_bytes(up) + expert * up_step * 4 + row0 * (H // 2) + warp * 256
    for d in gl.static_range(D):
        there = good & ((warp + d // 4 * W) * 2 + d % 2 < QUADS)
        copy_codes(base + d * 2048, lane, (gates if d % 4 < 2 else ups) + (d // 4 * W * 256 + d % 2 * 128), there, H, 16)
        if d == 0 or d == 2:
            for n in gl.static_range(MINE):
                e = lane + 32 * n
                quad = (warp + e % (2 * MINE) // 2 * W) * 2 + e % 2
                at = (row0 + e // (2 * MINE)) * (QUADS * 4) + quad * 4 + expert * (gate_scale_step if d == 0 else up_scale_step)
                to = scales + 16 * d * PITCH + e * 8
                copy(COPY8, to, (gate_scales if d == 0 else up_scales) + at, good & (quad < QUADS))
                copy(COPY8, to + 16 * PITCH, (gate_biases if d == 0 else up_biases) + at, good & (quad < QUADS))
        run(COMMIT, lane)
    zero = (tid * 0).to(gl.float32)
    totals = (zero, zero, zero, zero)
    mine = g * 128 + ((t // 2) ^ (g % 2)) * 16 + (t % 2) * 8 + (g // 2) * 32
    for i in gl.static_range(MINE):
        X = sum_x(xs[i])
        live = (warp + i * W) * 2 + t // 2 < QUADS
        new = ()
        for m in gl.static_range(2):
            r = (X[0], X[0], X[0], X[0])
            for h in gl.static_range(2):
                slot = base + (4 * i + 2 * m + h) % D * 2048
                run(wait_ptx(D - 1), lane)
                r = _sum_quads(slot, xs[i], X, t, mine, h, r)
                if 4 * i + 2 * m + h + D < 4 * MINE:
                    run(SYNC, lane)
                    ahead = (4 * i + 2 * m + h + D) // 4 * W
                    source = (gates if (2 * m + h + D) % 4 < 2 else ups) + (ahead * 256 + (h + D) % 2 * 128)
                    copy_codes(slot, lane, source, good & ((warp + ahead) * 2 + (h + D) % 2 < QUADS), H, 16)
                run(COMMIT, lane)
            sums = _scaled(scales + 32 * m * PITCH + g * PITCH + i * 16 + t * 4, PITCH, r, X)
            for n in gl.static_range(2):
                new += (totals[2 * m + n] + gl.where(live, sums[n], 0.0),)  # type: ignore[assignment]
        totals = new  # type: ignore[assignment]
    gl.thread_barrier()
    for n in gl.static_range(4):
        put(ring + warp * 512 + n * 128 + lane * 4, totals[n])
    gl.thread_barrier()
    a, b = zero, zero
    for n in gl.static_range(W):
        at = ring + n * 512 + tid % 16 * 16
        a, b = a + _four_sum(at), b + _four_sum(at + 256)
    result = a / (1.0 + gl.exp(-a)) * b
    gl.store(out + pair.to(gl.int64) * inner + row0 + tid, result.to(out.dtype.element_ty), tid < 16)
    memory._keep_alive()


@gluon.jit
def down_slots(
    x, ids, weights, scores, bias, scale, residual, beside, beside_gate, down, down_scales, down_biases, step, scale_step,
    out, experts, hidden, INNER: gl.constexpr, K: gl.constexpr, E: gl.constexpr, SCORING: gl.constexpr,
    RENORMALIZE: gl.constexpr, W: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """16 elements of a token's results. Warp v takes slots v, v + W, ...

    Experts and their weights come from `ids` and `weights`, or, where `ids` are None, from `scores`. The result is the weighted
    sum, added to `residual` and to `beside` where they are given; with ids and without weights each slot's for itself.
    """
    QUADS: gl.constexpr = INNER // 256
    RUNS: gl.constexpr = (QUADS + 1) // 2
    MINE: gl.constexpr = (K + W - 1) // W * RUNS
    PITCH: gl.constexpr = 16 * MINE
    PER: gl.constexpr = D * 2048 + 32 * PITCH
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    token, row0 = gl.program_id(1).to(gl.int64), gl.program_id(0).to(gl.int64) * 16
    memory, ring = shared(PER * W, tid)
    base = ring + warp * PER
    scales = base + D * 2048
    if ids is None:
        found = load_scores(scores + token * experts, lane, experts, E)
        chosen = choose(found, bias, lane, experts, K - 1, E, SCORING == "sigmoid")
    else:
        chosen = gl.load(ids + token * K + gl.minimum(lane, K - 1))
    rows = code_bytes(down) + row0 * (INNER // 2)
    for d in gl.static_range(D):
        there, expert = _expert_of(chosen, warp + d // (2 * RUNS) * W, experts, K)
        if d % (2 * RUNS) < QUADS:
            copy_codes(base + d * 2048, lane, rows + (expert * step * 4 + d % (2 * RUNS) * 128), there, INNER, 16)
        if d == 0:
            for n in gl.static_range(MINE):
                e = lane + 32 * n
                quad = e % (2 * MINE) % (2 * RUNS)
                there, expert = _expert_of(chosen, warp + e % (2 * MINE) // (2 * RUNS) * W, experts, K)
                at = expert * scale_step + (row0 + e // (2 * MINE)) * (QUADS * 4) + quad * 4
                copy(COPY8, scales + e * 8, down_scales + at, there & (quad < QUADS))
                copy(COPY8, scales + 16 * PITCH + e * 8, down_biases + at, there & (quad < QUADS))
        run(COMMIT, lane)
    at = token * hidden + row0 + tid % 16
    if residual is not None:
        # there since before the experts were chosen
        kept = gl.load(residual + at).to(gl.float32)
        if beside is not None:
            more = gl.load(beside + at).to(gl.float32)
            if beside_gate is not None:
                more *= 1.0 / (1.0 + gl.exp(-gl.load(beside_gate + token).to(gl.float32)))
    if ids is None:
        share = weights_of(found, scores + token * experts, chosen, lane, scale, K, E, SCORING, RENORMALIZE)
    elif weights is not None:
        share = gl.load(weights + token * K + gl.minimum(lane, K - 1))
        share = gl.where((chosen >= 0) & (chosen < experts), share, float("nan"))
    run(AWAIT, lane)
    xs = ()
    for i in gl.static_range(MINE):
        slot = gl.minimum(warp + i // RUNS * W, K - 1)
        column = gl.minimum(i % RUNS * 512 + g * 64, INNER - 64) + t * 16
        x_at = (x + (token * K + slot) * INNER + column).to(gl.int64)
        xs += (load_x(X_GLOBAL, X_REGISTERS, x_at, x_at + 16),)  # type: ignore[assignment]
    total0 = (tid * 0).to(gl.float32)
    total1 = total0
    mine = g * 128 + ((t // 2) ^ (g % 2)) * 16 + (t % 2) * 8 + (g // 2) * 32
    totals = ()
    for i in gl.static_range(MINE):
        X = sum_x(xs[i])
        r = (X[0], X[0], X[0], X[0])
        for h in gl.static_range(2):
            slot = base + (2 * i + h) % D * 2048
            run(wait_ptx(D - 1), lane)
            if i % RUNS * 2 + h < QUADS:
                r = _sum_quads(slot, xs[i], X, t, mine, h, r)
            if 2 * i + h + D < 2 * MINE and (2 * i + h + D) % (2 * RUNS) < QUADS:
                run(SYNC, lane)
                there, expert = _expert_of(chosen, warp + (2 * i + h + D) // (2 * RUNS) * W, experts, K)
                source = rows + (expert * step * 4 + (2 * i + h + D) % (2 * RUNS) * 128)
                copy_codes(slot, lane, source, there, INNER, 16)
            run(COMMIT, lane)
        sum0, sum1 = _scaled(scales + g * PITCH + i * 16 + t * 4, PITCH, r, X)
        live = i % RUNS * 2 + t // 2 < QUADS
        sum0, sum1 = gl.where(live, sum0, 0.0), gl.where(live, sum1, 0.0)
        total0, total1 = (sum0, sum1) if i % RUNS == 0 else (total0 + sum0, total1 + sum1)
        if i % RUNS == RUNS - 1:
            totals += (total0, total1)  # type: ignore[assignment]
    gl.thread_barrier()
    for n in gl.static_range(MINE // RUNS):
        put(ring + (warp + n * W) * 256 + lane * 4, totals[2 * n])
        put(ring + (warp + n * W) * 256 + lane * 4 + 128, totals[2 * n + 1])
    gl.thread_barrier()
    if ids is not None and weights is None:
        for n in gl.static_range((K + 2 * W - 1) // (2 * W)):
            slot = tid // 16 + n * 2 * W
            there, _ = _expert_of(chosen, slot, experts, K)
            value = _four_sum(ring + slot * 256 + tid % 16 * 16)
            gl.store(out + (token * K + slot) * hidden + row0 + tid % 16, value, there)
    else:
        result = (tid * 0).to(gl.float32)
        for n in gl.static_range(K):
            weight = from_lane(share.to(gl.int32, bitcast=True), lane * 0 + n).to(gl.float32, bitcast=True)
            result = gl.fma(_four_sum(ring + n * 256 + tid % 16 * 16), weight, result)
        if residual is not None:
            # rounded and added as `expert_mlp` and `combine` would, to the bit
            result = kept + result.to(out.dtype.element_ty).to(gl.float32)
            if beside is not None:
                result += more
        gl.store(out + at, result.to(out.dtype.element_ty), tid < 16)
    memory._keep_alive()
