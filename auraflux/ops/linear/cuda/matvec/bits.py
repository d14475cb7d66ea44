"""One token times quantized weights on Hopper; the instructions of a warp are in `hopper/mma_bits.py`.

y[n] = Σ_k x[k] (code[n, k] scale[n, k/group] + bias[n, k/group])

- An `mma` has eight columns and one token needs one, so column c gets the x of column c of a run: eight share their registers.
- Warps split K and never synchronise: each fills its own ring in shared memory by `cp.async`.
- Weights are requested before `griddepcontrol.wait`, x after it: the gap between launches is hidden behind the previous kernel.
"""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.hopper.copy import COMMIT
from auraflux.ops.hopper.mma_bits import column_starts, word_count
from auraflux.ops.hopper.ptx import WAIT_AND_LAUNCH, run, shared
from auraflux.ops.hopper.shared_memory import put
from auraflux.ops.linear.cuda.matvec.bits_warp import (
    block_sums,
    load_run_x,
    request_part,
    request_scales,
    sum_warps,
    warp_runs,
    weigh,
)
from auraflux.ops.linear.cuda.row_copies import products_of, select_weight
from auraflux.quant import QTensor

MOST_WEIGHTS = 4  # per launch
WIDEST = 32768  # inputs whose scales fit shared memory
MANY_RUNS = 16  # runs of eight columns from which eight warps have work
MANY_ROWS = 8192  # rows from which programs take several blocks
MX = 0  # stands for the bits of MXFP4 in the tables below
# (bits, groups of 32): (blocks of 16 rows per program where rows are many, parts of a run, parts in flight, interleaved
# columns). Fastest of those measured on an H200, 8192 x 8192; formats missing from EIGHT_WARPS gain nothing from eight
EIGHT_WARPS = {
    (MX, True): (2, 1, 4, 4), (2, False): (4, 1, 2, 4), (4, True): (2, 1, 3, 8),
    (8, False): (2, 4, 3, 2), (8, True): (2, 2, 3, 2),
}  # fmt: skip
FOUR_WARPS = {
    (MX, True): (1, 1, 2, 4), (2, False): (1, 1, 3, 4), (3, False): (1, 1, 2, 2), (4, False): (1, 2, 3, 4),
    (4, True): (1, 1, 2, 4), (5, False): (1, 1, 2, 2), (6, False): (1, 1, 2, 2),
    (8, False): (1, 4, 3, 1), (8, True): (1, 2, 3, 2),
}  # fmt: skip


