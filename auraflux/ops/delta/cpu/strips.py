"""The delta rule on a strip of state columns, as LLVM IR.

State columns are independent, so a strip that fits the L1 cache is run through all tokens of a sequence before the next one is
touched. A token reads the strip at its key and its query, then corrects it; the correction is fused with the next token's
reads. After the last token the next strip is prefetched while this one is written, so that memory is never idle.
"""

from numba.core import cgutils

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import jit
from auraflux.ops.simd.vectors import F32, at, fma, kernel, load, pick, prefetch, splat, spread, store, variable, vector

LANES = ISA.lanes
STRIP_VECTORS = {16: 4, 8: 4, 4: 8}[LANES]  # two sums each take half of the registers
STRIP = STRIP_VECTORS * LANES


@kernel(2)
def _steps(
    b, vectors, lanes, state, q, k, v, decay, beta, overlaps, out, n, depth, row_bytes, key_step, value_step, gate_step, ahead
):
    """Run `vectors` vectors of `lanes` columns through n tokens; steps are byte strides between tokens."""
    kind, size = vector(F32, lanes), 4 * lanes
    at_key, at_query = ([variable(b, splat(kind, 0.0)) for _ in range(vectors)] for _ in range(2))
    changes, last_decay = [variable(b, splat(kind, 0.0)) for _ in range(vectors)], variable(b, splat(kind, 0.0))

    def one(address, index):
        return spread(b, load(b, address, b.mul(index, at(4)), F32), lanes)

    def corrected(row, key, i):
        return fma(b, key, b.load(changes[i]), b.fmul(load(b, row, i * size, kind), b.load(last_decay)))

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
        decay_now, strength = (spread(b, load(b, base, gate, F32), lanes) for base in (decay, beta))
        overlap = one(overlaps, token)
        for i in range(vectors):
            wanted = load(b, v, b.add(value, at(i * size)), kind)
            change = b.fmul(b.fsub(wanted, b.fmul(decay_now, b.load(at_key[i]))), strength)
            # the query reads the new state: the decayed old one, and the change times the dot product of key and query
            result = fma(b, overlap, change, b.fmul(decay_now, b.load(at_query[i])))
            store(b, result, out, b.add(value, at(i * size)))
            b.store(change, changes[i])
        b.store(decay_now, last_decay)

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
    """Compute the dot product of a query and a key: one sum per lane, reduced pairwise, then the remainder."""
    total = variable(b, splat(ISA.floats, 0.0))
    vectorized = b.sdiv(width, at(LANES))
    with cgutils.for_range(b, vectorized) as loop:
        place = b.mul(loop.index, at(4 * LANES))
        b.store(fma(b, load(b, q, place, ISA.floats), load(b, k, place, ISA.floats), b.load(total)), total)
    found = b.load(total)
    while found.type.count > 1:
        half = found.type.count // 2
        found = b.fadd(*(pick(b, found, found, list(range(first, first + half))) for first in (0, half)))
    rest = variable(b, found)
    with cgutils.for_range_slice(b, b.mul(vectorized, at(LANES)), width, at(1)) as (index, _):
        place = b.mul(index, at(4))
        b.store(fma(b, load(b, q, place, found.type), load(b, k, place, found.type), b.load(rest)), rest)
    store(b, b.load(rest), out, 0)


@jit
def overlap(q, k, width, out):
    """Store the dot product of a query and a key at `out`."""
    _overlap((q, k, width, out))


@jit
def step_strip(state, inputs, overlaps, out, n, depth, row_bytes, steps, ahead):
    """Run STRIP columns; inputs are q, k, v, decay, beta; `ahead` bytes further are the next columns."""
    _steps((STRIP_VECTORS, LANES, state, inputs, overlaps, out, n, depth, row_bytes, steps, ahead))


@jit
def step_vector(state, inputs, overlaps, out, n, depth, row_bytes, steps, ahead):
    """Run LANES columns."""
    _steps((1, LANES, state, inputs, overlaps, out, n, depth, row_bytes, steps, ahead))


@jit
def step_column(state, inputs, overlaps, out, n, depth, row_bytes, steps, ahead):
    """Run one column."""
    _steps((1, 1, state, inputs, overlaps, out, n, depth, row_bytes, steps, ahead))
