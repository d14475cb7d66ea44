"""One token times four-bit weights on Hopper, optionally with residual add and norm first; see `hopper/mma_int4.py`.

- An `mma` has eight columns and one token needs one, so column c gets the x of group c: eight groups share their x registers.
- Warps split K and never synchronise: each fills its own ring in shared memory by `cp.async`.
- Weights are requested before `griddepcontrol.wait`, x after it: the gap between launches is hidden behind the previous kernel.
- A norm before the product costs no launch: it is linear except for one factor, which is applied to the results.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.blocks.codes import Codes
from auraflux.ops.gpu.device import launches_early, multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.hopper.copy import COMMIT, COPY8, WAIT_ALL, copy, wait_ptx
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
from auraflux.ops.hopper.ptx import SYNC, WAIT_AND_LAUNCH, bf16_at, run, shared
from auraflux.ops.hopper.reduce import sum_over
from auraflux.ops.hopper.shared_memory import put, word_at
from auraflux.ops.linear.adapters import Adapters
from auraflux.ops.linear.cuda.adapted import (
    adapted_of,
    count_up,
    expand_nbytes,
    expanded,
    request_columns,
    request_rows,
    shrink,
    slots_of,
    sum_parts,
)
from auraflux.ops.linear.cuda.call import NO_NORM, FusedNorm, NoNorm
from auraflux.ops.linear.cuda.row_copies import products_of, select_weight
from auraflux.quant import QTensor

MOST_WEIGHTS = 4  # per launch
WIDEST = 16384  # inputs that fit the threads' registers
WARPS, MANY_WARPS = 4, 16
WHOLE = 4096  # inputs whose codes fit four half runs of each warp
FEW_RUNS = 4  # runs of a warp below which a program takes several tiles of rows
LEAST_PROGRAMS = 384  # programs that must remain then


@gluon.constexpr_function
def warp_runs(K, W):
    """Return the number of runs of eight groups of a warp, at most."""
    return ((K // 256 + 1) // 2 + W - 1) // W


@gluon.constexpr_function
def nbytes_of(K, tiles, W, deep):
    """Return the shared memory of a warp: half runs in flight, and the scales and biases of its rows."""
    return deep * 2048 + 512 * warp_runs(K, W) * tiles


@gluon.jit
def copy_step(
    base, lane, warp, first, second, STEP: gl.constexpr, MINE: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr,
    W: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Request the codes of one of a warp's steps: half a run of one tile of rows."""
    TILE: gl.constexpr = STEP // (2 * MINE)
    RUN: gl.constexpr = STEP % (2 * MINE) // 2
    HALF: gl.constexpr = STEP % 2
    ahead = TILE * ROWS * (K // 2) + RUN * W * 256 + HALF * 128
    there = 2 * (warp + RUN * W) + HALF < K // 256
    copy_halves(base + STEP % D * 2048, lane, first + ahead, second + ahead, there, K, 16)


@gluon.jit
def copy_scales(
    scales, lane, warp, s, b, s1, b1, row0, MINE: gl.constexpr, GATED: gl.constexpr, K: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Request the scales and biases of a warp's runs of 16 rows, or of eight rows of each of two weights."""
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

    Returns the result pointer, the first row, and where a warp's codes begin: of the upper rows of a tile and of the lower.
    """
    MINE: gl.constexpr = warp_runs(K, W)
    ROWS: gl.constexpr = 8 if GATED else 16
    own, number = select_weight(gl.program_id(0), ends, [(each.codes, each.out) for each in products])
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
                copy_scales(at, lane, warp, s, b, also.scales, also.biases, row0 + n * ROWS, MINE, GATED, K, W)
        run(COMMIT, lane)
    return y, row0, first, second


@gluon.jit
def load_inputs(x, normed, warp, g, t, stores, MINE: gl.constexpr, K: gl.constexpr, W: gl.constexpr):
    """Load a lane's inputs of every run, and the sum of their squares if there is a norm."""
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
    """Multiply the codes of one of a program's runs and refill their slots.

    Returns the sums of x in this lane's two groups, and those groups' sums for rows g (2) and g + 8 (2).
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
            owned = t == 2 * h + j // 2
            if j % 2 == 0:
                r0, r2 = gl.where(owned, c[0], r0), gl.where(owned, c[2], r2)
            else:
                r1, r3 = gl.where(owned, c[1], r1), gl.where(owned, c[3], r3)
    return X, r0, r1, r2, r3


@gluon.jit
def sum_warps(at, W: gl.constexpr):
    """Sum what four lanes of each warp have for a row, warp by warp."""
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
    """Scale the sums of two groups, of codes and of inputs; scales and biases are two to a word."""
    found = gl.fma(bf16_at(scales, 1), second, bf16_at(scales, 0) * first)
    return gl.fma(bf16_at(biases, 1), x1, gl.fma(bf16_at(biases, 0), x0, found))


@gluon.jit
def norm_factor(at, tid, eps, K: gl.constexpr, W: gl.constexpr):
    """Return the factor of a norm from the sums of squares of W warps."""
    length = (tid * 0).to(gl.float32)
    for v in gl.static_range(W):
        length += word_at(at + v * 4 + tid * 0).to(gl.float32, bitcast=True)
    return 1.0 / gl.sqrt(length / K + eps)


@gluon.jit
def gated_sum(gate, up):
    """Return silu(gate) * up, rounded as two products stored in bf16 would be."""
    gate, up = gate.to(gl.bfloat16).to(gl.float32), up.to(gl.bfloat16).to(gl.float32)
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def matvec(
    x, normed, products, ends, adapted, GATED: gl.constexpr, K: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr,
    D: gl.constexpr, LORA: gl.constexpr,
):  # fmt: skip
    """Multiply one token by TILES x 16 rows per program; warp v takes runs v, v + W, ...

    Of eight groups, D half runs in flight.

    Programs of the weights follow each other, see `select_weight`. GATED takes eight rows of each of two weights to a tile, and
    stores silu(first) * second.

    With a norm, x is the residual stream and delta is added to it: every program adds and normalises for itself, one
    of them stores the sum, and the factor that the squares give is applied to the results.

    LORA  sizes of adapters, see `adapted.py`
    """
    QUADS: gl.constexpr = K // 256
    MINE: gl.constexpr = warp_runs(K, W)
    PITCH: gl.constexpr = 16 * MINE
    PER: gl.constexpr = nbytes_of(K, TILES, W, D)
    ROWS: gl.constexpr = 8 if GATED else 16
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    COLUMNS: gl.constexpr = ROWS * TILES
    memory, ring = shared(PER * W + expand_nbytes(COLUMNS, LORA.rank, 1, 2 if GATED else 1), tid)
    base = ring + warp * PER
    scales = base + D * 2048
    if LORA.rank:
        slots = slots_of(adapted, 1, lane, 1)
    y, row0, first, second = request(base, lane, warp, products, ends, GATED, K, TILES, W, D)
    if LORA.rank:
        request_rows(adapted, slots, 1, warp, lane, LORA)
        owned = request_columns(ring + PER * W, adapted, slots, ends, row0, 1, tid, GATED, COLUMNS, LORA)
    run(WAIT_AND_LAUNCH, lane)
    xs, squares = load_inputs(x, normed, warp, g, t, gl.program_id(0) == 0, MINE, K, W)
    if LORA.rank:
        inner = shrink(x, normed.delta, normed.weight, adapted, slots, 1, warp, lane, LORA)
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
            # both groups of a lane lie in one quad of 256 inputs
            live = 2 * (warp + i * W) + t // 2 < QUADS
            total0 += gl.where(live, pair_sum(s0, b0, r0, r1, X[0], X[1]), 0.0)
            total1 += gl.where(live, pair_sum(s1_, b1_, r2, r3, X[0], X[1]), 0.0)
        found += (total0, total1)  # type: ignore[assignment]
    if LORA.rank:
        run(WAIT_ALL, lane)
    gl.thread_barrier()
    for n in gl.static_range(TILES):
        put(ring + (n * W + warp) * 256 + lane * 4, found[2 * n])
        put(ring + (n * W + warp) * 256 + lane * 4 + 128, found[2 * n + 1])
    if normed.weight is not None:
        put(ring + TILES * W * 256 + warp * 4, sum_over(squares, 32))
    if LORA.rank:
        sum_parts(ring + PER * W, adapted, inner, owned, 1, warp, lane, COLUMNS, LORA)
    gl.thread_barrier()
    if LORA.rank:
        count_up(adapted, lane, tid == 32 * W - 1)
    tile_at = ring + tid // ROWS % TILES * (W * 256) + tid % ROWS * 16
    out = sum_warps(tile_at, W)
    if LORA.rank:
        out += expanded(ring + PER * W, 0, tid % COLUMNS, 0, 2 if GATED else 1, COLUMNS, LORA)
    factor = out
    if normed.weight is not None:
        factor = norm_factor(ring + TILES * W * 256, tid, normed.eps, K, W)
        out *= factor
    if GATED:
        up = sum_warps(tile_at + 128, W)
        if LORA.rank:
            up += expanded(ring + PER * W, 0, tid % COLUMNS, 1, 2 if GATED else 1, COLUMNS, LORA)
        if normed.weight is not None:
            up *= factor
        out = gated_sum(out, up)
    gl.store(y + row0 + tid, out.to(gl.bfloat16), tid < ROWS * TILES)
    memory._keep_alive()


def multiply(
    x: Tensor,
    weights: Sequence[QTensor],
    outs: Sequence[Tensor],
    gated: bool = False,
    normed: FusedNorm | NoNorm = NO_NORM,
    adapters: Adapters | None = None,
) -> None:
    """Multiply one token by up to MOST_WEIGHTS weights of one width in one launch; gated: silu(first) * second, into one out.

    normed    residual add and norm applied to x first
    adapters  of the weights; their products are added before the gate
    """
    width, processors = weights[0].shape[1], multiprocessors(x.device)
    rows = [weight.shape[0] for weight in weights]
    warps, deep, cap = launch_shape(rows, width, gated, processors, launches_early(x.device))
    tiles = tiles_for(rows, width, gated)
    ends = tuple(accumulate(count // (16 * tiles) for count in rows))
    splits, grid = ((), rows[0] // (8 * tiles)) if gated else (ends[:-1], ends[-1])
    adapted, share = adapted_of(adapters, rows, width, 1, warps, grid, (min(grid, processors), 1))
    products, sizes = products_of(weights, outs, codes=operands), (gated, width, tiles, warps, deep, share)
    launch(matvec, (grid,))(x, normed, products, splits, adapted, *sizes, num_warps=warps, maxnreg=cap, launch_pdl=True)


def launch_shape(rows: Sequence[int], width: int, gated: bool, processors: int, early: bool) -> tuple[int, int, int | None]:
    """Choose warps per program, half runs of each in flight, and a cap on registers.

    early  the GPU launches kernels early, and has shared memory for deep rings
    """
    if not gated and sum(rows) <= 16 * processors and 3 * MANY_WARPS // 4 < -(-width // 512) <= MANY_WARPS:
        # one program per multiprocessor, and about one run per warp
        return MANY_WARPS, 2, 64
    if width > 8192:
        return WARPS, 4 if early else 2, None
    if early and not gated and len(rows) == 1 and width == WHOLE and 16 * processors < rows[0] < 16 * 2 * LEAST_PROGRAMS:
        # several programs of one tile on a multiprocessor, all codes of each on their way before x is there
        return WARPS, 4, 128
    # 128 registers fit four programs on a multiprocessor; where the last run is partial, the assembler would spill
    return WARPS, 3, None if width % (512 * WARPS) else 128


def tiles_for(rows: Sequence[int], width: int, gated: bool) -> int:
    """Choose the tiles of 16 rows per program: more than one where enough programs remain for every multiprocessor."""
    most = max(2 if gated and width % (512 * WARPS) else 1, FEW_RUNS // -(-width // (512 * WARPS)))
    for tiles in (4, 2):
        programs = sum(rows) // (16 * tiles)
        if tiles <= most and programs >= LEAST_PROGRAMS and not any(count % ((8 if gated else 16) * tiles) for count in rows):
            return tiles
    return 1


def operands(weight: QTensor) -> Codes:
    assert weight.biases is not None
    return Codes(weight.packed.view(torch.int8), weight.scales.view(torch.int64), weight.biases.view(torch.int64))
