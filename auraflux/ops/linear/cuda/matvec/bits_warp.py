"""Steps of a warp that multiplies codes as bf16 pairs on Hopper, for one token.

Request codes and scales, multiply runs of columns.

`int8_warp.py` does the same with codes as bytes.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.copy import COMMIT, wait_ptx
from auraflux.ops.hopper.mma_bits import MX_SHIFT, column_sums, load_x, words_at
from auraflux.ops.hopper.ptx import SYNC, run
from auraflux.ops.hopper.shared_memory import word_at
from auraflux.ops.linear.cuda.row_copies import copy_part, copy_scales, row_pitch, scale_piece, scale_pitch, scales_at


@dataclass(frozen=True)
class RunLayout:
    """Layout of a warp's runs in memory and in its ring; bytes unless stated otherwise.

    column, columns  inputs per column, columns of K
    mine, even       runs per warp, every W-th; whether all exist
    row, part        codes of a row, and of one request
    pitch, slot      from row to row of a part in the ring, from part to part
    stride           from one of a warp's runs to the next
    rows, steps      rows of a weight per block; parts of a run over all blocks
    s_row, s_run     scales of a row, of a run
    s_held, s_pitch  from run to run of scales in the ring, from row to row; biases follow s_all bytes on
    whole            whether scales are full words
    """

    column: int
    columns: int
    mine: int
    even: bool
    row: int
    part: int
    pitch: int
    slot: int
    stride: int
    rows: int
    steps: int
    s_row: int
    s_run: int
    s_held: int
    s_pitch: int
    s_all: int
    whole: bool


@gluon.constexpr_function
def warp_runs(width, bits, group, affine, gated, blocks, parts, warps):
    column = min(group, 64)
    columns = width // column
    mine = ((columns + 7) // 8 + warps - 1) // warps
    row, part = width // 8 * bits, column * bits // parts
    pitch, size = row_pitch(part, bits, column), 2 if affine else 1
    s_row, s_run = width // group * size, 8 * column // group * size
    whole = scale_piece(s_row, s_run) > 0
    s_held = s_run if whole else s_run + 4
    s_pitch = scale_pitch(mine, s_held)
    return RunLayout(
        column, columns, mine, columns % (8 * warps) == 0, row, part, pitch, 16 * pitch, warps * part * parts,
        8 if gated else 16, blocks * parts, s_row, s_run, s_held, s_pitch, 16 * blocks * s_pitch, whole,
    )  # fmt: skip


@gluon.jit
def request_part(to, lane, first, second, start, at, STEP: gl.constexpr, PARTS: gl.constexpr, C: gl.constexpr):
    """Request one of a warp's parts, counted from its run `at`; past a row's end nothing is copied."""
    ahead = (at + STEP // C.steps) * C.stride + STEP % PARTS * C.part
    further = ahead + STEP % C.steps // PARTS * (C.rows * C.row)
    copy_part(to, lane, first + further, second + further, C.row - ahead - start, C.row, C.part, C.pitch)


@gluon.jit
def request_scales(
    to, s, b, s1, b1, row0, warp, lane, GATED: gl.constexpr, R: gl.constexpr, W: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Request the scales of a warp's runs, and biases if any; where GATED, the second weight's for eight rows of 16."""
    for r in gl.static_range(R):
        at, row = to + 16 * r * C.s_pitch, (row0 + C.rows * r) * C.s_row
        last = (s1 if GATED else s + 8 * C.s_row) + row
        copy_scales(at, s + row, last, warp, lane, C.mine, W, C.s_row, C.s_run, C.s_held, C.s_pitch)
        if b is not None:
            last = (b1 if GATED else b + 8 * C.s_row) + row
            copy_scales(at + C.s_all, b + row, last, warp, lane, C.mine, W, C.s_row, C.s_run, C.s_held, C.s_pitch)


