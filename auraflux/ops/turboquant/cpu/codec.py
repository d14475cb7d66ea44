"""The steps between a vector and its codes, a row at a time.

Codes must be those of the reference to the last bit, so the order of its float32 operations is kept: these functions are
compiled without reassociation, except for sums in float64, which are the same in any order once rounded.
"""

import numba
import numpy as np
from llvmlite import ir

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import doubles, floats, int32s, int64s, jit, strict
from auraflux.ops.simd.softmax import fill
from auraflux.ops.simd.vectors import F32, I32, call, fma, kernel, load, pick, splat, spread, store, vector
from auraflux.ops.turboquant.cpu.quantize import CHUNK, F64, gather, quantize_chunks

BLOCK = 8  # rows encoded together
PERMUTES = {16: "llvm.x86.avx512.permvar.sf.512", 8: "llvm.x86.avx2.permps"}  # by lanes
NOTHING, NOT_A_NUMBER = np.float32(-np.inf), np.float32(np.nan)


@kernel(constants=2)
def hadamard_row(b, width, inverse, x, signs, y):
    """Apply the signs and the Walsh-Hadamard transform, or undo them. Emits nothing where the width is no power of two."""
    if width & (width - 1):
        return
    lanes = min(ISA.lanes, width)
    kind = vector(F32, lanes)
    rows = [load(b, x, 4 * lanes * i, kind) for i in range(width // lanes)]
    sign = [load(b, signs, 4 * lanes * i, kind) for i in range(width // lanes)]
    if inverse:
        rows = [b.fmul(v, s) for v, s in zip(_hadamard(b, rows), sign, strict=True)]
    else:
        rows = _hadamard(b, [b.fmul(v, s) for v, s in zip(rows, sign, strict=True)])
    for i, v in enumerate(rows):
        store(b, v, y, 4 * lanes * i)


@kernel(constants=1)
def _length_row(b, width, x, length_at):
    """Leave the length of a row, summed in float64."""
    lanes = min(ISA.lanes, width)
    kind, wide = vector(F32, lanes), vector(F64, lanes)
    sums = [splat(wide, 0.0)] * 2
    for i in range(width // lanes):
        v = b.fpext(load(b, x, 4 * lanes * i, kind), wide)
        sums[i % 2] = call(b, f"llvm.fma.v{lanes}f64", wide, v, v, sums[i % 2])
    total = b.fadd(*sums)
    while total.type.count > 2:
        n = total.type.count // 2
        total = b.fadd(pick(b, total, total, list(range(n))), pick(b, total, total, list(range(n, 2 * n))))
    total = b.fadd(*(b.extract_element(total, ir.Constant(I32, i)) for i in range(2)))
    store(b, call(b, "llvm.sqrt.f64", F64, total), length_at, 0)


@kernel(constants=1)
def _unit_hadamard_row(b, width, x, length_at, signs, y):
    """Rotate the direction of a row of known length, as `hadamard_row` does. A row of zeros stays one."""
    if width & (width - 1):
        return
    lanes = min(ISA.lanes, width)
    kind, wide, length = vector(F32, lanes), vector(F64, lanes), load(b, length_at, 0, F64)
    zero, one = ir.Constant(F64, 0.0), ir.Constant(F64, 1.0)
    inverse = spread(b, b.select(b.fcmp_ordered("==", length, zero), zero, b.fdiv(one, length)), lanes)
    rows = []
    for i in range(width // lanes):
        v = b.fptrunc(b.fmul(b.fpext(load(b, x, 4 * lanes * i, kind), wide), inverse), kind)
        rows.append(b.fmul(v, load(b, signs, 4 * lanes * i, kind)))
    for i, v in enumerate(_hadamard(b, rows)):
        store(b, v, y, 4 * lanes * i)


def _hadamard(b, rows):
    """The Walsh-Hadamard transform over the square root of the width, of a row in registers."""
    kind, lanes = rows[0].type, rows[0].type.count
    width = lanes * len(rows)
    span = 1
    while span < lanes:
        # the second of a pair becomes partner - itself
        turned = ir.Constant(kind, [-1.0 if i & span else 1.0 for i in range(lanes)])
        rows = [fma(b, v, turned, pick(b, v, v, [i ^ span for i in range(lanes)])) for v in rows]
        span *= 2
    span = 1
    while span < len(rows):
        pairs = [(rows[i & ~span], rows[i | span]) for i in range(len(rows))]
        rows = [b.fsub(*pair) if i & span else b.fadd(*pair) for i, pair in enumerate(pairs)]
        span *= 2
    factor = splat(kind, float(np.float32(width**-0.5)))
    return [b.fmul(v, factor) for v in rows]


@strict
def matrix_row(x_at, table, y_at, width, sums_at):
    """y = x @ table, summed in float64."""
    x, y, sums = floats(x_at, width), floats(y_at, width), doubles(sums_at, width)
    for d in range(width):
        sums[d] = 0.0
    for k in range(width):
        factor, row = np.float64(x[k]), doubles(table + 8 * k * width, width)
        for d in range(width):
            sums[d] += factor * row[d]
    for d in range(width):
        y[d] = np.float32(sums[d])


@numba.njit(inline="always")
def rotate_row(width, inverse, x, table, y, sums):
    """Rotate one row; `width` and `inverse` are known when this is compiled."""
    if width & (width - 1):
        matrix_row(x, table, y, width, sums)
    else:
        hadamard_row((width, inverse, x, table, y))


@jit
def _sum_of_squares(x):
    total = 0.0
    for i in range(len(x)):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@strict
def _unit_row(x_at, unit_at, width):
    """Give the length of a row, and leave its direction at `unit_at`."""
    x, unit = floats(x_at, width), floats(unit_at, width)
    length = np.sqrt(_sum_of_squares(x))
    inverse = 1.0 / length if length != 0 else 0.0
    for i in range(width):
        unit[i] = np.float32(np.float64(x[i]) * inverse)
    return length


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
            # what is no number has the last code
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
def _quantize_row(y_at, width, bits, levels, codes, total_at, words):
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
            rest[i] = NOTHING
        quantize_chunks(bits, y_at + 4 * whole * CHUNK, 1, levels.search, words, total_at)
        lowest = np.float64(floats(levels.book, 1 << bits)[int64s(levels.order, 1)[0]])
        total[0] -= (CHUNK - left) * lowest * lowest
        source, target = int32s(words, bits), int32s(codes + 4 * bits * whole, bits)
        for i in range((left * bits + 31) // 32):
            target[i] = source[i]
    if not levels.ordered:
        _renumber(int32s(codes, (width * bits + 31) // 32), width, bits, int64s(levels.order, 1 << bits))


def scratch_nbytes(width: int) -> int:
    """What one job needs: lists of a block's rows, and the rows, rounded up to whole chunks; one of them in float64."""
    return 4 * (BLOCK + 3) * (width + CHUNK) + 64 * BLOCK


@numba.njit(inline="always")
def encode_block(width, bits, turn, levels, count, work):
    """Encode up to BLOCK rows; `width` is known when this is compiled.

    Step by step for all of them: each row is a chain of long latencies, and the processor works on several at once.
    work  three lists [BLOCK] of addresses, of rows, their codes and their norms; then memory to work in
    """
    room = (width + CHUNK - 1) // CHUNK * CHUNK
    rows, codes, norms = int64s(work, BLOCK), int64s(work + 8 * BLOCK, BLOCK), int64s(work + 16 * BLOCK, BLOCK)
    lengths_at, totals_at, words = work + 24 * BLOCK, work + 32 * BLOCK, work + 40 * BLOCK
    y, unit = work + 64 * BLOCK, work + 64 * BLOCK + 4 * BLOCK * room
    lengths, totals = doubles(lengths_at, BLOCK), doubles(totals_at, BLOCK)
    if width & (width - 1):
        for r in range(count):
            lengths[r] = _unit_row(rows[r], unit, width)
            matrix_row(unit, turn, y + 4 * r * room, width, unit + 4 * room)
    else:
        for r in range(count):
            _length_row((width, rows[r], lengths_at + 8 * r))
        for r in range(count):
            _unit_hadamard_row((width, rows[r], lengths_at + 8 * r, turn, y + 4 * r * room))
    for r in range(count):
        if not lengths[r] < np.inf:
            # of one sign, which quantizing looks at
            fill(y + 4 * r * room, width, NOT_A_NUMBER)
    for r in range(count):
        _quantize_row(y + 4 * r * room, width, bits, levels, codes[r], totals_at + 8 * r, words)
    for r in range(count):
        # all levels of a row may be 0 where they are given
        floats(norms[r], 1)[0] = np.float32(lengths[r] / np.sqrt(totals[r]) if totals[r] != 0 else lengths[r] * 0)


@kernel(constants=1)
def _unpack_chunk(b, bits, words_at, book, out):
    """Look up the levels of 32 codes."""
    words = load(b, words_at, 0, vector(I32, bits))
    places = [divmod(d * bits, 32) for d in range(CHUNK)]
    kind = vector(I32, CHUNK)
    low = pick(b, words, words, [word for word, _ in places])
    shifts = ir.Constant(kind, [shift for _, shift in places])
    if 32 % bits:
        high = pick(b, words, words, [min(word + 1, bits - 1) for word, _ in places])
        found = call(b, f"llvm.fshr.v{CHUNK}i32", kind, high, low, shifts)
    else:
        found = b.lshr(low, shifts)
    codes = b.and_(found, splat(kind, (1 << bits) - 1))
    lanes = ISA.lanes
    permute = PERMUTES.get(lanes) if bits <= 4 else None
    # sixteen levels in one register, or in two
    tables = [] if permute is None else _registers(b, book, 1 << bits)
    for first in range(0, CHUNK, lanes):
        part = pick(b, codes, codes, list(range(first, first + lanes)))
        if permute is None:
            levels = gather(b, book, part, F32, 4)
        else:
            levels = call(b, permute, ISA.floats, tables[0], part)
            if len(tables) > 1:
                upper = b.icmp_unsigned(">=", part, splat(ISA.ints, lanes))
                levels = b.select(upper, call(b, permute, ISA.floats, tables[1], part), levels)
        store(b, levels, out, 4 * first)


def _registers(b, book, count):
    """A table of `count` floats in as many registers as it fills, the rest of the last one repeating it."""
    lanes, size = ISA.lanes, min(count, ISA.lanes)
    held = [load(b, book, 4 * lanes * i, vector(F32, size)) for i in range(count // size)]
    return [pick(b, v, v, [i % size for i in range(lanes)]) for v in held]


@jit
def _unpack_any(bits, words, book, out):
    if bits == 2:
        _unpack_chunk((2, words, book, out))
    elif bits == 3:
        _unpack_chunk((3, words, book, out))
    elif bits == 4:
        _unpack_chunk((4, words, book, out))
    elif bits == 6:
        _unpack_chunk((6, words, book, out))
    else:
        _unpack_chunk((8, words, book, out))


@jit
def unpack_row(bits, words_at, width, book, out):
    """Look up the levels of a row; `out` has room for whole chunks."""
    whole = width // CHUNK
    for i in range(whole):
        _unpack_any(bits, words_at + 4 * bits * i, book, out + 4 * CHUNK * i)
    if width % CHUNK:
        left, here = int32s(words_at + 4 * bits * whole, bits), out + 4 * CHUNK * whole
        # the room for this chunk's levels holds its words first, filled up with zeros
        words = int32s(here, bits)
        count = ((width % CHUNK) * bits + 31) // 32
        for i in range(bits):
            words[i] = left[i] if i < count else np.int32(0)
        _unpack_any(bits, here, book, here)
