"""The float32 inner loops of attention on levels, as LLVM IR: a vector holds neighbouring coordinates of one token.

Rows are padded to whole chunks of 32 coordinates; queries are zero there.
"""

from numba.core import cgutils

from auraflux.ops.simd.jit import jit
from auraflux.ops.simd.vectors import F32, ISA, at, fma, kernel, load, splat, spread, store, sum_four, variable

LANES = ISA.lanes
BYTES = 4 * LANES
WIDE = 4 if LANES == 4 else 2  # vectors of a sum that are kept in registers together


@kernel(constants=1)
def score_tile(b, rows, q, levels, step, quads, out, out_step):
    """Multiply `rows` queries with the levels of `quads` times four tokens; both lie `step` bytes apart."""
    with cgutils.for_range(b, quads) as outer:
        first = b.add(levels, b.mul(outer.index, b.mul(step, at(4))))
        sums = [[variable(b, splat(ISA.floats, 0.0)) for _ in range(4)] for _ in range(rows)]
        with cgutils.for_range(b, b.sdiv(step, at(BYTES))) as loop:
            offset = b.mul(loop.index, at(BYTES))
            keys = [load(b, first, b.add(offset, b.mul(step, at(i))), ISA.floats) for i in range(4)]
            for r in range(rows):
                query = load(b, q, b.add(offset, b.mul(step, at(r))), ISA.floats)
                for i in range(4):
                    b.store(fma(b, query, keys[i], b.load(sums[r][i])), sums[r][i])
        for r in range(rows):
            total = sum_four(b, [b.load(s) for s in sums[r]])
            store(b, total, out, b.add(b.mul(out_step, at(r)), b.mul(outer.index, at(16))))


@kernel(constants=1)
def value_tile(b, rows, weights, weight_step, levels, step, count, sums, keeps):
    """Scale the sums of `rows` rows by their `keeps`, and add the levels of `count` tokens by their weights."""
    with cgutils.for_range(b, b.sdiv(step, at(BYTES * WIDE))) as outer:
        column = b.mul(outer.index, at(BYTES * WIDE))
        places = {(r, v): b.add(b.mul(step, at(r)), b.add(column, at(BYTES * v))) for r in range(rows) for v in range(WIDE)}
        totals = {}
        for (r, v), place in places.items():
            keep = spread(b, load(b, keeps, 4 * r, F32), LANES)
            totals[r, v] = variable(b, b.fmul(load(b, sums, place, ISA.floats), keep))
        with cgutils.for_range(b, count) as loop:
            row = b.add(column, b.mul(loop.index, step))
            value = [load(b, levels, b.add(row, at(BYTES * v)), ISA.floats) for v in range(WIDE)]
            for r in range(rows):
                weight = load(b, weights, b.add(b.mul(weight_step, at(r)), b.mul(loop.index, at(4))), F32)
                wide = spread(b, weight, LANES)
                for v in range(WIDE):
                    b.store(fma(b, wide, value[v], b.load(totals[r, v])), totals[r, v])
        for key, place in places.items():
            store(b, b.load(totals[key]), sums, place)


@jit
def score_rows(rows, q, levels, step, count, scores, line):
    """Multiply rows of queries with the levels of `count` tokens, to rows of scores `line` bytes apart."""
    r, quads = 0, (count + 3) // 4
    while r + 4 <= rows:
        score_tile((4, q + r * step, levels, step, quads, scores + r * line, line))
        r += 4
    while r < rows:
        score_tile((1, q + r * step, levels, step, quads, scores + r * line, line))
        r += 1


@jit
def add_values(rows, weights, line, levels, step, count, sums, keeps):
    """Scale the sums of rows by `keeps`, and add the levels of tokens by their weights."""
    r = 0
    while r + 4 <= rows:
        value_tile((4, weights + r * line, line, levels, step, count, sums + r * step, keeps + 4 * r))
        r += 4
    while r < rows:
        value_tile((1, weights + r * line, line, levels, step, count, sums + r * step, keeps + 4 * r))
        r += 1
