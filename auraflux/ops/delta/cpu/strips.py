"""Tokens of the delta rule on a strip of the state's columns, as LLVM IR.

Columns of the state do not meet, so a strip narrow enough for the first cache is taken through all tokens of a sequence before
the next one is touched. A token reads it at its key and its query, then corrects it; the correction is made while the next
token reads. After the last token the next strip is fetched while this one is written: memory is then never idle.
"""

from numba.core import cgutils

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import jit
from auraflux.ops.simd.vectors import F32, at, fma, kernel, load, pick, prefetch, splat, spread, store, variable, vector

LANES = ISA.lanes
STRIP_VECTORS = {16: 4, 8: 4, 4: 8}[LANES]  # two sums each: half of the registers
STRIP = STRIP_VECTORS * LANES


@kernel(2)
def _steps(
    b, vectors, lanes, state, q, k, v, decay, beta, overlaps, out, n, depth, row_bytes, key_step, value_step, gate_step, ahead
):
    """Take `vectors` vectors of `lanes` columns through n tokens; steps in bytes, between tokens."""
    kind, size = vector(F32, lanes), 4 * lanes
    at_key, at_query = ([variable(b, splat(kind, 0.0)) for _ in range(vectors)] for _ in range(2))
    changes, fading = [variable(b, splat(kind, 0.0)) for _ in range(vectors)], variable(b, splat(kind, 0.0))

    def one(address, index):
        return spread(b, load(b, address, b.mul(index, at(4)), F32), lanes)

    def corrected(row, key, i):
        return fma(b, key, b.load(changes[i]), b.fmul(load(b, row, i * size, kind), b.load(fading)))

    def read(token, first):
        keys, queries = (b.add(base, b.mul(key_step, token)) for base in (k, q))
        before = b.sub(keys, key_step)
        for slot in (*at_key, *at_query):
            b.store(splat(kind, 0.0), slot)
        with cgutils.for_range(b, depth) as loop:
            key, query = one(keys, loop.index), one(queries, loop.index)
            row = b.add(state, b.mul(loop.index, row_bytes))
            last = None if first else one(before, loop.index)
            for i in range(vectors):
                old = load(b, row, i * size, kind) if first else corrected(row, last, i)
                if not first:
                    store(b, old, row, i * size)
                b.store(fma(b, key, old, b.load(at_key[i])), at_key[i])
                b.store(fma(b, query, old, b.load(at_query[i])), at_query[i])
        gate, value = b.mul(gate_step, token), b.mul(value_step, token)
        fade, strength = (spread(b, load(b, base, gate, F32), lanes) for base in (decay, beta))
        overlap = one(overlaps, token)
        for i in range(vectors):
            wanted = load(b, v, b.add(value, at(i * size)), kind)
            change = b.fmul(b.fsub(wanted, b.fmul(fade, b.load(at_key[i]))), strength)
            # the query meets the new state: the old one decayed, and the change as far as key and query overlap
            result = fma(b, overlap, change, b.fmul(fade, b.load(at_query[i])))
            store(b, result, out, b.add(value, at(i * size)))
            b.store(change, changes[i])
        b.store(fade, fading)

    read(at(0), True)
    with cgutils.for_range_slice(b, at(1), n, at(1)) as (token, _):
        read(token, False)
    keys = b.add(k, b.mul(key_step, b.sub(n, at(1))))
    with cgutils.for_range(b, depth) as loop:
        row = b.add(state, b.mul(loop.index, row_bytes))
        prefetch(b, [b.add(row, ahead)], vectors * size)
        key = one(keys, loop.index)
        for i in range(vectors):
            store(b, corrected(row, key, i), row, i * size)


@kernel(0)
def _overlap(b, q, k, width, out):
    """The product of a query and a key: in as many sums as there are lanes, which are then added, and what is left over."""
    total = variable(b, splat(ISA.floats, 0.0))
    whole = b.sdiv(width, at(LANES))
    with cgutils.for_range(b, whole) as loop:
        place = b.mul(loop.index, at(4 * LANES))
        b.store(fma(b, load(b, q, place, ISA.floats), load(b, k, place, ISA.floats), b.load(total)), total)
    found = b.load(total)
    while found.type.count > 1:
        half = found.type.count // 2
        found = b.fadd(*(pick(b, found, found, list(range(first, first + half))) for first in (0, half)))
    rest = variable(b, found)
    with cgutils.for_range_slice(b, b.mul(whole, at(LANES)), width, at(1)) as (index, _):
        place = b.mul(index, at(4))
        b.store(fma(b, load(b, q, place, found.type), load(b, k, place, found.type), b.load(rest)), rest)
    store(b, b.load(rest), out, 0)


@jit
def overlap(q, k, width, out):
    """Leave the product of a query and a key at `out`."""
    _overlap((q, k, width, out))


@jit
def step_strip(state, inputs, overlaps, out, n, depth, row_bytes, steps, ahead):
    """STRIP columns; inputs are q, k, v, decay, beta; the columns to be worked on next lie `ahead` bytes further."""
    _steps((STRIP_VECTORS, LANES, state, inputs, overlaps, out, n, depth, row_bytes, steps, ahead))


@jit
def step_vector(state, inputs, overlaps, out, n, depth, row_bytes, steps, ahead):
    """LANES columns."""
    _steps((1, LANES, state, inputs, overlaps, out, n, depth, row_bytes, steps, ahead))


@jit
def step_column(state, inputs, overlaps, out, n, depth, row_bytes, steps, ahead):
    """One column."""
    _steps((1, 1, state, inputs, overlaps, out, n, depth, row_bytes, steps, ahead))