@gluon.jit
def matvec_codes(
    x, products, ends, GATED: gl.constexpr, K: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr, R: gl.constexpr,
    PARTS: gl.constexpr, W: gl.constexpr, D: gl.constexpr, INTERLEAVE: gl.constexpr,
):  # fmt: skip
    """Multiply one token by 16R rows per program; warp v takes runs v, v + W, ...

    Of eight columns in PARTS, D of them in flight.

    Programs of the weights follow each other, see `select_weight`. GATED takes eight rows of each of two weights, and stores
    silu(first) * second.
    """
    AFFINE: gl.constexpr = products[0].codes.biases is not None
    C: gl.constexpr = warp_runs(K, BITS, GROUP, AFFINE, GATED, R, PARTS, W)
    MINE: gl.constexpr = C.mine
    PER: gl.constexpr = D * C.slot + (2 if AFFINE else 1) * C.s_all
    AHEAD: gl.constexpr = MINE > 1
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    program = gl.program_id(0)
    own, number = select_weight(program, ends, [(each.codes.packed, each.codes.scales, each.out) for each in products])
    w, s, y = own
    # selected separately, since a function cannot return None
    b = select_weight(program, ends, [each.codes.biases for each in products])[0] if AFFINE else None
    a = select_weight(program, ends, [each.bias for each in products])[0] if products[0].bias is not None else None
    also = products[1 if GATED else 0].codes
    row0 = number.to(gl.int64) * (C.rows * R)
    memory, ring = shared(PER * W, tid)
    base = ring + warp * PER
    line, start = base + D * C.slot, warp * (C.part * PARTS)
    first = w + row0 * C.row + start
    second = (also.packed if GATED else w + 8 * C.row) + row0 * C.row + start
    for d in gl.static_range(D):
        request_part(base + d * C.slot, lane, first, second, start, 0, d, PARTS, C)
        if d == 0:
            request_scales(line, s, b, also.scales, also.biases, row0, warp, lane, GATED, R, W, C)
        run(COMMIT, lane)
    run(WAIT_AND_LAUNCH, lane)
    # first word of a lane, and the bit at which its codes begin there
    word = 24 * t // 32 if BITS == 3 else t if BITS == 5 else word_count(BITS, C.column) * t
    mine = base + g * C.pitch + word * 4
    after, shift = mine, mine
    if BITS == 3 or BITS == 5:
        after, shift = base + g * C.pitch + gl.minimum(word + 1, BITS - 1) * 4, 8 * BITS * t % 32
    line += g * C.s_pitch + t * (C.s_run // 4)
    if not C.whole:
        line += g * C.s_row % 4
    totals = ((tid * 0).to(gl.float32),) * (2 * R)
    slot = 0 * warp
    if AHEAD:
        x_next = load_run_x(x, warp, g, t, BITS, AFFINE, C)
    for i in range(MINE):
        if AHEAD:
            xs, x_next = x_next, load_run_x(x, warp + (i + 1) * W, g, t, BITS, AFFINE, C)
        else:
            xs = load_run_x(x, warp + i * W, g, t, BITS, AFFINE, C)
        X = column_starts(xs, BITS, C.column, AFFINE)
        new = ()
        for r in gl.static_range(R):
            slot, r0, r1, r2, r3 = block_sums(
                base, slot, mine, after, lane, first, second, start, i, xs, X, shift, r, BITS, AFFINE, PARTS, D, INTERLEAVE, C
            )  # fmt: skip
            at, pair = line + 16 * r * C.s_pitch, (warp + i * W) * 8 + 2 * t
            new += (weigh(totals[2 * r], r0, r1, X, at, pair, AFFINE, GROUP == 128, C),)  # type: ignore[assignment]
            at += 8 * C.s_pitch
            new += (weigh(totals[2 * r + 1], r2, r3, X, at, pair, AFFINE, GROUP == 128, C),)  # type: ignore[assignment]
        totals = new
        line += C.s_held
    gl.thread_barrier()
    for r in gl.static_range(2 * R):
        put(ring + (warp * (2 * R) + r) * 128 + lane * 4, totals[r])
    gl.thread_barrier()
    # eight rows of the first weight precede eight of the second
    row = tid % 8 + tid % (8 * R) // 8 * 16 if GATED else tid % (16 * R)
    out = sum_warps(ring, row, W, R)
    if GATED:
        up = sum_warps(ring, row + 8, W, R)
        # round as two products stored in bf16 would
        out, up = out.to(gl.bfloat16).to(gl.float32), up.to(gl.bfloat16).to(gl.float32)
        out = out / (1.0 + gl.exp(-out)) * up
    if a is not None:
        out += gl.load(a + row0 + tid, tid < C.rows * R, 0.0).to(gl.float32)
    gl.store(y + row0 + tid, out.to(gl.bfloat16), tid < C.rows * R)
    memory._keep_alive()


def _shape(weights: Sequence[QTensor]) -> tuple[int, int, int, int, int]:
    """Choose blocks of 16 rows per program, parts of a run, warps, parts in flight, interleaved columns."""
    first, rows = weights[0], [weight.shape[0] for weight in weights]
    runs = cdiv(first.shape[1], 8 * min(first.group, 64))
    kind = MX if first.biases is None else first.bits, first.group == 32
    # every warp executes the same number of runs, so that up to 20 % may be padding
    eight = kind in EIGHT_WARPS and runs >= MANY_RUNS and 8 * cdiv(runs, 8) <= 1.2 * runs
    block, parts, deep, interleave = (EIGHT_WARPS if eight else FOUR_WARPS)[kind]
    if sum(rows) < MANY_ROWS or any(count % (16 * block) for count in rows):
        block = 1
    return block, parts, 8 if eight else 4, deep, interleave


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
    block, parts, warps, deep, interleave = _shape(weights)
    ends = list(accumulate(weight.shape[0] // (16 * block) for weight in weights))
    splits = () if gated else tuple(ends[:-1])
    products = products_of(weights, outs, biases)
    sizes = gated, weights[0].shape[1], weights[0].bits, weights[0].group, block, parts, warps, deep, interleave
    launch(matvec_codes, (ends[-1],))(x, products, splits, *sizes, num_warps=warps, launch_pdl=True)
