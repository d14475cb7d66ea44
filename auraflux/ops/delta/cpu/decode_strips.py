"""One token of the delta rule on a strip of the state's columns, as LLVM IR.

Columns of the state do not meet, so a strip narrow enough for the first cache is read at the key and the query, corrected and
written back before the next one is touched. While it is written the next strip is fetched: memory is then never idle.
"""

from numba.core import cgutils

from auraflux.ops.simd.jit import jit
from auraflux.ops.simd.vectors import F32, ISA, at, fma, kernel, load, prefetch, splat, spread, store, variable

LANES = ISA.lanes
STRIP_VECTORS = {16: 4, 8: 4, 4: 8}[LANES]  # two sums each: half of the registers
STRIP = STRIP_VECTORS * LANES
VECTOR_BYTES = 4 * LANES


@kernel(1)
def _step(b, vectors, state, q, k, v, decay, beta, overlap, out, depth, row_bytes, ahead):
    zero = splat(ISA.floats, 0.0)
    at_key, at_query = ([variable(b, zero) for _ in range(vectors)] for _ in range(2))
    with cgutils.for_range(b, depth) as loop:
        key, query = (spread(b, load(b, base, b.mul(loop.index, at(4)), F32), LANES) for base in (k, q))
        row = b.add(state, b.mul(loop.index, row_bytes))
        for i in range(vectors):
            old = load(b, row, i * VECTOR_BYTES, ISA.floats)
            b.store(fma(b, key, old, b.load(at_key[i])), at_key[i])
            b.store(fma(b, query, old, b.load(at_query[i])), at_query[i])
    decay, beta, overlap = (spread(b, x, LANES) for x in (decay, beta, overlap))
    changes = []
    for i in range(vectors):
        wanted = load(b, v, i * VECTOR_BYTES, ISA.floats)
        change = b.fmul(b.fsub(wanted, b.fmul(decay, b.load(at_key[i]))), beta)
        # the query meets the new state: the old one decayed, and the change as far as key and query overlap
        store(b, fma(b, overlap, change, b.fmul(decay, b.load(at_query[i]))), out, i * VECTOR_BYTES)
        changes.append(change)
    with cgutils.for_range(b, depth) as loop:
        key = spread(b, load(b, k, b.mul(loop.index, at(4)), F32), LANES)
        row = b.add(state, b.mul(loop.index, row_bytes))
        prefetch(b, [b.add(row, ahead)], vectors * VECTOR_BYTES)
        for i, change in enumerate(changes):
            old = load(b, row, i * VECTOR_BYTES, ISA.floats)
            store(b, fma(b, key, change, b.fmul(old, decay)), row, i * VECTOR_BYTES)


@jit
def step_strip(state, q, k, v, decay, beta, overlap, out, depth, row_bytes, ahead):
    """STRIP columns, `overlap` being the product of key and query; the next to be worked on lie `ahead` bytes further."""
    _step((STRIP_VECTORS, state, q, k, v, decay, beta, overlap, out, depth, row_bytes, ahead))


@jit
def step_vector(state, q, k, v, decay, beta, overlap, out, depth, row_bytes, ahead):
    """LANES columns."""
    _step((1, state, q, k, v, decay, beta, overlap, out, depth, row_bytes, ahead))
