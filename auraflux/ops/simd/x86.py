"""x86 instruction sets: AVX-512 VNNI, AVX2, and AVX2 with VNNI."""

from functools import reduce

import llvmlite.binding as llvm
from llvmlite import ir

from auraflux.ops.simd.portable import Isa, Term, load_entries
from auraflux.ops.simd.vectors import I16, I32, I64, call, pick, splat, vector


class Avx512(Isa):
    name, lanes, tokens = "avx512-vnni", 16, 8
    features: tuple[str, ...] = ("avx512f", "avx512bw", "avx512vnni")
    widens_halves, digits = True, 3

    def dot(self, b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, bits: int) -> ir.Value:
        return vpdpbusd(b, total, codes, acts, 512)

    def gather(self, b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> ir.Value:
        masks, scale = splat(vector(ir.IntType(1), 16), 1), ir.Constant(I32, 4)
        name = "llvm.x86.avx512.mask.gather.dpi.512"
        return call(b, name, self.ints, splat(self.ints, 0), table, index, masks, scale)

    def gather_pairs(self, b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> list[ir.Value]:
        return _load_pairs(b, table, index)

    def every_other(self, b: ir.IRBuilder, x: ir.Value, y: ir.Value, first: int) -> ir.Value:
        # one instruction; LLVM narrows both vectors and joins them
        places = ir.Constant(self.ints, list(range(first, 32, 2)))
        return call(b, "llvm.x86.avx512.vpermi2var.d.512", self.ints, x, places, y)

    def look_up(self, b: ir.IRBuilder, table: list[int], codes: ir.Value) -> ir.Value:
        return call(b, "llvm.x86.avx512.pshuf.b.512", self.bytes, ir.Constant(self.bytes, table * 4), codes)


class Avx512Amx(Avx512):
    name, matrix_tiles = "avx512-amx", True
    features = (*Avx512.features, "amx-int8", "amx-tile")

    def gather_pairs(self, b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> list[ir.Value]:
        kind, masks, scale = vector(I64, 8), splat(vector(ir.IntType(1), 8), 1), ir.Constant(I32, 8)
        name = "llvm.x86.avx512.mask.gather.dpq.512"
        return [call(b, name, kind, splat(kind, 0), table, part, masks, scale) for part in _halves(b, index)]


class Avx2(Isa):
    name, lanes, tokens, signed_codes = "avx2", 8, 4, True
    widens_halves = True
    features: tuple[str, ...] = ("avx2", "fma", "f16c")

    def dot(self, b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, bits: int) -> ir.Value:
        return self.dot_unpacked(b, total, self.unpacked(b, codes, bits), acts, bits)

    def unpacked(self, b: ir.IRBuilder, codes: ir.Value, bits: int) -> ir.Value:
        return b.xor(codes, splat(self.bytes, -128)) if bits == 8 else codes

    def dot_unpacked(self, b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, bits: int) -> ir.Value:
        return self._add_pairs(b, total, self._pairs(b, codes, acts, bits))

    def dots(self, b: ir.IRBuilder, sums: dict[int, ir.Value], terms: list[Term], bits: int, unpacked: bool) -> None:
        for shift in sums:
            mine = [term for term in terms if term.shift == shift]
            # sums of pairs that fit 16 bits are added to the total together
            most = max(1, (2**15 - 1) // (2 * 128 * (2**bits - 1 << shift)))
            for first in range(0, len(mine), most):
                some = [
                    self._pairs(b, codes if unpacked else self.unpacked(b, codes, bits), acts, bits)
                    for codes, _, acts in mine[first : first + most]
                ]
                sums[shift] = self._add_pairs(b, sums[shift], reduce(b.add, some))

    def _pairs(self, b: ir.IRBuilder, codes: ir.Value, acts: ir.Value, bits: int) -> ir.Value:
        """Return the sums of two products each, in 16 bits."""
        if bits == 8:
            # they would overflow: use |code - 128| and move its sign to the activation
            acts = call(b, "llvm.x86.avx2.psign.b", self.bytes, acts, codes)
            codes = call(b, "llvm.abs.v32i8", self.bytes, codes, ir.Constant(ir.IntType(1), 0))
        return call(b, "llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), codes, acts)

    def _add_pairs(self, b: ir.IRBuilder, total: ir.Value, pairs: ir.Value) -> ir.Value:
        return b.add(total, call(b, "llvm.x86.avx2.pmadd.wd", self.ints, pairs, splat(vector(I16, 16), 1)))

    def gather(self, b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> ir.Value:
        return load_entries(b, table, _numbers(b, index), I32)

    def gather_pairs(self, b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> list[ir.Value]:
        return _load_pairs(b, table, index)

    def look_up(self, b: ir.IRBuilder, table: list[int], codes: ir.Value) -> ir.Value:
        return call(b, "llvm.x86.avx2.pshuf.b", self.bytes, ir.Constant(self.bytes, table * 2), codes)


class AvxVnni(Avx2):
    name, features, signed_codes = "avx-vnni", ("avx2", "fma", "f16c", "avxvnni"), False
    digits = 3

    def unpacked(self, b: ir.IRBuilder, codes: ir.Value, bits: int) -> ir.Value:
        return codes

    def dot_unpacked(self, b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, bits: int) -> ir.Value:
        return vpdpbusd(b, total, codes, acts, 256)

    def dots(self, b: ir.IRBuilder, sums: dict[int, ir.Value], terms: list[Term], bits: int, unpacked: bool) -> None:
        Isa.dots(self, b, sums, terms, bits, unpacked)


def _load_pairs(b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> list[ir.Value]:
    """Load entries of 64 bits one by one, faster than gathers of AVX2 and of AVX-512 before Sapphire Rapids."""
    numbers, half = _numbers(b, index), index.type.count // 2
    return [load_entries(b, table, numbers[first : first + half], I64) for first in (0, half)]


def _numbers(b: ir.IRBuilder, index: ir.Value) -> list[ir.Value]:
    """Return the lanes of a vector by way of memory; extracting them would occupy the port of shuffles."""
    with b.goto_entry_block():
        place = b.alloca(index.type)
        place.align = 64
    b.store(index, place)
    kind = I32.as_pointer()
    # empty, and hides from LLVM what the memory holds
    start = b.asm(ir.FunctionType(kind, [kind]), "", "=r,0,~{memory}", [b.bitcast(place, kind)], True)
    return [b.load(b.gep(start, [ir.Constant(I32, lane)])) for lane in range(index.type.count)]


def _halves(b: ir.IRBuilder, vectors: ir.Value) -> list[ir.Value]:
    half = vectors.type.count // 2
    return [pick(b, vectors, vectors, list(range(first, first + half))) for first in (0, half)]


def vpdpbusd(b: ir.IRBuilder, total: ir.Value, codes: ir.Value, acts: ir.Value, width: int) -> ir.Value:
    # recent LLVM types the operands as bytes, older releases as 32-bit lanes
    if llvm.llvm_version_info[0] < 22:
        codes, acts = b.bitcast(codes, total.type), b.bitcast(acts, total.type)
    return call(b, f"llvm.x86.avx512.vpdpbusd.{width}", total.type, total, codes, acts)
