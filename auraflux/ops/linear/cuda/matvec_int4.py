"""One token times four-bit weights on Hopper, if asked from the residual stream on; see `hopper/mma_int4.py`.

- An `mma` has eight columns and one token needs one, so column c gets the x of group c: eight groups share their x registers.
- Warps split K and never wait for each other: each fills its own ring in shared memory by `cp.async`.
- Weights are requested before `griddepcontrol.wait`, x after it: the gap between launches disappears behind the kernel before.
- A norm before the product costs no launch: it is linear but for one factor, which is applied to the results.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.codes import Codes
from auraflux.ops.hopper.copy import COMMIT, COPY8, copy, wait_ptx
from auraflux.ops.hopper.device import multiprocessors
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.mma_int4 import (
    ADDED_X,
    NORMED_X,
    X_GLOBAL,
    codes_at,
    copy_halves,
    group_sums,
    load_normed_x,
    load_x,
    sum_x,
)
from auraflux.ops.hopper.ptx import AWAIT, SYNC, bf16_at, run, shared
from auraflux.ops.hopper.reduce import sum_over
from auraflux.ops.hopper.shared_memory import put, word_at
from auraflux.ops.linear.cuda.call import PLAIN, Normed, Plain
from auraflux.ops.linear.cuda.row_copies import chosen, products_of
from auraflux.quant import QTensor

MOST_WEIGHTS = 4  # of a launch
WIDEST = 16384  # inputs that the threads hold
WARPS, MANY_WARPS = 4, 16
FEW_RUNS = 4  # of a warp; with fewer, a program takes several tiles of rows
LEAST_PROGRAMS = 384  # that are left then


@gluon.constexpr_function
def runs_of(K, W):
    """How many runs of eight groups a warp has at most."""
    return ((K // 256 + 1) // 2 + W - 1) // W


@gluon.constexpr_function
def nbytes_of(K, tiles, W, deep):
    """Shared memory of a warp: half runs in flight, and the scales and biases of its rows."""
    return deep * 2048 + 512 * runs_of(K, W) * tiles


@gluon.jit
def copy_step(
    base, lane, warp, first, second, STEP: gl.constexpr, MINE: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr,
    W: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Request the codes of a warp's step: half a run of one tile of rows."""
    TILE: gl.constexpr = STEP // (2 * MINE)
    RUN: gl.constexpr = STEP % (2 * MINE) // 2
    HALF: gl.constexpr = STEP % 2
    ahead = TILE * ROWS * (K // 2) + RUN * W * 256 + HALF * 128
    there = 2 * (warp + RUN * W) + HALF < K // 256
    copy_halves(base + STEP % D * 2048, lane, first + ahead, second + ahead, there, K, 16)


@gluon.jit
def _copy_scales(
    scales, lane, warp, s, b, s1, b1, row0, MINE: gl.constexpr, GATED: gl.constexpr, K: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Request the scales and biases of a warp's runs of 16 rows, or of eight and of eight of a second weight."""
    QUADS: gl.constexpr = K // 256
    for k in gl.static_range(MINE):
        e = lane + 32 * k
        quad, row = (warp + e % (2 * MINE) // 2 * W) * 2 + e % 2, e // (2 * MINE)
        at = (row0 + row) * QUADS + quad
        s_at, b_at = (s + at).to(gl.int64), (b + at).to(gl.int64)
        if GATED:
            s_at = gl.where(row < 8, s_at, (s1 + (at - 8 * QUADS)).to(gl.int64))
            b_at = gl.where(row < 8, b_at, (b1 + (at - 8 * QUADS)).to(gl.int64))
        copy(COPY8, scales + e * 8, s_at, quad < QUADS)
        copy(COPY8, scales + 256 * MINE + e * 8, b_at, quad < QUADS)


@gluon.jit
def request(
    base, lane, warp, products, ends, GATED: gl.constexpr, K: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Request a program's scales and its first D half runs.

    Gives where results go, the first row, and where a warp's codes begin: those of the upper rows of a tile and of the lower.
    """
    MINE: gl.constexpr = runs_of(K, W)
    ROWS: gl.constexpr = 8 if GATED else 16
    own, number = chosen(gl.program_id(0), ends, [(each.codes, each.out) for each in products])
    codes, y = own
    w, s, b = codes
    also = products[1 if GATED else 0].codes
    row0 = number.to(gl.int64) * (ROWS * TILES)
    first = w + row0 * (K // 2) + warp * 256
    second = (also.packed if GATED else w + 8 * (K // 2)) + row0 * (K // 2) + warp * 256
    for d in gl.static_range(D):
        if d < 2 * MINE * TILES:
            copy_step(base, lane, warp, first, second, d, MINE, ROWS, K, W, D)
        if d == 0:
            for n in gl.static_range(TILES):
                at = base + (D * 2048 + n * 512 * MINE)
                _copy_scales(at, lane, warp, s, b, also.scales, also.biases, row0 + n * ROWS, MINE, GATED, K, W)
        run(COMMIT, lane)
    return y, row0, first, second


@gluon.jit
def _load_inputs(x, normed, warp, g, t, stores, MINE: gl.constexpr, K: gl.constexpr, W: gl.constexpr):
    """Load a lane's inputs of every run, and the sum of their squares if they are to be normalised."""
    xs = ()
    squares = (g * 0).to(gl.float32)
    for i in gl.static_range(MINE):
        begin = (warp + i * W) * 512 + g * 64
        mine = gl.minimum(begin, K - 64) + t * 16
        x_at = (x + mine).to(gl.int64)
        if normed.weight is None:
            xs += (load_x(X_GLOBAL, "=r,=r,=r,=r,=r,=r,=r,=r,l,l", x_at, x_at + 16),)  # type: ignore[assignment]
        else:
            norm_at, there = (normed.weight + mine).to(gl.int64), begin < K
            if normed.delta is None:
                got = load_normed_x(NORMED_X, x_at, norm_at, x_at, x_at, there & stores)
            else:
                delta_at, total_at = (normed.delta + mine).to(gl.int64), (normed.total + mine).to(gl.int64)
                got = load_normed_x(ADDED_X, x_at, norm_at, delta_at, total_at, there & stores)
            xs += ((got[0], got[1], got[2], got[3], got[4], got[5], got[6], got[7]),)  # type: ignore[assignment]
            squares += gl.where(there, got[8], 0.0)
    return xs, squares


@gluon.jit
def _run_of_codes(
    base, lane, warp, first, second, mine, x, RUN: gl.constexpr, TILES: gl.constexpr, MINE: gl.constexpr, ROWS: gl.constexpr,
    K: gl.constexpr, W: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Multiply the codes of one of a program's runs; their slots are filled again.

    Gives the sums of x in this lane's two groups, and those groups' sums for rows g (2) and g + 8 (2).
    """
    t = lane % 4
    X = sum_x(x)
    r0, r1, r2, r3 = X[0], X[0], X[0], X[0]
    for h in gl.static_range(2):
        slot = base + (2 * RUN + h) % D * 2048
        run(wait_ptx(D - 1), lane)
        ws = ()
        for j in gl.static_range(4):
            ws += (codes_at(slot + (mine ^ (32 * j))),)  # type: ignore[assignment]
        if 2 * RUN + h + D < 2 * MINE * TILES:
            run(SYNC, lane)
            copy_step(base, lane, warp, first, second, 2 * RUN + h + D, MINE, ROWS, K, W, D)
        run(COMMIT, lane)
        for j in gl.static_range(4):
            c = group_sums(ws[j], x, X, 1)
            keep = t == 2 * h + j // 2
            if j % 2 == 0:
                r0, r2 = gl.where(keep, c[0], r0), gl.where(keep, c[2], r2)
            else:
                r1, r3 = gl.where(keep, c[1], r1), gl.where(keep, c[3], r3)
    return X, r0, r1, r2, r3


@gluon.jit
def _added(at, W: gl.constexpr):
    """What four lanes of each warp found for a row: summed warp by warp."""
    zero = (at * 0).to(gl.float32)
    found = zero
    for v in gl.static_range(W):
        some = zero
        for t in gl.static_range(4):
            some += word_at(at + v * 256 + t * 4).to(gl.float32, bitcast=True)
        found += some
    return found


@gluon.jit
def pair_sum(scales, biases, first, second, x0, x1):
    """Weigh the sums of two groups, of codes and of inputs; scales and biases are two in a word."""
    found = gl.fma(bf16_at(scales, 1), second, bf16_at(scales, 0) * first)
    return gl.fma(bf16_at(biases, 1), x1, gl.fma(bf16_at(biases, 0), x0, found))


@gluon.jit
def norm_factor(at, tid, eps, K: gl.constexpr, W: gl.constexpr):
    """Give the factor of a norm, of the sums of squares that W warps have left."""
    length = (tid * 0).to(gl.float32)
    for v in gl.static_range(W):
        length += word_at(at + v * 4 + tid * 0).to(gl.float32, bitcast=True)
    return 1.0 / gl.sqrt(length / K + eps)


@gluon.jit
def gated_sum(gate, up):
    """Give silu(gate) * up, as two products stored in bf16 would have it."""
    gate, up = gate.to(gl.bfloat16).to(gl.float32), up.to(gl.bfloat16).to(gl.float32)
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def matvec(
    x, normed, products, ends, GATED: gl.constexpr, K: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One token, TILES times 16 rows a program. Warp v takes runs v, v + W, ... of eight groups; D half runs are in flight.

    Weights have their programs one after the other, see `chosen`. GATED takes eight rows of each of two weights to a tile, and
    stores silu(first) * second.

    Where it is `normed`, x and delta are the residual stream and what is added to it: every program adds and weighs for itself,
    one of them stores the sum, and the factor that the squares give is applied to the results.
    """
    QUADS: gl.constexpr = K // 256
    MINE: gl.constexpr = runs_of(K, W)
    PITCH: gl.constexpr = 16 * MINE
    PER: gl.constexpr = nbytes_of(K, TILES, W, D)
    ROWS: gl.constexpr = 8 if GATED else 16
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    memory, ring = shared(PER * W, tid)
    base = ring + warp * PER
    scales = base + D * 2048
    y, row0, first, second = request(base, lane, warp, products, ends, GATED, K, TILES, W, D)
    run(AWAIT, lane)
    xs, squares = _load_inputs(x, normed, warp, g, t, gl.program_id(0) == 0, MINE, K, W)
    mine = g * 128 + ((t // 2) ^ (g % 2)) * 16 + (t % 2) * 8 + (g // 2) * 32
    found = ()
    for n in gl.static_range(TILES):
        total0 = (tid * 0).to(gl.float32)
        total1 = total0
        for i in gl.static_range(MINE):
            sums = _run_of_codes(base, lane, warp, first, second, mine, xs[i], n * MINE + i, TILES, MINE, ROWS, K, W, D)
            X, r0, r1, r2, r3 = sums[0], sums[1], sums[2], sums[3], sums[4]
            at = scales + n * 32 * PITCH + g * PITCH + i * 16 + t * 4
            s0, s1_, b0, b1_ = word_at(at), word_at(at + 8 * PITCH), word_at(at + 16 * PITCH), word_at(at + 24 * PITCH)
            # a lane's two groups lie in one quad
            live = 2 * (warp + i * W) + t // 2 < QUADS
            total0 += gl.where(live, pair_sum(s0, b0, r0, r1, X[0], X[1]), 0.0)
            total1 += gl.where(live, pair_sum(s1_, b1_, r2, r3, X[0], X[1]), 0.0)
        found += (total0, total1)  # type: ignore[assignment]
    gl.thread_barrier()
    for n in gl.static_range(TILES):
        put(ring + (n * W + warp) * 256 + lane * 4, found[2 * n])
        put(ring + (n * W + warp) * 256 + lane * 4 + 128, found[2 * n + 1])
    if normed.weight is not None:
        put(ring + TILES * W * 256 + warp * 4, sum_over(squares, 32))
    gl.thread_barrier()
    tile_at = ring + tid // ROWS % TILES * (W * 256) + tid % ROWS * 16
    out = _added(tile_at, W)
    factor = out
    if normed.weight is not None:
        factor = norm_factor(ring + TILES * W * 256, tid, normed.eps, K, W)
        out *= factor
    if GATED:
        up = _added(tile_at + 128, W)
        if normed.weight is not None:
            up *= factor
        out = gated_sum(out, up)
    gl.store(y + row0 + tid, out.to(gl.bfloat16), tid < ROWS * TILES)
    memory._keep_alive()


def multiply(
    x: Tensor, weights: Sequence[QTensor], outs: Sequence[Tensor], gated: bool = False, normed: Normed | Plain = PLAIN
) -> None:
    """One token times up to MOST_WEIGHTS weights of one width in one launch; gated: silu(first) * second, into one out.

    normed  what x goes through first
    """
    width, processors = weights[0].shape[1], multiprocessors(x.device)
    rows = [weight.shape[0] for weight in weights]
    warps, deep, cap = room_for(rows, width, gated, processors)
    tiles = tiles_for(rows, width, gated)
    ends = tuple(accumulate(count // (16 * tiles) for count in rows))
    parted, grid = ((), rows[0] // (8 * tiles)) if gated else (ends[:-1], ends[-1])
    products, sizes = products_of(weights, outs, codes=operands), (gated, width, tiles, warps, deep)
    launch(matvec, (grid,))(x, normed, products, parted, *sizes, num_warps=warps, maxnreg=cap, launch_pdl=True)


def room_for(rows: Sequence[int], width: int, gated: bool, processors: int) -> tuple[int, int, int | None]:
    """Warps of a program, half runs of each in flight, and a cap on registers."""
    if not gated and sum(rows) <= 16 * processors and 3 * MANY_WARPS // 4 < -(-width // 512) <= MANY_WARPS:
        # a program has a multiprocessor for itself, and nearly each warp one run
        return MANY_WARPS, 2, 64
    if width > 8192:
        return WARPS, 2, None
    # 128 registers: four programs on each multiprocessor; where the last run is not whole, the assembler would rather spill
    return WARPS, 3, None if width % (512 * WARPS) else 128


def tiles_for(rows: Sequence[int], width: int, gated: bool) -> int:
    """How many tiles of 16 rows a program takes: more than one where that leaves every multiprocessor its programs."""
    most = max(2 if gated and width % (512 * WARPS) else 1, FEW_RUNS // -(-width // (512 * WARPS)))
    for tiles in (4, 2):
        programs = sum(rows) // (16 * tiles)
        if tiles <= most and programs >= LEAST_PROGRAMS and not any(count % ((8 if gated else 16) * tiles) for count in rows):
            return tiles
    return 1


def operands(weight: QTensor) -> Codes:
    assert weight.biases is not None
    return Codes(weight.packed.view(torch.int8), weight.scales.view(torch.int64), weight.biases.view(torch.int64))
