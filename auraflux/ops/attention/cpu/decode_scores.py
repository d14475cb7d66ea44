"""Scores of keys where they lie, as LLVM IR: the sums of `row_tiles.score_tile`, of keys that are turned in registers."""

from numba.core import cgutils

from auraflux.ops.attention.cpu.decode_tiles import BYTES, LANES, SIZES, _load_floats, _place, typed
from auraflux.ops.attention.cpu.row_tiles import KEYS, four_chains, quarters
from auraflux.ops.simd.vectors import I64, ISA, at, fma, load, prefetch, splat, store, variable


@typed(1)
def score_block(b, element, heads, q, q_step, rows, batches, vectors, last, out, out_step, ahead, ahead_nbytes):
    """Score `heads` queries against `batches` of LANES keys.

    q      [heads][vectors * KEYS * LANES]  four coordinates over and over; zero where the last vector overlaps its neighbour
    rows   [batches * LANES]                addresses of the keys
    out    [heads][.]                       rows `out_step` bytes apart
    ahead  [batches * LANES]                addresses of `ahead_nbytes` each that will be needed next
    """
    with cgutils.for_range(b, batches) as batch:
        first = b.mul(batch.index, at(8 * LANES))
        sums = [[] for _ in range(heads)]
        for pair in range(0, 4, 2):
            # of two vectors' keys: their addresses fit in registers
            numbers = [[i + 4 * g for g in range(KEYS)] for i in range(pair, pair + 2)]
            places = [[b.add(first, at(8 * n)) for n in each] for each in numbers]
            where = [[load(b, rows, place, I64) for place in each] for each in places]
            prefetch(b, [load(b, ahead, place, I64) for each in places for place in each], ahead_nbytes)
            totals = [[variable(b, splat(ISA.floats, 0.0)) for _ in where] for _ in range(heads)]
            with cgutils.for_range(b, vectors) as loop:
                offset = b.mul(_place(b, loop.index, last), at(SIZES[element]))
                turned = [quarters(b, [_load_floats(b, element, row, offset) for row in each]) for each in where]
                query = b.mul(loop.index, at(KEYS * BYTES))
                for h in range(heads):
                    mine = b.add(b.mul(q_step, at(h)), query)
                    for m in range(KEYS):
                        four = load(b, q, b.add(mine, at(m * BYTES)), ISA.floats)
                        for i, total in enumerate(totals[h]):
                            b.store(fma(b, four, turned[i][m], b.load(total)), total)
            for mine, found in zip(sums, totals, strict=True):
                mine += [b.load(total) for total in found]
        for h, mine in enumerate(sums):
            place = b.add(b.mul(out_step, at(h)), b.mul(batch.index, at(BYTES)))
            store(b, four_chains(b, mine), out, place)
