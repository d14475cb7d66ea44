"""One token times wide four-bit weights on Hopper: persistent programs, with a ring filled by TMA.

A stage is 8 rows: one bulk copy each of codes, scales and biases; a program takes every num_programs-th stage. Warps split the
inputs: each multiplies a slice of the first half of the rows and the same slice of the second. The last warp that has read a
stage requests its refill.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.device import multiprocessors, shared_nbytes
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.hopper.copy import await_stage, count_read, expect, init_barriers, tma_copy
from auraflux.ops.hopper.mma_int4_groups import codes_two, load_16, pair_16, row_products, scales_two, sums_16
from auraflux.ops.hopper.ptx import WAIT_AND_LAUNCH, run, shared
from auraflux.ops.hopper.reduce import sum_four
from auraflux.ops.hopper.shared_memory import float_at, put_float
from auraflux.quant import QTensor

WARPS = 16
DEEP = 2  # stages in flight
LEAST_WIDTH = 16384  # below, `int4.py` fits enough programs and is faster
UNIT = 512  # inputs per warp and iteration: 256 of each half
LEAST_STAGES = 7  # per program; with fewer, prologue and epilogue dominate
BARRIERS = gl.constexpr(256)  # bytes


@gluon.jit
def _request(ring, bars, w, s, b, n, spot, lane, there, K: gl.constexpr):
    """Request a program's n-th stage."""
    STAGE: gl.constexpr = K // 2 * 9
    codes, bar = lane == 0, bars + spot * 8
    source = gl.where(codes, w.to(gl.int64), gl.where(lane == 1, s.to(gl.int64), b.to(gl.int64)))
    row0 = ((gl.program_id(0) + n * gl.num_programs(0)) * 8).to(gl.int64)
    to = ring + spot * STAGE + gl.where(codes, 0, 4 * K + (lane - 1) * (K // 4))
    expect(bar, lane * 0 + STAGE, there & codes)
    tma_copy(to, source + row0 * gl.where(codes, K // 2, K // 32), gl.where(codes, 4 * K, K // 4), bar, there & (lane < 3))


@gluon.jit
def matvec_ring(
    x, w, s, b, y, rows, K: gl.constexpr, COUNT: gl.constexpr, D: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Multiply one token by up to COUNT stages per program, D of them in flight."""
    STAGE: gl.constexpr = K // 2 * 9
    UNITS: gl.constexpr = K // 512
    SETS: gl.constexpr = (UNITS + W - 1) // W
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    first, programs = gl.program_id(0), gl.num_programs(0)
    count = (rows // 8 - first + programs - 1) // programs
    memory, ring = shared(D * STAGE + BARRIERS + COUNT * W * 32, tid)
    bars, counts, sums = ring + D * STAGE, ring + (D * STAGE + 8 * D), ring + (D * STAGE + BARRIERS)
    zero = (tid * 0).to(gl.float32)
    init_barriers(bars, tid, D)
    put_float(counts + tid * 4, zero, tid < D)
    gl.thread_barrier()
    for d in gl.static_range(D):
        _request(ring, bars, w, s, b, d, lane * 0 + d, lane, (tid < 32) & (d < count), K)
    run(WAIT_AND_LAUNCH, lane)
    # even columns of the tensor cores get the first half of the inputs
    pairs, totals = (), ()
    for k in gl.static_range(SETS):
        unit = gl.minimum(warp + k * W, UNITS - 1)
        pairs += (pair_16(load_16(x + (lane // 4 % 2 * UNITS + unit) * 256 + lane // 8 * 64 + lane % 4 * 16)),)  # type: ignore[assignment]
        totals += (sums_16(pairs[k]),)  # type: ignore[assignment]
    for i in range(count):
        stage = ring + i % D * STAGE
        await_stage(bars + i % D * 8, lane * 0 + i // D, lane >= 0)
        words, lines = (), ()
        for k in gl.static_range(SETS):
            unit = gl.minimum(warp + k * W, UNITS - 1)
            words += (codes_two(stage + unit * 128, lane, K // 2, UNITS * 128),)  # type: ignore[assignment]
            lines += (scales_two(stage + 4 * K + unit * 8, lane, K // 32, UNITS * 8, 8),)  # type: ignore[assignment]
        last = count_read(counts + i % D * 4, lane, lane >= 0) == (i // D + 1) * W - 1
        if i + D < count:
            _request(ring, bars, w, s, b, i + D, lane * 0 + i % D, lane, last, K)
        total = zero
        for k in gl.static_range(SETS):
            sum0, sum1 = row_products(words[k], lines[k], pairs[k], totals[k], lane, 1)
            total += gl.where(warp + k * W < UNITS, sum0 + sum1, 0.0) if (k + 1) * W > UNITS else sum0 + sum1
        put_float(sums + (i * W + warp) * 32 + lane // 4 * 4, sum_four(total), lane % 4 == 0)
    gl.thread_barrier()
    for r in gl.static_range((COUNT * 8 + 32 * W - 1) // (32 * W)):
        n, row = tid // 8 + r * 4 * W, tid % 8
        total = zero
        for v in gl.static_range(W):
            total += float_at(sums + (n * W + v) * 32 + row * 4, n < count)
        gl.store(y + (first + n * programs) * 8 + row, total.to(gl.bfloat16), n < count)
    memory._keep_alive()


def refuses(x: Tensor, weight: QTensor) -> str | None:
    """Return why `int4.py` is faster or this kernel does not run; None for weights so wide that few of its programs fit."""
    rows, width = weight.shape
    count = cdiv(rows // 8, multiprocessors(x.device))
    if width < LEAST_WIDTH or width % UNIT:
        return f"width {width} is below {LEAST_WIDTH} or no multiple of {UNIT}"
    if rows % 8 or count < LEAST_STAGES:
        return f"{rows} rows are fewer than {LEAST_STAGES} stages of 8 per multiprocessor"
    if DEEP * width // 2 * 9 + count * WARPS * 32 + 2048 > shared_nbytes(x.device):
        return "its stages do not fit into shared memory"
    return None if weight.biases is not None and not weight.biases.data_ptr() % 16 else "the biases are not aligned"


def multiply(x: Tensor, weight: QTensor, out: Tensor, processors: int) -> None:
    """Multiply one token by a weight, into bf16 [1, N]."""
    rows, width = weight.shape
    sizes = rows, width, cdiv(rows // 8, processors), DEEP, WARPS
    arrays = weight.packed, weight.scales, weight.biases
    launch(matvec_ring, (processors,))(x, *arrays, out, *sizes, num_warps=WARPS, launch_pdl=True)
