"""The matrix work of a chunk of the delta rule, as LLVM IR that keeps a tile of the result in registers.

All operands lie in scratch memory, padded to whole tiles, with strides known at compile time:

keys    [K][2 * CHUNK]       a chunk's keys, then its queries, tokens being the fast axis
pairs   [2 * CHUNK][CHUNK]   what each token's write, then each token's output, takes from each write
gates   [4][CHUNK]           decay, beta, the decay since before the chunk, the decay until its last token
panel   [K][PANEL]           a strip of the state
rows    [3][CHUNK][PANEL]    what the keys read, then the writes; what the queries read; the writes as the chunk leaves them
"""

from numba.core import cgutils

from auraflux.ops.simd.jit import jit
from auraflux.ops.simd.vectors import F32, ISA, at, fma, kernel, load, pick, splat, spread, store, variable

CHUNK = 16
# a tile of sums fills about half of the registers; more rows would not fit those of AVX2
ROWS, VECTORS = {16: (8, 2), 8: (4, 2), 4: (4, 4)}[ISA.lanes]
LANES, PANEL = ISA.lanes, VECTORS * ISA.lanes
PAIR_VECTORS = CHUNK // LANES
PAIR_ROWS = ROWS * VECTORS // PAIR_VECTORS

VECTOR_BYTES, KEY_BYTES, PAIR_BYTES, ROW_BYTES = 4 * LANES, 8 * CHUNK, 4 * CHUNK, 4 * PANEL
BLOCK_BYTES = CHUNK * ROW_BYTES
BETA, SINCE, UNTIL = 4 * CHUNK, 8 * CHUNK, 12 * CHUNK
TINY = 1.2e-38  # products of decays below it are taken as zero: arithmetic on subnormals is slow


@kernel(7)
def _tile(b, rows, vectors, left_row, left_step, right_step, kept, factor_row, left, right, old, factors, depth, out, out_row):
    """Sum left[r, d] * right[d, :] over d, onto old[r, :] times its factor if `kept`, into out[r, :]. Strides in bytes."""
    sums = {}
    for row in range(rows):
        scale = spread(b, load(b, factors, row * factor_row, F32), LANES) if kept else None
        for v in range(vectors):
            start = load(b, old, (row * vectors + v) * VECTOR_BYTES, ISA.floats) if kept else None
            sums[row, v] = variable(b, b.fmul(start, scale) if kept else splat(ISA.floats, 0.0))
    with cgutils.for_range(b, depth) as loop:
        left_at = b.add(left, b.mul(loop.index, at(left_step)))
        right_at = b.add(right, b.mul(loop.index, at(right_step)))
        others = [load(b, right_at, v * VECTOR_BYTES, ISA.floats) for v in range(vectors)]
        for row in range(rows):
            one = spread(b, load(b, left_at, row * left_row, F32), LANES)
            for v in range(vectors):
                b.store(fma(b, one, others[v], b.load(sums[row, v])), sums[row, v])
    for (row, v), total in sums.items():
        store(b, b.load(total), b.add(out, b.mul(out_row, at(row))), v * VECTOR_BYTES)


