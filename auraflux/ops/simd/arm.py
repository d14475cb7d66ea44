"""ARM instruction sets: NEON with byte dot products, and with byte matrix products (i8mm)."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.simd.portable import Isa
from auraflux.ops.simd.processor import machine
from auraflux.ops.simd.vectors import F32, I32, I64, call, load, pick, splat, store


class Dotprod(Isa):
    name, lanes, tokens, signed_codes = "neon-dotprod", 4, 8, True
    features: tuple[str, ...] = ("dotprod",)
    # two Neoverse-N1 cores read 4-bit weights at 27.6 GB/s without, 29.2 from 512 to 2048, 25.6 at 4096 (measured peak: 37);
    # 8-bit weights at 34-36 without and at 512, at 33 from 1024 on
    prefetch_nbytes = 512
    inputs_per_step_2bit, inputs_per_step = 256, 64
    by_lane = small_tables = widens_halves = denormals = half_products = True
    digits = 3
    small_unit = 2.0**-133

    def quads(self, b: ir.IRBuilder, address: ir.Value, count: int) -> list[ir.Value]:
        # the dot instruction broadcasts one lane of a register, so a splat of a loaded lane costs nothing
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
            # LLVM parses inline assembly of its own architecture only
            return super().dot_lanes(b, sums, codes, acts)
        # in this order a Neoverse-N1 issues two per cycle; LLVM's order takes a quarter longer
        count, many = len(sums), len(sums) + len(codes)
        lines = [f"sdot ${t}.4s, ${count + i}.16b, ${many + t}.4b[{i}]" for i in range(len(codes)) for t in range(count)]
        constraints = ["=&w"] * count + ["w"] * many + [str(t) for t in range(count)]
        kind = ir.FunctionType(ir.LiteralStructType([self.ints] * count), [each.type for each in (*codes, *acts, *sums)])
        found = b.asm(kind, "\n".join(lines), ",".join(constraints), [*codes, *acts, *sums], side_effect=False)
        return [b.extract_value(found, t) for t in range(count)]

    def ordered_after(self, b: ir.IRBuilder, address: ir.Value, made: list[ir.Value]) -> ir.Value:
        # emits no instruction, but LLVM sees a dependency on all of them
        kind = ir.FunctionType(I64, [I64, *(each.type for each in made)])
        return b.asm(kind, "", ",".join(["=r", "0", *["w" for _ in made]]), [address, *made], side_effect=True)

    def spill(self, b: ir.IRBuilder, values: list[ir.Value]) -> Any:
        # in memory: register copies would compete with arithmetic
        slots = cgutils.alloca_once(b, ir.ArrayType(values[0].type, len(values)))
        where = b.ptrtoint(slots, I64)
        for i, value in enumerate(values):
            store(b, value, where, 16 * i)
        return where, values[0].type, len(values)

    def reload(self, b: ir.IRBuilder, spilled: Any, step: ir.Value) -> list[ir.Value]:
        where, kind, count = spilled
        # emits no instruction, but LLVM sees an address that depends on the step
        hidden = b.asm(ir.FunctionType(I64, [I64, I64]), "", "=r,0,r", [where, step], side_effect=False)
        return [load(b, hidden, 16 * i, kind) for i in range(count)]

    def shift_right_insert(self, b: ir.IRBuilder, top: ir.Value, rest: ir.Value, count: int) -> ir.Value:
        # one instruction; LLVM selects it only where it does not reorder its users
        return call(b, "llvm.aarch64.neon.vsri.v16i8", self.bytes, top, rest, ir.Constant(I32, count))

    def powers(self, b: ir.IRBuilder, address: ir.Value, offset: ir.Value) -> ir.Value:
        # a table look-up moves bytes to the top of their lanes; widening would take two instructions
        four = b.insert_element(splat(self.floats, 0.0), load(b, address, offset, F32), ir.Constant(I32, 0))
        places = ir.Constant(self.bytes, [n for lane in range(4) for n in (-1, -1, -1, lane)])
        moved = call(b, "llvm.aarch64.neon.tbl1.v16i8", self.bytes, b.bitcast(four, self.bytes), places)
        return b.bitcast(b.lshr(b.bitcast(moved, self.ints), splat(self.ints, 1)), self.floats)

    def small_float(self, b: ir.IRBuilder, words: ir.Value, byte: int) -> ir.Value:
        # the byte fills the top of the mantissa, all else is 0: a denormal or one of the smallest normal floats
        places = ir.Constant(self.bytes, [n for lane in range(4) for n in (-1, -1, 4 * lane + byte, -1)])
        found = call(b, "llvm.aarch64.neon.tbl1.v16i8", self.bytes, b.bitcast(words, self.bytes), places)
        return b.bitcast(found, self.floats)

    def larger(self, b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
        # one instruction; compare and select would lengthen the dependency chain
        return call(b, "llvm.maxnum.v4f32", x.type, x, y) if x.type.count == 4 else super().larger(b, x, y)

    def at_least(self, b: ir.IRBuilder, x: ir.Value, bound: ir.Value) -> ir.Value:
        return call(b, f"llvm.maximum.v{x.type.count}f32", x.type, x, bound)

    def look_up(self, b: ir.IRBuilder, table: list[int], codes: ir.Value) -> ir.Value:
        return call(b, "llvm.aarch64.neon.tbl1.v16i8", self.bytes, ir.Constant(self.bytes, table), codes)

    def look_up_more(self, b: ir.IRBuilder, table: list[int], codes: ir.Value) -> ir.Value:
        # a table of two registers is as cheap as one; more are not. Indices outside it give 0
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
