"""x86 instruction sets: AVX-512 VNNI, AVX2, and AVX2 with VNNI."""

import llvmlite.binding as llvm
from llvmlite import ir

from auraflux.ops.simd.portable import Isa
from auraflux.ops.simd.vectors import I16, call, splat, vector


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
            # sums of two products would overflow 16 bits: use |code - 128| and move its sign to the activation
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


def vpdpbusd(b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, width: int) -> ir.Value:
    # recent LLVM types the operands as bytes, older releases as 32-bit lanes
    if llvm.llvm_version_info[0] < 22:
        codes, acts = b.bitcast(codes, total.type), b.bitcast(acts, total.type)
    return call(b, f"llvm.x86.avx512.vpdpbusd.{width}", total.type, total, codes, acts)
