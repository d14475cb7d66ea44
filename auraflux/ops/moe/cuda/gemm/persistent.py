"""4-bit experts for hundreds of pairs on Hopper: persistent programs, each with an equal share of all rows of all blocks.

A block is up to 8 or 16 (token, slot) pairs of one expert, one or two octets, see `assign`. A stage is the rows of a block
that eight warps multiply at once: in `up_stream` each has 8 rows of gate and the same 8 of up, one MMA tile, so that both are
in one thread; in `down_stream` 16 rows. Codes stream through a ring of quads per warp, across stages; a block's vectors stay
in shared memory for all of its stages (`int4_quads`).

`down_stream` starts wherever a program of `up_stream` has ended. It does not wait for all of them: warps count their stages,
and a block's hidden vectors are read when its count is complete. All programs that count have started by then, so this cannot
deadlock.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.device import multiprocessor_nbytes, multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.hopper.copy import COMMIT, wait_ptx
from auraflux.ops.hopper.ptx import LAUNCH, SYNC, WAIT, WAIT_AND_LAUNCH, from_lane, run, shared
from auraflux.ops.moe.cuda.gemm.int4_quads import (
    TILE,
    W,
    add_quad,
    add_quad_ordered,
    both,
    fetch_quad,
    four_lanes,
    load_inputs,
    put_inputs,
    quad_at,
)
from auraflux.ops.moe.cuda.routing.assign import Blocks, assign_given
from auraflux.ops.moe.cuda.stacks import gate_of, rows_of, stack_args
from auraflux.ops.moe.experts import Experts

FEW_PAIRS, MOST_PAIRS, MOST_EACH = 1024, 2048, 14  # pairs: always, at most, and per expert on average between them
CROWDED = 6  # pairs per expert on average, above which blocks have two octets
DEEPEST = 4  # quads of a warp in flight
REGISTERS = 128  # per thread, for the same
SKEW = 2  # sixteenths


class StreamShape(NamedTuple):
    """Compile-time shape of the kernels.

    hidden, inner  widths of an expert
    depth          quads of a warp in flight
    octets         of a block
    ordered        0; or the order of `slots`, one octet at a time: 1 quad by quad, 2 per group of a quad (down only)
    skewed         sixteenths that the first programs have more stages than others
    """

    hidden: int
    inner: int
    depth: int
    octets: int
    ordered: int
    skewed: int = 0


@gluon.jit
def _share(stages, p, SKEWED: gl.constexpr):
    """Return the first stage of program p. The first programs, which start first, have up to SKEWED / 16 more than others."""
    if SKEWED == 0:
        return stages * p // gl.num_programs(0)
    count = gl.num_programs(0).to(gl.int64)
    return (stages * p * (16 * count + SKEWED * (count - p)) // (16 * count * count)).to(gl.int32)


@gluon.jit
def _opaque(lane):
    """Return the lane opaquely, so that values derived from it are recomputed instead of occupying registers."""
    return gl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [lane], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _count_stage(at, lane):
    """Count a warp's stage as done, releasing all its stores."""
    text: gl.constexpr = (
        "{.reg .pred p; setp.eq.b32 p,$2,0; bar.warp.sync 0xffffffff; @p red.release.gpu.global.add.u32 [$1],1; mov.b32 $0,0;}"
    )
    gl.inline_asm_elementwise(text, "=r,l,r,~{memory}", [at.to(gl.int64), lane], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _await_stages(at, count):
    text: gl.constexpr = (
        "{.reg .pred p; .reg .b32 n; AGAIN: ld.acquire.gpu.global.u32 n,[$1]; setp.lt.u32 p,n,$2; @p bra AGAIN; mov.b32 $0,0;}"
    )
    gl.inline_asm_elementwise(text, "=r,l,r,~{memory}", [at.to(gl.int64), count], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pairs_of(placed, block, most, lane, OCTETS: gl.constexpr):
    """Load a lane's pair in each octet of a block."""
    found = ()
    for n in gl.static_range(OCTETS):
        found += (gl.load(placed + gl.minimum(block, most - 1) * (8 * OCTETS) + n * 8 + lane // 4),)  # type: ignore[assignment]
    return found


@gluon.jit
def _inputs(
    to, x, pair, pairs, k, warp, lane, FIRST: gl.constexpr, K: gl.constexpr, OCTETS: gl.constexpr, ORDERED: gl.constexpr
):  # fmt: skip
    """Store a block's vectors as operands, except the FIRST quads of each warp and the first octet."""
    EACH: gl.constexpr = (K // 256 + W - 1) // W
    for i in gl.static_range(FIRST, EACH * OCTETS):
        quad = i % EACH * W + warp
        put_inputs(to + i // EACH * (17 * K), load_inputs(x, pair[i // EACH], pairs, k, quad, lane, K), quad, lane, K, ORDERED)


@gluon.jit
def _add_quads(
    acc, total, ring, inputs, part, source, more, lane, K: gl.constexpr, HALVES: gl.constexpr, SHAPE: gl.constexpr
):  # fmt: skip
    """Add a warp's D quads in flight to its sums, and start copies from `source` into their stages."""
    D: gl.constexpr = SHAPE.depth
    OCTETS: gl.constexpr = SHAPE.octets
    ORDERED: gl.constexpr = SHAPE.ordered
    for d in range(D):
        spot, n = ring + d * TILE, part * D + d
        run(wait_ptx(D - 1), lane)
        quad = quad_at(spot, lane, ORDERED != 0)
        run(SYNC, lane)
        fetch_quad(spot, lane, (source[0] + d * 128, source[1] + d * 128, source[2] + d * 8), more & (lane >= 0), K, HALVES)
        run(COMMIT, lane)
        sums = inputs + 16 * K + n * 256
        if ORDERED == 0:
            acc, total = add_quad(acc, total, quad, inputs + n * 4096 + lane * 16, sums + lane * 8, K, OCTETS)
        else:
            acc, total = add_quad_ordered(acc, total, quad, inputs + n * 4096 + lane * 16, sums, lane, ORDERED == 2)
    return acc, total


@gluon.jit
def _up_sources(
    s, block0, owners, warp, lane, gate, up, K: gl.constexpr, PER: gl.constexpr
):  # fmt: skip
    """Return a lane's addresses of stage s, 8 rows of gate and of up per warp: codes of each, and scales or biases."""
    expert = from_lane(owners, s // PER - block0 + lane * 0).to(gl.int64)
    row, first = (s % PER * 64 + warp * 8).to(gl.int64), lane % 16 < 8
    at = (row + lane // 8) * (K // 2) + lane % 8 * 16
    line = expert * gl.where(first, gate.scale_step, up.scale_step) + (row + lane % 8) * (K // 64)
    scales = gl.where(first, gate.scales.to(gl.int64), up.scales.to(gl.int64))
    biases = gl.where(first, gate.biases.to(gl.int64), up.biases.to(gl.int64))
    return (
        gate.packed.to(gl.int64) + (expert * gate.step * 4 + at),
        up.packed.to(gl.int64) + (expert * up.step * 4 + at),
        gl.where(lane < 16, scales, biases) + line * 2,
    )


@gluon.jit
def _down_sources(s, block0, owners, warp, lane, down, K: gl.constexpr, PER: gl.constexpr):
    """Return a lane's addresses of stage s, 16 rows per warp: codes, and scales or biases."""
    expert = from_lane(owners, s // PER - block0 + lane * 0).to(gl.int64)
    row = (s % PER * 128 + warp * 16).to(gl.int64)
    codes = down.packed.to(gl.int64) + (expert * down.step * 4 + (row + lane // 8) * (K // 2) + lane % 8 * 16)
    line = expert * down.scale_step + (row + lane % 16) * (K // 64)
    return codes, codes, gl.where(lane < 16, down.scales.to(gl.int64), down.biases.to(gl.int64)) + line * 2


@gluon.jit(do_not_specialize_on_alignment=["pairs"])
def up_stream(
    x, placed, owner, gate, up, out, pairs, k, most, SHAPE: gl.constexpr
):  # fmt: skip
    """Write silu(gate x) * up x of all blocks; a stage is 64 elements of a block, with D quads per warp in flight."""
    H: gl.constexpr = SHAPE.hidden
    INNER: gl.constexpr = SHAPE.inner
    D: gl.constexpr = SHAPE.depth
    OCTETS: gl.constexpr = SHAPE.octets
    ORDERED: gl.constexpr = SHAPE.ordered
    PARTS: gl.constexpr = H // 256 // D
    PER: gl.constexpr = INNER // 64
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    memory, inputs = shared(17 * H * OCTETS + W * D * TILE, tid)
    ring = inputs + 17 * H * OCTETS + warp * (D * TILE)
    run(WAIT_AND_LAUNCH, tid)
    stages = gl.load(owner + most) * PER
    begin, end = _share(stages, gl.program_id(0), 0), _share(stages, gl.program_id(0) + 1, 0)
    block0 = begin // PER
    owners = gl.load(owner + gl.minimum(block0 + lane, most - 1))
    pair = _pairs_of(placed, block0, most, lane, OCTETS)
    # issued before the codes, so as not to queue behind them
    raw = load_inputs(x, pair[0], pairs, k, warp, lane, H)
    source = _up_sources(begin, block0, owners, warp, lane, gate, up, H, PER)
    for d in gl.static_range(D):
        ahead = (source[0] + d * 128, source[1] + d * 128, source[2] + d * 8)
        fetch_quad(ring + d * TILE, lane, ahead, (begin < end) & (lane >= 0), H, True)
        run(COMMIT, lane)
    put_inputs(inputs, raw, warp, lane, H, ORDERED != 0)
    _inputs(inputs, x, pair, pairs, k, warp, lane, 1, H, OCTETS, ORDERED != 0)
    gl.thread_barrier()
    for block in range(block0, (end + PER - 1) // PER):
        if block > block0:
            pair = _pairs_of(placed, block, most, _opaque(lane), OCTETS)
            gl.thread_barrier()
            _inputs(inputs, x, pair, pairs, k, warp, _opaque(lane), 0, H, OCTETS, ORDERED != 0)
            gl.thread_barrier()
        for s in range(gl.maximum(begin, block * PER), gl.minimum(end, (block + 1) * PER)):
            zero = (tid * 0).to(gl.float32)
            acc, total = (zero,) * (16 if ORDERED == 2 else 4 * OCTETS), (zero,) * (4 * OCTETS)
            for part in range(PARTS):
                more = s < end
                if part == PARTS - 1:
                    more = s + 1 < end
                    source = _up_sources(s + 1, block0, owners, warp, _opaque(lane), gate, up, H, PER)
                else:
                    source = (source[0] + D * 128, source[1] + D * 128, source[2] + D * 8)
                acc, total = _add_quads(acc, total, ring, inputs, part, source, more, lane, H, True, SHAPE)
            r, thread = total, _opaque(tid)
            if ORDERED == 0:
                r = both(acc, total, OCTETS)
            for n in gl.static_range(2 * OCTETS):
                mine = gl.load(placed + (block * OCTETS + n // 2) * 8 + thread % 4 * 2 + n % 2)
                gated = r[n // 2 * 4 + n % 2]
                value = gated / (1.0 + gl.exp(-gated)) * r[n // 2 * 4 + n % 2 + 2]
                at = mine.to(gl.int64) * INNER + (s % PER * 64 + thread // 4)
                gl.store(out + at, value.to(out.dtype.element_ty), mine < pairs)
            _count_stage(owner + (most + 1 + block) + thread * 0, thread % 32)
    memory._keep_alive()


@gluon.jit(do_not_specialize_on_alignment=["pairs"])
def down_stream(
    x, placed, owner, down, out, pairs, most, SHAPE: gl.constexpr
):  # fmt: skip
    """Write the results of all blocks; a stage is 128 elements of a block."""
    HIDDEN: gl.constexpr = SHAPE.hidden
    INNER: gl.constexpr = SHAPE.inner
    D: gl.constexpr = SHAPE.depth
    SKEWED: gl.constexpr = SHAPE.skewed
    OCTETS: gl.constexpr = SHAPE.octets
    ORDERED: gl.constexpr = SHAPE.ordered
    PARTS: gl.constexpr = INNER // 256 // D
    PER: gl.constexpr = HIDDEN // 128
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    memory, inputs = shared(17 * INNER * OCTETS + W * D * TILE, tid)
    ring = inputs + 17 * INNER * OCTETS + warp * (D * TILE)
    stages = gl.load(owner + most) * PER
    begin, end = _share(stages, gl.program_id(0), SKEWED), _share(stages, gl.program_id(0) + 1, SKEWED)
    block0 = begin // PER
    owners = gl.load(owner + gl.minimum(block0 + lane, most - 1))
    source = _down_sources(begin, block0, owners, warp, lane, down, INNER, PER)
    for d in gl.static_range(D):
        ahead = (source[0] + d * 128, source[1] + d * 128, source[2] + d * 8)
        fetch_quad(ring + d * TILE, lane, ahead, (begin < end) & (lane >= 0), INNER, False)
        run(COMMIT, lane)
    run(LAUNCH, lane)
    for block in range(block0, (end + PER - 1) // PER):
        pair = _pairs_of(placed, block, most, _opaque(lane), OCTETS)
        gl.thread_barrier()
        # the number of (warp, stage) counts of a block in `up_stream`
        _await_stages(owner + (most + 1 + gl.minimum(block, most - 1)) + _opaque(lane) * 0, lane * 0 + INNER // 8)
        _inputs(inputs, x, pair, pairs, 1, warp, _opaque(lane), 0, INNER, OCTETS, ORDERED != 0)
        gl.thread_barrier()
        for s in range(gl.maximum(begin, block * PER), gl.minimum(end, (block + 1) * PER)):
            zero = (tid * 0).to(gl.float32)
            acc, total = (zero,) * (16 if ORDERED == 2 else 4 * OCTETS), (zero,) * (4 * OCTETS)
            for part in range(PARTS):
                more = s < end
                if part == PARTS - 1:
                    more = s + 1 < end
                    source = _down_sources(s + 1, block0, owners, warp, lane, down, INNER, PER)
                else:
                    source = (source[0] + D * 128, source[1] + D * 128, source[2] + D * 8)
                acc, total = _add_quads(acc, total, ring, inputs, part, source, more, lane, INNER, False, SHAPE)
            if ORDERED == 0:
                r = both(acc, total, OCTETS)
            elif ORDERED == 1:
                r = total
            else:
                r = four_lanes(acc)
            for n in gl.static_range(4 * OCTETS):
                mine = gl.load(placed + (block * OCTETS + n // 4) * 8 + lane % 4 * 2 + n % 2)
                at = mine.to(gl.int64) * HIDDEN + (s % PER * 128 + warp * 16 + lane // 4 + n % 4 // 2 * 8)
                gl.store(out + at, r[n], mine < pairs)
    # a kernel that waits for this one must also have waited for the previous one
    run(WAIT, lane)
    memory._keep_alive()


def ring_sizes(width: int, octets: int, device: torch.device) -> tuple[int, int]:
    """Return programs per multiprocessor, and quads in flight, a divisor of those in a row; (0, 0) if nothing fits."""
    each = multiprocessor_nbytes(device)
    for programs in (2, 1):
        # each program takes a kilobyte more than it allocates
        nbytes = each // programs - 1024
        for depth in range(DEEPEST, 0, -1):
            room = 17 * width * octets + W.value * depth * TILE.value + 2048 <= nbytes
            if room and width // 256 % depth == 0:
                return programs, depth
    return 0, 0


def most_pairs(experts: int) -> int:
    """Return the number of pairs up to which these kernels are the fastest."""
    return min(MOST_PAIRS, max(FEW_PAIRS, MOST_EACH * experts))


def octets_for(pairs: int, experts: Experts, device: torch.device) -> int:
    """Return the octets of a block: two where most experts have more pairs than one would hold."""
    crowded = pairs > CROWDED * experts.count
    return 2 if crowded and all(ring_sizes(width, 2, device)[0] for width in (experts.hidden, experts.inner)) else 1


def multiply(x: Tensor, k: int, blocks: Blocks, experts: Experts, parts: Tensor, ordered: tuple[int, int] = (0, 0)) -> None:
    """Run `expert_parts` for pairs assigned to blocks.

    ordered  ORDERED of both kernels
    """
    placed, owner, octets = blocks
    pairs, inner, hidden, most = x.shape[0] * k, experts.inner, experts.hidden, len(placed) // (8 * octets)
    between, processors = x.new_empty(pairs, inner), multiprocessors(x.device)
    (programs, depth), (down_programs, down_depth) = ring_sizes(hidden, octets, x.device), ring_sizes(inner, octets, x.device)
    launch(up_stream, (programs * processors,))(
        x, placed, owner, stack_args(gate_of(experts)), stack_args(experts.up), between, pairs, k, most,
        StreamShape(hidden, inner, depth, octets, ordered[0]),
        num_warps=W.value, maxnreg=REGISTERS, launch_pdl=True,
    )  # fmt: skip
    launch(down_stream, (down_programs * processors,))(
        between, placed, owner, stack_args(experts.down), parts, pairs, most,
        StreamShape(hidden, inner, down_depth, octets, ordered[1], SKEW),
        num_warps=W.value, maxnreg=REGISTERS, launch_pdl=True,
    )  # fmt: skip


def write_parts(x: Tensor, ids: Tensor, experts: Experts, parts: Tensor) -> None:
    """Run `expert_parts` for hundreds of pairs."""
    blocks = assign_given(ids, experts.count, octets_for(ids.numel(), experts, x.device))
    owner = blocks.owner[: blocks.most]
    rows_of(owner, experts, out=owner)
    multiply(x, ids.shape[1], blocks, experts, parts)
