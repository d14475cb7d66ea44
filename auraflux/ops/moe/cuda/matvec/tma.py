"""4-bit experts of megabytes each for single tokens on Hopper: persistent programs with rings filled by TMA.

A stage of `up_ring` is 8 rows of gate and the same of up, one of `down_ring` 8 rows of one slot. A program has every
num_programs-th stage. Those of a shared expert come first: they are known from the start and load while the experts are
selected. The last warp to read a stage issues the next copy into it, so that no warp waits for others; sums of warps are
combined when all stages are done.

In `up_ring` each warp has its inputs in registers, the same in all stages. In `down_ring` a team of warps has a stage, and the
inputs of all slots are in shared memory.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.copy import await_stage, count_read, expect, init_barriers, tma_copy
from auraflux.ops.hopper.mma_int4_groups import codes_two, load_16, pair_16, paired, put_rows, row_products, scales_two, sums_16
from auraflux.ops.hopper.ptx import LAUNCH, WAIT, WAIT_AND_LAUNCH, run, shared
from auraflux.ops.hopper.reduce import sum_four
from auraflux.ops.hopper.shared_memory import float_at, put_float
from auraflux.ops.moe.cuda.matvec.tma_stages import copy_array, inputs_at, put_chosen, put_shared_expert, put_source
from auraflux.ops.moe.cuda.routing.topk import load_scores, weights_of
from auraflux.ops.moe.cuda.routing.topk_warps import list_nbytes, load_keys, pick


class RingShape(NamedTuple):
    """Compile-time shape of the kernels.

    width                                 inputs: hidden in `up_ring`, inner in `down_ring`
    k, scoring, renormalize, topk_groups  see `Routing`; no groups: 0
    experts                               padded to a multiple of 32
    length, depth                         stages (up) or tiles (down) of a program at most, and stages in flight
    warps                                 of a program
    """

    width: int
    k: int
    experts: int
    scoring: str
    renormalize: bool
    topk_groups: int
    length: int
    depth: int
    warps: int


BARRIERS = gl.constexpr(640)  # bytes: barriers of up to 48 stages, then a count for each


@gluon.jit
def _put_up_sources(sources, table, tid, tiles, H: gl.constexpr, COUNT: gl.constexpr, SLOTS: gl.constexpr, W: gl.constexpr):
    """Compute the source addresses of a program's first COUNT stages, of SLOTS slots."""
    for r in gl.static_range((COUNT * 6 + 32 * W - 1) // (32 * W)):
        entry = tid + r * 32 * W
        tile = gl.minimum(gl.program_id(0) + entry // 6 * gl.num_programs(0), SLOTS * tiles - 1)
        put_source(sources, table, entry, tile // tiles, tile % tiles * 8, entry < COUNT * 6, 6, H)


@gluon.jit
def _read_up(half, warp, lane, S: gl.constexpr, H: gl.constexpr, W: gl.constexpr):
    """Load codes, scales and biases of a warp's S-th four groups."""
    quad = gl.minimum(warp + S * W, H // 256 - 1)
    codes = codes_two(half + quad * 128, lane, H // 2, H // 2 * 9)
    return codes, scales_two(half + 4 * H + quad * 8, lane, H // 32, H // 2 * 9, 8)


@gluon.jit
def _add_up(totals, read, x, sums, warp, lane, S: gl.constexpr, H: gl.constexpr, W: gl.constexpr):
    sum0, sum1 = row_products(read[0], read[1], x, sums, lane, 0)
    if (S + 1) * W > H // 256:
        live = warp + S * W < H // 256
        sum0, sum1 = gl.where(live, sum0, 0.0), gl.where(live, sum1, 0.0)
    return totals[0] + sum0, totals[1] + sum1


@gluon.jit
def _store_up(sums, out, tid, count, COUNT: gl.constexpr, W: gl.constexpr):
    """Sum over warps, and store silu(gate) * up in the order and scale of an MMA operand."""
    zero = (tid * 0).to(gl.float32)
    for r in gl.static_range((COUNT * 8 + 32 * W - 1) // (32 * W)):
        n, row = tid // 8 + r * 4 * W, tid % 8
        a, b = zero, zero
        for w in gl.static_range(W):
            a += float_at(sums + (n * W + w) * 64 + row * 4, n < count)
            b += float_at(sums + (n * W + w) * 64 + 32 + row * 4, n < count)
        result = (a / (1.0 + gl.exp(-a)) * b).to(out.dtype.element_ty).to(gl.float32)
        result, spot = paired(result, row)
        at = (gl.program_id(0) + n * gl.num_programs(0)) * 8 + spot
        gl.store(out + at, result.to(out.dtype.element_ty), n < count)


@gluon.jit
def up_ring(
    x, scores, bias, gate, up, shared_gate, shared_up, out, experts, inner, SHAPE: gl.constexpr
):  # fmt: skip
    """Write silu(gate x) * up x of a token, up to COUNT stages a program, D of them in flight; grid (programs, tokens)."""
    H: gl.constexpr = SHAPE.width
    K: gl.constexpr = SHAPE.k
    E: gl.constexpr = SHAPE.experts
    SCORING: gl.constexpr = SHAPE.scoring
    COUNT: gl.constexpr = SHAPE.length
    D: gl.constexpr = SHAPE.depth
    W: gl.constexpr = SHAPE.warps
    HAS_SHARED: gl.constexpr = 0 if shared_gate is None else 1
    SLOTS: gl.constexpr = K + HAS_SHARED
    RING: gl.constexpr = D * 9 * H
    PLACES: gl.constexpr = RING + BARRIERS + SLOTS * 48
    SETS: gl.constexpr = (H // 256 + W - 1) // W
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    token, tiles, programs, first = gl.program_id(1).to(gl.int64), inner // 8, gl.num_programs(0), gl.program_id(0)
    count = (SLOTS * tiles - first + programs - 1) // programs
    memory, ring = shared(PLACES + COUNT * 48 + max(COUNT * W * 64, list_nbytes(K, E)), tid)
    bars, counts, table = ring + RING, ring + (RING + 8 * D), ring + (RING + BARRIERS)
    sources, sums = ring + PLACES, ring + (PLACES + COUNT * 48)
    init_barriers(bars, tid, D)
    put_float(counts + tid * 4, (tid * 0).to(gl.float32), tid < D)
    if HAS_SHARED:
        put_shared_expert(table, tid, shared_gate, 0)
        put_shared_expert(table, tid, shared_up, 3)
        gl.thread_barrier()
        _put_up_sources(sources, table, tid, tiles, H, D, 1, W)
        gl.thread_barrier()
        for d in gl.static_range(D):
            copy_array(ring, bars, sources, d, lane * 0 + d, lane, (tid < 6) & (first + d * programs < tiles), 6, H)
    run(WAIT, lane)
    # issued before the weights, so as not to queue behind them
    xs = ()
    for s in gl.static_range(SETS):
        quad = gl.minimum(warp + s * W, H // 256 - 1)
        xs += (load_16(x + token * H + quad * 256 + lane // 8 * 64 + lane % 4 * 16),)  # type: ignore[assignment]
    keys = load_keys(scores + token * experts, bias, tid, experts, E, SCORING, W)
    chosen = pick(keys, tid, sums, K, E, SHAPE.topk_groups, W)
    put_chosen(table, tid, chosen, gate, 0, 6, K, HAS_SHARED)
    put_chosen(table, tid, chosen, up, 3, 6, K, HAS_SHARED)
    gl.thread_barrier()
    _put_up_sources(sources, table, tid, tiles, H, COUNT, SLOTS, W)
    gl.thread_barrier()
    for d in gl.static_range(min(D, COUNT)):
        copy_array(
            ring,
            bars,
            sources,
            d,
            lane * 0 + d,
            lane,
            (tid < 6) & (first + d * programs >= HAS_SHARED * tiles) & (d < count),
            6,
            H,
        )
    run(LAUNCH, lane)
    pairs, totals = (), ()
    for s in gl.static_range(SETS):
        pairs += (pair_16(xs[s]),)  # type: ignore[assignment]
        totals += (sums_16(pairs[s]),)  # type: ignore[assignment]
    zero = (tid * 0).to(gl.float32)
    for i in range(count):
        await_stage(bars + i % D * 8, lane * 0 + i // D, lane >= 0)
        found, read = (zero, zero), ()
        for s in gl.static_range(SETS):
            read += (_read_up(ring + i % D * (9 * H), warp, lane, s, H, W),)  # type: ignore[assignment]
            if SETS > 2:
                found = _add_up(found, read[s], pairs[s], totals[s], warp, lane, s, H, W)
        last = count_read(counts + i % D * 4, lane, lane >= 0) == (i // D + 1) * W - 1
        if i + D < count:
            copy_array(ring, bars, sources, i + D, lane * 0 + i % D, lane, last & (lane < 6), 6, H)
        for s in gl.static_range(SETS if SETS <= 2 else 0):
            found = _add_up(found, read[s], pairs[s], totals[s], warp, lane, s, H, W)
        put_rows(sums + (i * W + warp) * 64, lane, found[0], found[1])
    gl.thread_barrier()
    _store_up(sums, out + token * (SLOTS * inner), tid, count, COUNT, W)
    memory._keep_alive()


@gluon.jit
def _put_down_sources(
    sources, table, tid, mine, INNER: gl.constexpr, COUNT: gl.constexpr, SLOTS: gl.constexpr, W: gl.constexpr
):
    """Compute the source addresses of a program's stages: slot by slot, `mine` tiles of each."""
    for r in gl.static_range((COUNT * SLOTS * 3 + 32 * W - 1) // (32 * W)):
        entry = tid + r * 32 * W
        n = gl.minimum(entry // 3, SLOTS * mine - 1)
        row0 = (gl.program_id(0) + n % mine * gl.num_programs(0)) * 8
        put_source(sources, table, entry, n // mine, row0, entry < COUNT * SLOTS * 3, 3, INNER)


@gluon.jit
def _copy_down(ring, bars, sources, lane, tid, begin, end, INNER: gl.constexpr, D: gl.constexpr):
    """Let the first warp issue copies of stages from `begin` to `end`, as far as the ring has room."""
    for r in gl.static_range((D + 9) // 10):
        n = r * 10 + lane // 3
        copy_array(ring, bars, sources, n, n, lane % 3, (tid < 30) & (n >= begin) & (n < gl.minimum(end, D)), 3, INNER)


@gluon.jit
def _load_epilogue(epilogue, at, token, here):
    """Return the residual stream, and the shared expert's output or, where that is computed here, its factor."""
    residual = gl.load(epilogue.residual + at, mask=here, other=0.0).to(gl.float32)
    more = residual * 0.0 + 1.0
    if epilogue.shared is not None:
        more = gl.load(epilogue.shared + at, mask=here, other=0.0).to(gl.float32)
    if epilogue.gate is not None:
        more *= 1.0 / (1.0 + gl.exp(-gl.load(epilogue.gate + token).to(gl.float32)))
    return residual, more


@gluon.jit
def _slot_sum(sums, slot, tid, mine, here, PARTS: gl.constexpr):
    """Sum a team's warps for a thread's element of one slot."""
    at = sums + (slot * mine + tid // 8) * (PARTS * 32) + tid % 8 * 4
    total = float_at(at, here)
    for k in gl.static_range(1, PARTS):
        total += float_at(at + k * 32, here)
    return total


@gluon.jit
def down_ring(
    x, scores, bias, scale, epilogue, down, shared_down, out, experts, hidden, SHAPE: gl.constexpr
):  # fmt: skip
    """Write a token's results plus the epilogue; up to COUNT tiles of 8 a program, D stages of a slot in flight."""
    INNER: gl.constexpr = SHAPE.width
    K: gl.constexpr = SHAPE.k
    E: gl.constexpr = SHAPE.experts
    SCORING: gl.constexpr = SHAPE.scoring
    RENORMALIZE: gl.constexpr = SHAPE.renormalize
    COUNT: gl.constexpr = SHAPE.length
    D: gl.constexpr = SHAPE.depth
    W: gl.constexpr = SHAPE.warps
    HAS_SHARED: gl.constexpr = 0 if shared_down is None else 1
    SLOTS: gl.constexpr = K + HAS_SHARED
    STAGE: gl.constexpr = INNER // 2 * 9
    INPUTS: gl.constexpr = SLOTS * INNER * 2
    AFTER: gl.constexpr = D * STAGE + INPUTS + BARRIERS
    PARTS: gl.constexpr = INNER // 512
    TEAMS: gl.constexpr = W // PARTS
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    token, first, programs = gl.program_id(1).to(gl.int64), gl.program_id(0), gl.num_programs(0)
    mine = (hidden // 8 - first + programs - 1) // programs
    PLACES: gl.constexpr = AFTER + SLOTS * 24 + 128
    memory, ring = shared(PLACES + COUNT * SLOTS * 24 + max(COUNT * SLOTS * PARTS * 32, list_nbytes(K, E)), tid)
    inputs, bars, counts = ring + D * STAGE, ring + (D * STAGE + INPUTS), ring + (D * STAGE + INPUTS + 8 * D + 8)
    box, table = ring + AFTER, ring + (AFTER + 128)
    sources, sums = ring + PLACES, ring + (PLACES + COUNT * SLOTS * 24)
    keys = load_keys(scores + token * experts, bias, tid, experts, E, SCORING, W)
    init_barriers(bars, tid, D + 1)
    put_float(counts + tid * 4, (tid * 0).to(gl.float32), tid < D)
    known = mine * HAS_SHARED
    if HAS_SHARED:
        put_shared_expert(table, tid, shared_down, 0)
        gl.thread_barrier()
        _put_down_sources(sources, table, tid, mine, INNER, COUNT, 1, W)
        gl.thread_barrier()
        _copy_down(ring, bars, sources, lane, tid, 0, known, INNER, D)
    chosen = pick(keys, tid, sums, K, E, SHAPE.topk_groups, W)
    put_chosen(table, tid, chosen, down, 0, 3, K, HAS_SHARED)
    gl.thread_barrier()
    _put_down_sources(sources, table, tid, mine, INNER, COUNT, SLOTS, W)
    gl.thread_barrier()
    _copy_down(ring, bars, sources, lane, tid, known, SLOTS * mine, INNER, D)
    run(WAIT_AND_LAUNCH, lane)
    arrived = bars + 8 * D + lane * 0
    expect(arrived, lane * 0 + INPUTS, tid == 0)
    tma_copy(inputs + lane * 0, (x + token * (SLOTS * INNER)).to(gl.int64) + lane * 0, lane * 0 + INPUTS, arrived, tid == 0)
    at, here = token * hidden + (first + tid // 8 * programs) * 8 + tid % 8, tid < mine * 8
    residual, more = _load_epilogue(epilogue, at, token, here)
    found = ()
    if SCORING == "softmax" and not RENORMALIZE:
        found = load_scores(scores + token * experts, tid, experts, E)
    share = weights_of(found, scores + token * experts, chosen, lane, scale, K, E, SCORING, RENORMALIZE)
    put_float(box + lane * 4, share, tid < 32)
    await_stage(arrived, lane * 0, lane >= 0)
    # the second half of a row is in the odd columns
    team, q = warp // PARTS, warp % PARTS
    my_x = inputs + (lane // 4 % 2 * PARTS + q) * 512 + lane // 8 * 128 + lane % 4 * 32
    spot, lap, slot, tile = team % D, team // D, team // mine, team % mine
    for i in range((SLOTS * mine + TEAMS - 1) // TEAMS):
        n = i * TEAMS + team
        there = (n < SLOTS * mine) & (team < TEAMS)
        await_stage(bars + spot * 8, lap, there)
        words = codes_two(ring + spot * STAGE + q * 128, lane, INNER // 2, PARTS * 128)
        lines = scales_two(ring + spot * STAGE + 4 * INNER + q * 8, lane, INNER // 32, PARTS * 8, 8)
        v = inputs_at(my_x + gl.minimum(slot, SLOTS - 1) * (2 * INNER))
        last = (count_read(counts + spot * 4, lane, there) == (lap + 1) * PARTS - 1) & there & (n + D < SLOTS * mine)
        copy_array(ring, bars, sources, gl.minimum(n + D, SLOTS * mine - 1), spot, lane % 3, last & (lane < 3), 3, INNER)
        sum0, sum1 = row_products(words, lines, v, sums_16(v), lane, 1)
        put_float(sums + (n * PARTS + q) * 32 + lane // 4 * 4, sum_four(sum0 + sum1), there & (lane % 4 == 0))
        spot += TEAMS % D
        lap += TEAMS // D + (spot >= D).to(gl.int32)
        spot = gl.where(spot >= D, spot - D, spot)
        tile += TEAMS % mine
        slot += TEAMS // mine + (tile >= mine).to(gl.int32)
        tile = gl.where(tile >= mine, tile - mine, tile)
    gl.thread_barrier()
    result = (tid * 0).to(gl.float32)
    for s in gl.static_range(K):
        result = gl.fma(_slot_sum(sums, s + HAS_SHARED, tid, mine, here, PARTS), float_at(box + s * 4, here), result)
    # rounded and added as in `expert_mlp` and `combine`
    result = residual + result.to(out.dtype.element_ty).to(gl.float32)
    if HAS_SHARED:
        result += _slot_sum(sums, 0, tid, mine, here, PARTS).to(out.dtype.element_ty).to(gl.float32) * more
    elif epilogue.shared is not None:
        result += more
    gl.store(out + at, result.to(out.dtype.element_ty), here)
    memory._keep_alive()
