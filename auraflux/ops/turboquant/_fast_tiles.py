"""The inner loops of decode attention on codes, as LLVM IR: bytes looked up in tables, and dot products of bytes.

Keys: a lane holds four coordinates of one token, so that a dot product adds to the scores of LANES tokens. Values: a lane holds
one coordinate of four tokens, so that a dot product sums over those. Either way rows of packed words are turned side by side
in registers, by shuffles within 128 bits.

Levels are signed bytes. Queries and weights are two bytes of seven bits, high and low, kept unsigned: products of seven bits
with eight fit every instruction. Queries are therefore stored plus 64, and take back 64 times the sum of the levels.
"""

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils

from auraflux.ops._jit import LINE
from auraflux.ops._simd import (
    F32,
    I8,
    I32,
    I64,
    ISA,
    at,
    call,
    cpu_features,
    kernel,
    load,
    pick,
    splat,
    spread,
    store,
    variable,
    vector,
)
from auraflux.ops.turboquant.codebook import index_of_rank, normal_levels

LANES = ISA.lanes
BYTES = 4 * LANES  # of a vector, and how many bytes it holds
HIGH = 128  # what one step of a high byte is worth in steps of the low one
MOST = 127 * HIGH + 64  # of a weight; an approximate exponential may be a little above
MOST_Q = 63 * HIGH + 63  # of a query's coordinate
OFFSET = 64  # what is added to a query's bytes
LEVEL_BYTES = {4: 1, 8: 2}

# whether one instruction looks up bytes in 128 entries
WIDE_LOOK_UP = ISA.name == "avx512-vnni" and "avx512vbmi" in cpu_features()
# where `look_up` mirrors the levels, their order must
FAST_KEY_BITS = tuple(
    b for b in LEVEL_BYTES if b == 4 or torch.equal(index_of_rank(b), (1 << b) - 1 - index_of_rank(b).flip(0))
)


