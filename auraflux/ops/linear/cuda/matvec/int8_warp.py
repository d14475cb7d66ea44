"""Steps of a warp that multiplies codes as bytes on Hopper.

Request codes and scales, multiply a run of columns, scale the sums.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.copy import COMMIT, wait_ptx
from auraflux.ops.hopper.mma_int8 import byte_sums, byte_words_at, column_of, raw_x, rounded, sums_of_x
from auraflux.ops.hopper.ptx import SYNC, run
from auraflux.ops.hopper.reduce import sum_four
from auraflux.ops.hopper.shared_memory import word_at
from auraflux.ops.linear.cuda.row_copies import copy_part, copy_scales, row_pitch, scale_piece, scale_pitch, scales_at


@dataclass(frozen=True)
class ByteLayout:
    """Layout of a warp's codes and scales in memory and in its ring; bytes unless stated otherwise.

    column, columns  inputs per column, columns of K
    mine             consecutive runs of eight columns per warp
    row, part        codes of a row, and of one request
    pitch, slot      from row to row of a part in the ring, from part to part
    block, steps     from one block of 16 rows to the next; parts of a run over all blocks
    s_row, s_run     scales of a row, of a run
    s_held, s_pitch  from run to run of scales in the ring, from row to row; biases follow s_all bytes on
    whole, even      whether scales are full words, whether every run exists
    """

    column: int
    columns: int
    mine: int
    row: int
    part: int
    pitch: int
    slot: int
    block: int
    steps: int
    s_row: int
    s_run: int
    s_held: int
    s_pitch: int
    s_all: int
    whole: bool
    even: bool


@gluon.constexpr_function
def byte_layout(width, bits, group, gated, blocks, parts, warps):
    column = min(group, 64)
    columns = width // column
    mine = -(-columns // (8 * warps))
    row, part = width // 8 * bits, column * bits // parts
    pitch = row_pitch(part, bits, column)
    s_row, s_run = width // group * 2, 8 * column // group * 2
    whole = scale_piece(s_row, s_run) > 0
    s_held = s_run if whole else s_run + 4
    # where scales are not full words, two words are read
    s_pitch = mine * s_held if whole else scale_pitch(mine, s_held)
    return ByteLayout(
        column, columns, mine, row, part, pitch, 16 * pitch, (8 if gated else 16) * row, blocks * parts,
        s_row, s_run, s_held, s_pitch, 16 * blocks * s_pitch, whole, columns % (8 * warps) == 0,
    )  # fmt: skip


@gluon.jit
def request_part(to, lane, first, second, start, at, STEP: gl.constexpr, PARTS: gl.constexpr, C: gl.constexpr):
    """Request one of a warp's parts, counted from its run `at`; past a row's end nothing is copied."""
    later = at + STEP // C.steps
    ahead = later * (PARTS * C.part) + STEP % PARTS * C.part
    further = ahead + STEP % C.steps // PARTS * C.block
    # past a warp's last run lie those of the next warp
    left = gl.where(later < C.mine, C.row - ahead - start, 0)
    copy_part(to, lane, first + further, second + further, left, C.row, C.part, C.pitch)


@gluon.jit
def request_scales(to, s, b, s1, b1, row0, run0, lane, GATED: gl.constexpr, R: gl.constexpr, C: gl.constexpr):
    """Request the scales and biases of a warp's runs; where GATED, the second weight's for the last eight rows of 16."""
    for r in gl.static_range(R):
        at, row = to + 16 * r * C.s_pitch, (row0 + (8 if GATED else 16) * r) * C.s_row
        last = (s1 if GATED else s + 8 * C.s_row) + row
        copy_scales(at, s + row, last, run0, lane, C.mine, 1, C.s_row, C.s_run, C.s_held, C.s_pitch)
        last = (b1 if GATED else b + 8 * C.s_row) + row
        copy_scales(at + C.s_all, b + row, last, run0, lane, C.mine, 1, C.s_row, C.s_run, C.s_held, C.s_pitch)


@gluon.jit
def load_run_x(x, at, lane, C: gl.constexpr):
    """Load the x of a lane's codes of one column of run `at`."""
    column = at * 8 + column_of(lane)
    place = (x + gl.minimum(column, C.columns - 1) * C.column).to(gl.int64)
    return raw_x(place, lane % 4, C.column)


