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
from auraflux.ops.hopper.ptx import LAUNCH, WAIT, from_lane, run, shared
from auraflux.ops.hopper.shared_memory import long_at, put_long
from auraflux.ops.moe.cuda.routing.topk import choose, load_scores

BARRIERS = gl.constexpr(128)  # bytes


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
def select_experts(scores, ids, bias, token, tid, experts, last, K: gl.constexpr, E: gl.constexpr, SCORING: gl.constexpr):
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


@gluon.constexpr_function
def up_nbytes(width, tiles, warps, early):
    """Return the shared memory of a program of `up_slots`: tiles, barriers and sums."""
    side = warps // 2
    # sums of a row: of each warp, or without TMA, with half as many warps, of each set: they add up in the same order
    sums = side if early else side * ((width // 256 + side - 1) // side)
    return tiles * (2 * 9 * width + 128 * sums) + 128


@gluon.jit
def up_slots(
    x, ids, scores, bias, gate, up, shared_gate, shared_up, out, experts, inner, SHAPE: gl.constexpr
):  # fmt: skip
    """Write silu(gate x) * up x, up to TILES tiles of a token; grid (programs, tokens).

    Experts come from `ids`, or, where these are None, from `scores`. Slot K is the shared expert's, if there is one.
    """
    tid = gl.arange(0, 32 * SHAPE.warps, gl.BlockedLayout([1], [32], [SHAPE.warps], [0]))
    memory, ring = shared(up_nbytes(SHAPE.width, SHAPE.tiles, SHAPE.warps, launches_early()), tid)
    weights, shared_weights = (gate, up), (shared_gate, shared_up)
    place = gl.program_id(0), gl.num_programs(0), gl.program_id(1).to(gl.int64)
    up_tiles(x, (ids, scores, bias), weights, shared_weights, out, experts, inner, place, ring, tid, SHAPE)
    memory._keep_alive()


@gluon.jit
def up_tiles(x, choice, weights, shared_weights, out, experts, inner, place, ring, tid, SHAPE: gl.constexpr):
    """Compute the tiles of one program.

    choice                   ids, scores and their bias
    weights, shared_weights  gate and up
    place                    the program's number, the number of programs, and the token
    """
    H: gl.constexpr = SHAPE.width
    K: gl.constexpr = SHAPE.k
    E: gl.constexpr = SHAPE.experts
    SCORING: gl.constexpr = SHAPE.scoring
    TILES: gl.constexpr = SHAPE.tiles
    ROW: gl.constexpr = H // 2
    LINE: gl.constexpr = H // 32
    HALF: gl.constexpr = 16 * (ROW + 2 * LINE)
    WARPS: gl.constexpr = SHAPE.warps
    SIDE: gl.constexpr = WARPS // 2  # warps of gate, and of up
    SETS: gl.constexpr = (H // 256 + SIDE - 1) // SIDE
    # sums of a row: of each warp, or without TMA, with half as many warps, of each set: they add up in the same order
    SUMS: gl.constexpr = SIDE if launches_early() else SIDE * SETS
    ids, scores, bias = choice
    gate, up = weights
    shared_gate, shared_up = shared_weights
    program, programs, token = place
    warp, lane = tid // 32, tid % 32
    tiles, routed = inner // 16, K * (inner // 16)
    count = routed if shared_gate is None else routed + tiles
    begin = program * count // programs
    end = (program + 1) * count // programs
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
        group = gl.minimum((warp % SIDE + s * SIDE) * 4, H // 64 - 4) + lane // 8
        xs += (load_16(x + token * H + group * 64 + lane % 4 * 16),)  # type: ignore[assignment]
    _, chosen = select_experts(scores, ids, bias, token, tid, experts, gl.minimum((end - 1) // tiles, K - 1), K, E, SCORING)
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
        half = ring + i * (2 * HALF) + warp // SIDE * HALF
        if launches_early():
            await_bytes(bars + i * 16 + warp // SIDE * 8)
        else:
            run(wait_ptx(TILES - 1 - i), lane)
            gl.thread_barrier()
        total0, total1 = zero, zero
        for s in gl.static_range(SETS):
            group = gl.minimum((warp % SIDE + s * SIDE) * 4, H // 64 - 4)
            words = codes_two(half + group * 32, lane, ROW, 8 * ROW)
            lines = scales_two(half + 16 * ROW + group * 2, lane, LINE, 8 * LINE, 16)
            sum0, sum1 = row_products(words, lines, pairs[s], None, lane, 0)
            if H % (256 * SIDE):
                live = (warp % SIDE + s * SIDE) * 4 < H // 64
                sum0, sum1 = gl.where(live, sum0, 0.0), gl.where(live, sum1, 0.0)
            if launches_early():
                total0, total1 = total0 + sum0, total1 + sum1
            else:
                put_rows(sums + (i * 2 * SUMS + warp // SIDE * SUMS + s * SIDE + warp % SIDE) * 64, lane, sum0, sum1)
        if launches_early():
            put_rows(sums + (i * WARPS + warp) * 64, lane, total0, total1)
    gl.thread_barrier()
    at, here = sums + tid // 16 * (128 * SUMS) + tid % 16 * 4, tid < TILES * 16
    a, b = sum_at(at, here, SUMS), sum_at(at + 64 * SUMS, here, SUMS)
    result = (a / (1.0 + gl.exp(-a)) * b).to(out.dtype.element_ty).to(gl.float32)
    result, place = paired(result, tid % 16)
    at = (token * count + begin + tid // 16) * 16 + place
    gl.store(out + at, result.to(out.dtype.element_ty), here & (begin + tid // 16 < end))
