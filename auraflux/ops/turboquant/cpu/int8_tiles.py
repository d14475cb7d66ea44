"""The inner loops of decode attention on codes, as LLVM IR: bytes looked up in tables, and dot products of bytes.

Keys: a lane holds four coordinates of one token, so that a dot product adds to the scores of LANES tokens. Values: a lane holds
one coordinate of four tokens, so that a dot product sums over those. Either way rows of packed words are turned side by side
in registers, by shuffles within 128 bits.

Queries are two signed bytes, high and low, weights two of seven bits. Where the dot product takes unsigned bytes the levels of
keys are stored plus 128, and 128 times the sum of a query is subtracted.
"""

from functools import cache
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.attention.cpu.launch_args import named_values
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import Kernel, arguments
from auraflux.ops.simd.vectors import (
    F32,
    I8,
    I32,
    I64,
    MAGIC,
    MAGIC_BITS,
    at,
    fma,
    kernel,
    load,
    pick,
    prefetch,
    splat,
    spread,
    store,
    variable,
    vector,
)
from auraflux.ops.turboquant.cpu.int8_codebook import CODES, HIGH, REST

BLOCK = 128  # positions that are attended to together
LANES = ISA.lanes
BYTES = 4 * LANES  # of a vector, and how many bytes it holds
TILES = (4, 3, 2, 1) if ISA.by_lane else (4, 2, 1)  # heads that share each load
PLUS = 0 if ISA.signed_codes else 128
STRAIGHT = ISA.small_tables
WAYS = 16 // LANES  # groups of tokens per loop iteration: short iterations stall on their first loads
WEIGHT = 4 if ISA.by_lane else BYTES  # bytes of four tokens' weights in a load


def room_of(tile):
    """Return for how many heads the queries and weights of a tile are laid out: three take the registers of four."""
    return 4 if tile == 3 else tile


def _choose(b, heads, build):
    """Emit a variant for each number of heads."""
    for tile in TILES:
        with b.if_then(b.icmp_signed("==", heads, at(tile))):
            build(tile)


def _prefetch(b, rows, group, nbytes):
    """Prefetch the rows of a group."""
    first = b.mul(group, at(LANES))
    prefetch(b, [load(b, rows, b.mul(b.add(first, at(t)), at(8)), I64) for t in range(LANES)], nbytes)


def _quads(b, address, count):
    """Load `count` times four bytes, each repeated in all lanes."""
    if count % 4 == 0:
        return ISA.quads(b, address, count)
    return [b.bitcast(spread(b, load(b, address, 4 * i, I32), LANES), ISA.bytes) for i in range(count)]


def _dot_signed(b, total, levels, query):
    # where the instruction set needs signed bytes it converts stored ones itself, so the conversion is undone first
    return ISA.dot(b, total, levels if PLUS else b.xor(levels, splat(ISA.bytes, -128)), query, 8)


