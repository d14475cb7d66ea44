"""The inner loops of attention with one query per sequence, as LLVM IR: a vector holds neighbouring coordinates of one key.

A few query heads share each load of the cache. Scores have the sums of `row_tiles.score_tile`, with keys turned in registers.
Rows are covered by whole vectors: the last one ends with the row, and overlaps its neighbour where the width is not a multiple
of LANES.
"""

from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.attention.cpu.dtypes import BYTES, LANES, SIZES, load_floats, typed
from auraflux.ops.attention.cpu.launch_args import named_values
from auraflux.ops.attention.cpu.row_tiles import KEYS, four_chains, quarters
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import LINE
from auraflux.ops.simd.vectors import F32, I64, at, fma, load, pick, prefetch, splat, spread, store, variable

# loops process several vectors of a key, or several positions, per iteration and prefetch line by line: Neoverse-N1 drops
# prefetches that are faster than memory
UNROLLED = LANES == 4
TOGETHER = 4 if UNROLLED else 2  # vectors of keys, whose addresses and sums fit in registers


class ScoreArgs(NamedTuple):
    """The values of `score_block`.

    q       [heads][vectors * KEYS * LANES]  four coordinates over and over; zero where the last vector overlaps its neighbour
    rows    [batches * LANES]                addresses of the keys
    last    where the last vector of a key begins, in elements
    out     [heads][.]                       rows with a stride of `out_step` bytes
    ahead   [batches * LANES]                addresses to prefetch, `ahead_nbytes` each, or line by line
    """

    q: ir.Value
    q_step: ir.Value
    rows: ir.Value
    batches: ir.Value
    vectors: ir.Value
    last: ir.Value
    out: ir.Value
    out_step: ir.Value
    ahead: ir.Value
    ahead_nbytes: ir.Value


@typed(1)
@named_values(ScoreArgs)
def score_block(b, element, heads, args):
    """Score `heads` queries against `batches` of LANES keys."""
    with cgutils.for_range(b, args.batches) as batch:
        first = b.mul(batch.index, at(8 * LANES))
        sums = [[] for _ in range(heads)]
        for start in range(0, 4, TOGETHER):
            numbers = [[i + 4 * g for g in range(KEYS)] for i in range(start, start + TOGETHER)]
            places = [[b.add(first, at(8 * n)) for n in each] for each in numbers]
            where = [[load(b, args.rows, place, I64) for place in each] for each in places]
            totals = [[variable(b, splat(ISA.floats, 0.0)) for _ in where] for _ in range(heads)]

            def meet(number, offset, where=where, totals=totals):
                """Multiply a vector of each key with all queries."""
                transposed = [quarters(b, [load_floats(b, element, row, offset) for row in each]) for each in where]
                query = b.mul(number, at(KEYS * BYTES))
                for h in range(heads):
                    mine = b.add(b.mul(args.q_step, at(h)), query)
                    for m in range(KEYS):
                        four = load(b, args.q, b.add(mine, at(m * BYTES)), ISA.floats)
                        for i, total in enumerate(totals[h]):
                            b.store(fma(b, four, transposed[i][m], b.load(total)), total)

            begun = at(0)
            if UNROLLED:
                begun = _unrolled(b, element, args.last, load(b, args.ahead, first, I64), meet)
            else:
                prefetch(b, [load(b, args.ahead, place, I64) for each in places for place in each], args.ahead_nbytes)
            with cgutils.for_range_slice(b, begun, args.vectors, at(1)) as (number, _):
                meet(number, b.mul(_place(b, number, args.last), at(SIZES[element])))
            for mine, found in zip(sums, totals, strict=True):
                mine += [b.load(total) for total in found]
        for h, mine in enumerate(sums):
            place = b.add(b.mul(args.out_step, at(h)), b.mul(batch.index, at(BYTES)))
            store(b, four_chains(b, mine), args.out, place)


