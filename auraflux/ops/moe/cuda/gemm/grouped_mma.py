"""Grouped expert GEMM for many tokens by `cp.async` and `mma.sync`: four-bit weights, for GPUs without wgmma.

A program multiplies up to 128 pairs of one expert (see `grouped`) by 128 rows of its weights, for gate and up 64 of each. Its
four warps share stages of 64 inputs: codes, tokens, and the scales of four groups in every fourth. A warp makes bf16 weights of
its 64 rows in registers, as operands of `mma.sync`, and multiplies them by every second eight of the pairs: as many as the
block has, in steps of 32. Half the shared memory of a multiprocessor is enough: two programs overlap loads and products.

Rows are permuted in shared memory: of the eight rows of a lane's sums, which are stored together, operand r has rows 2r and
2r + 1, its rows g and g + 8 for the instruction.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.blocks.elementwise import silu
from auraflux.ops.gpu.device import multiprocessor_nbytes
from auraflux.ops.gpu.launch import launch
from auraflux.ops.hopper.copy import COMMIT, COPY8, COPY16, WAIT_ALL, copy, wait_ptx
from auraflux.ops.hopper.mma import mma_bf16
from auraflux.ops.hopper.mma_int4 import WEIGHTS_SCALE, half_weight_pairs, load_half_x, scaled_line
from auraflux.ops.hopper.ptx import run, shared
from auraflux.ops.hopper.shared_memory import long_at
from auraflux.ops.moe.cuda.gemm.grouped import grouped
from auraflux.ops.moe.cuda.stacks import StackArgs, gate_of, rows_of, stack_args
from auraflux.ops.moe.experts import Experts

PAIRS, ROWS, WARPS = 128, 128, 4  # of a program
MOST_STAGES = 3
LEAST_EACH = 16  # pairs per expert from which these kernels are faster than `persistent`
THREADS = gl.constexpr(32 * WARPS)
CODES, TOKENS, LINES = gl.constexpr(ROWS * 32), gl.constexpr(PAIRS * 128), gl.constexpr(ROWS * 8)  # bytes
STAGE = gl.constexpr(CODES.value + TOKENS.value)
X_REGS = gl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r")


class GroupedShape(NamedTuple):
    """Compile-time sizes: inputs and rows of a weight, places of a token among the pairs, stages in shared memory."""

    inputs: int
    rows: int
    k: int
    stages: int


@gluon.constexpr_function
def _store_ptx(values, wide):
    """Return PTX that rounds floats to bf16 and stores them together, as floats if `wide`, where the last operand is not 0."""
    words = values // 2
    text = f"{{.reg .pred p; .reg .b32 w<{values}>; setp.ne.b32 p,${values + 2},0;"
    text += "".join(f"cvt.rn.bf16x2.f32 w{i},${3 + 2 * i},${2 + 2 * i};" for i in range(words))
    if not wide:
        return text + f"@p st.global.v{words}.b32 [$1],{{{','.join(f'w{i}' for i in range(words))}}}; mov.b32 $0,0;}}"
    text = text.replace(".reg .b32 ", f".reg .b32 f<{values}>,")
    text += "".join(f"shl.b32 f{2 * i},w{i},16; and.b32 f{2 * i + 1},w{i},0xffff0000;" for i in range(words))
    for i in range(0, values, 4):
        text += f"@p st.global.v4.b32 [$1+{4 * i}],{{f{i},f{i + 1},f{i + 2},f{i + 3}}};"
    return text + "mov.b32 $0,0;}"


@gluon.constexpr_function
def _store_registers(values):
    return "=r,l," + "f," * values + "r,~{memory}"


@gluon.jit
def _store(to, v, there, COUNT: gl.constexpr, WIDE: gl.constexpr):
    """Store COUNT neighbouring values of a lane, 4 or 8, rounded to bf16, where `there`."""
    TEXT: gl.constexpr = _store_ptx(COUNT, WIDE)
    REGS: gl.constexpr = _store_registers(COUNT)
    if COUNT == 4:
        args = [to, v[0], v[1], v[2], v[3], there.to(gl.int32)]
    else:
        args = [to, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], there.to(gl.int32)]
    gl.inline_asm_elementwise(TEXT, REGS, args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _array_at(weights, part: gl.constexpr, expert, first, place, NBYTES: gl.constexpr, GATED: gl.constexpr):
    """Return where the row of a place in shared memory lies in an expert's codes (0), scales (1) or biases (2).

    first   row of the program
    NBYTES  of a row
    """
    c = place % 64 // 8
    within = place % 8 * 4 + c % 4 if GATED else place % 8 * 8 + c
    row = first + place // 64 * (32 if GATED else 64) + within
    stack = weights[0]
    at = stack[part].to(gl.int64) + expert * (stack.step * 4 if part == 0 else stack.scale_step * 2)
    if GATED:
        stack = weights[1]
        up = stack[part].to(gl.int64) + expert * (stack.step * 4 if part == 0 else stack.scale_step * 2)
        at = gl.where(c < 4, at, up)
    return at + row.to(gl.int64) * NBYTES


@gluon.jit
def _request(base, tid, sources, stage, SHAPE: gl.constexpr, GATED: gl.constexpr):
    """Request a stage: two pieces of codes and eight of tokens for each thread, and a row's scales in every fourth."""
    K: gl.constexpr = SHAPE.inputs
    COUNT: gl.constexpr = K // 64
    HALF: gl.constexpr = 32 if GATED else 64  # rows between those of a warp and those of the next
    codes, scales, biases, x, places = sources
    slot, there = base + stage % SHAPE.stages * STAGE, tid * 0 + stage < COUNT
    for n in gl.static_range(2):
        copy(COPY16, slot + tid * 16 + n * (CODES // 2), codes + n * (HALF * K // 2) + stage * 32, there)
    to = slot + CODES + tid // 8 * 128 + (tid % 8 ^ tid // 8 % 8) * 16
    for n in gl.static_range(8):
        source = x + (places[n] + stage * 8).to(gl.int64) * 16
        copy(COPY16, to + n * 2048, source, there & (places[n] >= 0))
    line = base + SHAPE.stages * STAGE + stage // 4 % 2 * (2 * LINES) + tid * 8
    there &= stage % 4 == 0
    copy(COPY8, line, scales + stage * 2, there)
    copy(COPY8, line + LINES, biases + stage * 2, there)
    run(COMMIT, tid)


@gluon.jit
def _add_stage(acc, codes, line, x, EIGHTS: gl.constexpr):
    """Add a stage to a warp's sums: four operands of 16 rows by eights of pairs, every second of the program's."""
    rows = ()
    for r in gl.static_range(4):
        first, second = scaled_line(line + r * 128, LINES), scaled_line(line + (r * 128 + 64), LINES)
        rows += ((first, second, long_at(codes + r * 512), long_at(codes + (r * 512 + 256))),)  # type: ignore[assignment]
    for h in gl.static_range(2):
        weights, new = (), ()
        for r in gl.static_range(4):
            own = rows[r]  # type: ignore[var-annotated]
            u, v = (own[2] >> (32 * h)).to(gl.int32), (own[3] >> (32 * h)).to(gl.int32)
            weights += (half_weight_pairs(u, v, own[0], own[1]),)  # type: ignore[assignment]
        for n in gl.static_range(EIGHTS):
            b = load_half_x((x + n * 2048) ^ (16 * h))
            for r in gl.static_range(n * 4, n * 4 + 4):
                c = acc[r * 4], acc[r * 4 + 1], acc[r * 4 + 2], acc[r * 4 + 3]
                a = weights[r % 4]  # type: ignore[var-annotated]
                for step in gl.static_range(2):
                    c = mma_bf16(
                        c, (a[step * 4], a[step * 4 + 1], a[step * 4 + 2], a[step * 4 + 3]), b[step * 2], b[step * 2 + 1]
                    )
                new += c  # type: ignore[assignment]
        acc = new
    return acc


@gluon.jit
def _store_sums(acc, placed, pairs, out, first, lane, half, SHAPE: gl.constexpr, GATED: gl.constexpr, EIGHTS: gl.constexpr):
    """Store a warp's rows from `first` on for its pairs: silu(gate) * up, or the sums."""
    g, t = lane // 4, lane % 4
    WIDE: gl.constexpr = out.dtype.element_ty == gl.float32
    for n in gl.static_range(EIGHTS):
        for j in gl.static_range(2):
            pair = gl.load(placed + (2 * n + half) * 8 + t * 2 + j)
            sums = ()
            for c in gl.static_range(8):
                sums += (acc[(n * 4 + c // 2) * 4 + c % 2 * 2 + j] * WEIGHTS_SCALE,)  # type: ignore[assignment]
            row = pair.to(gl.int64) * SHAPE.rows + first
            if GATED:
                found = ()
                for c in gl.static_range(4):
                    found += (silu(sums[c]) * sums[c + 4],)  # type: ignore[assignment]
                _store((out + (row + g * 4)).to(gl.int64), found, pair < pairs, 4, WIDE)
            else:
                _store((out + (row + g * 8)).to(gl.int64), sums, pair < pairs, 8, WIDE)


@gluon.jit
def _multiply(base, tid, sources, placed, pairs, out, first, SHAPE: gl.constexpr, GATED: gl.constexpr, EIGHTS: gl.constexpr):
    """Multiply and store a program's tile of 16 pairs for each of EIGHTS."""
    D: gl.constexpr = SHAPE.stages
    COUNT: gl.constexpr = SHAPE.inputs // 64
    lane, side, half = tid % 32, tid // 32 % 2, tid // 64
    g, t = lane // 4, lane % 4
    for d in gl.static_range(D - 1):
        _request(base, tid, sources, d, SHAPE, GATED)
    codes = base + side * 2048 + g * 32 + t * 8
    line = base + D * STAGE + side * 512 + g * 8
    x = base + CODES + (half * 8 + g) * 128 + (t * 2 ^ g) * 16
    acc = ((tid * 0).to(gl.float32),) * (16 * EIGHTS)
    for stage in range(COUNT):
        run(wait_ptx(D - 2), lane)
        gl.thread_barrier()
        _request(base, tid, sources, stage + (D - 1), SHAPE, GATED)
        slot = stage % D * STAGE
        acc = _add_stage(acc, codes + slot, line + stage // 4 % 2 * (2 * LINES) + stage % 4 * 2, x + slot, EIGHTS)
    run(WAIT_ALL, lane)
    _store_sums(acc, placed, pairs, out, first + side * (32 if GATED else 64), lane, half, SHAPE, GATED, EIGHTS)


@gluon.jit(do_not_specialize_on_alignment=["pairs"])
def expert_blocks(x, blocks, weights, out, experts, pairs, SHAPE: gl.constexpr):
    """Multiply blocks of pairs by their expert's rows; grid (tiles of rows, blocks).

    x        bf16 [rows of x, inputs]; a pair's row is pair // k
    blocks   pairs by block, and each block's expert
    weights  gate and up, or down alone
    out      [pairs, rows], bf16 or float32 of the same values
    """
    GATED: gl.constexpr = len(weights) == 2
    K: gl.constexpr = SHAPE.inputs
    tid = gl.arange(0, THREADS, gl.BlockedLayout([1], [32], [THREADS // 32], [0]))
    placed, owner = blocks
    expert = gl.load(owner + gl.program_id(1)).to(gl.int64)
    if expert >= experts:
        return
    placed += gl.program_id(1) * 128
    memory, base = shared(SHAPE.stages * STAGE + 4 * LINES, tid)
    first = gl.program_id(0) * (64 if GATED else 128)
    # of codes, a thread copies half of a row and of another; of scales and biases, those of one row
    codes = _array_at(weights, 0, expert, first, tid // 2, K // 2, GATED) + tid % 2 * 16
    scales = _array_at(weights, 1, expert, first, tid, K // 32, GATED)
    biases = _array_at(weights, 2, expert, first, tid, K // 32, GATED)
    places = ()
    for n in gl.static_range(8):
        pair = gl.load(placed + tid // 8 + n * 16)
        places += (gl.where(pair < pairs, pair // SHAPE.k * (K // 8) + tid % 8, -1),)  # type: ignore[assignment]
    sources = codes, scales, biases, x.to(gl.int64), places
    # pairs come before the empty places of a block
    if gl.load(placed + 96) < pairs:
        _multiply(base, tid, sources, placed, pairs, out, first, SHAPE, GATED, 8)
    elif gl.load(placed + 64) < pairs:
        _multiply(base, tid, sources, placed, pairs, out, first, SHAPE, GATED, 6)
    elif gl.load(placed + 32) < pairs:
        _multiply(base, tid, sources, placed, pairs, out, first, SHAPE, GATED, 4)
    else:
        _multiply(base, tid, sources, placed, pairs, out, first, SHAPE, GATED, 2)
    memory._keep_alive()


def stages_for(device: torch.device) -> int:
    """Return the stages with which two programs share a multiprocessor."""
    room = multiprocessor_nbytes(device) // 2 - 1024 - 4 * cast("int", LINES.value) - 2048
    return min(MOST_STAGES, room // cast("int", STAGE.value))


def write_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    tokens, k = ids.shape
    inner, hidden, pairs, stages = experts.inner, experts.hidden, tokens * k, stages_for(x.device)
    placed, owner = grouped(ids, experts.count, PAIRS)
    owner = rows_of(owner, experts, out=owner)
    between = x.new_empty(pairs, inner)
    first: tuple[StackArgs, ...] = stack_args(gate_of(experts)), stack_args(experts.up)
    for source, weights, out, shape in (
        (x, first, between, GroupedShape(hidden, inner, k, stages)),
        (between, (stack_args(experts.down),), parts, GroupedShape(inner, hidden, 1, stages)),
    ):
        tiles = shape.rows * len(weights) // ROWS
        launch(expert_blocks, (tiles, len(owner)))(
            source, (placed, owner), weights, out, experts.rows, pairs, shape, num_warps=WARPS
        )
