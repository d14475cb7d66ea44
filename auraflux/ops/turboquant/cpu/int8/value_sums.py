"""Weighted sums of int8 values, as LLVM IR: weights of two bytes of seven bits, times bytes looked up in tables."""

from numba.core import cgutils

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.vectors import (
    F32,
    I8,
    I32,
    MAGIC,
    MAGIC_BITS,
    at,
    fma,
    kernel,
    load,
    pick,
    splat,
    spread,
    store,
    variable,
    vector,
)
from auraflux.ops.turboquant.cpu.int8.codebook import CODES, HIGH
from auraflux.ops.turboquant.cpu.int8.tiles import (
    BYTES,
    LANES,
    WAYS,
    group_rows,
    load_quads,
    per_tile,
    room_of,
    side_by_side,
    transpose,
    zip_runs,
)

WEIGHT = 4 if ISA.by_lane else BYTES  # bytes of four tokens' weights in a load


@kernel(constants=0)
def transpose_values(b, rows, groups, columns, out, out_step):
    """Transpose packed rows so that a lane holds a byte of each of four tokens.

    rows  [groups * LANES]  int64, addresses of rows of 16 * `columns` bytes
    out   [4 * columns][groups] vectors, rows with a stride of `out_step` bytes
    """
    with cgutils.for_range(b, groups) as group:
        where = group_rows(b, rows, group.index)
        with cgutils.for_range(b, columns) as loop:
            transposed = transpose(b, side_by_side(b, where, b.mul(loop.index, at(16)), I8), 16)
            place = b.add(b.mul(b.mul(loop.index, at(4)), out_step), b.mul(group.index, at(BYTES)))
            for i, v in enumerate(transposed):
                store(b, v, out, b.add(place, b.mul(out_step, at(i))))


@kernel(constants=0)
def spread_weights(b, heads, weights, step, groups, out):
    """Repeat each four tokens' weights for the four coordinates that share 128 bits.

    weights  [heads][2][.]  bytes of seven bits, high and low, rows with a stride of `step` bytes
    out      [groups][heads][2] vectors; four bytes each where a vector is 128 bits and one of its lanes serves for all
    """
    if ISA.by_lane:
        per_tile(b, heads, lambda tile: _transpose_weights(b, 2 * room_of(tile), weights, step, groups, out))
        return
    lanes = [i // 4 for i in range(WEIGHT // 4)]
    with cgutils.for_range(b, groups) as group, cgutils.for_range(b, b.mul(heads, at(2))) as row:
        place = b.add(b.mul(row.index, step), b.mul(group.index, at(LANES)))
        four = load(b, weights, place, vector(I32, LANES // 4))
        target = b.mul(b.add(b.mul(group.index, b.mul(heads, at(2))), row.index), at(WEIGHT))
        store(b, pick(b, four, four, lanes), out, target)


def _transpose_weights(b, count, weights, step, groups, out):
    """Interleave the four bytes of each of `count` rows, one group after the other."""
    with cgutils.for_range(b, b.sdiv(groups, at(WAYS))) as loop:
        here = b.add(weights, b.mul(loop.index, at(BYTES)))
        rows = [load(b, here, b.mul(step, at(n)), ISA.ints) for n in range(count)]
        if count == 2:
            transposed = [zip_runs(b, *rows, 4, 1)]
        else:
            transposed = list(zip(*(transpose(b, rows[n : n + 4], 4) for n in range(0, count, 4)), strict=True))
        for n, each in enumerate(v for group in transposed for v in group):
            store(b, each, out, b.add(b.mul(loop.index, at(count * BYTES)), at(n * BYTES)))


@kernel(constants=1)
def add_value_loop(b, bits, heads, transposed, step, groups, columns, weights, rescales, gains, sums):
    """Scale sums by `rescales` and add `gains` times weights times levels.

    groups        a multiple of WAYS
    transposed    as `transpose_values` leaves it, rows with a stride of `step` bytes
    weights       as `spread_weights` leaves it
    rescales, gains  [heads]
    sums          [columns][codes of a byte][heads] vectors of floats
    """

    code = CODES[bits]
    sides = range(code.vectors)

    def build(tile):
        room = room_of(tile)
        with cgutils.for_range(b, columns) as column:
            # sums of a block stay below 2**22, so that they become floats by a subtraction
            start = splat(ISA.ints, MAGIC_BITS)
            totals = {(s, h): [variable(b, start) for _ in range(2)] for s in sides for h in range(tile)}
            source = b.add(transposed, b.mul(column.index, step))
            with cgutils.for_range(b, b.sdiv(groups, at(WAYS))) as loop:
                here, place = b.mul(loop.index, at(WAYS * BYTES)), b.mul(loop.index, at(WAYS * 2 * room * WEIGHT))
                packed = [load(b, source, b.add(here, at(n * BYTES)), ISA.ints) for n in range(WAYS)]
                levels = [[code.look_up(b, codes) for codes in code.split(b, each)] for each in packed]
                for n in range(WAYS):
                    found = _weights(b, b.add(weights, b.add(place, at(n * 2 * room * WEIGHT))), 2 * room)
                    for (s, h), sums_of in totals.items():
                        _add_weighed(b, sums_of, found[2 * h : 2 * h + 2], levels[n][s])
            target = b.add(sums, b.mul(column.index, at(code.vectors * tile * BYTES)))
            for (s, h), (high, low) in totals.items():
                upper, lower = (b.fsub(b.bitcast(b.load(v), ISA.floats), splat(ISA.floats, MAGIC)) for v in (high, low))
                value = fma(b, upper, splat(ISA.floats, HIGH), lower)
                rescale, gain = (spread(b, load(b, address, 4 * h, F32), LANES) for address in (rescales, gains))
                place = (s * tile + h) * BYTES
                before = b.fmul(load(b, target, place, ISA.floats), rescale)
                store(b, b.fadd(b.fmul(value, gain), before), target, place)

    per_tile(b, heads, build)


def _add_weighed(b, totals, weights, levels):
    """Add to the sums of high and of low bytes the products of weights with levels of one or two bytes."""
    (high, low), (upper, lower) = totals, weights
    b.store(_dot(b, b.load(high), upper, levels[0]), high)
    total = _dot(b, b.load(low), lower, levels[0])
    b.store(_dot(b, total, upper, levels[1]) if len(levels) > 1 else total, low)


def _weights(b, address, count):
    if ISA.by_lane:
        return load_quads(b, address, count)
    return [load(b, address, n * WEIGHT, ISA.bytes) for n in range(count)]


def _dot(b, total, weight, levels):
    return ISA.dot(b, total, levels, weight, 7) if ISA.by_lane else ISA.dot(b, total, weight, levels, 7)
