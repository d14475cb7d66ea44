"""What a warp does with codes as bytes on Hopper: ask for them and their scales, multiply a run of columns, weigh the sums."""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.copy import COMMIT, wait_ptx
from auraflux.ops.hopper.mma_int8 import byte_sums, byte_words_at, column_of, raw_x, rounded, sums_of_x
from auraflux.ops.hopper.ptx import SYNC, run
from auraflux.ops.hopper.reduce import sum_four
from auraflux.ops.hopper.shared_memory import word_at
from auraflux.ops.linear.cuda.row_copies import copy_part, copy_scales, lines_at, row_pitch, scale_piece, scale_pitch


@dataclass(frozen=True)
class Cut:
    """How a warp's codes and scales are cut into what is asked for at a time, and held; bytes where nothing else is said.

    column, columns  inputs of a column, columns of K
    mine             runs of eight columns of a warp, one beside the other
    row, part        codes of a row, and those of them that are asked for at a time
    pitch, slot      from row to row where parts are held, from part to part
    block, steps     from one block of 16 rows to the next; parts of a run of all blocks, in number
    s_row, s_run     scales of a row, of a run
    s_held, s_pitch  from run to run where they are held, from row to row; biases lie s_all further on
    whole, even      whether scales are whole words, whether every run is there
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
def cut_of(width, bits, group, gated, blocks, parts, warps):
    column = min(group, 64)
    columns = width // column
    mine = -(-columns // (8 * warps))
    row, part = width // 8 * bits, column * bits // parts
    pitch = row_pitch(part, bits, column)
    s_row, s_run = width // group * 2, 8 * column // group * 2
    whole = scale_piece(s_row, s_run) > 0
    s_held = s_run if whole else s_run + 4
    # where scales are not whole words, two are read
    s_pitch = mine * s_held if whole else scale_pitch(mine, s_held)
    return Cut(
        column, columns, mine, row, part, pitch, 16 * pitch, (8 if gated else 16) * row, blocks * parts,
        s_row, s_run, s_held, s_pitch, 16 * blocks * s_pitch, whole, columns % (8 * warps) == 0,
    )  # fmt: skip


@gluon.jit
def ask(to, lane, first, second, start, at, STEP: gl.constexpr, PARTS: gl.constexpr, C: gl.constexpr):
    """Request one of a warp's parts, counted from its run number `at` on; there is none behind a row's end."""
    later = at + STEP // C.steps
    ahead = later * (PARTS * C.part) + STEP % PARTS * C.part
    further = ahead + STEP % C.steps // PARTS * C.block
    # where a warp's runs end, the next one's begin
    left = gl.where(later < C.mine, C.row - ahead - start, 0)
    copy_part(to, lane, first + further, second + further, left, C.row, C.part, C.pitch)


@gluon.jit
def ask_lines(to, s, b, s1, b1, row0, run0, lane, GATED: gl.constexpr, R: gl.constexpr, C: gl.constexpr):
    """Request the scales and biases of a warp's runs; of the second weight for the last eight rows of 16 where GATED."""
    for r in gl.static_range(R):
        at, row = to + 16 * r * C.s_pitch, (row0 + (8 if GATED else 16) * r) * C.s_row
        last = (s1 if GATED else s + 8 * C.s_row) + row
        copy_scales(at, s + row, last, run0, lane, C.mine, 1, C.s_row, C.s_run, C.s_held, C.s_pitch)
        last = (b1 if GATED else b + 8 * C.s_row) + row
        copy_scales(at + C.s_all, b + row, last, run0, lane, C.mine, 1, C.s_row, C.s_run, C.s_held, C.s_pitch)


@gluon.jit
def ask_x(x, at, lane, C: gl.constexpr):
    """The x of a lane's codes of one column of run `at`."""
    column = at * 8 + column_of(lane)
    place = (x + gl.minimum(column, C.columns - 1) * C.column).to(gl.int64)
    return raw_x(place, lane % 4, C.column)


@gluon.jit
def inputs(x, lane, BITS: gl.constexpr, C: gl.constexpr):
    """x as `block_sums` takes it; of each column that a lane keeps the sum of x, and what sums of codes are multiplied by."""
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
def _keep(kept, sums, lane, FIRST: gl.constexpr, GANG: gl.constexpr):
    """Put sums of columns from FIRST on where they belong: four columns of rows g, then as many of rows g + 8."""
    for n in gl.static_range(GANG):
        new = ()
        for k in gl.static_range(8):
            if k % 4 == (FIRST + n) % 4:
                found = sums[4 * n + k // 4 * 2 + (FIRST + n) % 2]
                new += (gl.where(lane % 2 == (FIRST + n) // 4, found, kept[k]),)  # type: ignore[assignment]
            else:
                new += (kept[k],)  # type: ignore[assignment]
        kept = new
    return kept


@gluon.jit
def block_sums(
    base, slot, mine, lane, first, second, start, at, x, shift,
    BLOCK: gl.constexpr, BITS: gl.constexpr, PARTS: gl.constexpr, D: gl.constexpr, GANG: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Multiply run `at` of 16 rows, whose slots are filled again. Gives the next slot, and what `_keep` keeps."""
    HELD: gl.constexpr = 8 // PARTS
    kept = (0 * lane,) * 8
    for h in gl.static_range(PARTS):
        run(wait_ptx(D - 1), lane)
        words = ()
        for j in gl.static_range(HELD):
            found = byte_words_at(mine + slot, j * (C.column * BITS // 8), BITS, C.column, C.pitch)
            words += (found,)  # type: ignore[assignment]
        run(SYNC, lane)
        ask(base + slot, lane, first, second, start, at, BLOCK * PARTS + h + D, PARTS, C)
        run(COMMIT, lane)
        for j in gl.static_range(HELD // GANG):
            some = ()
            for n in gl.static_range(GANG):
                some += words[j * GANG + n]  # type: ignore[assignment]
            sums = byte_sums(some, x + shift, BITS, C.column, GANG, (h * HELD + j * GANG) % 4)
            kept = _keep(kept, sums, lane, h * HELD + j * GANG, GANG)
        slot = gl.where(slot == (D - 1) * C.slot, 0, slot + C.slot)
    return slot, kept


@gluon.jit
def weigh(total, kept, X, factors, line, column, HALF: gl.constexpr, ALIKE: gl.constexpr, C: gl.constexpr):
    """Add scale * Σ code x + bias * Σ x of what is kept of a row to its total; `column` is the first of four."""
    found = (column * 0).to(gl.float32)
    for k in gl.static_range(4):
        if k % 2 == 0:
            lines = lines_at(line + k * (1 if ALIKE else 2), C.s_all, True, C.whole, ALIKE)
        sums = kept[HALF * 4 + k].to(gl.float32) * factors[k]
        if C.even:
            found += lines[k % 2] * sums
            found += lines[2 + k % 2] * X[k]
        else:
            found += gl.where(column + k < C.columns, lines[k % 2] * sums + lines[2 + k % 2] * X[k], 0.0)
    return total + found


@gluon.jit
def added(at, W: gl.constexpr, R: gl.constexpr):
    """What all warps and four lanes of each found for a row."""
    found = (at * 0).to(gl.float32)
    for k in gl.static_range(W):
        found += word_at(at + k * (256 * R)).to(gl.float32, bitcast=True)
    return sum_four(found)
