"""One token times affine weights of many rows on Hopper, codes as bytes; the steps of a warp are in `int8_warp.py`.

As `bits.py`, which takes the other weights, with integer instead of bf16 products: faster where a program has several blocks.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.device import multiprocessors, shared_nbytes
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.hopper.copy import COMMIT
from auraflux.ops.hopper.mma_int8 import shifts
from auraflux.ops.hopper.ptx import LAUNCH, WAIT, WAIT_AND_LAUNCH, run, shared
from auraflux.ops.hopper.shared_memory import put
from auraflux.ops.linear.cuda.matvec.int8_warp import (
    block_sums,
    byte_layout,
    inputs,
    load_run_x,
    request_part,
    request_scales,
    sum_warps,
    weigh,
)
from auraflux.ops.linear.cuda.row_copies import products_of, select_weight
from auraflux.quant import QTensor

MOST_WEIGHTS = 4  # per launch
WARPS = 8
LEAST_RUNS = 16  # runs of eight columns from which eight warps have work
LEAST_ROWS = 8192  # rows from which programs take several blocks
# (bits, groups of 32): (blocks of 16 rows per program, parts of a run, parts in flight, interleaved columns). Fastest of those
# measured on an H200, 8192 x 8192
SHAPES = {
    (2, False): (4, 1, 4, 2), (3, False): (4, 1, 2, 2), (4, False): (2, 2, 4, 2), (4, True): (2, 1, 3, 4),
    (5, False): (4, 1, 2, 2), (6, False): (4, 1, 2, 2), (8, False): (2, 4, 3, 2), (8, True): (2, 2, 3, 2),
}  # fmt: skip


@gluon.jit
def matvec_bytes(
    x, products, ends, GATED: gl.constexpr, K: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr, R: gl.constexpr,
    PARTS: gl.constexpr, W: gl.constexpr, D: gl.constexpr, INTERLEAVE: gl.constexpr, LATE: gl.constexpr, ROOM: gl.constexpr,
):  # fmt: skip
    """Multiply one token by 16R rows per program.

    Each of W warps takes some runs of eight columns in PARTS, D of them in flight.

    Programs of the weights follow each other, see `select_weight`. GATED takes eight rows of each of two weights, and stores
    silu(first) * second. LATE: the next kernel may start only when x is loaded. ROOM: shared memory to allocate at least,
    bytes.
    """
    C: gl.constexpr = byte_layout(K, BITS, GROUP, GATED, R, PARTS, W)
    MINE: gl.constexpr = C.mine
    PER: gl.constexpr = D * C.slot + 2 * C.s_all
    ROWS: gl.constexpr = 8 if GATED else 16
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    program = gl.program_id(0)
    own, number = select_weight(
        program, ends, [(each.codes.packed, each.codes.scales, each.codes.biases, each.out) for each in products]
    )
    w, s, b, y = own
    # selected separately, since a function cannot return None
    a = select_weight(program, ends, [each.bias for each in products])[0] if products[0].bias is not None else None
    also = products[1 if GATED else 0].codes
    row0 = number.to(gl.int64) * (ROWS * R)
    memory, ring = shared(max(PER * W, ROOM), tid)
    base = ring + warp * PER
    run0 = warp * C.mine
    line, start = base + D * C.slot, run0 * (C.part * PARTS)
    first = w + row0 * C.row + start
    second = (also.packed if GATED else w + 8 * C.row) + row0 * C.row + start
    request_scales(line, s, b, also.scales, also.biases, row0, run0, lane, GATED, R, C)
    for d in gl.static_range(D):
        request_part(base + d * C.slot, lane, first, second, start, 0 * warp, d, PARTS, C)
        run(COMMIT, lane)
    run(WAIT if LATE else WAIT_AND_LAUNCH, lane)
    x_next = load_run_x(x, run0, lane, C)
    # first word of a lane
    mine, shift = base + g * C.pitch + C.column * BITS // 32 * t // 4 * 4, shifts(t, BITS)
    # the first of the columns whose sums a lane accumulates
    column0 = t % 2 * 4
    line += g * C.s_pitch + column0 * (C.s_run // 8)
    if not C.whole:
        line += g * C.s_row % 4
    totals = ((tid * 0).to(gl.float32),) * (2 * R)
    slot = 0 * warp
    for i in range(MINE):
        x_now, x_next = x_next, load_run_x(x, run0 + (i + 1), lane, C)
        xs, X, factors = inputs(x_now, lane, BITS, C)
        column = (run0 + i) * 8 + column0
        new = ()
        for r in gl.static_range(R):
            if LATE and r == 1:  # noqa: SIM102 - decided when the kernel is compiled
                if i == 0:
                    run(LAUNCH, lane)
            slot, sums = block_sums(
                base, slot, mine, lane, first, second, start, i, xs, shift, r, BITS, PARTS, D, INTERLEAVE, C
            )  # fmt: skip
            for half in gl.static_range(2):
                at = line + (16 * r + 8 * half) * C.s_pitch
                new += (weigh(totals[2 * r + half], sums, X, factors, at, column, half, GROUP == 128, C),)  # type: ignore[assignment]
        totals = new
        line += C.s_held
    gl.thread_barrier()
    for r in gl.static_range(2 * R):
        put(ring + (warp * (2 * R) + r) * 128 + lane * 4, totals[r])
    gl.thread_barrier()
    n = tid // 4 % (ROWS * R)
    at = ring + ((n // 8 * 16 + n % 8) if GATED else n) * 16 + t * 4
    out = sum_warps(at, W, R)
    if GATED:
        # round as two products stored in bf16 would
        out, up = out.to(gl.bfloat16).to(gl.float32), sum_warps(at + 128, W, R).to(gl.bfloat16).to(gl.float32)
        out = out / (1.0 + gl.exp(-out)) * up
    mask = (t == 0) & (tid < 4 * ROWS * R)
    if a is not None:
        out += gl.load(a + row0 + n, mask, 0.0).to(gl.float32)
    gl.store(y + row0 + n, out.to(gl.bfloat16), mask)
    memory._keep_alive()


@cache
def _shape(
    bits: int, group: int, width: int, rows: tuple[int, ...], processors: int, most_nbytes: int
) -> tuple[int, int, int, int, int, bool, int, int | None] | None:
    """Choose R, PARTS, W, D, INTERLEAVE, LATE and ROOM of the kernel, and a cap on its registers.

    None where it would be slow.
    """
    runs = cdiv(width, 8 * min(group, 64))
    block, parts, deep, interleave = SHAPES[bits, group == 32]
    # every warp executes the same number of runs, so that up to 20 % may be padding
    wasteful = runs < LEAST_RUNS or WARPS * cdiv(runs, WARPS) > 1.2 * runs
    if wasteful or sum(rows) < LEAST_ROWS or any(count % (16 * block) for count in rows):
        return None
    while _shared_nbytes(width, bits, group, block, parts, deep) > most_nbytes:
        block //= 2
        if block < 2:
            return None
    # a multiprocessor fits as many programs as the launch has for it; with 2 bits one more, which prefetches its weights
    each = cdiv(sum(rows) // (16 * block), processors)
    pair = bits == 2 and block == 4 and 2 * _shared_nbytes(width, bits, group, block, parts, deep) <= most_nbytes
    late = pair and each == 1
    room = most_nbytes // (each + late + 1) if each <= 2 else 0
    # two programs of eight warps fit with 128 registers per thread
    return block, parts, WARPS, deep, interleave, late, room, 128 if pair else None


def _shared_nbytes(width: int, bits: int, group: int, block: int, parts: int, deep: int) -> int:
    cut = byte_layout(width, bits, group, False, block, parts, WARPS)
    return WARPS * (deep * cut.slot + 2 * cut.s_all) + 2048


def _shape_of(x: Tensor, weights: Sequence[QTensor]) -> tuple[int, int, int, int, int, bool, int, int | None] | None:
    first, rows = weights[0], tuple(weight.shape[0] for weight in weights)
    if first.biases is None:
        return None
    sizes = first.bits, first.group, first.shape[1], rows
    return _shape(*sizes, multiprocessors(x.device), shared_nbytes(x.device))


def refuses(x: Tensor, weights: Sequence[QTensor]) -> str | None:
    """Return why `bits.py` is faster; None where this kernel is."""
    if weights[0].biases is None:
        return "codes without biases are not integers"
    return None if _shape_of(x, weights) is not None else "too few rows or columns for programs of several blocks"


def multiply(
    x: Tensor,
    weights: Sequence[QTensor],
    outs: Sequence[Tensor],
    biases: Sequence[Tensor | None] = (),
    gated: bool = False,
) -> None:
    """Multiply one token by up to MOST_WEIGHTS weights of one width and format in one launch, into bf16 [1, N] each.

    biases  vectors to add, one for each weight, or none at all
    gated   silu(first product) * second, into one out
    """
    found = _shape_of(x, weights)
    assert found is not None
    *shape, cap = found
    ends = list(accumulate(weight.shape[0] // (16 * shape[0]) for weight in weights))
    splits = () if gated else tuple(ends[:-1])
    products = products_of(weights, outs, biases)
    sizes = gated, weights[0].shape[1], weights[0].bits, weights[0].group, *shape
    launch(matvec_bytes, (ends[-1],))(x, products, splits, *sizes, num_warps=WARPS, maxnreg=cap, launch_pdl=True)
