"""Scores of keys where they lie, as LLVM IR: the sums of `row_tiles.score_tile`, of keys that are turned in registers."""

from numba.core import cgutils

from auraflux.ops.attention.cpu.decode_tiles import BYTES, IN_TURNS, LANES, SIZES, _load_floats, _place, typed
from auraflux.ops.attention.cpu.row_tiles import KEYS, four_chains, quarters
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import LINE
from auraflux.ops.simd.vectors import I64, at, fma, load, prefetch, splat, store, variable

TOGETHER = 4 if IN_TURNS else 2  # vectors of keys, whose addresses and sums fit in registers


@typed(1)
def score_block(b, element, heads, q, q_step, rows, batches, vectors, last, out, out_step, ahead, ahead_nbytes):
    """Score `heads` queries against `batches` of LANES keys.

    q      [heads][vectors * KEYS * LANES]  four coordinates over and over; zero where the last vector overlaps its neighbour
    rows   [batches * LANES]                addresses of the keys
    out    [heads][.]                       rows `out_step` bytes apart
    ahead  [batches * LANES]                addresses of `ahead_nbytes` each that will be needed next, here or line by line
    """
    with cgutils.for_range(b, batches) as batch:
        first = b.mul(batch.index, at(8 * LANES))
        sums = [[] for _ in range(heads)]
        for start in range(0, 4, TOGETHER):
            numbers = [[i + 4 * g for g in range(KEYS)] for i in range(start, start + TOGETHER)]
            places = [[b.add(first, at(8 * n)) for n in each] for each in numbers]
            where = [[load(b, rows, place, I64) for place in each] for each in places]
            totals = [[variable(b, splat(ISA.floats, 0.0)) for _ in where] for _ in range(heads)]

            def meet(number, offset, where=where, totals=totals):
                """Multiply a vector of each key with all queries."""
                turned = [quarters(b, [_load_floats(b, element, row, offset) for row in each]) for each in where]
                query = b.mul(number, at(KEYS * BYTES))
                for h in range(heads):
                    mine = b.add(b.mul(q_step, at(h)), query)
                    for m in range(KEYS):
                        four = load(b, q, b.add(mine, at(m * BYTES)), ISA.floats)
                        for i, total in enumerate(totals[h]):
                            b.store(fma(b, four, turned[i][m], b.load(total)), total)

            begun = at(0)
            if IN_TURNS:
                begun = _turns(b, element, last, load(b, ahead, first, I64), meet)
            else:
                prefetch(b, [load(b, ahead, place, I64) for each in places for place in each], ahead_nbytes)
            with cgutils.for_range_slice(b, begun, vectors, at(1)) as (number, _):
                meet(number, b.mul(_place(b, number, last), at(SIZES[element])))
            for mine, found in zip(sums, totals, strict=True):
                mine += [b.load(total) for total in found]
        for h, mine in enumerate(sums):
            place = b.add(b.mul(out_step, at(h)), b.mul(batch.index, at(BYTES)))
            store(b, four_chains(b, mine), out, place)


def _turns(b, element, last, ahead, meet):
    """Meet LANES keys, a cache line of each in a turn, and ask for as many lines from `ahead` on; give how many vectors it was.

    Rows of neighbours lie side by side, as a rule, and memory is fastest line after line.
    """
    step = LINE // (LANES * SIZES[element])
    turns = b.sdiv(b.add(last, at(LANES)), at(step * LANES))
    with cgutils.for_range(b, turns) as loop:
        here = b.mul(loop.index, at(LINE))
        for n in range(step):
            if n % (step // LANES) == 0:
                prefetch(b, [b.add(ahead, b.add(b.mul(here, at(LANES)), at(LINE * LANES * n // step)))], LINE)
            meet(b.add(b.mul(loop.index, at(step)), at(n)), b.add(here, at(n * LANES * SIZES[element])))
    return b.mul(turns, at(step))
