"""Scores of queries and int8 keys, as LLVM IR: bytes looked up in tables, and dot products of bytes.

Queries are two signed bytes, high and low. Where the dot product takes unsigned bytes the levels of keys are stored plus 128,
and 128 times the sum of a query is subtracted.
"""

from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.attention.cpu.launch_args import named_values
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.vectors import (
    F32,
    I32,
    I64,
    at,
    fma,
    kernel,
    load,
    prefetch,
    splat,
    spread,
    store,
    variable,
)
from auraflux.ops.turboquant.cpu.int8.codebook import CODES, HIGH, REST
from auraflux.ops.turboquant.cpu.int8.tiles import (
    BYTES,
    LANES,
    PLUS,
    STRAIGHT,
    group_rows,
    load_quads,
    per_tile,
    room_of,
    side_by_side,
    transpose,
)


def _prefetch(b, rows, group, nbytes):
    """Prefetch the rows of a group."""
    first = b.mul(group, at(LANES))
    prefetch(b, [load(b, rows, b.mul(b.add(first, at(t)), at(8)), I64) for t in range(LANES)], nbytes)


def _dot_signed(b, total, levels, query):
    # where the instruction set needs signed bytes it converts stored ones itself, so the conversion is undone first
    return ISA.dot(b, total, levels if PLUS else b.xor(levels, splat(ISA.bytes, -128)), query, 8)


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
            totals = _products(b, CODES[bits], tile, group_rows(b, args.rows, group.index), args.quads, args.q)
            _store_scores(b, totals, group.index, args)

    per_tile(b, args.heads, build)


@kernel(constants=1)
def transpose_key_loop(b, bits, rows, groups, quads, out, out_step):
    """Transpose and look up LANES * `groups` keys once, for many queries: their levels in the order of products.

    rows  [groups * LANES]  int64, addresses of the packed rows, each of 4 * `quads` words
    out   a group every `out_step` bytes; where levels have two bytes, the low ones follow the high ones
    """
    code = CODES[bits]
    with cgutils.for_range(b, groups) as group:
        where, here = group_rows(b, rows, group.index), b.add(out, b.mul(group.index, out_step))
        with cgutils.for_range(b, quads) as loop:
            words = transpose(b, side_by_side(b, where, b.mul(loop.index, at(16)), I32), 4)
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
                x = load_quads(b, b.add(args.q, b.mul(loop.index, at(room_of(tile) * 8))), 2 * room_of(tile))
                _add_dots(b, totals, levels, x)
            _store_scores(b, totals, group.index, args)

    per_tile(b, args.heads, build)


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
        words = transpose(b, side_by_side(b, where, b.mul(loop.index, at(16)), I32), 4)
        query = b.add(q, b.mul(loop.index, at(4 * code.vectors * room * 8)))
        for n, codes in enumerate(c for word in words for c in code.split(b, word)):
            levels = code.key_levels(b, codes, PLUS)
            _add_dots(b, totals, levels, load_quads(b, b.add(query, at(n * room * 8)), 2 * room))
    return totals
