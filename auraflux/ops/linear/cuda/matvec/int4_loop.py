"""One token times many rows of four-bit weights on Hopper: the tiles of `int4.py` in a loop.

As many programs as run at once take every such tile. Their rings never run dry between tiles, and each loads and normalises x
once; launched for one tile each, later programs would begin with both while the memory waits.
"""

from collections.abc import Sequence

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.device import multiprocessors, shared_nbytes
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.hopper.copy import COMMIT, WAIT_ALL, wait_ptx
from auraflux.ops.hopper.mma_int4 import codes_at, copy_halves, group_sums, sum_x
from auraflux.ops.hopper.ptx import SYNC, WAIT_AND_LAUNCH, run, shared
from auraflux.ops.hopper.reduce import sum_over
from auraflux.ops.hopper.shared_memory import put, word_at
from auraflux.ops.linear.cuda.call import NO_NORM, FusedNorm, NoNorm
from auraflux.ops.linear.cuda.matvec.int4 import (
    copy_scales,
    gated_sum,
    load_inputs,
    norm_factor,
    operands,
    pair_sum,
    sum_warps,
    warp_runs,
)
from auraflux.ops.linear.cuda.row_copies import products_of
from auraflux.quant import QTensor

WARPS = 4
RESIDENT, REGISTERS = 3, 160  # programs of a multiprocessor, registers of a thread
DEEP = 4  # half runs in flight of each warp, which divide an iteration or are several
LEAST_TILES = 3  # of a program
WIDTHS = (2048, 4096)


@gluon.constexpr_function
def scale_buffers(runs, deep):
    """Return how many tiles' scales a warp holds: of those in flight and of the one that it multiplies."""
    return (deep + 2 * runs - 1) // (2 * runs) + 1


@gluon.constexpr_function
def warp_nbytes(K, W, deep):
    """Return the shared memory of a warp: half runs in flight, and scales and biases of tiles."""
    return deep * 2048 + 512 * warp_runs(K, W) * scale_buffers(warp_runs(K, W), deep)