def _side_by_side(b, rows, offset, kind):
    """Load 16 bytes of each of LANES rows: vector i holds row i of every four, 128 bits each."""
    pieces = [load(b, row, offset, vector(kind, 128 // kind.width)) for row in rows]
    while len(pieces) > 4:
        count, half = pieces[0].type.count, len(pieces) // 2
        pieces = [pick(b, x, y, list(range(2 * count))) for x, y in _neighbours(pieces, half)]
    return pieces


def _neighbours(pieces, half):
    # rows i and i + 4 are joined first, then pairs at a distance of 8
    if half == 8:
        return [(pieces[i + 8 * k], pieces[i + 8 * k + 4]) for k in range(2) for i in range(4)]
    return [(pieces[i], pieces[i + 4]) for i in range(4)]


def _zip(b, x, y, per, unit):
    """Interleave runs of `unit` elements within every `per`: the lower halves, the upper halves."""
    count = x.type.count
    found = []
    for half in (0, per // 2):
        starts = [base + half + i for base in range(0, count, per) for i in range(0, per // 2, unit)]
        found.append(pick(b, x, y, [n for s in starts for side in (0, count) for n in range(side + s, side + s + unit)]))
    return found


def _transpose(b, rows, per):
    """Transpose four vectors of rows to four with an element of each row together, `per` elements in 128 bits."""
    low, high = _zip(b, rows[0], rows[1], per, 1)
    low2, high2 = _zip(b, rows[2], rows[3], per, 1)
    return [*_zip(b, low, low2, per, 2), *_zip(b, high, high2, per, 2)]


def _group_rows(b, rows, group):
    return [load(b, rows, b.add(b.mul(group, at(8 * LANES)), at(8 * t)), I64) for t in range(LANES)]


@kernel(constants=0)
def list_rows(b, source, step, count, out):
    """Write the addresses of `count` rows with a stride of `step` bytes."""
    with cgutils.for_range(b, count) as loop:
        store(b, b.add(source, b.mul(loop.index, step)), out, b.mul(loop.index, at(8)))


@kernel(constants=0)
def prefetch_bytes(b, address, nbytes):
    """Prefetch a range of bytes."""
    prefetch(b, [address], nbytes)


class KeyScores(NamedTuple):
    """The values of `key_score_loop`.

    rows    [groups * LANES]  int64, addresses of the packed rows, each of 4 * `quads` words
    q       [words][codes of a word / 4][room][2] four bytes, as `spread_query` leaves them
    units   [heads]           what a step of the result is worth
    excess  [heads]           int32, to be subtracted
    out     [heads][.]        rows with a stride of `out_step` bytes
    keys_ahead, values_ahead  like rows: the rows to prefetch, and how many bytes of each
    """

    heads: ir.Value
    rows: ir.Value
    groups: ir.Value
    quads: ir.Value
    norms: ir.Value
    q: ir.Value
    units: ir.Value
    excess: ir.Value
    out: ir.Value
    out_step: ir.Value
    keys_ahead: ir.Value
    key_nbytes: ir.Value
    values_ahead: ir.Value
    value_nbytes: ir.Value


@kernel(constants=1)
@named_values(KeyScores)
def key_score_loop(b, bits, args):
    """Score `heads` queries against LANES * `groups` keys."""

    def build(tile):
        with cgutils.for_range(b, args.groups) as group:
            _prefetch(b, args.keys_ahead, group.index, args.key_nbytes)
            _prefetch(b, args.values_ahead, group.index, args.value_nbytes)
            totals = _products(b, CODES[bits], tile, _group_rows(b, args.rows, group.index), args.quads, args.q)
            _store_scores(b, totals, group.index, args)

    _choose(b, args.heads, build)


@kernel(constants=1)
def transpose_key_loop(b, bits, rows, groups, quads, out, out_step):
    """Transpose and look up LANES * `groups` keys once, for many queries: their levels in the order of products.

    rows  [groups * LANES]  int64, addresses of the packed rows, each of 4 * `quads` words
    out   a group every `out_step` bytes; where levels have two bytes, the low ones follow the high ones
    """
    code = CODES[bits]
    with cgutils.for_range(b, groups) as group:
        where, here = _group_rows(b, rows, group.index), b.add(out, b.mul(group.index, out_step))
        with cgutils.for_range(b, quads) as loop:
            words = _transpose(b, _side_by_side(b, where, b.mul(loop.index, at(16)), I32), 4)
            found = [v for word in words for c in code.split(b, word) for v in code.key_levels(b, c, PLUS)]
            place = b.add(here, b.mul(loop.index, at(len(found) * BYTES)))
            for n, levels in enumerate(found):
                store(b, levels, place, n * BYTES)


class TransposedScores(NamedTuple):
    """The values of `transposed_score_loop`: keys as `transpose_key_loop` leaves them, and the rest as in `KeyScores`."""

    heads: ir.Value
    keys: ir.Value
    key_step: ir.Value
    groups: ir.Value
    steps: ir.Value
    norms: ir.Value
    q: ir.Value
    units: ir.Value
    excess: ir.Value
    out: ir.Value
    out_step: ir.Value


@kernel(constants=1)
@named_values(TransposedScores)
def transposed_score_loop(b, bits, args):
    """Score `heads` queries against transposed keys, `steps` vectors each."""
    bytes_ = len(CODES[bits].tables)

    def build(tile):
        with cgutils.for_range(b, args.groups) as group:
            here = b.add(args.keys, b.mul(group.index, args.key_step))
            totals = _nothing(b, tile, 3 if STRAIGHT and bytes_ == 2 else 2)
            with cgutils.for_range(b, args.steps) as loop:
                place = b.add(here, b.mul(loop.index, at(bytes_ * BYTES)))
                levels = [load(b, place, n * BYTES, ISA.bytes) for n in range(bytes_)]
                x = _quads(b, b.add(args.q, b.mul(loop.index, at(room_of(tile) * 8))), 2 * room_of(tile))
                _add_dots(b, totals, levels, x)
            _store_scores(b, totals, group.index, args)

    _choose(b, args.heads, build)


def _nothing(b, tile, count):
    """Return a query's empty sums: of its high bytes, its low ones, and its high bytes with the rest of a straight line."""
    return [[variable(b, splat(ISA.ints, 0)) for _ in range(count)] for _ in range(tile)]


def _add_dots(b, totals, levels, x):
    """Add to each query's sums its products with some levels."""
    for h, (high, low, *rest) in enumerate(totals):
        b.store(_dot_signed(b, b.load(high), levels[0], x[2 * h]), high)
        b.store(_dot_signed(b, b.load(low), levels[0], x[2 * h + 1]), low)
        for second in levels[1:]:
            total = rest[0] if rest else low
            b.store(_dot_signed(b, b.load(total), second, x[2 * h]), total)


def _store_scores(b, totals, group, args):
    """Write the scores of a group of keys, of `KeyScores` or `TransposedScores`."""
    norm = load(b, args.norms, b.mul(group, at(BYTES)), ISA.floats)
    for h, (high, low, *rest) in enumerate(totals):
        total = b.add(b.shl(b.load(high), splat(ISA.ints, 7)), b.load(low))
        if PLUS or rest:
            total = b.sub(total, spread(b, load(b, args.excess, 4 * h, I32), LANES))
        unit = spread(b, load(b, args.units, 4 * h, F32), LANES)
        value = b.sitofp(total, ISA.floats)
        for slot in rest:
            value = fma(b, b.sitofp(b.load(slot), ISA.floats), splat(ISA.floats, HIGH / REST), value)
        score = b.fmul(b.fmul(value, unit), norm)
        store(b, score, args.out, b.add(b.mul(args.out_step, at(h)), b.mul(group, at(BYTES))))


def _products(b, code, tile, where, quads, q):
    """Return the sums over a group of keys for each of some queries, of the high bytes and of the low ones."""
    totals, room = _nothing(b, tile, 3 if code.straight else 2), room_of(tile)
    with cgutils.for_range(b, quads) as loop:
        words = _transpose(b, _side_by_side(b, where, b.mul(loop.index, at(16)), I32), 4)
        query = b.add(q, b.mul(loop.index, at(4 * code.vectors * room * 8)))
        for n, codes in enumerate(c for word in words for c in code.split(b, word)):
            levels = code.key_levels(b, codes, PLUS)
            _add_dots(b, totals, levels, _quads(b, b.add(query, at(n * room * 8)), 2 * room))
    return totals


@kernel(constants=0)
def transpose_values(b, rows, groups, columns, out, out_step):
    """Transpose packed rows so that a lane holds a byte of each of four tokens.

    rows  [groups * LANES]  int64, addresses of rows of 16 * `columns` bytes
    out   [4 * columns][groups] vectors, rows with a stride of `out_step` bytes
    """
    with cgutils.for_range(b, groups) as group:
        where = _group_rows(b, rows, group.index)
        with cgutils.for_range(b, columns) as loop:
            transposed = _transpose(b, _side_by_side(b, where, b.mul(loop.index, at(16)), I8), 16)
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
        _choose(b, heads, lambda tile: _transpose_weights(b, 2 * room_of(tile), weights, step, groups, out))
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
            transposed = [_zip(b, *rows, 4, 1)]
        else:
            transposed = list(zip(*(_transpose(b, rows[n : n + 4], 4) for n in range(0, count, 4)), strict=True))
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

    _choose(b, heads, build)


def _add_weighed(b, totals, weights, levels):
    """Add to the sums of high and of low bytes the products of weights with levels of one or two bytes."""
    (high, low), (upper, lower) = totals, weights
    b.store(_dot(b, b.load(high), upper, levels[0]), high)
    total = _dot(b, b.load(low), lower, levels[0])
    b.store(_dot(b, total, upper, levels[1]) if len(levels) > 1 else total, low)


def _weights(b, address, count):
    if ISA.by_lane:
        return _quads(b, address, count)
    return [load(b, address, n * WEIGHT, ISA.bytes) for n in range(count)]


def _dot(b, total, weight, levels):
    return ISA.dot(b, total, levels, weight, 7) if ISA.by_lane else ISA.dot(b, total, weight, levels, 7)


# loops of one number of bits each: a cache has one for its keys and one for its values, and waits for no others


@cache
def _key_loops(bits: int) -> tuple[Kernel, ...]:
    @Kernel
    def key_scores(args, job, jobs):
        key_score_loop((bits, arguments(args, 14)))

    @Kernel
    def transpose_keys(args, job, jobs):
        transpose_key_loop((bits, arguments(args, 5)))

    @Kernel
    def transposed_scores(args, job, jobs):
        transposed_score_loop((bits, arguments(args, 11)))

    return key_scores, transpose_keys, transposed_scores


@cache
def _value_loops(bits: int) -> tuple[Kernel, ...]:
    @Kernel
    def add_values(args, job, jobs):
        add_value_loop((bits, arguments(args, 9)))

    return (add_values,)


_known: dict[tuple[int, int], tuple[int, ...]] = {}


def loops_for(key_bits: int, value_bits: int) -> tuple[int, ...]:
    """Return the addresses of the loops for a cache's bits: key_scores, transpose_keys, transposed_scores, add_values."""
    found = _known.get((key_bits, value_bits))
    if found is None:
        found = tuple(each.address for each in (*_key_loops(key_bits), *_value_loops(value_bits)))
        if all(found):
            _known[key_bits, value_bits] = found
    return found
