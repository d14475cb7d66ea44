"""Several tokens times a four-bit affine weight, by `cp.async` and `mma.sync` alone: for GPUs without wgmma.

y[m, n] = Σ_k x[m, k] (code[n, k] scale[n, k/64] + bias[n, k/64]), weights rounded to bf16 as where they are dequantized; the
instructions of a warp are in `hopper/mma_int4.py`. A program multiplies 32 to 128 rows of one of several weights by up to 64
tokens. Its warps share
stages of codes, scales, biases and x, a few in flight; a warp multiplies 32 rows by all tokens over one group of 64 inputs of
each stage. Where there are few programs, several share K, and another kernel adds their sums.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.device import multiprocessors, shared_nbytes
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.hopper.copy import COMMIT, COPY16, WAIT_ALL, copy, copy_ptx, wait_ptx
from auraflux.ops.hopper.mma import mma_bf16
from auraflux.ops.hopper.mma_int4 import WEIGHTS_SCALE, X_SHARED, load_x, scaled_line, weight_pairs
from auraflux.ops.hopper.ptx import WAIT_AND_LAUNCH, run, shared
from auraflux.ops.hopper.shared_memory import float_at, put
from auraflux.ops.linear.cuda.gemm.invariant import add_in_order
from auraflux.ops.linear.cuda.row_copies import select_weight
from auraflux.quant import QTensor

MOST_TOKENS = 128  # beyond, dequantizing the weight for cuBLAS is as fast where memory is
MOST_WEIGHTS = 4  # per launch

WARPS = 8
LEAST_INPUTS = 128  # of a stage
MOST_STAGES = 5
SUM_BLOCK = 1024  # elements that a program of `add_in_order` adds


class Weight(NamedTuple):
    """A weight of a launch: codes in bytes, scales and biases, its rows, and those of the weights before it."""

    packed: Tensor
    scales: Tensor
    biases: Tensor
    rows: int
    before: int


class Tile(NamedTuple):
    """Tokens and rows of a program, and its warps: 32 rows and one group of each stage for each of them."""

    tokens: int
    rows: int
    warps: int = WARPS

    @property
    def inputs(self) -> int:
        """Return the inputs of a stage."""
        return self.warps * 32 // self.rows * 64

    @property
    def nbytes(self) -> int:
        """Return the bytes of a stage: codes, scales, biases and x."""
        return self.inputs * (self.rows // 2 + self.tokens * 2) + self.inputs // 64 * self.rows * 4


TILES = (Tile(16, 32), Tile(16, 64), Tile(32, 64), Tile(64, 64), Tile(64, 128))  # the best first


@gluon.jit
def turned(row, CHUNKS: gl.constexpr):
    """Return what the chunks of a row's codes are swizzled by: four rows that are read together do not conflict."""
    return row // max(1, 8 // CHUNKS) % min(CHUNKS // 2, 4) * 2


