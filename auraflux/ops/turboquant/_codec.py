"""The steps between a vector and its codes, a row at a time.

Codes must be those of the reference to the last bit, so the order of its float32 operations is kept: these functions are
compiled without reassociation, except for sums in float64, which are the same in any order once rounded.
"""

import numba
import numpy as np
from llvmlite import ir

from auraflux.ops._jit import _pointer, floats, int32s, int64s, jit
from auraflux.ops._simd import F32, I32, ISA, call, kernel, load, pick, splat, store, vector

CHUNK = 32  # codes; they are exactly `bits` words
FEW_LEVELS = 4  # bits; up to here every boundary is compared with, beyond they are searched

# flags are spelt out: without any, Numba takes those of the first caller
strict = numba.njit(error_model="numpy", fastmath={"contract"})


@numba.njit(inline="always")
def doubles(address, n):
    return numba.carray(_pointer(address, np.float64), (n,))


@kernel(constants=2)
def hadamard_row(b, width, inverse, x, signs, y):
    """Apply the signs and the Walsh-Hadamard transform, or undo them. Emits nothing where the width is no power of two."""
    if width & (width - 1):
        return
    lanes = min(ISA.lanes, width)
    kind = vector(F32, lanes)
    rows = [load(b, x, 4 * lanes * i, kind) for i in range(width // lanes)]
    sign = [load(b, signs, 4 * lanes * i, kind) for i in range(width // lanes)]
    if not inverse:
        rows = [b.fmul(v, s) for v, s in zip(rows, sign, strict=True)]
    span = 1
    while span < lanes:
        # the second of a pair becomes partner - itself
        turned = ir.Constant(kind, [-1.0 if i & span else 1.0 for i in range(lanes)])
        rows = [b.fadd(pick(b, v, v, [i ^ span for i in range(lanes)]), b.fmul(v, turned)) for v in rows]
        span *= 2
    span = 1
    while span < len(rows):
        pairs = [(rows[i & ~span], rows[i | span]) for i in range(len(rows))]
        rows = [b.fsub(*pair) if i & span else b.fadd(*pair) for i, pair in enumerate(pairs)]
        span *= 2
    factor = splat(kind, float(np.float32(width**-0.5)))
    for i, v in enumerate(rows):
        v = b.fmul(v, factor)
        store(b, b.fmul(v, sign[i]) if inverse else v, y, 4 * lanes * i)


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
def turn_row(width, inverse, x, table, y, sums):
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
def unit_row(x_at, unit_at, width):
    """Give the length of a row, and leave its direction at `unit_at`."""
    x, unit = floats(x_at, width), floats(unit_at, width)
    length = np.sqrt(_sum_of_squares(x))
    if length == 0:
        for i in range(width):
            unit[i] = np.float32(0)
    else:
        for i in range(width):
            unit[i] = np.float32(np.float64(x[i]) / length)
    return length


@strict
def _rank(y, middles, bits, ranks):
    """Count the boundaries below each coordinate; not-a-number is above all."""
    one, zero = np.int32(1), np.int32(0)
    for d in range(len(y)):
        ranks[d] = zero
    if bits <= FEW_LEVELS:
        for i in range((1 << bits) - 1):
            middle = middles[i]
            for d in range(len(y)):
                ranks[d] += zero if middle >= y[d] else one
        return
    step = 1 << (bits - 1)
    while step > 0:
        wide = np.int32(step)
        for d in range(len(y)):
            ranks[d] += zero if middles[ranks[d] + wide - one] >= y[d] else wide
        step >>= 1


@strict
def pack_row(codes, bits, words):
    held, filled, word = np.uint64(0), 0, 0
    for d in range(len(codes)):
        held |= np.uint64(codes[d]) << np.uint64(filled)
        filled += bits
        if filled >= 32:
            words[word] = np.int32(held & np.uint64(0xFFFFFFFF))
            held >>= np.uint64(32)
            filled -= 32
            word += 1
    if filled > 0:
        words[word] = np.int32(held & np.uint64(0xFFFFFFFF))


@strict
def quantize_row(y_at, width, bits, book, middles, order, ranks_at, codes):
    """Write the codes nearest to a rotated row; give the length of what they stand for.

    book, middles, order  addresses of the levels by code, of the boundaries, and of the code of each level
    """
    y, ranks, levels, code = floats(y_at, width), int32s(ranks_at, width), floats(book, 1 << bits), int64s(order, 1 << bits)
    _rank(y, floats(middles, 1 << bits), bits, ranks)
    total = 0.0
    for d in range(width):
        ranks[d] = np.int32(code[ranks[d]])
        level = np.float64(levels[ranks[d]])
        total += level * level
    pack_row(ranks, bits, int32s(codes, (width * bits + 31) // 32))
    return np.sqrt(total)


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
    levels = b.inttoptr(book, F32.as_pointer())
    for d in range(CHUNK):
        code = b.extract_element(codes, ir.Constant(I32, d))
        store(b, b.load(b.gep(levels, [code])), out, 4 * d)


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
