"""One token times quantized weights on Hopper: how a warp multiplies codes is in `hopper/mma_bits.py`.

y[n] = Σ_k x[k] (code[n, k] scale[n, k/group] + bias[n, k/group])

- An `mma` has eight columns and one token needs one, so column c gets the x of column c of a run: eight share their registers.
- Warps split K and never wait for each other: each fills its own ring in shared memory by `cp.async`.
- Weights are requested before `griddepcontrol.wait`, x after it: the gap between launches disappears behind the kernel before.
"""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.copy import COMMIT
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.mma_bits import column_starts, word_count
from auraflux.ops.hopper.ptx import AWAIT, run, shared
from auraflux.ops.hopper.shared_memory import put
from auraflux.ops.hopper.sizes import cdiv
from auraflux.ops.linear.cuda.matvec_bits_warp import added, ask, ask_lines, ask_x, block_sums, runs_of, weigh
from auraflux.ops.linear.cuda.row_copies import chosen, products_of
from auraflux.quant import QTensor

MOST_WEIGHTS = 4  # that one launch multiplies one token by
WIDEST = 32768  # inputs whose scales shared memory holds
MANY_RUNS = 16  # of eight columns: enough for eight warps
MANY_ROWS = 8192  # enough for programs of several blocks
MX = 0  # stands for the bits of MXFP4 below
# by bits and whether groups are of 32: blocks of 16 rows of a program, where there are many rows; parts of a run, parts in
# flight, columns in turns. Measured on an H200, 8192 x 8192; what is not among those for eight warps was no better with them
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
    PARTS: gl.constexpr, W: gl.constexpr, D: gl.constexpr, GANG: gl.constexpr,
):  # fmt: skip
    """One token, 16R rows a program. Warp v takes runs v, v + W, ... of eight columns, in PARTS; D parts are in flight.

    Weights have their programs one after the other, see `chosen`; products may be added to. GATED takes eight rows of each of
    two weights, and stores silu(first) * second.
    """
    AFFINE: gl.constexpr = products[0].codes.biases is not None
    C: gl.constexpr = runs_of(K, BITS, GROUP, AFFINE, GATED, R, PARTS, W)
    MINE: gl.constexpr = C.mine
    PER: gl.constexpr = D * C.slot + (2 if AFFINE else 1) * C.s_all
    AHEAD: gl.constexpr = MINE > 1
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    program = gl.program_id(0)
    own, number = chosen(program, ends, [(each.codes.packed, each.codes.scales, each.out) for each in products])
    w, s, y = own
    # apart, since a function cannot return None
    b = chosen(program, ends, [each.codes.biases for each in products])[0] if AFFINE else None
    a = chosen(program, ends, [each.added for each in products])[0] if products[0].added is not None else None
    also = products[1 if GATED else 0].codes
    row0 = number.to(gl.int64) * (C.rows * R)
    memory, ring = shared(PER * W, tid)
    base = ring + warp * PER
    line, start = base + D * C.slot, warp * (C.part * PARTS)
    first = w + row0 * C.row + start
    second = (also.packed if GATED else w + 8 * C.row) + row0 * C.row + start
    for d in gl.static_range(D):
        ask(base + d * C.slot, lane, first, second, start, 0, d, PARTS, C)
        if d == 0:
            ask_lines(line, s, b, also.scales, also.biases, row0, warp, lane, GATED, R, W, C)
        run(COMMIT, lane)
    run(AWAIT, lane)
    # where a lane's words begin, and by how many bits its stream is shifted there
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
        x_next = ask_x(x, warp, g, t, BITS, AFFINE, C)
    for i in range(MINE):
        if AHEAD:
            xs, x_next = x_next, ask_x(x, warp + (i + 1) * W, g, t, BITS, AFFINE, C)
        else:
            xs = ask_x(x, warp + i * W, g, t, BITS, AFFINE, C)
        X = column_starts(xs, BITS, C.column, AFFINE)
        new = ()
        for r in gl.static_range(R):
            slot, r0, r1, r2, r3 = block_sums(
                base, slot, mine, after, lane, first, second, start, i, xs, X, shift, r, BITS, AFFINE, PARTS, D, GANG, C
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
    # results of eight rows of the first half lie before those of the second
    row = tid % 8 + tid % (8 * R) // 8 * 16 if GATED else tid % (16 * R)
    out = added(ring, row, W, R)
    if GATED:
        up = added(ring, row + 8, W, R)
        # as two products stored in bf16 would have it
        out, up = out.to(gl.bfloat16).to(gl.float32), up.to(gl.bfloat16).to(gl.float32)
        out = out / (1.0 + gl.exp(-out)) * up
    if a is not None:
        out += gl.load(a + row0 + tid, tid < C.rows * R, 0.0).to(gl.float32)
    gl.store(y + row0 + tid, out.to(gl.bfloat16), tid < C.rows * R)
    memory._keep_alive()


def _shape(weights: Sequence[QTensor]) -> tuple[int, int, int, int, int]:
    """Blocks of 16 rows of a program, parts of a run, warps, parts in flight, columns in turns."""
    first, rows = weights[0], [weight.shape[0] for weight in weights]
    runs = cdiv(first.shape[1], 8 * min(first.group, 64))
    kind = MX if first.biases is None else first.bits, first.group == 32
    # each warp takes as many runs, whether they are there or not
    eight = kind in EIGHT_WARPS and runs >= MANY_RUNS and 8 * cdiv(runs, 8) <= 1.2 * runs
    block, parts, deep, gang = (EIGHT_WARPS if eight else FOUR_WARPS)[kind]
    if sum(rows) < MANY_ROWS or any(count % (16 * block) for count in rows):
        block = 1
    return block, parts, 8 if eight else 4, deep, gang


def multiply(
    x: Tensor,
    weights: Sequence[QTensor],
    outs: Sequence[Tensor],
    added: Sequence[Tensor | None] = (),
    gated: bool = False,
) -> None:
    """One token times up to MOST_WEIGHTS weights of one width and format in one launch, into bf16 [1, N] each.

    added   vectors to add, one for each weight, or none at all
    gated   silu(first product) * second, into one out
    """
    block, parts, warps, deep, gang = _shape(weights)
    ends = list(accumulate(weight.shape[0] // (16 * block) for weight in weights))
    parted = () if gated else tuple(ends[:-1])
    products = products_of(weights, outs, added)
    sizes = gated, weights[0].shape[1], weights[0].bits, weights[0].group, block, parts, warps, deep, gang
    launch(matvec_codes, (ends[-1],))(x, products, parted, *sizes, num_warps=warps, launch_pdl=True)