@gluon.jit
def _request_step(
    base, lane, warp, products, at, number, count, STEP: gl.constexpr, GATED: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Request a half run of an iteration that begins with a program's tile `number`, and with its first half run its scales."""
    MINE: gl.constexpr = warp_runs(K, W)
    ROWS: gl.constexpr = 8 if GATED else 16
    TILE: gl.constexpr = STEP // (2 * MINE)
    RUN: gl.constexpr = STEP % (2 * MINE) // 2
    first, second, stride = at
    ahead = (lane * 0 + number + TILE).to(gl.int64) * stride + (RUN * W * 256 + STEP % 2 * 128)
    there = (2 * (warp + RUN * W) + STEP % 2 < K // 256) & (number + TILE < count)
    copy_halves(base + STEP % D * 2048, lane, first + ahead, second + ahead, there, K, 16)
    if STEP % (2 * MINE) == 0:
        # past the end, the last tile's again
        tile = gl.program_id(0) + gl.minimum(number + TILE, count - 1) * gl.num_programs(0)
        BUFFERS: gl.constexpr = scale_buffers(MINE, D)
        to = base + D * 2048 + (number + TILE) % BUFFERS * (512 * MINE)
        own, also = products[0].codes, products[1 if GATED else 0].codes
        row0 = (lane * 0 + tile).to(gl.int64) * ROWS
        copy_scales(to, lane, warp, own.scales, own.biases, also.scales, also.biases, row0, MINE, GATED, K, W)
    run(COMMIT, lane)


@gluon.jit
def _run_of_codes(
    place, products, at, tiles, mine, x, X, RUN: gl.constexpr, GATED: gl.constexpr, K: gl.constexpr, W: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Multiply the codes of an iteration's run and refill their slots; see `int4.run_of_codes`."""
    base, lane, warp = place
    number, count = tiles
    t = lane % 4
    r0, r1, r2, r3 = X[0], X[0], X[0], X[0]
    for h in gl.static_range(2):
        slot = base + (2 * RUN + h) % D * 2048
        run(wait_ptx(D - 1), lane)
        ws = ()
        for j in gl.static_range(4):
            ws += (codes_at(slot + (mine ^ (32 * j))),)  # type: ignore[assignment]
        run(SYNC, lane)
        _request_step(base, lane, warp, products, at, number, count, 2 * RUN + h + D, GATED, K, W, D)
        for j in gl.static_range(4):
            c = group_sums(ws[j], x, X, 1)
            owned = t == 2 * h + j // 2
            if j % 2 == 0:
                r0, r2 = gl.where(owned, c[0], r0), gl.where(owned, c[2], r2)
            else:
                r1, r3 = gl.where(owned, c[1], r1), gl.where(owned, c[3], r3)
    return r0, r1, r2, r3


@gluon.jit
def matvec_tiles(
    x, normed, products, tiles, GATED: gl.constexpr, K: gl.constexpr, COUNT: gl.constexpr, U: gl.constexpr, W: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Multiply one token by all tiles of 16 rows, at most COUNT per program, U in an iteration; see `int4.matvec`."""
    MINE: gl.constexpr = warp_runs(K, W)
    PITCH: gl.constexpr = 16 * MINE
    QUADS: gl.constexpr = K // 256
    ROWS: gl.constexpr = 8 if GATED else 16
    BUFFERS: gl.constexpr = scale_buffers(MINE, D)
    PER: gl.constexpr = warp_nbytes(K, W, D)
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    memory, ring = shared(PER * W + COUNT * W * 256 + W * 4, tid)
    base, sums, squares_at = ring + warp * PER, ring + PER * W, ring + PER * W + COUNT * W * 256
    programs, program = gl.num_programs(0), gl.program_id(0)
    count = (tiles - program + programs - 1) // programs
    row0, w = (lane * 0 + program).to(gl.int64) * ROWS, products[0].codes.packed
    other = products[1].codes.packed if GATED else w + 8 * (K // 2)
    at = (
        w + row0 * (K // 2) + warp * 256,
        other + row0 * (K // 2) + warp * 256,
        (lane * 0 + programs).to(gl.int64) * (ROWS * (K // 2)),
    )
    for d in gl.static_range(D):
        _request_step(base, lane, warp, products, at, 0 * count, count, d, GATED, K, W, D)
    run(WAIT_AND_LAUNCH, lane)
    xs, squares = load_inputs(x, normed, warp, g, t, program == 0, MINE, K, W)
    totals = ()
    for i in gl.static_range(MINE):
        totals += (sum_x(xs[i]),)  # type: ignore[assignment]
    mine = g * 128 + ((t // 2) ^ (g % 2)) * 16 + (t % 2) * 8 + (g // 2) * 32
    for n in range(0, count, U):
        for u in gl.static_range(U):
            total0 = (tid * 0).to(gl.float32)
            total1 = total0
            scales = base + D * 2048 + (n + u) % BUFFERS * (512 * MINE)
            for i in gl.static_range(MINE):
                place = base, lane, warp
                r = _run_of_codes(place, products, at, (n, count), mine, xs[i], totals[i], u * MINE + i, GATED, K, W, D)
                line = scales + g * PITCH + i * 16 + t * 4
                s0, s1, b0, b1 = (
                    word_at(line),
                    word_at(line + 8 * PITCH),
                    word_at(line + 16 * PITCH),
                    word_at(line + 24 * PITCH),
                )
                live = 2 * (warp + i * W) + t // 2 < QUADS
                total0 += gl.where(live, pair_sum(s0, b0, r[0], r[1], totals[i][0], totals[i][1]), 0.0)
                total1 += gl.where(live, pair_sum(s1, b1, r[2], r[3], totals[i][0], totals[i][1]), 0.0)
            put(sums + ((n + u) * W + warp) * 256 + lane * 4, total0)
            put(sums + ((n + u) * W + warp) * 256 + lane * 4 + 128, total1)
    run(WAIT_ALL, lane)
    if normed.weight is not None:
        put(squares_at + warp * 4, sum_over(squares, 32))
    gl.thread_barrier()
    for r in gl.static_range((COUNT * ROWS + 32 * W - 1) // (32 * W)):
        number, row = (tid + r * 32 * W) // ROWS, tid % ROWS
        tile_at = sums + gl.minimum(number, COUNT - 1) * (W * 256) + row * 16
        out = sum_warps(tile_at, W)
        factor = out
        if normed.weight is not None:
            factor = norm_factor(squares_at, tid, normed.eps, K, W)
            out *= factor
        if GATED:
            up = sum_warps(tile_at + 128, W)
            if normed.weight is not None:
                up *= factor
            out = gated_sum(out, up)
        to = products[0].out + (program + number * programs).to(gl.int64) * ROWS + row
        gl.store(to, out.to(gl.bfloat16), number < count)
    memory._keep_alive()


def unrolled_for(width: int) -> int:
    """Return the tiles of an iteration: as many as make the ring begin at its first slot in each."""
    return max(1, DEEP // (2 * warp_runs(width, WARPS)))


def refuses(x: Tensor, weights: Sequence[QTensor], gated: bool) -> str | None:
    """Return why `int4.py` is as fast or this kernel does not run: few tiles, several results, partial runs."""
    rows, width = weights[0].shape
    if len(weights) != 1 + gated:
        return f"{len(weights)} weights have results of their own"
    if width not in WIDTHS:
        return f"width {width}; the kernel was measured with {WIDTHS}"
    tiles, programs = rows // (8 if gated else 16), RESIDENT * multiprocessors(x.device)
    if tiles < LEAST_TILES * programs:
        return f"{tiles} tiles for {programs} programs; {LEAST_TILES} for each are needed"
    nbytes = WARPS * (warp_nbytes(width, WARPS, DEEP) + 256 * (cdiv(tiles, programs) + unrolled_for(width)))
    return "sums of so many tiles leave no room for as many programs" if RESIDENT * nbytes > shared_nbytes(x.device) else None


def multiply(
    x: Tensor, weights: Sequence[QTensor], outs: Sequence[Tensor], gated: bool = False, normed: FusedNorm | NoNorm = NO_NORM
) -> None:
    """Multiply one token by a weight, or by two of a gate, into bf16 [1, N]; with residual add and norm first."""
    rows, width = weights[0].shape
    tiles, programs, unrolled = rows // (8 if gated else 16), RESIDENT * multiprocessors(x.device), unrolled_for(width)
    count = cdiv(cdiv(tiles, programs), unrolled) * unrolled
    products, sizes = products_of(weights, outs, codes=operands), (gated, width, count, unrolled, WARPS, DEEP)
    launch(matvec_tiles, (programs,))(x, normed, products, tiles, *sizes, num_warps=WARPS, maxnreg=REGISTERS, launch_pdl=True)
