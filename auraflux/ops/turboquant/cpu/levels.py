"""Rows of codes as rows of float32 levels: a codebook of up to 64 levels stays in registers, and permutes look it up.

Rows are padded to whole chunks of 32 coordinates, of which the last ones are of no use to anybody.
"""

from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import int32s, jit
from auraflux.ops.simd.vectors import F32, I8, I32, at, call, kernel, load, pick, splat, spread, store, vector
from auraflux.ops.turboquant.codebook import BITS

CHUNK = 32  # codes; they are exactly `bits` words
LANES = ISA.lanes


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
    "avx512-vnni": Avx512Book,
    "avx2": Avx2Book,
    "avx-vnni": Avx2Book,
    "neon-i8mm": NeonBook,
    "neon-dotprod": NeonBook,
}


def _codes(b, bits, words):
    """The 32 codes of a chunk, in 32-bit lanes."""
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
    """Write the levels of `count` rows of whole chunks, times their norms; rows of words lie `step` bytes apart."""
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
    """Write the levels of `count` neighbouring rows, times their norms, to rows of whole chunks `out_step` bytes apart."""
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