@gluon.jit
def _request(slot, tid, x, codes, stage, end, row0, token0, N, M, K: gl.constexpr, TILE: gl.constexpr):
    """Request a stage before `end`. Chunks of 16 bytes are swizzled by row, or by token, against shared-memory conflicts."""
    INPUTS: gl.constexpr = TILE.inputs
    THREADS: gl.constexpr = 32 * TILE.warps
    CHUNKS: gl.constexpr = INPUTS // 32  # of the codes of a row
    LINE: gl.constexpr = INPUTS // 32  # bytes of the scales of a row
    CODES: gl.constexpr = TILE.rows * INPUTS // 2
    LINES: gl.constexpr = TILE.rows * LINE
    packed, scales, biases = codes
    rows, tokens = gl.where(stage < end, N - row0, 0), gl.where(stage < end, M - token0, 0)
    for n in gl.static_range(TILE.rows * CHUNKS // THREADS):
        row, chunk = tid // CHUNKS + n * (THREADS // CHUNKS), tid % CHUNKS
        at = (row0 + row) * (K // 2) + stage * (INPUTS // 2) + chunk * 16
        to = slot + row * (CHUNKS * 16) + (chunk ^ turned(row, CHUNKS)) * 16
        copy(COPY16, to, packed + at, row < rows)
    row = tid % TILE.rows
    line = (row0 + row).to(gl.int64) * (K // 64) + stage * (INPUTS // 64)
    source = gl.where(tid < TILE.rows, scales.to(gl.int64), biases.to(gl.int64)) + line * 2
    copy(copy_ptx(LINE), slot + (CODES + tid * LINE), source, (row < rows) & (tid < 2 * TILE.rows))
    for n in gl.static_range((TILE.tokens * INPUTS // 8 + THREADS - 1) // THREADS):
        place = tid + n * THREADS
        token, chunk = place // (INPUTS // 8), place % (INPUTS // 8)
        at = (token0 + token) * K + stage * INPUTS + chunk * 8
        to = slot + (CODES + 2 * LINES) + token * (INPUTS * 2) + (chunk ^ (token % 8)) * 16
        copy(COPY16, to, x + at, token < gl.minimum(tokens, TILE.tokens))


@gluon.jit
def _add_group(acc, slot, row, group, lane, TILE: gl.constexpr):
    """Add a group of a stage to a warp's sums: two blocks of 16 rows from `row` on, all tiles of eight tokens."""
    INPUTS: gl.constexpr = TILE.inputs
    CHUNKS: gl.constexpr = INPUTS // 32
    CODES: gl.constexpr = TILE.rows * INPUTS // 2
    LINES: gl.constexpr = TILE.rows * (INPUTS // 32)
    EIGHTS: gl.constexpr = TILE.tokens // 8
    g, t = lane // 4, lane % 4
    weights = ()
    for r in gl.static_range(2):
        line = slot + CODES + (row + g + r * 16) * (INPUTS // 32) + group * 2
        first, second = scaled_line(line, LINES), scaled_line(line + 8 * (INPUTS // 32), LINES)
        # rows that differ by a multiple of eight are swizzled alike
        chunk = (group * 2 + t // 2) ^ turned(g, CHUNKS)
        at = slot + (row + r * 16 + g) * (CHUNKS * 16) + chunk * 16 + t % 2 * 8
        weights += (weight_pairs(at, CHUNKS * 128, first, second),)  # type: ignore[assignment]
    new, xs = (), slot + (CODES + 2 * LINES)
    for m in gl.static_range(EIGHTS):
        at = xs + (m * 8 + g) * (INPUTS * 2) + ((group * 8 + t * 2) ^ g) * 16
        x = load_x(X_SHARED, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", at, at ^ 16)
        for r in gl.static_range(2 * m, 2 * m + 2):
            c = acc[r * 4], acc[r * 4 + 1], acc[r * 4 + 2], acc[r * 4 + 3]
            a = weights[r % 2]  # type: ignore[var-annotated]
            for step in gl.static_range(4):
                c = mma_bf16(c, (a[step * 4], a[step * 4 + 1], a[step * 4 + 2], a[step * 4 + 3]), x[step], x[4 + step])
            new += c  # type: ignore[assignment]
    return new


@gluon.jit
def matmul_tiles(x, weights, ends, bias, y, part, M, N, K: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr):
    """Multiply a tile's tokens by its rows, D stages at once; grid (tiles of rows, tiles of tokens, shares of K).

    ends  where the tiles of each weight but the last end
    y     bf16 [M * N], the result [M, rows] of each weight after those before it; N are the rows of all weights
    part  float32 [shares, M * N] for sums of a share of K; None where there is one share
    """
    W: gl.constexpr = TILE.warps
    SIDES: gl.constexpr = TILE.rows // 32  # warps that share a group
    GROUPS: gl.constexpr = W // SIDES
    STAGES: gl.constexpr = K // TILE.inputs
    SLOT: gl.constexpr = TILE.nbytes
    SUMS: gl.constexpr = TILE.tokens  # of a thread: those of 32 rows by TILE.tokens over 32 lanes
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    lane, warp = tid % 32, tid // 32
    side, group = warp % SIDES, warp // SIDES
    own, tile = select_weight(
        gl.program_id(0), ends, [(each.packed, each.scales, each.biases, each.rows, each.before) for each in weights]
    )
    codes, rows, before = (own[0], own[1], own[2]), own[3], own[4]
    row0, token0 = tile * TILE.rows, gl.program_id(1) * TILE.tokens
    begin, end = STAGES * gl.program_id(2) // gl.num_programs(2), STAGES * (gl.program_id(2) + 1) // gl.num_programs(2)
    NBYTES: gl.constexpr = max(D * SLOT, W * SUMS * 128)
    memory, base = shared(NBYTES, tid)
    run(WAIT_AND_LAUNCH, lane)
    for d in gl.static_range(D - 1):
        _request(base + d * SLOT, tid, x, codes, begin + d, end, row0, token0, rows, M, K, TILE)
        run(COMMIT, lane)
    acc = ((tid * 0).to(gl.float32),) * SUMS
    slot = base
    for next_stage in range(begin + D - 1, end + D - 1):
        run(wait_ptx(D - 2), lane)
        gl.thread_barrier()
        # the slot of the previous stage
        free = gl.where(slot == base, base + (D - 1) * SLOT, slot - SLOT)
        _request(free, tid, x, codes, next_stage, end, row0, token0, rows, M, K, TILE)
        run(COMMIT, lane)
        acc = _add_group(acc, slot, side * 32, group, lane, TILE)
        slot = gl.where(slot == base + (D - 1) * SLOT, base, slot + SLOT)
    run(WAIT_ALL, lane)
    gl.thread_barrier()
    # warps leave their sums; then each lane has a row, and the warps of the same rows share its tokens
    for k in gl.static_range(SUMS):
        put(base + (warp * SUMS + k) * 128 + lane * 4, acc[k])
    gl.thread_barrier()
    n = row0 + side * 32 + lane
    mine = base + side * (SUMS * 128) + (lane // 16 * 4 + lane // 8 % 2 * 2) * 128 + lane % 8 * 16
    more = (tid * 0).to(gl.float32)
    if part is None and bias is not None:
        more = gl.load(bias + n, n < rows, 0.0).to(gl.float32)
    for i in gl.static_range(TILE.tokens // GROUPS):
        token = group * (TILE.tokens // GROUPS) + i
        at = mine + token // 8 * 1024 + token % 2 * 128 + token % 8 // 2 * 4
        value = float_at(at, n < rows)
        for other in gl.static_range(1, GROUPS):
            value += float_at(at + other * (SIDES * SUMS * 128), n < rows)
        value *= WEIGHTS_SCALE
        m = (token0 + token).to(gl.int64)
        to, there = (m * 0 + before) * M + m * rows + n, (n < rows) & (m < M)
        if part is None:
            gl.store(y + to, (value + more).to(gl.bfloat16), there)
        else:
            gl.store(part + (gl.program_id(2).to(gl.int64) * M * N + to), value, there)
    memory._keep_alive()


class Plan(NamedTuple):
    """Tile of a program, stages in its shared memory, and programs that share K."""

    tile: Tile
    stages: int
    shares: int


def plan_for(tokens: int, weights: Sequence[QTensor], device: torch.device) -> Plan | None:
    """Plan a launch; None where the shapes are not supported or shared memory is too small."""
    rows, width, most = [weight.shape[0] for weight in weights], weights[0].shape[1], multiprocessors(device)
    fitting = [each for each in TILES if min(tokens, TILES[-1].tokens) <= each.tokens and width % each.inputs == 0]
    # offsets have 32 bits
    if not fitting or any(count % 8 or count * width >= 1 << 32 for count in rows):
        return None
    tile = fitting[0]
    stages = min(MOST_STAGES, (shared_nbytes(device) - 2048) // tile.nbytes)
    if stages < 2:
        return None
    programs = sum(cdiv(count, tile.rows) for count in rows) * cdiv(tokens, tile.tokens)
    # each share has several stages
    shares = max(1, min(most // programs, width // tile.inputs // (2 * stages)))
    return Plan(tile, stages, shares)


def multiply(x: Tensor, weights: Sequence[QTensor], bias: Tensor | None) -> list[Tensor]:
    """Multiply tokens by weights of one width, into bf16 [T, N] each, one after the other in memory.

    bias  of the only weight, or None
    """
    tokens, width = x.shape
    plan = plan_for(tokens, weights, x.device)
    assert plan is not None
    tile, stages, shares = plan
    rows = [weight.shape[0] for weight in weights]
    before, total = [0, *accumulate(rows)][:-1], sum(rows)
    out = x.new_empty(tokens * total)
    part = torch.empty(shares, tokens * total, device=x.device) if shares > 1 else None
    ends = tuple(accumulate(cdiv(count, tile.rows) for count in rows))
    held = tuple(
        Weight(weight.packed.view(torch.int8), weight.scales, _biases(weight), *place)
        for weight, *place in zip(weights, rows, before, strict=True)
    )
    launch(matmul_tiles, (ends[-1], cdiv(tokens, tile.tokens), shares))(
        x, held, ends[:-1], bias, out, part, tokens, total, width, tile, stages, num_warps=tile.warps, launch_pdl=True
    )
    if part is not None:
        count = tokens * total
        launch(add_in_order, (cdiv(count, SUM_BLOCK),))(part, bias, out, total, count, shares, SUM_BLOCK)
    return [each.view(tokens, -1) for each in out.split([tokens * count for count in rows])]


def _biases(weight: QTensor) -> Tensor:
    assert weight.biases is not None
    return weight.biases