@gluon.jit
def load_run_x(x, at, g, t, BITS: gl.constexpr, AFFINE: gl.constexpr, C: gl.constexpr):
    """Load the x of a lane's codes of column g of run `at`."""
    column = gl.minimum(at * 8 + g, C.columns - 1)
    return load_x((x + column * C.column).to(gl.int64), t, BITS, C.column, AFFINE, "global")


@gluon.jit
def block_sums(
    base, slot, mine, after, lane, first, second, start, at, x, X, shift, BLOCK: gl.constexpr, BITS: gl.constexpr,
    AFFINE: gl.constexpr, PARTS: gl.constexpr, D: gl.constexpr, INTERLEAVE: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Multiply run `at` of 16 rows and refill its slots; return the next slot and the sums of a lane's two columns.

    The sums are those of rows g (2) and g + 8 (2).
    """
    HELD: gl.constexpr = 8 // PARTS
    r0, r1, r2, r3 = X[0], X[0], X[0], X[0]
    for h in gl.static_range(PARTS):
        run(wait_ptx(D - 1), lane)
        ws = ()
        for j in gl.static_range(HELD):
            found = words_at(mine + slot, after + slot, j * (C.column * BITS // 8), BITS, C.column, C.pitch)
            ws += (found,)  # type: ignore[assignment]
        run(SYNC, lane)
        request_part(base + slot, lane, first, second, start, at, BLOCK * PARTS + h + D, PARTS, C)
        run(COMMIT, lane)
        for j in gl.static_range(HELD // INTERLEAVE):
            words = ()
            for n in gl.static_range(INTERLEAVE):
                words += ws[j * INTERLEAVE + n]  # type: ignore[assignment]
            c = column_sums(words, x, shift, BITS, C.column, AFFINE, 1, INTERLEAVE)
            for n in gl.static_range(INTERLEAVE):
                owned = lane % 4 == (h * HELD + j * INTERLEAVE + n) // 2
                if (j * INTERLEAVE + n) % 2 == 0:
                    r0, r2 = gl.where(owned, c[4 * n], r0), gl.where(owned, c[4 * n + 2], r2)
                else:
                    r1, r3 = gl.where(owned, c[4 * n + 1], r1), gl.where(owned, c[4 * n + 3], r3)
        slot = gl.where(slot == (D - 1) * C.slot, 0, slot + C.slot)
    if AFFINE:
        r0, r1, r2, r3 = r0 + X[2], r1 + X[3], r2 + X[2], r3 + X[3]
    else:
        r0, r1, r2, r3 = r0 * MX_SHIFT, r1 * MX_SHIFT, r2 * MX_SHIFT, r3 * MX_SHIFT
    return slot, r0, r1, r2, r3


@gluon.jit
def weigh(total, sum0, sum1, X, line, pair, AFFINE: gl.constexpr, ONE_GROUP: gl.constexpr, C: gl.constexpr):
    """Add scale * Σ code x + bias * Σ x of a lane's two columns of a row to its total; `pair` is the first column."""
    lines = scales_at(line, C.s_all, AFFINE, C.whole, ONE_GROUP)
    sum0, sum1 = lines[0] * sum0, lines[1] * sum1
    if AFFINE:
        sum0, sum1 = sum0 + lines[2] * X[0], sum1 + lines[3] * X[1]
    if not C.even:
        sum0, sum1 = gl.where(pair < C.columns, sum0, 0.0), gl.where(pair + 1 < C.columns, sum1, 0.0)
    return total + (sum0 + sum1)


@gluon.jit
def sum_warps(ring, row, W: gl.constexpr, R: gl.constexpr):
    """Sum what four lanes of each warp have for a row."""
    found = (row * 0).to(gl.float32)
    for k in gl.static_range(4 * W):
        found += word_at(ring + k // 4 * (256 * R) + row * 16 + k % 4 * 4).to(gl.float32, bitcast=True)
    return found