@kernel(0)
def _transpose(b, source, step, out):
    rows = [load(b, source, b.mul(step, at(4 * row)), ISA.floats) for row in range(LANES)]
    # each round interleaves the first half of the rows with the second; after log2(LANES) rounds rows are columns
    low = [lane // 2 + lane % 2 * LANES for lane in range(LANES)]
    high = [lane + LANES // 2 for lane in low]
    for _ in range(LANES.bit_length() - 1):
        pairs = list(zip(rows[: LANES // 2], rows[LANES // 2 :], strict=True))
        rows = [pick(b, x, y, lanes) for x, y in pairs for lanes in (low, high)]
    for row in range(LANES):
        store(b, rows[row], out, row * KEY_BYTES)


@kernel(0)
def _decay_pairs(b, products, gates, pairs):
    def not_tiny(x):
        limit, zero = (splat(x.type, TINY), splat(x.type, 0.0))
        return b.select(b.fcmp_unordered(">", x, limit), x, zero)

    between, since = [splat(ISA.floats, 0.0)] * PAIR_VECTORS, splat(ISA.floats, 1.0)
    for token in range(CHUNK):
        decay, beta = (spread(b, load(b, gates, where + 4 * token, F32), LANES) for where in (0, BETA))
        since = not_tiny(b.fmul(since, decay))
        store(b, b.extract_element(since, at(0)), gates, SINCE + 4 * token)
        for v in range(PAIR_VECTORS):
            key_at, query_at = (row * PAIR_BYTES + v * VECTOR_BYTES for row in (token, CHUNK + token))
            between[v] = not_tiny(b.fmul(between[v], decay))
            owed = b.fmul(b.fmul(between[v], beta), load(b, products, key_at, ISA.floats))
            store(b, b.fneg(owed), pairs, key_at)
            if token // LANES == v:
                between[v] = b.insert_element(between[v], F32(1.0), at(token % LANES))
            store(b, b.fmul(between[v], load(b, products, query_at, ISA.floats)), pairs, query_at)
    for v in range(PAIR_VECTORS):
        store(b, between[v], gates, UNTIL + v * VECTOR_BYTES)


@kernel(0)
def _solve(b, pairs, gates, values, value_bytes, rows):
    with cgutils.for_range(b, at(VECTORS)) as loop:
        here, value = (b.add(base, b.mul(loop.index, at(VECTOR_BYTES))) for base in (rows, values))

        def gate(which, token):
            return spread(b, load(b, gates, which + 4 * token, F32), LANES)

        found = []
        for token in range(CHUNK):
            read = load(b, here, token * ROW_BYTES, ISA.floats)
            wanted = load(b, value, b.mul(value_bytes, at(token)), ISA.floats)
            found.append(b.fmul(b.fsub(wanted, b.fmul(gate(SINCE, token), read)), gate(BETA, token)))
        for token in range(CHUNK):
            for later in range(token + 1, CHUNK):
                weight = spread(b, load(b, pairs, later * PAIR_BYTES + 4 * token, F32), LANES)
                found[later] = fma(b, weight, found[token], found[later])
        for token in range(CHUNK):
            store(b, found[token], here, token * ROW_BYTES)
            store(b, b.fmul(found[token], gate(UNTIL, token)), here, 2 * BLOCK_BYTES + token * ROW_BYTES)


@jit
def transpose(source, step, out):
    """Turn LANES tokens' stretches of LANES floats into as many rows of `keys`."""
    _transpose((source, step, out))


@jit
def multiply_keys(keys, depth, products):
    """Multiply each key, then each query, with each key."""
    for row in range(0, 2 * CHUNK, PAIR_ROWS):
        left, out = keys + 4 * row, products + row * PAIR_BYTES
        _tile((PAIR_ROWS, PAIR_VECTORS, 4, KEY_BYTES, KEY_BYTES, 0, 0, left, keys, out, out, depth, out, PAIR_BYTES))


@jit
def decay_pairs(products, gates, pairs):
    """Weigh the products by the decay between their tokens, keys also by -beta; fill in the last two lines of the gates."""
    _decay_pairs((products, gates, pairs))


@jit
def read_panel(keys, first, n, panel, depth, rows):
    """Read the state at n keys, or from `first` = CHUNK on at n queries."""
    for row in range(first, first + n, ROWS):
        left, out = keys + 4 * row, rows + row * ROW_BYTES
        _tile((ROWS, VECTORS, 4, KEY_BYTES, ROW_BYTES, 0, 0, left, panel, out, out, depth, out, ROW_BYTES))


@jit
def solve(pairs, gates, values, value_step, rows):
    """Turn what the keys read into what is written: from the first token on, each corrected by the writes before it."""
    _solve((pairs, gates, values, 4 * value_step, rows))


@jit
def add_writes(pairs, gates, n, rows, out, out_step):
    """Decay what n queries read, add the writes up to their own, and put it out."""
    for row in range(0, n, ROWS):
        left, read, since = pairs + (CHUNK + row) * PAIR_BYTES, rows + BLOCK_BYTES + row * ROW_BYTES, gates + SINCE + 4 * row
        here, step = out + 4 * row * out_step, 4 * out_step
        _tile((ROWS, VECTORS, PAIR_BYTES, 4, ROW_BYTES, 1, 4, left, rows, read, since, row + ROWS, here, step))


@jit
def update_panel(keys, gates, n, rows, panel, depth):
    """Decay the state over the chunk and add n writes at their keys."""
    since, writes = gates + SINCE + 4 * (CHUNK - 1), rows + 2 * BLOCK_BYTES
    for row in range(0, depth, ROWS):
        left, out = keys + row * KEY_BYTES, panel + row * ROW_BYTES
        _tile((ROWS, VECTORS, KEY_BYTES, 4, ROW_BYTES, 1, 0, left, writes, out, since, n, out, ROW_BYTES))
