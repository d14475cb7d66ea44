"""Codes to float32 levels: a codebook of up to 64 levels stays in registers, and permutes look it up.

`level_rows` dequantizes contiguous rows (levels times norms); `unpack_row` gives the levels of one row. Both write whole chunks
of 32 coordinates, so that a row has padding at its end.
"""

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import int32s, jit
from auraflux.ops.simd.vectors import F32, I8, I32, at, call, kernel, load, pick, splat, spread, store, vector
from auraflux.ops.turboquant.codebook import BITS
from auraflux.ops.turboquant.cpu.quantize import CHUNK, gather

LANES = ISA.lanes
PERMUTES = {16: "llvm.x86.avx512.permvar.sf.512", 8: "llvm.x86.avx2.permps"}  # by lanes


def _part(b, x, first, count):
    return pick(b, x, x, list(range(first, first + count)))


class Book:
    """A codebook of 2 ** bits floats at an address, looked up one by one."""

    def __init__(self, b, bits, address):
        self.bits, self.address = bits, address

    def look_up(self, b, codes):
        """Replace LANES codes by their levels."""
        found = ir.Constant(ISA.floats, ir.Undefined)
        levels = b.inttoptr(self.address, F32.as_pointer())
        for lane in range(LANES):
            place = ir.Constant(I32, lane)
            found = b.insert_element(found, b.load(b.gep(levels, [b.extract_element(codes, place)])), place)
        return found


class Avx512Book(Book):
    """Pairs of registers of 16 floats; codes of 8 bits are gathered."""

    def __init__(self, b, bits, address):
        super().__init__(b, bits, address)
        size = min(1 << bits, LANES)
        self.tables = [load(b, address, 4 * i, vector(F32, size)) for i in range(0, 1 << bits, size)] if bits < 8 else []
        self.tables = [pick(b, t, t, [i % size for i in range(LANES)]) for t in self.tables]

    def look_up(self, b, codes):
        if not self.tables:
            everywhere = ir.Constant(vector(ir.IntType(1), LANES), [1] * LANES)
            pointer = b.inttoptr(self.address, I8.as_pointer())
            before = ir.Constant(ISA.floats, [0.0] * LANES)
            name = "llvm.x86.avx512.mask.gather.dps.512"
            return call(b, name, ISA.floats, before, pointer, codes, everywhere, ir.Constant(I32, 4))
        if len(self.tables) == 1:
            return call(b, "llvm.x86.avx512.permvar.sf.512", ISA.floats, self.tables[0], codes)
        pairs = zip(self.tables[::2], self.tables[1::2], strict=True)
        found = [call(b, "llvm.x86.avx512.vpermi2var.ps.512", ISA.floats, low, codes, high) for low, high in pairs]
        upper = b.icmp_unsigned(">=", codes, splat(ISA.ints, 2 * LANES))
        return b.select(upper, found[1], found[0])


class Avx2Book(Book):
    """One or two registers of 8 floats; codes of more bits are gathered."""

    def __init__(self, b, bits, address):
        super().__init__(b, bits, address)
        size = min(1 << bits, LANES)
        self.tables = [load(b, address, 4 * i, vector(F32, size)) for i in range(0, 1 << bits, size)] if bits <= 4 else []
        self.tables = [pick(b, t, t, [i % size for i in range(LANES)]) for t in self.tables]

    def look_up(self, b, codes):
        if not self.tables:
            everywhere = b.bitcast(splat(ISA.ints, -1), ISA.floats)
            pointer = b.inttoptr(self.address, I8.as_pointer())
            before = ir.Constant(ISA.floats, [0.0] * LANES)
            name = "llvm.x86.avx2.gather.d.ps.256"
            return call(b, name, ISA.floats, before, pointer, codes, everywhere, ir.Constant(I8, 4))
        found = [call(b, "llvm.x86.avx2.permps", ISA.floats, table, codes) for table in self.tables]
        return b.select(b.icmp_unsigned(">=", codes, splat(ISA.ints, LANES)), found[-1], found[0])


