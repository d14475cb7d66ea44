"""What kernels ask of a processor's vectors, answered in portable IR.

Vectors have `lanes` 32-bit lanes. An instruction set is a class that replaces what its instructions do better, above all the
three things that differ most: a dot product of bytes, a table look-up, how four bytes of activations reach all lanes.
"""

from typing import Any

from llvmlite import ir

from auraflux.ops.simd.vectors import F32, I8, I32, call, load, pick, splat, spread, vector


class Isa:
    """Portable IR: right everywhere, fast nowhere. The others replace what their instructions do better."""

    name = "portable"
    features: tuple[str, ...] = ()
    slow_on: tuple[str, ...] = ()  # what LLVM's names of processors begin with that have it, and are no faster with it
    lanes = 4
    tokens = 4  # how many tokens' sums fit in registers
    signed_codes = False  # whether `dot` takes 8-bit codes as signed, stored minus 128
    # bytes into which exact products split an activation for `dot`, 3, or none: it stays float32 then. Two Neoverse-N1 cores
    # need four times as long to unpack codes as floats and multiply those
    digits = 0
    by_lane = False  # whether both sides of `dot` are signed, and a lane of the last one serves for all
    by_pair = False  # whether one instruction multiplies two rows by two tokens, eight inputs of each: `dot_pairs`
    # bytes ahead at which one token's weights are asked for, or 0: the processor's own prefetching stops at the end of a page.
    # Two x86 AVX-512 cores read 4-bit weights at 17-19 GB/s without, 20 at 1024, 21 at 2048, 23-24 from 4096 on, beside a read
    # ceiling of 28-30
    ahead = 4096
    # inputs of one token that a turn of the loop over 2-bit codes takes, or 0: those of a group. Two Neoverse-N1 cores read
    # 16.3 GB/s at 256, 15.1 without, 15.9 at 512
    small_codes = 0
    # the same with more bits. Groups of 32 with 4 bits are read at 23.1 GB/s at 64, 22.5 without; groups of 64 slower
    small_spans = 0
    small_unit = 1.0  # what `small_float` gives for a byte of 1
    denormals = False  # whether products of denormal floats take no longer than others
    half_products = False  # whether eight products of half precision take as long as four of float32
    widens_halves = False  # whether f16 becomes float32 by one instruction
    small_tables = False  # whether bytes are looked up among 32 at a time, so that a few instructions more are cheaper

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
        """Codes as they are kept for many tokens, for `dot_unpacked`."""
        return codes

    def dot_unpacked(self, b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, bits: int) -> ir.Value:
        return self.dot(b, total, codes, acts, bits)

    def sum_bytes(self, b: ir.IRBuilder, values: ir.Value) -> ir.Value:
        """The sum of signed bytes."""
        whole = vector(I32, values.type.count)
        return call(b, f"llvm.vector.reduce.add.v{whole.count}i32", I32, b.sext(values, whole))

    def dot_lanes(self, b: ir.IRBuilder, sums: list[ir.Value], codes: list[ir.Value], acts: list[ir.Value]) -> list[ir.Value]:
        """Add to each sum, lane by lane, dot products of vectors of unpacked codes: the first with the first four bytes of the
        sum's own activations, and so on."""
        for i, v in enumerate(codes):
            quads = [b.bitcast(pick(b, x, x, [i] * self.lanes), self.bytes) for x in acts]
            sums = [self.dot_unpacked(b, total, v, quad, 8) for total, quad in zip(sums, quads, strict=True)]
        return sums

    def dot_pairs(self, b: ir.IRBuilder, total: ir.Value, acts: ir.Value, codes: ir.Value) -> ir.Value:
        """Add dot products of two tokens' eight activations with two rows' eight unpacked codes: t0 r0, t0 r1, t1 r0, t1 r1."""
        raise NotImplementedError

    def after(self, b: ir.IRBuilder, address: ir.Value, made: list[ir.Value]) -> ir.Value:
        """The same address, from which nothing should be loaded before these vectors are made."""
        return address

    def kept(self, b: ir.IRBuilder, values: list[ir.Value]) -> Any:
        """Vectors of one type, for `copies`."""
        return values

    def copies(self, b: ir.IRBuilder, kept: Any, turn: ir.Value) -> list[ir.Value]:
        """Copies of what is kept, about to be written over; `turn` is another number every time."""
        return kept

    def put_below(self, b: ir.IRBuilder, top: ir.Value, rest: ir.Value, count: int) -> ir.Value:
        """Bytes of the highest `count` bits of one vector's bytes and, below them, the highest bits of the other's."""
        kept = b.and_(top, splat(self.bytes, 256 - (256 >> count)))
        return b.or_(kept, b.lshr(rest, splat(self.bytes, count)))

    def powers(self, b: ir.IRBuilder, address: ir.Value, offset: ir.Value) -> ir.Value:
        """Load a byte for each lane as the exponent of a float."""
        exponents = b.zext(load(b, address, offset, vector(I8, self.lanes)), self.ints)
        return b.bitcast(b.shl(exponents, splat(self.ints, 23)), self.floats)

    def small_float(self, b: ir.IRBuilder, words: ir.Value, byte: int) -> ir.Value:
        """One of the four bytes of each lane as a float, times `small_unit`."""
        found = b.lshr(words, splat(self.ints, 8 * byte)) if byte else words
        return b.sitofp(b.and_(found, splat(self.ints, 255)), self.floats)

    def larger(self, b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
        """The larger of two floats; y, which is a number, where x is none."""
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    def at_least(self, b: ir.IRBuilder, x: ir.Value, bound: ir.Value) -> ir.Value:
        """x, or the bound where x is less; not-a-number stays."""
        return b.select(b.fcmp_ordered(">", bound, x), bound, x)

    def look_up(self, b: ir.IRBuilder, table: list[int], codes: ir.Value) -> ir.Value:
        """Replace each byte, in 0..15, by that entry of the table."""
        found = splat(self.bytes, 0)
        for code, value in enumerate(table):
            found = b.select(b.icmp_unsigned("==", codes, splat(self.bytes, code)), splat(self.bytes, value), found)
        return found

    def look_up_more(self, b: ir.IRBuilder, table: list[int], codes: ir.Value) -> ir.Value:
        """The same with a table of more entries, a multiple of 32."""
        within, part = b.and_(codes, splat(self.bytes, 15)), b.lshr(codes, splat(self.bytes, 4))
        found = self.look_up(b, table[:16], within)
        for i in range(1, len(table) // 16):
            here = b.icmp_unsigned("==", part, splat(self.bytes, i))
            found = b.select(here, self.look_up(b, table[16 * i : 16 * i + 16], within), found)
        return found