def _unrolled(b, element, last, ahead, meet):
    """Call `meet` for LANES keys, one cache line of each per iteration, and prefetch as many; return the number of vectors.

    Rows of neighbours are contiguous as a rule, and memory is fastest line after line.
    """
    step = LINE // (LANES * SIZES[element])
    iterations = b.sdiv(b.add(last, at(LANES)), at(step * LANES))
    with cgutils.for_range(b, iterations) as loop:
        here = b.mul(loop.index, at(LINE))
        for n in range(step):
            if n % (step // LANES) == 0:
                prefetch(b, [b.add(ahead, b.add(b.mul(here, at(LANES)), at(LINE * LANES * n // step)))], LINE)
            meet(b.add(b.mul(loop.index, at(step)), at(n)), b.add(here, at(n * LANES * SIZES[element])))
    return b.mul(iterations, at(step))


def _place(b, number, last):
    """Return where a vector begins in a row, in elements: the last one ends with the row, and may overlap its neighbour."""
    here = b.mul(number, at(LANES))
    return b.select(b.icmp_signed("<", here, last), here, last)


class ValueArgs(NamedTuple):
    """The values of `value_block`.

    weights  [heads][count], rows with a stride of `weight_step` bytes
    rows     [count]  addresses of the values
    first    number of the first vector of a sum
    last     where the last vector of a value begins, in elements
    out      [heads][vectors * LANES], rows with a stride of `out_step` bytes
    ahead    [count]  addresses to prefetch, `ahead_nbytes` each; IN_TURNS one address, of contiguous rows
    """

    weights: ir.Value
    weight_step: ir.Value
    rows: ir.Value
    count: ir.Value
    first: ir.Value
    last: ir.Value
    out: ir.Value
    out_step: ir.Value
    rescale: ir.Value
    ahead: ir.Value
    ahead_nbytes: ir.Value


@typed(2)
@named_values(ValueArgs)
def value_block(b, element, heads, wide, args):
    """Scale `wide` vectors of each head's sum by its `rescale`, and add `count` weighted values."""
    numbers = [b.add(args.first, at(v)) for v in range(wide)]
    places = [b.mul(_place(b, n, args.last), at(SIZES[element])) for n in numbers]
    slots = {
        (h, v): b.add(b.mul(args.out_step, at(h)), b.mul(numbers[v], at(BYTES))) for h in range(heads) for v in range(wide)
    }
    sums = {}
    for (h, v), slot in slots.items():
        factor = spread(b, load(b, args.rescale, 4 * h, F32), LANES)
        sums[h, v] = variable(b, b.fmul(load(b, args.out, slot, ISA.floats), factor))

    def add(number, weigh):
        value = [load_floats(b, element, load(b, args.rows, b.mul(number, at(8)), I64), place) for place in places]
        for h in range(heads):
            weight = weigh(h)
            for v in range(wide):
                b.store(fma(b, weight, value[v], b.load(sums[h, v])), sums[h, v])

    begun = at(0)
    if UNROLLED:
        iterations, soon = b.sdiv(args.count, at(LANES)), load(b, args.ahead, 0, I64)
        with cgutils.for_range(b, iterations) as loop:
            position = b.mul(loop.index, at(LANES))
            four = [
                load(b, args.weights, b.add(b.mul(args.weight_step, at(h)), b.mul(position, at(4))), ISA.floats)
                for h in range(heads)
            ]
            for n in range(LANES):
                number = b.add(position, at(n))
                if n < SIZES[element]:
                    prefetch(b, [b.add(soon, b.add(b.mul(loop.index, at(SIZES[element] * LINE)), at(n * LINE)))], LINE)
                add(number, lambda h, n=n: pick(b, four[h], four[h], [n] * LANES))
        begun = b.mul(iterations, at(LANES))
    with cgutils.for_range_slice(b, begun, args.count, at(1)) as (number, _):
        if not UNROLLED:
            prefetch(b, [load(b, args.ahead, b.mul(number, at(8)), I64)], args.ahead_nbytes)
        offset = b.mul(number, at(4))
        add(number, lambda h: spread(b, load(b, args.weights, b.add(b.mul(args.weight_step, at(h)), offset), F32), LANES))
    for key, slot in slots.items():
        store(b, b.load(sums[key]), args.out, slot)