class NeonBook(Book):
    """Four registers, looked up by bytes; codes of more than 4 bits are loaded one by one."""

    def __init__(self, b, bits, address):
        super().__init__(b, bits, address)
        size = min(1 << bits, 16)
        floats_ = load(b, address, 0, vector(F32, size))
        whole = b.bitcast(pick(b, floats_, floats_, [i % size for i in range(16)]), vector(I8, 64))
        self.tables = [_part(b, whole, i, 16) for i in range(0, 64, 16)]

    def look_up(self, b, codes):
        if self.bits > 4:
            return super().look_up(b, codes)
        places = b.add(b.mul(codes, splat(ISA.ints, 0x04040404)), splat(ISA.ints, 0x03020100))
        found = call(b, "llvm.aarch64.neon.tbl4.v16i8", ISA.bytes, *self.tables, b.bitcast(places, ISA.bytes))
        return b.bitcast(found, ISA.floats)


BOOKS = {
    "avx512-amx": Avx512Book,
    "avx512-vnni": Avx512Book,
    "avx2": Avx2Book,
    "avx-vnni": Avx2Book,
    "neon-i8mm": NeonBook,
    "neon-dotprod": NeonBook,
}


def _codes(b, bits, words):
    """Return the 32 codes of a chunk, in 32-bit lanes."""
    places = [divmod(d * bits, 32) for d in range(CHUNK)]
    kind = vector(I32, CHUNK)
    found = pick(b, words, words, [word for word, _ in places])
    shifts = ir.Constant(kind, [shift for _, shift in places])
    if 32 % bits:
        above = pick(b, words, words, [min(word + 1, bits - 1) for word, _ in places])
        found = call(b, f"llvm.fshr.v{CHUNK}i32", kind, above, found, shifts)
    else:
        found = b.lshr(found, shifts)
    return b.and_(found, splat(kind, (1 << bits) - 1))


@kernel(constants=0)
def _level_rows(b, bits, words, step, count, chunks, book, norms, out, out_step):
    """Write the levels of `count` rows of whole chunks, times their norms; rows of words have a stride of `step` bytes."""
    for mine in BITS:
        with b.if_then(b.icmp_signed("==", bits, at(mine))):
            table = BOOKS.get(ISA.name, Book)(b, mine, book)
            with cgutils.for_range(b, count) as row:
                norm = spread(b, load(b, norms, b.mul(row.index, at(4)), F32), LANES)
                source, target = b.add(words, b.mul(row.index, step)), b.add(out, b.mul(row.index, out_step))
                with cgutils.for_range(b, chunks) as chunk:
                    here = load(b, source, b.mul(chunk.index, at(4 * mine)), vector(I32, mine))
                    codes = _codes(b, mine, here)
                    for first in range(0, CHUNK, LANES):
                        levels = table.look_up(b, _part(b, codes, first, LANES))
                        place = b.add(b.mul(chunk.index, at(4 * CHUNK)), at(4 * first))
                        store(b, b.fmul(levels, norm), target, place)


@jit
def level_rows(bits, words, width, count, book, norms, out, out_step):
    """Write the levels of `count` adjacent rows, times their norms, as whole chunks in rows of `out_step` bytes."""
    whole, size = width // CHUNK, (width * bits + 31) // 32
    _level_rows((bits, words, 4 * size, count, whole, book, norms, out, out_step))
    if width % CHUNK:
        for j in range(count):
            # the room for the last chunk's levels holds its words first, filled up with zeros
            here = out + j * out_step + 4 * CHUNK * whole
            given, padded = int32s(words + 4 * (j * size + bits * whole), bits), int32s(here, bits)
            for i in range(bits):
                padded[i] = given[i] if bits * whole + i < size else 0
            _level_rows((bits, here, 0, 1, 1, book, norms + 4 * j, here, 0))


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
    """Load a table of `count` floats into as many registers as it fills, repeated to the end of the last one."""
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
