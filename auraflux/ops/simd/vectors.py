"""Vector instructions in Numba, as LLVM IR.

Numba's own loops do not reach the byte dot-product instructions, so the inner loops of the quantized kernels are written with
llvmlite: vectors of `ISA.lanes` 32-bit lanes, generic LLVM operations on them, and the three things that differ between
processors (a dot product of bytes, a table look-up, how four bytes of activations reach all lanes) behind the `Isa` methods.

`AURAFLUX_ISA` picks another instruction set than the best one found: any in `ISAS` that the processor has.
"""

import os
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core import config as _config
from numba.extending import intrinsic

from auraflux.errors import BackendError
from auraflux.ops.simd.threads import LINE

# its names are made when it is imported, out of sight of type checkers
config: Any = _config
I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()

# 1.5 * 2**23: its bits plus n are the float 12582912 + n for |n| < 2**22, so that sums of integers started there become floats
# by one subtraction, and adding it to a float rounds that to an integer in the low bits
MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000


def vector(kind: ir.Type, count: int) -> ir.VectorType:
    return ir.VectorType(kind, count)


def at(n: int) -> ir.Constant:
    return ir.Constant(I64, n)


def splat(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def call(b: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def load(b: ir.IRBuilder, address: ir.Value, offset: ir.Value | int, kind: ir.Type) -> ir.Value:
    """Load from an integer address and a byte offset, aligned or not."""
    where = b.add(address, at(offset) if isinstance(offset, int) else offset)
    return b.load(b.inttoptr(where, kind.as_pointer()), align=1)


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, offset: ir.Value | int) -> None:
    where = b.add(address, at(offset) if isinstance(offset, int) else offset)
    b.store(value, b.inttoptr(where, value.type.as_pointer()), align=1)


def spread(b: ir.IRBuilder, scalar: ir.Value, count: int) -> ir.Value:
    """A vector with the scalar in every lane."""
    kind = vector(scalar.type, count)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(vector(I32, count), [0] * count))


def pick(b: ir.IRBuilder, x: ir.Value, y: ir.Value, lanes: list[int]) -> ir.Value:
    return b.shuffle_vector(x, y, ir.Constant(vector(I32, len(lanes)), lanes))


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def prefetch(b: ir.IRBuilder, addresses: list[ir.Value], nbytes: ir.Value | int) -> None:
    """Ask for the lines of so many bytes from each address on; any address will do."""
    for_reading, keep_near, data = (ir.Constant(I32, n) for n in (0, 3, 1))

    def ask(offset: ir.Value) -> None:
        for address in addresses:
            pointer = b.inttoptr(b.add(address, offset), I8.as_pointer())
            call(b, "llvm.prefetch.p0", ir.VoidType(), pointer, for_reading, keep_near, data)

    if isinstance(nbytes, int):
        for offset in range(0, nbytes, LINE):
            ask(at(offset))
        return
    with cgutils.for_range(b, b.sdiv(b.add(nbytes, at(LINE - 1)), at(LINE))) as loop:
        ask(b.mul(loop.index, at(LINE)))


def sum_four(b: ir.IRBuilder, rows: list[ir.Value]) -> ir.Value:
    """The sums across the lanes of four vectors, as one vector of four."""
    total = _add_neighbours(b, _add_neighbours(b, *rows[:2]), _add_neighbours(b, *rows[2:]))
    while total.type.count > 4:
        half = total.type.count // 2
        total = b.fadd(pick(b, total, total, list(range(half))), pick(b, total, total, list(range(half, 2 * half))))
    return total


