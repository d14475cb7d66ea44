"""17 and more tokens times a four-bit affine weight, by `cp.async` and `mma.sync` alone: for GPUs without wgmma.

y[m, n] = Σ_k x[m, k] (code[n, k] scale[n, k/64] + bias[n, k/64]); the instructions of a warp are in `hopper/mma_int4.py`. A
program multiplies 128 rows by up to 64 tokens. Its warps share stages of 128 inputs: codes, scales, biases, x and the sums of
x over each group, a few stages in flight. Where there are few programs, several share K, and another kernel adds their sums.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.blocks.dependent_launch import gdc_wait
from auraflux.ops.gpu.device import multiprocessors, shared_nbytes
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.hopper.copy import COMMIT, COPY4, COPY16, WAIT_ALL, copy, wait_ptx
from auraflux.ops.hopper.mma import mma_bf16
from auraflux.ops.hopper.mma_int4 import X_SHARED, code_pairs, load_x
from auraflux.ops.hopper.ptx import WAIT_AND_LAUNCH, run, shared
from auraflux.ops.hopper.shared_memory import float_pair_at, half_at, put_float_pair
from auraflux.ops.linear.cuda.gemm.invariant import add_in_order
from auraflux.quant import QTensor

MOST_TOKENS = 64  # beyond, dequantizing the weight for cuBLAS is as fast where memory is
FEWEST_WEIGHTS = 1 << 24  # dequantizing a smaller weight is as fast
TOKENS = (32, 64)  # of a program
ROWS = gl.constexpr(128)  # of a program: 32 of each of four warps
INPUTS = gl.constexpr(128)  # of a stage: two groups
CODES = gl.constexpr(ROWS.value * INPUTS.value // 2)  # bytes of a stage
LINES = gl.constexpr(ROWS.value * INPUTS.value // 64 * 2)  # bytes of scales of a stage, and of biases
MOST_STAGES = 4
TILES = gl.constexpr(4)  # of eight tokens of a warp
SUM_BLOCK = 1024  # elements that a program of `add_in_order` adds
SUM_TOKENS = 32  # of a program that sums x


class Inputs(NamedTuple):
    """Inputs of the kernel: x, its sums over groups, float32 [K / 64, M], codes in bytes, scales and biases in pairs."""

    x: Tensor
    sums: Tensor
    packed: Tensor
    scales: Tensor
    biases: Tensor


@gluon.constexpr_function
def stage_nbytes(tokens):
    """Return the bytes of a stage: codes, scales, biases, x, and sums of x."""
    return CODES.value + 2 * LINES.value + tokens * INPUTS.value * 2 + tokens * INPUTS.value // 64 * 4


@triton.jit
def sum_groups(x, sums, M, K, BLOCK: tl.constexpr):
    """Write the sums of x over groups of 64 inputs, [K / 64, M]; grid (blocks of tokens, groups)."""
    gdc_wait()
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * 64 + tl.arange(0, 64)
    values = tl.load(x + m[:, None].to(tl.int64) * K + k[None, :], mask=m[:, None] < M, other=0.0)
    tl.store(sums + tl.program_id(1) * M + m, tl.sum(values.to(tl.float32), 1), mask=m < M)


@gluon.jit
def _request(slot, tid, inputs, stage, end, row0, token0, N, M, K: gl.constexpr, T: gl.constexpr, THREADS: gl.constexpr):
    """Request a stage before `end`. Chunks of 16 bytes are swizzled by row, or by token, against shared-memory conflicts."""
    rows, tokens = gl.where(stage < end, N - row0, 0), gl.where(stage < end, M - token0, 0)
    for n in gl.static_range(ROWS * 4 // THREADS):
        row, chunk = tid // 4 + n * (THREADS // 4), tid % 4
        at = (row0 + row) * (K // 2) + stage * 64 + chunk * 16
        copy(COPY16, slot + row * 64 + (chunk ^ (tid // 8 % 2 * 2)) * 16, inputs.packed + at, row < rows)
    row, there = tid % ROWS, tid % ROWS < rows
    line = (row0 + row) * (K // 128) + stage
    copy(COPY4, slot + (CODES + row * 4), inputs.scales + line, there & (tid < ROWS))
    copy(COPY4, slot + (CODES + LINES + row * 4), inputs.biases + line, there & (tid >= ROWS) & (tid < 2 * ROWS))
    token, group = tid % T, tid // T % 2
    there = (tid < 2 * T) & (token < tokens)
    to = slot + (CODES + 2 * LINES + T * 256) + tid % (2 * T) * 4
    copy(COPY4, to, inputs.sums + (stage * 2 + group) * M + token0 + token, there)
    for n in gl.static_range(T * 16 // THREADS):
        token, chunk = tid // 16 + n * (THREADS // 16), tid % 16
        at = (token0 + token) * K + stage * INPUTS + chunk * 8
        to = slot + (CODES + 2 * LINES) + token * 256 + (chunk ^ (tid // 16 % 8)) * 16
        copy(COPY16, to, inputs.x + at, token < tokens)


@gluon.jit
def _x_at(xs, tile, group, lane):
    """Load a lane's 16 values of x of eight tokens and a group."""
    g, t = lane // 4, lane % 4
    first = xs + (tile * 8 + g) * 256 + ((group * 8 + t * 2) ^ g) * 16
    return load_x(X_SHARED, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", first, first ^ 16)


@gluon.jit
def _add_group(acc, slot, row, tile0, group, lane, T: gl.constexpr):
    """Add a group of a stage to a warp's sums: two blocks of 16 rows from `row` on, TILES tiles of eight tokens."""
    g, t = lane // 4, lane % 4
    xs, sums = slot + (CODES + 2 * LINES), slot + (CODES + 2 * LINES + T * 256) + group * (T * 4)
    new, zero = (), (lane * 0).to(gl.float32)
    for r in gl.static_range(2):
        at = slot + CODES + (row + g + r * 16) * 4 + group * 2
        scales = half_at(at), half_at(at + 32)
        # the products are of 128 + code
        biases = half_at(at + LINES) - 128.0 * scales[0], half_at(at + LINES + 32) - 128.0 * scales[1]
        # rows that differ by a multiple of eight are swizzled alike
        chunk = (group * 2 + t // 2) ^ (g // 2 % 2 * 2)
        pairs = code_pairs(slot + (row + r * 16 + g) * 64 + chunk * 16 + t % 2 * 8, 512)
        for m in gl.static_range(TILES):
            x, X = _x_at(xs, tile0 + m, group, lane), float_pair_at(sums + (tile0 + m) * 32 + t * 8)
            c = (zero, zero, zero, zero)
            for step in gl.static_range(4):
                a = (pairs[step * 4], pairs[step * 4 + 1], pairs[step * 4 + 2], pairs[step * 4 + 3])
                c = mma_bf16(c, a, x[step], x[4 + step])
            for k in gl.static_range(4):
                new += (acc[(r * TILES + m) * 4 + k] + scales[k // 2] * c[k] + biases[k // 2] * X[k % 2],)  # type: ignore[assignment]
    return new


@gluon.jit
def matmul_tiles(inputs, bias, y, part, M, N, K: gl.constexpr, T: gl.constexpr, W: gl.constexpr, D: gl.constexpr):
    """Multiply T tokens by ROWS rows; grid (tiles of rows, tiles of tokens, shares of K). Half of the warps take a group each.

    part  float32 [shares, M, N] for sums of a share of K; None where there is one share
    """
    STAGES: gl.constexpr = K // INPUTS
    SLOT: gl.constexpr = stage_nbytes(T)
    HALF: gl.constexpr = 4 * TILES  # sums of a thread that it writes
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane, group, warp = tid % 32, tid // (16 * W), tid // 32 % (W // 2)
    row0, token0 = gl.program_id(0) * ROWS, gl.program_id(1) * T
    begin, end = STAGES * gl.program_id(2) // gl.num_programs(2), STAGES * (gl.program_id(2) + 1) // gl.num_programs(2)
    memory, base = shared(D * SLOT, tid)
    run(WAIT_AND_LAUNCH, lane)
    for d in gl.static_range(D - 1):
        _request(base + d * SLOT, tid, inputs, begin + d, end, row0, token0, N, M, K, T, 32 * W)
        run(COMMIT, lane)
    acc = ((tid * 0).to(gl.float32),) * (2 * HALF)
    row, tile0 = warp % 4 * 32, warp // 4 * TILES
    slot = base
    for next_stage in range(begin + D - 1, end + D - 1):
        run(wait_ptx(D - 2), lane)
        gl.thread_barrier()
        # the slot of the previous stage
        free = gl.where(slot == base, base + (D - 1) * SLOT, slot - SLOT)
        _request(free, tid, inputs, next_stage, end, row0, token0, N, M, K, T, 32 * W)
        run(COMMIT, lane)
        acc = _add_group(acc, slot, row, tile0, group, lane, T)
        slot = gl.where(slot == base + (D - 1) * SLOT, base, slot + SLOT)
    run(WAIT_ALL, lane)
    gl.thread_barrier()
    # each of two threads adds half of the sums: the first 16 rows where `group` is 0
    box = base + tid % (16 * W) * 8
    for k in gl.static_range(0, HALF, 2):
        first, second = gl.where(group == 0, acc[HALF + k], acc[k]), gl.where(group == 0, acc[HALF + k + 1], acc[k + 1])
        put_float_pair(box + (group * HALF + k) * (64 * W), first, second)
    gl.thread_barrier()
    for k in gl.static_range(0, HALF, 2):
        others = float_pair_at(box + ((1 - group) * HALF + k) * (64 * W))
        m, n = token0 + (tile0 + k // 4) * 8 + lane % 4 * 2, row0 + row + group * 16 + k % 4 // 2 * 8 + lane // 4
        for j in gl.static_range(2):
            value = gl.where(group == 0, acc[k + j], acc[HALF + k + j]) + others[j]
            there = (n < N) & (m + j < M)
            if part is None:
                if bias is not None:
                    value += gl.load(bias + n, n < N, 0.0).to(gl.float32)
                gl.store(y + (m + j).to(gl.int64) * N + n, value.to(gl.bfloat16), there)
            else:
                gl.store(part + ((gl.program_id(2).to(gl.int64) * M + m + j) * N + n), value, there)
    memory._keep_alive()


class Plan(NamedTuple):
    """Tokens of a program, stages in its shared memory, and programs that share K."""

    tokens: int
    stages: int
    shares: int

    @property
    def warps(self) -> int:
        return self.tokens // 4


def plan_for(tokens: int, weight: QTensor, device: torch.device) -> Plan | None:
    """Plan a launch; None where the shape is not supported or shared memory is too small."""
    rows, width = weight.shape
    # offsets have 32 bits
    if rows % 8 or width % INPUTS.value or rows * width >= 1 << 32:
        return None
    wide = next((each for each in TOKENS if tokens <= each), TOKENS[-1])
    stages = min(MOST_STAGES, (shared_nbytes(device) - 2048) // stage_nbytes.fn(wide))
    if stages < 2:
        return None
    programs, most = cdiv(rows, ROWS.value) * cdiv(tokens, wide), multiprocessors(device)
    # each share has several stages
    shares = max(1, min(most // programs, width // INPUTS.value // (2 * stages)))
    return Plan(wide, stages, shares)


def multiply(x: Tensor, weight: QTensor, bias: Tensor | None, out: Tensor) -> None:
    """Multiply tokens by a weight, into bf16 [T, N]."""
    tokens, (rows, width) = x.shape[0], weight.shape
    plan = plan_for(tokens, weight, x.device)
    assert plan is not None
    assert weight.biases is not None
    part = torch.empty(plan.shares, tokens, rows, device=x.device) if plan.shares > 1 else None
    sums = torch.empty(width // 64, tokens, device=x.device)
    codes = weight.packed.view(torch.int8), weight.scales.view(torch.int32), weight.biases.view(torch.int32)
    launch(sum_groups, (cdiv(tokens, SUM_TOKENS), width // 64))(x, sums, tokens, width, SUM_TOKENS, launch_pdl=True)
    grid = cdiv(rows, ROWS.value), cdiv(tokens, plan.tokens), plan.shares
    sizes = tokens, rows, width, plan.tokens, plan.warps, plan.stages
    launch(matmul_tiles, grid)(Inputs(x, sums, *codes), bias, out, part, *sizes, num_warps=plan.warps, launch_pdl=True)
    if part is not None:
        count = tokens * rows
        launch(add_in_order, (cdiv(count, SUM_BLOCK),))(part, bias, out, rows, count, plan.shares, SUM_BLOCK)
