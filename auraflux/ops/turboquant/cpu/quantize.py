"""From rotated coordinates to packed codes, as LLVM IR: a vector holds neighbouring coordinates of one row.

Codebooks are symmetric, so only the size of a coordinate is searched for, among the positive boundaries. Sizes are compared as
integers: positive floats are ordered as their bits are. A coordinate on a boundary belongs to the lower level, so that below
zero a size equal to a boundary counts as beyond it: there one is added to the bits.

Up to FEW bits every boundary is compared with. Beyond, equal cells are cut so fine that each holds one boundary at most: the
cell of a size, found by a multiplication, names the boundary to compare with and how many lie before. Where a register holds
sixteen cells, FEW bits are searched so too.
"""

from functools import cache

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import doubles, floats, int32s, int64s, jit, strict
from auraflux.ops.simd.vectors import F32, I8, I32, I64, at, call, kernel, load, pick, splat, spread, store, variable, vector
from auraflux.ops.turboquant.codebook import normal_levels

F64 = ir.DoubleType()
CHUNK = 32  # codes; they are exactly `bits` words
FEW = 4  # bits
TOGETHER = 16  # chunks, so that no count of a chunk's coordinates passes a byte
LANES, VECTORS = ISA.lanes, CHUNK // ISA.lanes
BYTE_PAIRS, NIBBLES = 0x00FF00FF, 0x0F0F0F0F
# where the counts of levels of each size come to lie after they are added up
PLACES = (0, 2, 1, 3, 4, 6, 5, 7)
NOTHING = np.iinfo(np.int32).max  # as a boundary: none
PERMUTE = "llvm.x86.avx512.permvar.si.512"
LOWEST = np.float32(-np.inf)


@cache
def search_table(bits: int, width: int) -> np.ndarray:
    """Lay out what a search needs, in bytes.

    few bits   squares of positive levels, float64 [8]; positive boundaries as integers, [8]; with FEW bits also cells per unit
               and the last cell, float32, boundaries of cells as integers, [16], and how many lie in cells before, int32 [16]
    more bits  cells per unit and the last cell, float32; the positive levels, float32; for each cell its boundary as an
               integer, and how many boundaries lie in cells before, int32 both
    """
    levels = normal_levels(bits) / np.sqrt(width)
    half = len(levels) // 2
    middles = ((levels[1:] + levels[:-1]) / 2).astype(np.float32)[half:]
    sizes = levels[half:].astype(np.float32)
    if bits <= FEW:
        squares, bounds = np.zeros(8), np.full(8, NOTHING, np.int32)
        squares[: len(sizes)] = sizes.astype(np.float64) ** 2
        bounds[: len(middles)] = middles.view(np.int32)
        held: list[np.ndarray] = [squares[list(PLACES)], bounds]
        if bits == FEW:
            scale, table = _cells(middles)
            cells = np.full((2, 16), NOTHING, np.int32)
            cells[:, : len(table)] = table.T
            held += [np.array([scale, len(table) - 1], np.float32), cells.ravel()]
        return np.concatenate([part.view(np.uint8) for part in held])
    scale, table = _cells(middles)
    head = np.array([scale, len(table) - 1], np.float32)
    return np.concatenate([head.view(np.uint8), sizes.view(np.uint8), table.ravel().view(np.uint8)])


def _cells(middles):
    """Return cells per unit, and for each cell its boundary as an integer and how many boundaries lie in cells before."""
    scale = np.float32(1.01) / np.diff(middles).min()
    cell = (middles * scale).astype(np.int32)
    table = np.full((cell[-1] + 2, 2), NOTHING, np.int32)
    table[cell, 0] = middles.view(np.int32)
    table[:, 1] = np.searchsorted(cell, np.arange(len(table)))
    return scale, table


def _sizes(b, bits_of_y):
    """Return the bits of sizes, one more below zero; and all ones where the sign is not positive."""
    size = b.and_(bits_of_y, splat(ISA.ints, 0x7FFFFFFF))
    compared = b.sub(size, b.ashr(bits_of_y, splat(ISA.ints, 31)))
    return size, compared, b.sext(b.icmp_signed("<=", bits_of_y, splat(ISA.ints, 0)), ISA.ints)