@gluon.jit
def inputs(x, lane, BITS: gl.constexpr, C: gl.constexpr):
    """Return x as `block_sums` takes it; for each column that a lane accumulates, the sum of x and the factor of its sums."""
    REGS: gl.constexpr = C.column // 8
    both, X, factors = (), (), ()
    made = rounded(x, lane, BITS, C.column)
    for n in gl.static_range(REGS):
        both += (made[n],)  # type: ignore[assignment]
    sums = sums_of_x(both, BITS, C.column)
    high = gl.where(lane % 4 < 2, 256, 1).to(gl.float32)
    for k in gl.static_range(4):
        factors += (made[REGS + k] * high,)  # type: ignore[assignment]
        X += (sums[k].to(gl.float32) * factors[k],)  # type: ignore[assignment]
    return both, X, factors


@gluon.jit
def _select_columns(sums_of_columns, sums, lane, FIRST: gl.constexpr, INTERLEAVE: gl.constexpr):
    """Store the sums of columns from FIRST on in their places: four columns of rows g, then four of rows g + 8."""
    for n in gl.static_range(INTERLEAVE):
        new = ()
        for k in gl.static_range(8):
            if k % 4 == (FIRST + n) % 4:
                found = sums[4 * n + k // 4 * 2 + (FIRST + n) % 2]
                new += (gl.where(lane % 2 == (FIRST + n) // 4, found, sums_of_columns[k]),)  # type: ignore[assignment]
            else:
                new += (sums_of_columns[k],)  # type: ignore[assignment]
        sums_of_columns = new
    return sums_of_columns


@gluon.jit
def block_sums(
    base, slot, mine, lane, first, second, start, at, x, shift,
    BLOCK: gl.constexpr, BITS: gl.constexpr, PARTS: gl.constexpr, D: gl.constexpr, INTERLEAVE: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Multiply run `at` of 16 rows and refill its slots; return the next slot and the sums that `_select_columns` selects."""
    HELD: gl.constexpr = 8 // PARTS
    sums_of_columns = (0 * lane,) * 8
    for h in gl.static_range(PARTS):
        run(wait_ptx(D - 1), lane)
        words = ()
        for j in gl.static_range(HELD):
            found = byte_words_at(mine + slot, j * (C.column * BITS // 8), BITS, C.column, C.pitch)
            words += (found,)  # type: ignore[assignment]
        run(SYNC, lane)
        request_part(base + slot, lane, first, second, start, at, BLOCK * PARTS + h + D, PARTS, C)
        run(COMMIT, lane)
        for j in gl.static_range(HELD // INTERLEAVE):
            some = ()
            for n in gl.static_range(INTERLEAVE):
                some += words[j * INTERLEAVE + n]  # type: ignore[assignment]
            sums = byte_sums(some, x + shift, BITS, C.column, INTERLEAVE, (h * HELD + j * INTERLEAVE) % 4)
            sums_of_columns = _select_columns(sums_of_columns, sums, lane, h * HELD + j * INTERLEAVE, INTERLEAVE)
        slot = gl.where(slot == (D - 1) * C.slot, 0, slot + C.slot)
    return slot, sums_of_columns


@gluon.jit
def weigh(total, sums_of_columns, X, factors, line, column, HALF: gl.constexpr, ONE_GROUP: gl.constexpr, C: gl.constexpr):
    """Add scale * Σ code x + bias * Σ x of a row's four columns from `column` on to its total."""
    found = (column * 0).to(gl.float32)
    for k in gl.static_range(4):
        if k % 2 == 0:
            lines = scales_at(line + k * (1 if ONE_GROUP else 2), C.s_all, True, C.whole, ONE_GROUP)
        sums = sums_of_columns[HALF * 4 + k].to(gl.float32) * factors[k]
        if C.even:
            found += lines[k % 2] * sums
            found += lines[2 + k % 2] * X[k]
        else:
            found += gl.where(column + k < C.columns, lines[k % 2] * sums + lines[2 + k % 2] * X[k], 0.0)
    return total + found


@gluon.jit
def sum_warps(at, W: gl.constexpr, R: gl.constexpr):
    """Sum what four lanes of each warp have for a row."""
    found = (at * 0).to(gl.float32)
    for k in gl.static_range(W):
        found += word_at(at + k * (256 * R)).to(gl.float32, bitcast=True)
    return sum_four(found)
