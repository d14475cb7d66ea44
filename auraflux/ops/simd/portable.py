"""The vector operations of CPU kernels, in portable LLVM IR.

Vectors have `lanes` 32-bit lanes. A subclass for an instruction set overrides the operations that it has instructions for.
Three differ most: the byte dot product, the table look-up, and the broadcast of four activation bytes to all lanes.
"""

from typing import Any, NamedTuple

from llvmlite import ir

from auraflux.ops.simd.vectors import F32, I8, I32, I64, call, load, pick, splat, spread, vector


def load_entries(b: ir.IRBuilder, table: ir.Value, numbers: list[ir.Value], kind: ir.IntType) -> ir.Value:
    """Load some entries of a table, one by one, into a vector."""
    found, start = ir.Constant(vector(kind, len(numbers)), ir.Undefined), b.ptrtoint(table, I64)
    for lane, number in enumerate(numbers):
        entry = load(b, start, b.mul(b.zext(number, I64), ir.Constant(I64, kind.width // 8)), kind)
        found = b.insert_element(found, entry, ir.Constant(I32, lane))
    return found


class Term(NamedTuple):
    """A vector of codes, how far they are shifted left within their bytes, and the activations they are multiplied by."""

    codes: ir.Value
    shift: int
    acts: ir.Value


class Isa:
    """Portable IR, correct on every processor and fast on none; subclasses override it with their instructions."""

    name = "portable"
    features: tuple[str, ...] = ()
    slow_on: tuple[str, ...] = ()  # prefixes of LLVM CPU names that support it without being faster
    lanes = 4
    tokens = 4  # tokens whose sums fit in registers
    signed_codes = False  # `dot` takes 8-bit codes as signed, stored minus 128
    # bytes into which exact products split an activation for `dot`; 0: activations stay float32. On two Neoverse-N1 cores,
    # unpacking codes to floats and multiplying those takes four times as long; with AVX-512 VNNI, by llvm-mca, one and a half
    # times with eight tokens
    digits = 0
    by_lane = False  # both operands of `dot` are signed, and one lane of the second is broadcast to all
    matrix_tiles = False  # AMX: one instruction multiplies 16 tokens by `lanes` rows, see `linear/cpu/matrix_tiles.py`
    by_pair = False  # one instruction multiplies two rows by two tokens, eight inputs of each: `dot_pairs`
    # prefetch distance for the weights of a single token; 0: none. The hardware prefetcher stops at the end of a page.
    # Two x86 AVX-512 cores read 4-bit weights at 17-19 GB/s without, 20 at 1024, 21 at 2048, 23-24 from 4096 on; the measured
    # peak is 28-30
    prefetch_nbytes = 4096
    # inputs per iteration of the single-token loop over 2-bit codes; 0: one group. Two Neoverse-N1 cores read 16.3 GB/s at
    # 256, 15.1 without, 15.9 at 512
    inputs_per_step_2bit = 0
    # the same for more bits. 4-bit codes in groups of 32 are read at 23.1 GB/s at 64, 22.5 without; groups of 64 are slower
    inputs_per_step = 0
    small_unit = 1.0  # result of `small_float` for a byte of 1
    denormals = False  # products of denormal floats are as fast as others
    half_products = False  # eight products in float16 take as long as four in float32
    widens_halves = False  # one instruction converts f16 to float32
    small_tables = False  # table look-ups cover 32 bytes at a time, so a few instructions more are cheaper than larger tables

    @property
    def floats(self) -> ir.VectorType:
        return vector(F32, self.lanes)

    @property
    def halves(self) -> ir.VectorType:
        return vector(ir.HalfType(), 2 * self.lanes)

    @property
    def ints(self) -> ir.VectorType:
        return vector(I32, self.lanes)

    @property
    def bytes(self) -> ir.VectorType:
        return vector(I8, 4 * self.lanes)

    def quads(self, b: ir.IRBuilder, address: ir.Value, count: int) -> list[ir.Value]:
        """Load `count` times four bytes of activations, each repeated in all lanes."""
        found = [load(b, address, 4 * i, I32) for i in range(count)]
        return [b.bitcast(spread(b, word, self.lanes), self.bytes) for word in found]

    def dot(self, b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, bits: int) -> ir.Value:
        """Add to each lane the dot product of its four codes (of `bits` bits) with its four activations."""
        wide = vector(I32, 4 * self.lanes)
        products = b.mul(b.zext(codes, wide), b.sext(acts, wide))
        for i in range(4):
            part = pick(b, products, products, list(range(i, 4 * self.lanes, 4)))
            total = b.add(total, part)
        return total

    def unpacked(self, b: ir.IRBuilder, codes: ir.Value, bits: int) -> ir.Value:
        """Convert codes to the form that `dot_unpacked` takes, once for many tokens."""
        return codes

    def dot_unpacked(self, b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, bits: int) -> ir.Value:
        return self.dot(b, total, codes, acts, bits)

    def dots(self, b: ir.IRBuilder, sums: dict[int, ir.Value], terms: list[Term], bits: int, unpacked: bool) -> None:
        """Add dot products to the sum of each shift, see `dot`; codes have `bits` bits before they are shifted."""
        dot = self.dot_unpacked if unpacked else self.dot
        for codes, shift, acts in terms:
            sums[shift] = dot(b, sums[shift], codes, acts, bits)

    def sum_bytes(self, b: ir.IRBuilder, values: ir.Value) -> ir.Value:
        """Return the sum of signed bytes."""
        wide = vector(I32, values.type.count)
        return call(b, f"llvm.vector.reduce.add.v{wide.count}i32", I32, b.sext(values, wide))

    def dot_lanes(self, b: ir.IRBuilder, sums: list[ir.Value], codes: list[ir.Value], acts: list[ir.Value]) -> list[ir.Value]:
        """Add to each sum, by lane, dot products of unpacked codes with its activations: vector i with bytes 4i to 4i+3."""
        for i, v in enumerate(codes):
            quads = [b.bitcast(pick(b, x, x, [i] * self.lanes), self.bytes) for x in acts]
            sums = [self.dot_unpacked(b, total, v, quad, 8) for total, quad in zip(sums, quads, strict=True)]
        return sums

    def dot_pairs(self, b: ir.IRBuilder, total: ir.Value, acts: ir.Value, codes: ir.Value) -> ir.Value:
        """Add dot products of two tokens' eight activations with two rows' eight unpacked codes: t0 r0, t0 r1, t1 r0, t1 r1."""
        raise NotImplementedError

    def ordered_after(self, b: ir.IRBuilder, address: ir.Value, made: list[ir.Value]) -> ir.Value:
        """Return the address with a dependency on vectors, so that LLVM loads from it only after they are computed."""
        return address

    def spill(self, b: ir.IRBuilder, values: list[ir.Value]) -> Any:
        """Store vectors of one type to memory for `reload`."""
        return values

    def reload(self, b: ir.IRBuilder, spilled: Any, step: ir.Value) -> list[ir.Value]:
        """Load copies of spilled vectors that will be overwritten; `step` is different at every call."""
        return spilled

    def shift_right_insert(self, b: ir.IRBuilder, top: ir.Value, rest: ir.Value, count: int) -> ir.Value:
        """Combine the highest `count` bits of each byte of `top` with, below them, the highest bits of `rest`."""
        high = b.and_(top, splat(self.bytes, 256 - (256 >> count)))
        return b.or_(high, b.lshr(rest, splat(self.bytes, count)))

    def powers(self, b: ir.IRBuilder, address: ir.Value, offset: ir.Value) -> ir.Value:
        """Load a byte for each lane as the exponent of a float."""
        exponents = b.zext(load(b, address, offset, vector(I8, self.lanes)), self.ints)
        return b.bitcast(b.shl(exponents, splat(self.ints, 23)), self.floats)

    def small_float(self, b: ir.IRBuilder, words: ir.Value, byte: int) -> ir.Value:
        """Convert one of the four bytes of each lane to a float, times `small_unit`."""
        found = b.lshr(words, splat(self.ints, 8 * byte)) if byte else words
        return b.sitofp(b.and_(found, splat(self.ints, 255)), self.floats)

    def larger(self, b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
        """Return the larger of two floats; y, which is never NaN, where x is NaN."""
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    def at_least(self, b: ir.IRBuilder, x: ir.Value, bound: ir.Value) -> ir.Value:
        """Return x, or the bound where x is less; NaN propagates."""
        return b.select(b.fcmp_ordered(">", bound, x), bound, x)

    def gather(self, b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> ir.Value:
        """Load the entry of a table for each lane: integers of 32 bits."""
        return load_entries(b, table, [b.extract_element(index, ir.Constant(I32, lane)) for lane in range(self.lanes)], I32)

    def gather_pairs(self, b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> list[ir.Value]:
        """Load entries of 64 bits: of the first half of the lanes, and of the others."""
        numbers, half = [b.extract_element(index, ir.Constant(I32, lane)) for lane in range(self.lanes)], self.lanes // 2
        return [load_entries(b, table, numbers[first : first + half], I64) for first in (0, half)]

    def every_other(self, b: ir.IRBuilder, x: ir.Value, y: ir.Value, first: int) -> ir.Value:
        """Return every other lane of two vectors, from lane `first` on."""
        return pick(b, x, y, list(range(first, 2 * self.lanes, 2)))

    def look_up(self, b: ir.IRBuilder, table: list[int], codes: ir.Value) -> ir.Value:
        """Replace each byte, in 0..15, by its entry of the table."""
        found = splat(self.bytes, 0)
        for code, value in enumerate(table):
            found = b.select(b.icmp_unsigned("==", codes, splat(self.bytes, code)), splat(self.bytes, value), found)
        return found

    def look_up_more(self, b: ir.IRBuilder, table: list[int], codes: ir.Value) -> ir.Value:
        """Replace each byte by its entry of a larger table, a multiple of 32 entries."""
        within, part = b.and_(codes, splat(self.bytes, 15)), b.lshr(codes, splat(self.bytes, 4))
        found = self.look_up(b, table[:16], within)
        for i in range(1, len(table) // 16):
            here = b.icmp_unsigned("==", part, splat(self.bytes, i))
            found = b.select(here, self.look_up(b, table[16 * i : 16 * i + 16], within), found)
        return found
