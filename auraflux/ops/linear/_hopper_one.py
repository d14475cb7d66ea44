"""One token times quantized weights on Hopper: how a warp multiplies codes is in `_planes.py`.

y[n] = Σ_k x[k] (code[n, k] scale[n, k/group] + bias[n, k/group])

- An `mma` has eight columns and one token needs one, so column c gets the x of column c of a run: eight share their registers.
- Warps split K and never wait for each other: each fills its own ring in shared memory by `cp.async`.
- Weights are requested before `griddepcontrol.wait`, x after it: the gap between launches disappears behind the kernel before.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops._triton import Build, cdiv
from auraflux.ops.linear._hopper_bytes import multiply_bytes, suits_bytes
from auraflux.ops.linear._hopper_rows import (
    copy_part,
    copy_scales,
    lines_at,
    passed,
    row_pitch,
    scale_piece,
    scale_pitch,
    served,
)
from auraflux.ops.linear._nibbles import AWAIT, COMMIT, SYNC, put, run, shared, wait_ptx, word_at
from auraflux.ops.linear._planes import MX_SHIFT, column_starts, column_sums, load_x, word_count, words_at
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
    x, w, s, b, a, y, w1, s1, b1, a1, y1, w2, s2, b2, a2, y2, w3, s3, b3, a3, y3, end0, end1, end2,
    COUNT: gl.constexpr, GATED: gl.constexpr, K: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr,
    R: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr, D: gl.constexpr, GANG: gl.constexpr,
):  # fmt: skip
    """One token, 16R rows a program. Warp v takes runs v, v + W, ... of eight columns, in PARTS; D parts are in flight.

    Up to four weights have their programs one after the other, the first `end0` of them work for the first; what is in `a` is
    added. GATED takes eight rows of each of two weights, and stores silu(first) * second.
    """
    AFFINE: gl.constexpr = b is not None
    COLUMN: gl.constexpr = min(GROUP, 64)
    COLUMNS: gl.constexpr = K // COLUMN
    MINE: gl.constexpr = ((COLUMNS + 7) // 8 + W - 1) // W
    EVEN: gl.constexpr = COLUMNS % (8 * W) == 0
    ROW: gl.constexpr = K // 8 * BITS
    PART: gl.constexpr = COLUMN * BITS // PARTS
    PITCH: gl.constexpr = row_pitch(PART, BITS, COLUMN)
    SLOT: gl.constexpr = 16 * PITCH
    STRIDE: gl.constexpr = W * PART * PARTS
    WORDS: gl.constexpr = word_count(BITS, COLUMN)
    SIZE: gl.constexpr = 2 if AFFINE else 1
    S_ROW: gl.constexpr = K // GROUP * SIZE
    S_RUN: gl.constexpr = 8 * COLUMN // GROUP * SIZE
    WHOLE: gl.constexpr = scale_piece(S_ROW, S_RUN) > 0
    S_HELD: gl.constexpr = S_RUN if WHOLE else S_RUN + 4
    S_PITCH: gl.constexpr = scale_pitch(MINE, S_HELD)
    STEPS: gl.constexpr = R * PARTS
    BIASES: gl.constexpr = 16 * R * S_PITCH
    PER: gl.constexpr = D * SLOT + SIZE * BIASES
    AHEAD: gl.constexpr = MINE > 1
    ROWS: gl.constexpr = 8 if GATED else 16
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    program = gl.program_id(0)
    before = 0 * program
    if COUNT > 1:  # noqa: SIM102 - decided when the kernel is compiled
        if program >= end0:
            w, s, b, a, y, before = w1, s1, b1, a1, y1, end0
    if COUNT > 2:  # noqa: SIM102 - decided when the kernel is compiled
        if program >= end1:
            w, s, b, a, y, before = w2, s2, b2, a2, y2, end1
    if COUNT > 3:  # noqa: SIM102 - decided when the kernel is compiled
        if program >= end2:
            w, s, b, a, y, before = w3, s3, b3, a3, y3, end2
    row0 = (program - before).to(gl.int64) * (ROWS * R)
    memory, ring = shared(PER * W, tid)
    base = ring + warp * PER
    scales = base + D * SLOT
    start = warp * (PART * PARTS)
    first = w + row0 * ROW + start
    second = (w1 if GATED else w + 8 * ROW) + row0 * ROW + start
    for d in gl.static_range(D):
        ahead = d // STEPS * STRIDE + d % PARTS * PART
        further = ahead + d % STEPS // PARTS * (ROWS * ROW)
        copy_part(base + d * SLOT, lane, first + further, second + further, ROW - ahead - start, ROW, PART, PITCH)
        if d == 0:
            for r in gl.static_range(R):
                to, row = scales + 16 * r * S_PITCH, (row0 + ROWS * r) * S_ROW
                s_last = (s1 if GATED else s + 8 * S_ROW) + row
                copy_scales(to, s + row, s_last, warp, lane, MINE, W, S_ROW, S_RUN, S_HELD, S_PITCH)
                if AFFINE:
                    b_last = (b1 if GATED else b + 8 * S_ROW) + row
                    copy_scales(to + BIASES, b + row, b_last, warp, lane, MINE, W, S_ROW, S_RUN, S_HELD, S_PITCH)
        run(COMMIT, lane)
    run(AWAIT, lane)
    # where a lane's words begin, and by how many bits its stream is shifted there
    word = 24 * t // 32 if BITS == 3 else t if BITS == 5 else WORDS * t
    mine = base + g * PITCH + word * 4
    after, shift = mine, mine
    if BITS == 3 or BITS == 5:
        after, shift = base + g * PITCH + gl.minimum(word + 1, BITS - 1) * 4, 8 * BITS * t % 32
    line = scales + g * S_PITCH + t * (S_RUN // 4)
    if not WHOLE:
        line += g * S_ROW % 4
    totals = ((tid * 0).to(gl.float32),) * (2 * R)
    slot = 0 * warp
    column = gl.minimum(warp * 8 + g, COLUMNS - 1)
    if AHEAD:
        x_next = load_x((x + column * COLUMN).to(gl.int64), t, BITS, COLUMN, AFFINE, "global")
    for i in range(MINE):
        if AHEAD:
            xs = x_next
            column = gl.minimum((warp + (i + 1) * W) * 8 + g, COLUMNS - 1)
            x_next = load_x((x + column * COLUMN).to(gl.int64), t, BITS, COLUMN, AFFINE, "global")
        else:
            column = gl.minimum((warp + i * W) * 8 + g, COLUMNS - 1)
            xs = load_x((x + column * COLUMN).to(gl.int64), t, BITS, COLUMN, AFFINE, "global")
        X = column_starts(xs, BITS, COLUMN, AFFINE)
        new = ()
        for r in gl.static_range(R):
            r0, r1, r2, r3 = X[0], X[0], X[0], X[0]
            for h in gl.static_range(PARTS):
                run(wait_ptx(D - 1), lane)
                ws = ()
                for j in gl.static_range(8 // PARTS):
                    found = words_at(mine + slot, after + slot, j * (COLUMN * BITS // 8), BITS, COLUMN, PITCH)
                    ws += (found,)  # type: ignore[assignment]
                run(SYNC, lane)
                ahead = (i + (r * PARTS + h + D) // STEPS) * STRIDE + (h + D) % PARTS * PART
                further = ahead + (r * PARTS + h + D) % STEPS // PARTS * (ROWS * ROW)
                copy_part(base + slot, lane, first + further, second + further, ROW - ahead - start, ROW, PART, PITCH)
                run(COMMIT, lane)
                for j in gl.static_range(8 // PARTS // GANG):
                    words = ()
                    for n in gl.static_range(GANG):
                        words += ws[j * GANG + n]  # type: ignore[assignment]
                    c = column_sums(words, xs, shift, BITS, COLUMN, AFFINE, 1, GANG)
                    for n in gl.static_range(GANG):
                        keep = t == (h * (8 // PARTS) + j * GANG + n) // 2
                        if (j * GANG + n) % 2 == 0:
                            r0, r2 = gl.where(keep, c[4 * n], r0), gl.where(keep, c[4 * n + 2], r2)
                        else:
                            r1, r3 = gl.where(keep, c[4 * n + 1], r1), gl.where(keep, c[4 * n + 3], r3)
                slot = gl.where(slot == (D - 1) * SLOT, 0, slot + SLOT)
            if AFFINE:
                r0, r1, r2, r3 = r0 + X[2], r1 + X[3], r2 + X[2], r3 + X[3]
            else:
                r0, r1, r2, r3 = r0 * MX_SHIFT, r1 * MX_SHIFT, r2 * MX_SHIFT, r3 * MX_SHIFT
            upper = lines_at(line + 16 * r * S_PITCH, BIASES, AFFINE, WHOLE, GROUP == 128)
            lower = lines_at(line + (16 * r + 8) * S_PITCH, BIASES, AFFINE, WHOLE, GROUP == 128)
            sum0, sum1, sum2, sum3 = upper[0] * r0, upper[1] * r1, lower[0] * r2, lower[1] * r3
            if AFFINE:
                sum0, sum1 = sum0 + upper[2] * X[0], sum1 + upper[3] * X[1]
                sum2, sum3 = sum2 + lower[2] * X[0], sum3 + lower[3] * X[1]
            if not EVEN:
                pair = (warp + i * W) * 8 + 2 * t
                sum0, sum2 = gl.where(pair < COLUMNS, sum0, 0.0), gl.where(pair < COLUMNS, sum2, 0.0)
                sum1, sum3 = gl.where(pair + 1 < COLUMNS, sum1, 0.0), gl.where(pair + 1 < COLUMNS, sum3, 0.0)
            new += (totals[2 * r] + (sum0 + sum1), totals[2 * r + 1] + (sum2 + sum3))  # type: ignore[assignment]
        totals = new
        line += S_HELD
    gl.thread_barrier()
    for r in gl.static_range(2 * R):
        put(ring + (warp * (2 * R) + r) * 128 + lane * 4, totals[r])
    gl.thread_barrier()
    # results of eight rows of the first half lie before those of the second
    row = tid % 8 + tid % (8 * R) // 8 * 16 if GATED else tid % (16 * R)
    out = (tid * 0).to(gl.float32)
    for k in gl.static_range(4 * W):
        out += word_at(ring + k // 4 * (256 * R) + row * 16 + k % 4 * 4).to(gl.float32, bitcast=True)
    if GATED:
        up = (tid * 0).to(gl.float32)
        for k in gl.static_range(4 * W):
            up += word_at(ring + k // 4 * (256 * R) + (row + 8) * 16 + k % 4 * 4).to(gl.float32, bitcast=True)
        # as two products stored in bf16 would have it
        out, up = out.to(gl.bfloat16).to(gl.float32), up.to(gl.bfloat16).to(gl.float32)
        out = out / (1.0 + gl.exp(-out)) * up
    if a is not None:
        out += gl.load(a + row0 + tid, tid < ROWS * R, 0.0).to(gl.float32)
    gl.store(y + row0 + tid, out.to(gl.bfloat16), tid < ROWS * R)
    memory._keep_alive()


def fits_codes_one(x: Tensor, weights: Sequence[QTensor], added: Sequence[Tensor | None] = ()) -> bool:
    """Whether `multiply_codes_one` serves one token times weights of one format."""
    return (
        x.shape[0] == 1
        and 0 < len(weights) <= MOST_WEIGHTS
        and 0 < x.shape[1] <= WIDEST
        and len({vector is None for vector in added}) <= 1
        and all(served(x, weight) for weight in weights)
    )


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


def multiply_codes_one(
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
    if suits_bytes(x, weights):
        multiply_bytes(x, weights, outs, added, gated)
        return
    args: list[Any] = []
    for number in range(MOST_WEIGHTS):
        args += passed(weights[number]) if number < len(weights) else [None] * 3
        args.append(added[number] if number < len(added) else None)
        args.append(outs[number] if number < len(outs) else None)
    block, parts, warps, deep, gang = _shape(weights)
    ends = list(accumulate(weight.shape[0] // (16 * block) for weight in weights))
    count = 1 if gated else len(weights)
    args += [ends[number] if number < count - 1 else None for number in range(MOST_WEIGHTS - 1)]
    sizes = count, gated, weights[0].shape[1], weights[0].bits, weights[0].group, block, parts, warps, deep, gang
    matvec_codes[(ends[-1],)](x, *args, *sizes, num_warps=warps, launch_pdl=True)


def _builds() -> list[Build]:
    """Each of the formats, three weights, and two of an MLP."""
    names, codes = "wsbay", "*i8 *i8 *i8"

    def build(types: str, weights: int, kind: tuple[int, bool], group: int, width: int, warps: int, **flags: Any) -> Build:
        block, parts, deep, gang = (EIGHT_WARPS if warps == 8 else FOUR_WARPS)[kind]
        absent = [f"{name}{number}" for number in range(weights, MOST_WEIGHTS) for name in names]
        absent += ["a", "a1", "a2", "a3", *(f"end{number}" for number in range(max(flags["COUNT"], 1) - 1, MOST_WEIGHTS - 1))]
        absent += (["b"] if kind[0] == MX else []) + (["y1"] if flags["GATED"] else [])
        sizes = {
            "K": width,
            "BITS": kind[0] or 4,
            "GROUP": group,
            "R": block,
            "PARTS": parts,
            "W": warps,
            "D": deep,
            "GANG": gang,
        }
        return Build(matvec_codes, types, {**dict.fromkeys(absent), **flags, **sizes}, hot=True, options={"num_warps": warps})

    one, alone = f"*bf16 {codes} *bf16", {"COUNT": 1, "GATED": False}
    three = f"*bf16 {' '.join([f'{codes} *bf16'] * 3)} i32 i32"
    return [
        *(build(one, 1, (bits, False), 64, 8192, 8, **alone) for bits in (2, 8)),
        *(build(one, 1, (bits, False), 64, 8192, 4, **alone) for bits in (3, 5, 6)),
        build(one, 1, (4, True), 32, 8192, 8, **alone),
        build("*bf16 *i8 *i8 *bf16", 1, (MX, True), 32, 8192, 8, **alone),
        build("*bf16 *i8 *i8 *bf16", 1, (MX, True), 32, 2880, 4, **alone),
        build(one, 1, (4, False), 64, 8256, 4, **alone),
        build(one, 1, (4, False), 128, 8192, 4, **alone),
        build(three, 3, (8, False), 64, 4096, 4, COUNT=3, GATED=False),
        build(f"{one} {codes}", 2, (8, False), 64, 4096, 4, COUNT=1, GATED=True),
    ]


ONE_BUILDS = _builds()
