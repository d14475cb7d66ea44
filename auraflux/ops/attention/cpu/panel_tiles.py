"""The inner loops of attention with many queries, as LLVM IR: a vector holds neighbouring queries, a panel of PANEL of them.

Nothing is summed across lanes, any head width will do, and a tile of the result stays in registers.
"""

from numba.core import cgutils

from auraflux.ops.attention.cpu.dtypes import BYTES, LANES
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.math import BOTTOM, LN2_HIGH, LN2_LOW, LOG2E, P0, P1, P2, P3, P4, P5
from auraflux.ops.simd.vectors import F32, I32, MAGIC, at, fma, kernel, load, splat, spread, store, variable

# a panel of queries is this many vectors wide, and a tile of sums this many keys (or value coordinates) tall
TALL, VECTORS = {16: (12, 2), 8: (6, 2), 4: (6, 4)}[LANES]
PANEL = VECTORS * LANES
POLYNOMIAL = (P0, P1, P2, P3, P4, P5)


def _larger(b, x, y):
    """Return the larger of two, y where x is not a number."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _exp(b, x):
    """Return e**x for x <= 0, to 2 ulp: 0 below -87.3, and not a number stays so."""

    def all_lanes(value):
        return splat(ISA.floats, float(value))

    low = b.fcmp_ordered("<", x, all_lanes(BOTTOM))
    x = b.select(low, all_lanes(BOTTOM), x)
    power = fma(b, x, all_lanes(LOG2E), all_lanes(MAGIC))
    n = b.fsub(power, all_lanes(MAGIC))
    r = fma(b, n, all_lanes(-LN2_LOW), fma(b, n, all_lanes(-LN2_HIGH), x))
    y = all_lanes(POLYNOMIAL[0])
    for c in POLYNOMIAL[1:]:
        y = fma(b, y, r, all_lanes(c))
    y = b.fadd(fma(b, y, b.fmul(r, r), r), all_lanes(1))
    factor = b.add(b.shl(b.bitcast(power, ISA.ints), splat(ISA.ints, 23)), splat(ISA.ints, 127 << 23))
    return b.select(low, all_lanes(0), b.fmul(y, b.bitcast(factor, ISA.floats)))


@kernel(1)
def weigh_panel(b, masked, scores, first, last, peaks, totals, rescale, lows, highs):
    """Convert a panel's scores [first, last) into weights, down the columns.

    peaks, totals  [PANEL]  the running maxima and sums of weights, updated
    rescale        [PANEL]  receives the correction of earlier sums
    lows, highs    [PANEL]  int32, the first and last row each column sees, where `masked`
    """
    kind, nothing = ISA.floats, splat(ISA.floats, -float("inf"))
    columns = [v * BYTES for v in range(VECTORS)]
    tops = [variable(b, load(b, peaks, v, kind)) for v in columns]
    bounds = [(load(b, lows, v, ISA.ints), load(b, highs, v, ISA.ints)) for v in columns] if masked else []
    with cgutils.for_range_slice(b, first, last, at(1)) as (row, _):
        here = b.add(scores, b.mul(row, at(PANEL * 4)))
        number = spread(b, b.trunc(row, I32), LANES)
        for v, top in zip(columns, tops, strict=True):
            score = load(b, here, v, kind)
            if masked:
                low, high = bounds[v // BYTES]
                seen = b.and_(b.icmp_signed(">=", number, low), b.icmp_signed("<=", number, high))
                score = b.select(seen, score, nothing)
                store(b, score, here, v)
            b.store(_larger(b, score, b.load(top)), top)
    bases, sums = [], []
    for v, top in zip(columns, tops, strict=True):
        peak = b.load(top)
        # where nothing was seen yet any finite base gives weights of 0
        base = b.select(b.fcmp_ordered(">", peak, nothing), peak, splat(kind, 0.0))
        factor = _exp(b, b.fsub(load(b, peaks, v, kind), base))
        store(b, factor, rescale, v)
        store(b, peak, peaks, v)
        bases.append(base)
        sums.append(variable(b, b.fmul(load(b, totals, v, kind), factor)))
    with cgutils.for_range_slice(b, first, last, at(1)) as (row, _):
        here = b.add(scores, b.mul(row, at(PANEL * 4)))
        for v, base, total in zip(columns, bases, sums, strict=True):
            weight = _exp(b, b.fsub(load(b, here, v, kind), base))
            store(b, weight, here, v)
            b.store(b.fadd(b.load(total), weight), total)
    for v, total in zip(columns, sums, strict=True):
        store(b, b.load(total), totals, v)


def _panel_tile(b, start, left, left_row, left_step, right, depth, out):
    """Write out[i, :] = start(i) + sum over d < depth of left[i, d] * right[d, :] for TALL rows i and PANEL columns."""
    sums = {(i, v): variable(b, start(i, v)) for i in range(TALL) for v in range(VECTORS)}
    row_offsets = [b.mul(left_row, at(i)) for i in range(TALL)]
    with cgutils.for_range(b, depth) as loop:
        here, there = b.add(left, b.mul(loop.index, left_step)), b.add(right, b.mul(loop.index, at(PANEL * 4)))
        columns = [load(b, there, v * BYTES, ISA.floats) for v in range(VECTORS)]
        for i in range(TALL):
            one = spread(b, load(b, here, row_offsets[i], F32), LANES)
            for v in range(VECTORS):
                b.store(fma(b, one, columns[v], b.load(sums[i, v])), sums[i, v])
    for (i, v), total in sums.items():
        store(b, b.load(total), out, (i * VECTORS + v) * BYTES)


@kernel(0)
def score_panel(b, keys, key_step, queries, depth, out):
    """Score a panel of queries [depth][PANEL] with TALL keys, rows with a stride of `key_step` bytes, to out [TALL][PANEL]."""
    _panel_tile(b, lambda i, v: splat(ISA.floats, 0.0), keys, key_step, at(4), queries, depth, out)


@kernel(0)
def value_panel(b, values, value_step, weights, depth, rescale, out):
    """Scale TALL coordinates of a panel's sums by `rescale` [PANEL], and add `depth` values weighted by weights [depth][PANEL].

    values  rows with a stride of `value_step` bytes, of which TALL elements are taken
    """
    factors = [load(b, rescale, v * BYTES, ISA.floats) for v in range(VECTORS)]

    def start(i, v):
        return b.fmul(load(b, out, (i * VECTORS + v) * BYTES, ISA.floats), factors[v])

    _panel_tile(b, start, values, at(4), value_step, weights, depth, out)