def _add_neighbours(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    # within 128 bits, where shuffles are cheap on x86 and ARM has one instruction for the whole
    lanes = x.type.count
    even = [n for first in range(0, lanes, 4) for n in (first, first + 2, lanes + first, lanes + first + 2)]
    return b.fadd(pick(b, x, y, even), pick(b, x, y, [n + 1 for n in even]))


def variable(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A mutable value that LLVM keeps in a register; set again each time this point is passed."""
    slot = cgutils.alloca_once(b, value.type)
    b.store(value, slot)
    return slot


class AsWritten:
    """A builder whose sums and products are made as they are written, wherever they are inlined.

    Numba marks all arithmetic without flags of its own as free to be reordered and contracted, also that of intrinsics. So it
    gets one that changes no number but the sign of a zero.
    """

    FLAGS = ("nsz",)

    def __init__(self, b: ir.IRBuilder):
        self._b = b

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._b, name)
        return partial(found, flags=self.FLAGS) if name in ("fadd", "fsub", "fmul", "fdiv") else found


def kernel(constants: int) -> Callable[[Callable[..., None]], Any]:
    """Make `build(b, *constants, *values)` callable from jitted code.

    Called with one tuple. Its first `constants` entries must be compile-time integers or strings (globals or closure variables)
    and reach `build` as Python values; the rest, tuples among them opened, arrive as IR values.
    """

    def wrap(build: Callable[..., None]) -> Any:
        @intrinsic(prefer_literal=True)
        def emit(typingctx, args):
            fixed = [t.literal_value for t in args.types[:constants]]

            def codegen(context, b, signature, values):
                entries = list(zip(args.types, cgutils.unpack_tuple(b, values[0]), strict=True))[constants:]
                opened = [v for kind, value in entries for v in (cgutils.unpack_tuple(b, value) if is_tuple(kind) else [value])]
                build(AsWritten(b), *fixed, *opened)
                return context.get_dummy_value()

            return types.void(args), codegen

        made: Any = emit
        # for those who compile it without Numba
        made.build = build
        return made

    return wrap


@kernel(constants=0)
def copy(b: ir.IRBuilder, source: ir.Value, nbytes: ir.Value, target: ir.Value) -> None:
    """Copy bytes to where they do not overlap."""
    here, there = (b.inttoptr(address, I8.as_pointer()) for address in (source, target))
    call(b, "llvm.memcpy.p0.p0.i64", ir.VoidType(), there, here, nbytes, ir.Constant(ir.IntType(1), 0))


def is_tuple(kind: types.Type) -> bool:
    return isinstance(kind, types.BaseTuple)


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
    widens_halves = False  # whether f16 becomes float32 by one instruction
    small_tables = False  # whether bytes are looked up among 32 at a time, so that a few instructions more are cheaper

    @property
    def floats(self) -> ir.VectorType:
        return vector(F32, self.lanes)

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

    def kept(self, b: ir.IRBuilder, value: ir.Value, count: int) -> Any:
        """So many copies of a vector, for `copies`."""
        return [value] * count

    def copies(self, b: ir.IRBuilder, kept: Any, turn: ir.Value) -> list[ir.Value]:
        """The copies, about to be written over; `turn` is another number every time."""
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


class Avx512(Isa):
    name, features, lanes, tokens = "avx512-vnni", ("avx512f", "avx512bw", "avx512vnni"), 16, 8

    def dot(self, b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, bits: int) -> ir.Value:
        return vpdpbusd(b, total, codes, acts, 512)

    def look_up(self, b: ir.IRBuilder, table: list[int], codes: ir.Value) -> ir.Value:
        return call(b, "llvm.x86.avx512.pshuf.b.512", self.bytes, ir.Constant(self.bytes, table * 4), codes)


class Avx2(Isa):
    name, lanes, tokens, signed_codes = "avx2", 8, 4, True
    features: tuple[str, ...] = ("avx2", "fma", "f16c")

    def dot(self, b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, bits: int) -> ir.Value:
        halves = vector(I16, 16)
        if bits == 8:
            # pairs of products would pass 16 bits: take code - 128, give its sign to the activation
            codes = b.xor(codes, splat(self.bytes, -128))
            acts = call(b, "llvm.x86.avx2.psign.b", self.bytes, acts, codes)
            codes = call(b, "llvm.abs.v32i8", self.bytes, codes, ir.Constant(ir.IntType(1), 0))
        pairs = call(b, "llvm.x86.avx2.pmadd.ub.sw", halves, codes, acts)
        return b.add(total, call(b, "llvm.x86.avx2.pmadd.wd", self.ints, pairs, splat(halves, 1)))

    def look_up(self, b: ir.IRBuilder, table: list[int], codes: ir.Value) -> ir.Value:
        return call(b, "llvm.x86.avx2.pshuf.b", self.bytes, ir.Constant(self.bytes, table * 2), codes)


class AvxVnni(Avx2):
    name, features, signed_codes = "avx-vnni", ("avx2", "fma", "f16c", "avxvnni"), False

    def dot(self, b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, bits: int) -> ir.Value:
        return vpdpbusd(b, total, codes, acts, 256)


class Dotprod(Isa):
    name, lanes, tokens, signed_codes = "neon-dotprod", 4, 8, True
    features: tuple[str, ...] = ("dotprod",)
    # two Neoverse-N1 cores read 4-bit weights at 27.6 GB/s without, 29.2 from 512 to 2048, 25.6 at 4096, beside a read ceiling
    # of 37; 8-bit ones at 34-36 without and at 512, at 33 from 1024 on
    ahead = 512
    small_codes, small_spans = 256, 64
    by_lane = small_tables = widens_halves = denormals = True
    digits = 3
    small_unit = 2.0**-133

    def quads(self, b: ir.IRBuilder, address: ir.Value, count: int) -> list[ir.Value]:
        # the dot instruction takes one lane of a register for all: a splat of a loaded vector's lane costs nothing
        found = []
        for i in range(0, count, 4):
            words = load(b, address, 4 * i, self.ints)
            found += [b.bitcast(pick(b, words, words, [lane] * 4), self.bytes) for lane in range(4)]
        return found

    def dot(self, b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, bits: int) -> ir.Value:
        return self.dot_unpacked(b, total, self.unpacked(b, codes, bits), acts, bits)

    def unpacked(self, b: ir.IRBuilder, codes: ir.Value, bits: int) -> ir.Value:
        return b.xor(codes, splat(self.bytes, -128)) if bits == 8 else codes

    def dot_unpacked(self, b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, bits: int) -> ir.Value:
        return call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", self.ints, total, codes, acts)

    def sum_bytes(self, b: ir.IRBuilder, values: ir.Value) -> ir.Value:
        if values.type.count % 16:
            return super().sum_bytes(b, values)
        total = splat(self.ints, 0)
        for first in range(0, values.type.count, 16):
            total = self.dot_unpacked(
                b, total, pick(b, values, values, list(range(first, first + 16))), splat(self.bytes, 1), 8
            )
        return call(b, "llvm.vector.reduce.add.v4i32", I32, total)

    def dot_lanes(self, b: ir.IRBuilder, sums: list[ir.Value], codes: list[ir.Value], acts: list[ir.Value]) -> list[ir.Value]:
        if machine() != "aarch64":
            # LLVM reads the assembly of no other processor than its own
            return super().dot_lanes(b, sums, codes, acts)
        # in this order a Neoverse-N1 begins two a cycle; in LLVM's they take a quarter longer
        count, many = len(sums), len(sums) + len(codes)
        lines = [f"sdot ${t}.4s, ${count + i}.16b, ${many + t}.4b[{i}]" for i in range(len(codes)) for t in range(count)]
        constraints = ["=&w"] * count + ["w"] * many + [str(t) for t in range(count)]
        kind = ir.FunctionType(ir.LiteralStructType([self.ints] * count), [each.type for each in (*codes, *acts, *sums)])
        found = b.asm(kind, "\n".join(lines), ",".join(constraints), [*codes, *acts, *sums], side_effect=False)
        return [b.extract_value(found, t) for t in range(count)]

    def after(self, b: ir.IRBuilder, address: ir.Value, made: list[ir.Value]) -> ir.Value:
        # no instruction, but one that LLVM believes to need all of them
        kind = ir.FunctionType(I64, [I64, *(each.type for each in made)])
        return b.asm(kind, "", ",".join(["=r", "0", *["w" for _ in made]]), [address, *made], side_effect=True)

    def kept(self, b: ir.IRBuilder, value: ir.Value, count: int) -> Any:
        # in memory: a copy of a register would take the place of arithmetic
        slots = cgutils.alloca_once(b, ir.ArrayType(value.type, count))
        where = b.ptrtoint(slots, I64)
        for i in range(count):
            store(b, value, where, 16 * i)
        return where, value.type, count

    def copies(self, b: ir.IRBuilder, kept: Any, turn: ir.Value) -> list[ir.Value]:
        where, kind, count = kept
        # no instruction, but LLVM believes that the address depends on the turn
        hidden = b.asm(ir.FunctionType(I64, [I64, I64]), "", "=r,0,r", [where, turn], side_effect=False)
        return [load(b, hidden, 16 * i, kind) for i in range(count)]

    def put_below(self, b: ir.IRBuilder, top: ir.Value, rest: ir.Value, count: int) -> ir.Value:
        # one instruction, which LLVM finds only where it does not rearrange what comes after
        return call(b, "llvm.aarch64.neon.vsri.v16i8", self.bytes, top, rest, ir.Constant(I32, count))

    def powers(self, b: ir.IRBuilder, address: ir.Value, offset: ir.Value) -> ir.Value:
        # bytes go to the top of their lanes by a look-up, in place of two instructions that widen them
        four = b.insert_element(splat(self.floats, 0.0), load(b, address, offset, F32), ir.Constant(I32, 0))
        places = ir.Constant(self.bytes, [n for lane in range(4) for n in (-1, -1, -1, lane)])
        moved = call(b, "llvm.aarch64.neon.tbl1.v16i8", self.bytes, b.bitcast(four, self.bytes), places)
        return b.bitcast(b.lshr(b.bitcast(moved, self.ints), splat(self.ints, 1)), self.floats)

    def small_float(self, b: ir.IRBuilder, words: ir.Value, byte: int) -> ir.Value:
        # a byte at the upper end of the fraction, the rest nothing: a denormal, or the next larger numbers
        places = ir.Constant(self.bytes, [n for lane in range(4) for n in (-1, -1, 4 * lane + byte, -1)])
        found = call(b, "llvm.aarch64.neon.tbl1.v16i8", self.bytes, b.bitcast(words, self.bytes), places)
        return b.bitcast(found, self.floats)

    def larger(self, b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
        # one instruction, where a comparison and a choice would be waited for at every step
        return call(b, "llvm.maxnum.v4f32", x.type, x, y) if x.type.count == 4 else super().larger(b, x, y)

    def at_least(self, b: ir.IRBuilder, x: ir.Value, bound: ir.Value) -> ir.Value:
        return call(b, f"llvm.maximum.v{x.type.count}f32", x.type, x, bound)

    def look_up(self, b: ir.IRBuilder, table: list[int], codes: ir.Value) -> ir.Value:
        return call(b, "llvm.aarch64.neon.tbl1.v16i8", self.bytes, ir.Constant(self.bytes, table), codes)

    def look_up_more(self, b: ir.IRBuilder, table: list[int], codes: ir.Value) -> ir.Value:
        # two registers are as cheap as one, more are not; outside of them 0 is found
        found = None
        for first in range(0, len(table), 32):
            part = [ir.Constant(self.bytes, table[i : i + 16]) for i in (first, first + 16)]
            place = b.sub(codes, splat(self.bytes, first)) if first else codes
            here = call(b, "llvm.aarch64.neon.tbl2.v16i8", self.bytes, *part, place)
            found = b.or_(found, here) if found else here
        return found


class I8mm(Dotprod):
    name, features, by_pair = "neon-i8mm", ("dotprod", "i8mm"), True
    # by llvm-mca 87 cycles for 64 inputs of 4 rows and 8 tokens, 85 without
    slow_on = ("ampere1",)

    def dot_pairs(self, b: ir.IRBuilder, total: ir.Value, acts: ir.Value, codes: ir.Value) -> ir.Value:
        return call(b, "llvm.aarch64.neon.smmla.v4i32.v16i8", self.ints, total, acts, codes)


def vpdpbusd(b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, width: int) -> ir.Value:
    # recent LLVM types the operands as bytes, older releases as 32-bit lanes
    if llvm.llvm_version_info[0] < 22:
        codes, acts = b.bitcast(codes, total.type), b.bitcast(acts, total.type)
    return call(b, f"llvm.x86.avx512.vpdpbusd.{width}", total.type, total, codes, acts)


ISAS = {isa.name: isa for isa in (Avx512(), AvxVnni(), Avx2(), I8mm(), Dotprod(), Isa())}


def cpu_features() -> set[str]:
    """What Numba compiles for: its own settings, or what LLVM sees. ARM's products of bytes are found by trying, see below."""
    given = config.CPU_FEATURES
    found = {name for name, there in llvm.get_host_cpu_features().items() if there}
    if given is not None:
        found = {name[1:] for name in given.split(",") if name.startswith("+")}
    if machine() == "aarch64":
        found |= _byte_products(given)
    return found


def cpu_name() -> str:
    """LLVM's name of the processor that Numba compiles for."""
    return config.CPU_NAME or llvm.get_host_cpu_name()


def machine() -> str:
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


# an instruction that LLVM makes of a plain sum of byte products where it knows of a feature, and what it makes it of
BYTE_PRODUCTS = {"dotprod": ("sdot", "sext"), "i8mm": ("usdot", "zext")}


def _byte_products(features: str | None) -> set[str]:
    """Which products of bytes LLVM knows of for this processor.

    On ARM its list of features leaves them out, and asking for an instruction that LLVM does not know of ends the process. So
    sums that may become the instruction, or may not, are compiled and the result read.
    """
    source = """
define i32 @dot(<16 x i8> %a, <16 x i8> %b) {
  %x = WIDEN <16 x i8> %a to <16 x i32>
  %y = sext <16 x i8> %b to <16 x i32>
  %p = mul <16 x i32> %x, %y
  %s = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %p)
  ret i32 %s
}
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""
    # kernels for ARM have lines of assembly, which the last reads
    for initialize in (llvm.initialize_native_target, llvm.initialize_native_asmprinter, llvm.initialize_native_asmparser):
        initialize()
    features = llvm.get_host_cpu_features().flatten() if features is None else features
    target = llvm.Target.from_default_triple().create_target_machine(cpu=cpu_name(), features=features)
    return {
        feature
        for feature, (instruction, widen) in BYTE_PRODUCTS.items()
        if instruction in target.emit_assembly(llvm.parse_assembly(source.replace("WIDEN", widen)))
    }


def _choose() -> Isa:
    there = cpu_features() if machine() in ("x86_64", "aarch64") else set()
    usable = [isa for isa in ISAS.values() if set(isa.features) <= there]
    best = next(isa for isa in usable if not cpu_name().startswith(isa.slow_on))
    wanted = os.environ.get("AURAFLUX_ISA", best.name)
    for isa in usable:
        if isa.name == wanted:
            return isa
    raise BackendError(f"AURAFLUX_ISA is {wanted!r}; this processor can run: {', '.join(isa.name for isa in usable)}.")


ISA = _choose()