def _joined(b, parts):
    """Concatenate vectors."""
    while len(parts) > 1:
        n = 2 * parts[0].type.count
        parts = [pick(b, x, y, list(range(n))) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _pack(b, bits, codes, words, offset):
    """Store CHUNK codes as `bits` words."""
    held = _joined(b, codes)
    while bits not in (8, 16, 24):
        # neighbours become one number of twice the bits
        pairs = vector(I64, held.type.count // 2)
        wide = b.bitcast(held, pairs)
        wide = b.or_(wide, b.lshr(wide, splat(pairs, 32 - bits)))
        held, bits = b.trunc(wide, vector(I32, pairs.count)), 2 * bits
    if bits == 24:
        octets = b.bitcast(held, vector(I8, 4 * held.type.count))
        store(b, pick(b, octets, octets, [i for i in range(4 * held.type.count) if i % 4 < 3]), words, offset)
    else:
        store(b, b.trunc(held, vector(ir.IntType(bits), held.type.count)), words, offset)


def _shift(b, x, n):
    return b.lshr(x, splat(x.type, n))


def _add_counts(b, even, odd):
    """Add up, across lanes, bytes that count levels: two vectors of four counts each, as float64, in the order of PLACES."""
    parts = [b.and_(x, splat(x.type, BYTE_PAIRS)) for v in (even, odd) for x in (v, _shift(b, v, 8))]
    while len(parts) > 1:
        n = parts[0].type.count
        lows = list(range(0, 2 * n, 2))
        parts = [
            b.add(pick(b, x, y, lows), pick(b, x, y, [i + 1 for i in lows]))
            for x, y in zip(parts[::2], parts[1::2], strict=True)
        ]
    total = parts[0]  # n/4 partial sums of each of four
    n = total.type.count // 4
    while n > 1:
        half = [q * n + i for q in range(4) for i in range(0, n, 2)]
        total = b.add(pick(b, total, total, half), pick(b, total, total, [i + 1 for i in half]))
        n //= 2
    wide = vector(F64, 4)
    return b.uitofp(b.and_(total, splat(total.type, 0xFFFF)), wide), b.uitofp(_shift(b, total, 16), wide)


def _held_cells(b, tables):
    """Load the scale and the boundaries of cells, where sixteen fit in a register."""
    scale, last = (spread(b, load(b, tables, offset, F32), LANES) for offset in (96, 100))
    return scale, last, load(b, tables, 104, ISA.ints), load(b, tables, 168, ISA.ints)


def _cell_of(b, size, scale, last):
    place = b.fmul(b.bitcast(size, ISA.floats), scale)
    # not a number is in the last
    return b.fptosi(b.select(b.fcmp_ordered("<", place, last), place, last), ISA.ints)


@kernel(constants=1)
def _few(b, bits, y, chunks, tables, words, total):
    """Quantize up to TOGETHER chunks by comparing with every boundary; add the squares of their levels to `total`."""
    half, kind = 1 << (bits - 1), ISA.ints
    cells = _held_cells(b, tables) if bits == FEW and LANES == 16 else None
    bounds = [spread(b, load(b, tables, 64 + 4 * i, I32), LANES) for i in range(half - 1)]
    even, odd = variable(b, splat(kind, 0)), variable(b, splat(kind, 0))
    with cgutils.for_range(b, chunks) as loop:
        here = b.add(y, b.mul(loop.index, at(4 * CHUNK)))
        codes, counts = [], splat(kind, 0)
        for v in range(VECTORS):
            size, compared, below = _sizes(b, load(b, here, 4 * LANES * v, kind))
            passed = splat(kind, 0)
            if cells is not None:
                scale, last, bound, before = cells
                cell = _cell_of(b, size, scale, last)
                passed, bounds = call(b, PERMUTE, kind, before, cell), [call(b, PERMUTE, kind, bound, cell)]
            for bound in bounds:
                passed = b.sub(passed, b.sext(b.icmp_signed(">", compared, bound), kind))
            codes.append(b.add(b.xor(passed, below), splat(kind, half)))
            # four bits count each size of level
            counts = b.add(counts, b.shl(splat(kind, 1), b.shl(passed, splat(kind, 2))))
        b.store(b.add(b.load(even), b.and_(counts, splat(kind, NIBBLES))), even)
        b.store(b.add(b.load(odd), b.and_(_shift(b, counts, 4), splat(kind, NIBBLES))), odd)
        _pack(b, bits, codes, words, b.mul(loop.index, at(4 * bits)))
    low, high = _add_counts(b, b.load(even), b.load(odd))
    wide = vector(F64, 4)
    sums = b.fadd(b.fmul(low, load(b, tables, 0, wide)), b.fmul(high, load(b, tables, 32, wide)))
    _add_up(b, sums, total)


def _add_up(b, sums, total):
    found = load(b, total, 0, F64)
    while sums.type.count > 2:
        n = sums.type.count // 2
        sums = b.fadd(pick(b, sums, sums, list(range(n))), pick(b, sums, sums, list(range(n, 2 * n))))
    for i in range(2):
        found = b.fadd(found, b.extract_element(sums, ir.Constant(I32, i)))
    store(b, found, total, 0)


def gather(b, base, index, element, nbytes):
    """Load elements of a table by their numbers."""
    n = index.type.count
    wide = vector(I64, n)
    places = b.add(spread(b, base, n), b.mul(b.zext(index, wide), splat(wide, nbytes)))
    pointers = b.inttoptr(places, vector(element.as_pointer(), n))
    kind, letters = vector(element, n), "f" if element in (F32, F64) else "i"
    return call(
        b,
        f"llvm.masked.gather.v{n}{letters}{8 * nbytes}.v{n}p0",
        kind,
        pointers,
        ir.Constant(I32, nbytes),
        splat(vector(ir.IntType(1), n), 1),
        ir.Constant(kind, ir.Undefined),
    )


@kernel(constants=1)
def _many(b, bits, y, chunks, tables, words, total):
    """Quantize chunks by cells; add the squares of their levels to `total`."""
    half, kind = 1 << (bits - 1), ISA.ints
    scale, last = (spread(b, load(b, tables, offset, F32), LANES) for offset in (0, 4))
    sizes, cells = b.add(tables, at(8)), b.add(tables, at(8 + 4 * half))
    wide = vector(F64, LANES)
    sums = variable(b, splat(wide, 0.0))
    with cgutils.for_range(b, chunks) as loop:
        here = b.add(y, b.mul(loop.index, at(4 * CHUNK)))
        codes = []
        for v in range(VECTORS):
            size, compared, below = _sizes(b, load(b, here, 4 * LANES * v, kind))
            cell = gather(b, cells, _cell_of(b, size, scale, last), I64, 8)
            bound, before = b.trunc(cell, kind), b.trunc(_shift(b, cell, 32), kind)
            passed = b.sub(before, b.sext(b.icmp_signed(">", compared, bound), kind))
            codes.append(b.add(b.xor(passed, below), splat(kind, half)))
            level = b.fpext(gather(b, sizes, passed, F32, 4), wide)
            b.store(b.fadd(b.load(sums), b.fmul(level, level)), sums)
        _pack(b, bits, codes, words, b.mul(loop.index, at(4 * bits)))
    _add_up(b, b.load(sums), total)


@jit
def quantize_chunks(bits, y, chunks, tables, words, total):
    """Write the codes nearest to rotated coordinates, and add the squares of the levels they stand for to `total`."""
    for first in range(0, chunks, TOGETHER):
        count, source, target = min(TOGETHER, chunks - first), y + 4 * CHUNK * first, words + 4 * bits * first
        if bits == 2:
            _few((2, source, count, tables, target, total))
        elif bits == 3:
            _few((3, source, count, tables, target, total))
        elif bits == 4:
            _few((4, source, count, tables, target, total))
        elif bits == 6:
            _many((6, source, count, tables, target, total))
        else:
            _many((8, source, count, tables, target, total))


@strict
def _renumber(words, width, bits, order):
    """Replace the ranks of levels in a packed row by their codes."""
    held, filled, source, target = np.uint64(0), 0, 0, 0
    old, left, mask = np.uint64(0), 0, np.uint64((1 << bits) - 1)
    for _ in range(width):
        if left < bits:
            old |= np.uint64(np.uint32(words[source])) << np.uint64(left)
            source, left = source + 1, left + 32
        held |= np.uint64(order[np.int64(old & mask)]) << np.uint64(filled)
        old, left, filled = old >> np.uint64(bits), left - bits, filled + bits
        if filled >= 32:
            words[target] = np.int32(held & np.uint64(0xFFFFFFFF))
            held, filled, target = held >> np.uint64(32), filled - 32, target + 1
    if filled > 0:
        words[target] = np.int32(held & np.uint64(0xFFFFFFFF))


@strict
def _quantize_by_halves(y_at, width, bits, levels, words):
    """Write the codes of any levels, found by halving their range; give the sum of squares of these."""
    y, middles, book = floats(y_at, width), floats(levels.search, (1 << bits) - 1), floats(levels.book, 1 << bits)
    held, filled, target, total = np.uint64(0), 0, 0, 0.0
    for d in range(width):
        code, step = 0, 1 << (bits - 1)
        while step:
            # not a number has the last code
            if not y[d] <= middles[code + step - 1]:
                code += step
            step >>= 1
        level = np.float64(book[code])
        total += level * level
        held |= np.uint64(code) << np.uint64(filled)
        filled += bits
        if filled >= 32:
            words[target] = np.int32(held & np.uint64(0xFFFFFFFF))
            held, filled, target = held >> np.uint64(32), filled - 32, target + 1
    if filled > 0:
        words[target] = np.int32(held & np.uint64(0xFFFFFFFF))
    return total


@strict
def quantize_row(y_at, width, bits, levels, codes, total_at, words):
    """Write the codes nearest to a rotated row, which has room for whole chunks, and the sum of squares of their levels.

    words  memory for those of a chunk
    """
    whole, left = width // CHUNK, width % CHUNK
    total = doubles(total_at, 1)
    total[0] = 0.0
    if levels.order == 0:
        total[0] = _quantize_by_halves(y_at, width, bits, levels, int32s(codes, (width * bits + 31) // 32))
        return
    quantize_chunks(bits, y_at, whole, levels.search, codes, total_at)
    if left:
        rest = floats(y_at + 4 * whole * CHUNK, CHUNK)
        for i in range(left, CHUNK):
            rest[i] = LOWEST
        quantize_chunks(bits, y_at + 4 * whole * CHUNK, 1, levels.search, words, total_at)
        lowest = np.float64(floats(levels.book, 1 << bits)[int64s(levels.order, 1)[0]])
        total[0] -= (CHUNK - left) * lowest * lowest
        source, target = int32s(words, bits), int32s(codes + 4 * bits * whole, bits)
        for i in range((left * bits + 31) // 32):
            target[i] = source[i]
    if not levels.ordered:
        _renumber(int32s(codes, (width * bits + 31) // 32), width, bits, int64s(levels.order, 1 << bits))