def level_bytes(bits: int) -> tuple[list[list[int]], float]:
    """The levels of N(0, 1) by code as high (and low) bytes, and what one step of the last of them is worth."""
    levels = np.empty(1 << bits)
    levels[index_of_rank(bits).numpy()] = normal_levels(bits)
    if LEVEL_BYTES[bits] == 2:
        unit = float(np.abs(levels).max()) / (127 * HIGH)
        steps = np.rint(levels / unit).astype(int)
        high = (steps + HIGH // 2) // HIGH
        return [high.tolist(), (steps - HIGH * high).tolist()], float(unit)
    # the scale at which the levels fall nearest to integers; a level is as frequent as its cell is wide and dense
    order = np.sort(levels)
    weight = np.exp(-(order**2) / 2) * np.gradient(order)
    scales = np.linspace(76, 127, 4000) / order[-1]
    errors = [np.sum(weight * (np.rint(order * s) / s - order) ** 2) for s in scales]
    scale = scales[int(np.argmin(errors))]
    return [np.rint(levels * scale).astype(int).tolist()], float(1 / scale)


TABLES = {bits: level_bytes(bits) for bits in FAST_KEY_BITS}
KEY_UNITS = np.array([TABLES.get(bits, ([], 0.0))[1] * (HIGH if bits == 8 else 1) for bits in range(9)], np.float32)
VALUE_UNIT = np.float32(TABLES[4][1])


def _dot(b, total, positive, signed):
    """Add products of bytes of seven bits with signed bytes."""
    if ISA.name == "neon-dotprod":
        # the instruction takes one lane for all as its second operand
        positive, signed = signed, positive
    return ISA.dot(b, total, positive, signed, 7)


def _look_up(b, tables, codes):
    """The levels of codes by each of some tables, which are all their own negative mirrored, or of 16 entries."""
    if len(tables[0]) == 16:
        return [ISA.look_up(b, table, codes) for table in tables]
    # one half of the levels is enough: 127 - code is in the other half where 128 + code would be
    negative = b.icmp_signed(">=", codes, splat(ISA.bytes, 0))
    place = b.xor(codes, b.select(negative, splat(ISA.bytes, 127), splat(ISA.bytes, -128)))
    found = [_look_up_half(b, table[128:], place) for table in tables]
    return [b.select(negative, b.sub(splat(ISA.bytes, 0), level), level) for level in found]


def _look_up_half(b, table, codes):
    """Replace each byte, in 0..127, by that entry of the table."""
    if WIDE_LOOK_UP:
        low, high = (ir.Constant(ISA.bytes, table[i : i + 64]) for i in (0, 64))
        return call(b, "llvm.x86.avx512.vpermi2var.qi.512", ISA.bytes, low, codes, high)
    within, part = b.and_(codes, splat(ISA.bytes, 15)), b.lshr(codes, splat(ISA.bytes, 4))
    found = ISA.look_up(b, table[:16], within)
    for i in range(1, 8):
        here = b.icmp_unsigned("==", part, splat(ISA.bytes, i))
        found = b.select(here, ISA.look_up(b, table[16 * i : 16 * i + 16], within), found)
    return found


def _prefetch(b, rows, group, quad, per_line):
    """Ask for cache lines of a group of rows, a share at each of the `per_line` steps that a line takes."""
    some = -(-LANES // per_line)
    first = b.udiv(b.mul(b.urem(quad, at(per_line)), at(LANES)), at(per_line))
    line = b.mul(b.udiv(quad, at(per_line)), at(LINE))
    for t in range(some):
        row = load(b, rows, b.mul(b.add(b.mul(group, at(LANES)), b.add(first, at(t))), at(8)), I64)
        pointer = b.inttoptr(b.add(row, line), I8.as_pointer())
        call(b, "llvm.prefetch.p0", ir.VoidType(), pointer, *[ir.Constant(I32, n) for n in (0, 3, 1)])


def _quads(b, address, count):
    """Load `count` times four bytes, each repeated in all lanes."""
    if count % 4 == 0:
        return ISA.quads(b, address, count)
    return [b.bitcast(spread(b, load(b, address, 4 * i, I32), LANES), ISA.bytes) for i in range(count)]


def _side_by_side(b, rows, offset, kind):
    """16 bytes of each of LANES rows: vector i holds row i of every four, 128 bits each."""
    pieces = [load(b, row, offset, vector(kind, 128 // kind.width)) for row in rows]
    while len(pieces) > 4:
        count, half = pieces[0].type.count, len(pieces) // 2
        pieces = [pick(b, x, y, list(range(2 * count))) for x, y in _neighbours(pieces, half)]
    return pieces


def _neighbours(pieces, half):
    # rows i and i + 4 are joined first, then those pairs that are 8 apart
    if half == 8:
        return [(pieces[i + 8 * k], pieces[i + 8 * k + 4]) for k in range(2) for i in range(4)]
    return [(pieces[i], pieces[i + 4]) for i in range(4)]


def _zip(b, x, y, per, unit):
    """Interleave runs of `unit` elements within every `per`: the lower halves, the upper halves."""
    count = x.type.count
    found = []
    for half in (0, per // 2):
        starts = [base + half + i for base in range(0, count, per) for i in range(0, per // 2, unit)]
        found.append(pick(b, x, y, [n for s in starts for side in (0, count) for n in range(side + s, side + s + unit)]))
    return found


def _turn(b, rows, per):
    """Four vectors of rows -> four with an element of each row together, `per` elements in 128 bits."""
    low, high = _zip(b, rows[0], rows[1], per, 1)
    low2, high2 = _zip(b, rows[2], rows[3], per, 1)
    return [*_zip(b, low, low2, per, 2), *_zip(b, high, high2, per, 2)]


def _code_vectors(b, bits, word):
    packed = b.bitcast(word, ISA.bytes)
    if bits == 8:
        return [packed]
    return [b.and_(packed, splat(ISA.bytes, 15)), b.lshr(packed, splat(ISA.bytes, 4))]


@kernel(constants=2)
def key_scores(b, heads, bits, rows, groups, quads, norms, q, units, out, out_step, keys_ahead, values_ahead):
    """Score `heads` queries against LANES * `groups` keys.

    rows   [groups * LANES]   int64, addresses of the packed rows, each of 4 * `quads` words
    q      [words][codes of a word / 4][heads][2] four bytes, as `spread_query` leaves them
    units  [heads]            what a step of the result is worth
    out    [heads][.]         rows `out_step` bytes apart
    keys_ahead, values_ahead  as rows: what will be needed next
    """
    tables, per_word = TABLES[bits][0], 8 // bits
    ones = splat(ISA.bytes, 1)
    with cgutils.for_range(b, groups) as group:
        where = [load(b, rows, b.add(b.mul(group.index, at(8 * LANES)), at(8 * t)), I64) for t in range(LANES)]
        high, low = ([variable(b, splat(ISA.ints, 0)) for _ in range(heads)] for _ in range(2))
        plain = [variable(b, splat(ISA.ints, 0)) for _ in tables]
        with cgutils.for_range(b, quads) as loop:
            _prefetch(b, keys_ahead, group.index, loop.index, LINE // 16)
            _prefetch(b, values_ahead, group.index, loop.index, LINE // 16 * bits // 4)
            words = _turn(b, _side_by_side(b, where, b.mul(loop.index, at(16)), I32), 4)
            query = b.add(q, b.mul(loop.index, at(4 * per_word * heads * 8)))
            codes = [c for word in words for c in _code_vectors(b, bits, word)]
            for n, code in enumerate(codes):
                levels = _look_up(b, tables, code)
                x = _quads(b, b.add(query, at(n * heads * 8)), 2 * heads)
                for i, level in enumerate(levels):
                    b.store(_dot(b, b.load(plain[i]), ones, level), plain[i])
                for h in range(heads):
                    b.store(_dot(b, b.load(high[h]), x[2 * h], levels[0]), high[h])
                    total = _dot(b, b.load(low[h]), x[2 * h + 1], levels[0])
                    b.store(_dot(b, total, x[2 * h], levels[1]) if len(levels) > 1 else total, low[h])
        excess = b.mul(b.load(plain[0]), splat(ISA.ints, OFFSET * (HIGH + 1)))
        if len(tables) > 1:
            excess = b.add(excess, b.mul(b.load(plain[1]), splat(ISA.ints, OFFSET)))
        norm = load(b, norms, b.mul(group.index, at(BYTES)), ISA.floats)
        for h in range(heads):
            total = b.sub(b.add(b.shl(b.load(high[h]), splat(ISA.ints, 7)), b.load(low[h])), excess)
            unit = spread(b, load(b, units, 4 * h, F32), LANES)
            score = b.fmul(b.fmul(b.sitofp(total, ISA.floats), unit), norm)
            store(b, score, out, b.add(b.mul(out_step, at(h)), b.mul(group.index, at(BYTES))))


@kernel(constants=0)
def turn_values(b, rows, groups, columns, out, out_step):
    """Turn packed rows so that a lane holds a byte of each of four tokens.

    rows  [groups * LANES]  int64, addresses of rows of 16 * `columns` bytes
    out   [4 * columns][groups] vectors, rows `out_step` bytes apart
    """
    with cgutils.for_range(b, groups) as group:
        where = [load(b, rows, b.add(b.mul(group.index, at(8 * LANES)), at(8 * t)), I64) for t in range(LANES)]
        with cgutils.for_range(b, columns) as loop:
            turned = _turn(b, _side_by_side(b, where, b.mul(loop.index, at(16)), I8), 16)
            place = b.add(b.mul(b.mul(loop.index, at(4)), out_step), b.mul(group.index, at(BYTES)))
            for i, v in enumerate(turned):
                store(b, v, out, b.add(place, b.mul(out_step, at(i))))


@kernel(constants=1)
def spread_weights(b, heads, weights, step, groups, out):
    """Repeat each four tokens' weights for the four coordinates that share 128 bits.

    weights  [heads][2][.]  bytes of seven bits, high and low, rows `step` bytes apart
    out      [groups][heads][2] vectors
    """
    lanes = [i // 4 for i in range(LANES)]
    with cgutils.for_range(b, groups) as loop:
        for n in range(2 * heads):
            four = load(b, weights, b.add(b.mul(step, at(n)), b.mul(loop.index, at(LANES))), vector(I32, LANES // 4))
            place = b.add(b.mul(loop.index, at(2 * heads * BYTES)), at(n * BYTES))
            store(b, pick(b, four, four, lanes), out, place)


@kernel(constants=1)
def add_values(b, heads, turned, step, groups, columns, weights, keeps, gains, sums, sum_step):
    """Scale sums by `keeps` and add `gains` times weights times levels.

    turned        as `turn_values` leaves it, rows `step` bytes apart
    weights       as `spread_weights` leaves it
    keeps, gains  [heads]
    sums          [columns][2][heads] vectors of floats, a column every `sum_step` bytes; even coordinates first
    """
    with cgutils.for_range(b, columns) as column:
        made = [(side, h) for side in range(2) for h in range(heads)]
        totals = {key: [variable(b, splat(ISA.ints, 0)) for _ in range(2)] for key in made}
        source = b.add(turned, b.mul(column.index, step))
        with cgutils.for_range(b, groups) as loop:
            packed = load(b, source, b.mul(loop.index, at(BYTES)), ISA.ints)
            p = b.add(weights, b.mul(loop.index, at(2 * heads * BYTES)))
            levels = [ISA.look_up(b, TABLES[4][0][0], codes) for codes in _code_vectors(b, 4, packed)]
            for h in range(heads):
                for n in range(2):
                    weight = load(b, p, (2 * h + n) * BYTES, ISA.bytes)
                    for side in range(2):
                        slot = totals[side, h][n]
                        b.store(_dot(b, b.load(slot), weight, levels[side]), slot)
        target = b.add(sums, b.mul(column.index, sum_step))
        for side, h in made:
            high, low = (b.load(slot) for slot in totals[side, h])
            value = b.sitofp(b.add(b.shl(high, splat(ISA.ints, 7)), low), ISA.floats)
            keep, gain = (spread(b, load(b, address, 4 * h, F32), LANES) for address in (keeps, gains))
            place = (side * heads + h) * BYTES
            before = b.fmul(load(b, target, place, ISA.floats), keep)
            store(b, b.fadd(b.fmul(value, gain), before), target, place)
