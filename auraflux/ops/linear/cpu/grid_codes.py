"""Codes of grid formats (`quant/grids.py`) as vectors of bytes, for the products on CPU.

Entries are looked up in one of two ways. A gather loads an entry of each row, four or eight bytes. Where an instruction looks
up 128 bytes (AVX512-VBMI), an entry's values are two bytes of small codes: two look-ups by all 64 index bytes of a vector, then
one per vector of values. That leaves values in another order (`grid_order`), in which activations are stored.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from auraflux.ops.linear.cpu.forms import BLOCK, BYTES, FLOATS, INTS, Form, half_floats
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.vectors import I8, I16, at, call, load, pick, splat, vector
from auraflux.quant import grids
from auraflux.quant.grids import CHUNK, Grid

HALVES = vector(I16, BLOCK)
LANE = range(0, 4 * BLOCK, 4)  # first bytes of lanes
PART = 128  # entries of one look-up


def of_form(form: Form) -> Grid:
    assert form.grid is not None
    return form.grid


class GridBlock:
    """A super-block of one block of rows.

    codes, halves  addresses
    """

    def __init__(self, b: ir.IRBuilder, form: Form, codes: ir.Value, halves: ir.Value):
        self.b, self.form, self.grid, self.codes, self.halves = b, form, of_form(form), codes, halves
        if form.kind != "iq1_m":
            self.scale = half_floats(b, self._half(at(0)))
            return
        whole = splat(INTS, 0)
        for i in range(4):
            top = b.and_(self._half(at(i)), splat(INTS, 0xF000))
            whole = b.or_(whole, b.lshr(top, splat(INTS, 12 - 4 * i)) if i < 3 else top)
        self.scale = half_floats(b, whole)

    def four(self, number: ir.Value) -> Any:
        """Return a function that computes scale and bias of each of four groups, see `scale_and_bias`."""
        b, form, grid = self.b, self.form, self.grid
        steps = self._half(b.add(number, at(grid.steps))) if grid.steps != grid.highs or form.kind == "iq1_m" else None

        def scale_of(group: int) -> list[ir.Value | None]:
            if steps is not None:
                bits = 3 if form.kind == "iq1_m" else 4
                step = _bits(b, steps, bits * group, bits)
            else:
                chunk = b.add(b.mul(number, at(4)), at(group))
                if form.kind == "iq1_s":
                    step = _bits(b, self._half(b.add(chunk, at(1))), 12, 3)
                else:
                    place = b.add(b.mul(chunk, at(4 * BLOCK * form.bits)), at(4 * BLOCK * (form.bits - 1)))
                    step = b.lshr(load(b, self.codes, place, INTS), splat(INTS, 28))
            odd = b.or_(b.shl(step, splat(INTS, 1)), splat(INTS, 1))
            scale = b.fmul(b.sitofp(odd, FLOATS), self.scale)
            return [scale, scale if form.zero else None]

        return scale_of

    def chunk(self, number: ir.Value, i: int, codes: ir.Value) -> list[ir.Value]:
        """Return the values of chunk `i` of four groups, whose words are at an address: eight vectors of bytes."""
        b, form, grid = self.b, self.form, self.grid
        words = [load(b, codes, 4 * BLOCK * n, INTS) for n in range(form.bits)]
        if not grid.highs:
            return chunk_values(b, form, words, None)
        chunks = 4 * grid.group // CHUNK
        if form.bits == 1:
            return chunk_values(b, form, words, self._half(b.add(b.mul(number, at(chunks)), at(grid.highs + i))))
        high = self._half(b.add(b.mul(number, at(chunks // 2)), at(grid.highs + i // 2)))
        return chunk_values(b, form, words, b.lshr(high, splat(INTS, 8)) if i % 2 else high)

    def _half(self, number: ir.Value) -> ir.Value:
        """Load a half of each row."""
        return self.b.zext(load(self.b, self.halves, self.b.mul(number, at(2 * BLOCK)), HALVES), INTS)


def _bits(b: ir.IRBuilder, words: ir.Value, low: int, count: int) -> ir.Value:
    return b.and_(b.lshr(words, splat(INTS, low)) if low else words, splat(INTS, 2**count - 1))


@cache
def grid_order(form: Form) -> list[int]:
    """Return the inputs of the bytes of the eight vectors of a chunk."""
    if not form.by_entry:
        return list(range(CHUNK))
    if form.bits == 3:
        return [16 * w + 4 * k + j for w in range(2) for j in range(4) for k in range(4)]
    if form.group == CHUNK:
        return [8 * k + j for j in range(8) for k in range(4)]
    return [16 * g + c + i for g in range(2) for c in range(4) for i in (0, 8, 4, 12)]


def chunk_values(b: ir.IRBuilder, form: Form, words: list[ir.Value], high: ir.Value | None) -> list[ir.Value]:
    """Return the values of a chunk plus `Form.zero`: eight vectors with four bytes of each row, in `grid_order`."""
    values = _looked_up(b, form, words, high) if form.by_entry else _gathered(b, form, words, high)
    if not of_form(form).has_signs:
        return values
    signs, order, twice = _sign_bytes(b, form, words[-1]), grid_order(form), splat(BYTES, 2 * form.zero)
    found = []
    for i, value in enumerate(values):
        inputs = order[4 * i : 4 * i + 4]
        source = [each // 8 for each in inputs]
        here = signs if source == [0, 1, 2, 3] else _in_lanes(b, signs, source)
        bits = b.and_(here, _repeated([1 << each % 8 for each in inputs]))
        found.append(b.select(b.icmp_signed("!=", bits, splat(BYTES, 0)), b.sub(twice, value), value))
    return found


def _repeated(octets: list[int]) -> ir.Constant:
    """Return a vector with the same four bytes in every lane."""
    return ir.Constant(BYTES, [octet - 256 if octet > 127 else octet for octet in octets] * BLOCK)


def _in_lanes(b: ir.IRBuilder, octets: ir.Value, source: list[int]) -> ir.Value:
    """Permute the bytes of each lane."""
    return pick(b, octets, octets, [first + i for first in LANE for i in source])


def _sign_bytes(b: ir.IRBuilder, form: Form, word: ir.Value) -> ir.Value:
    """Return the signs of eight inputs in each byte; the eighth makes their number even where it is not stored."""
    if form.kind in ("iq2_s", "iq3_s"):
        return b.bitcast(word, BYTES)
    if form.kind == "iq2_xs":
        seven = b.and_(b.lshr(word, splat(INTS, 1)), splat(INTS, 0x7F7F7F7F))
    else:
        seven = b.and_(word, splat(INTS, 0x7F))
        for i in range(1, 4):
            seven = b.or_(seven, b.and_(b.shl(word, splat(INTS, i)), splat(INTS, 0x7F << 8 * i)))
    octets = b.bitcast(seven, BYTES)
    ones = b.bitcast(call(b, f"llvm.ctpop.v{BYTES.count}i8", BYTES, octets), INTS)
    return b.bitcast(b.or_(seven, b.and_(b.shl(ones, splat(INTS, 7)), splat(INTS, -0x7F7F7F80))), BYTES)


def _gathered(b: ir.IRBuilder, form: Form, words: list[ir.Value], high: ir.Value | None) -> list[ir.Value]:
    """Look up entries by gathers; vectors are in the order of inputs."""
    grid, found = of_form(form), []
    for entry in range(CHUNK // grid.per_entry):
        index = _bits(b, words[entry // 4], 8 * (entry % 4), 8) if entry % 4 < 3 else b.lshr(words[entry // 4], splat(INTS, 24))
        if form.kind == "iq2_xs":
            index = b.or_(index, b.shl(_bits(b, words[1], 8 * entry, 1), splat(INTS, 8)))
        elif high is not None:
            bits = min(grid.high_bits, 3)
            index = b.or_(index, b.shl(_bits(b, high, grid.high_bits * entry, bits), splat(INTS, 8)))
        values = _gather(b, _entries(b, form), index, grid.per_entry)
        if form.bits == 1:
            assert high is not None
            # the sign of the shift, at the top of a half or of a nibble
            low = 15 if form.kind == "iq1_s" else 4 * entry + 3
            down = b.ashr(b.shl(high, splat(INTS, 31 - low)), splat(INTS, 31))
            two = b.bitcast(b.and_(down, splat(INTS, 0x02020202)), BYTES)
            values = [b.sub(value, two) for value in values]
        found += values
    return found


def _gather(b: ir.IRBuilder, table: ir.Value, index: ir.Value, size: int) -> list[ir.Value]:
    """Load `size` bytes of each row, four to a vector."""
    if size == 4:
        return [b.bitcast(ISA.gather(b, table, index), BYTES)]
    # of each half of the rows, eight bytes are adjacent
    halves = [b.bitcast(half, INTS) for half in ISA.gather_pairs(b, table, index)]
    return [b.bitcast(ISA.every_other(b, halves[0], halves[1], first), BYTES) for first in range(2)]


@cache
def _octets(kind: str, zero: int) -> np.ndarray:
    """Return the values of entries plus `zero`, and plus the positive shift, as unsigned bytes."""
    values = grids.table(kind).numpy().astype(np.int16) + zero + (grids.FORMATS[kind].bits == 1)
    return (values & 255).astype(np.uint8)


def _entries(b: ir.IRBuilder, form: Form) -> ir.Value:
    """Return a pointer to the entries, as integers of an entry's size."""
    octets = _octets(form.kind, form.zero)
    kind = ir.IntType(8 * octets.shape[1])
    return _constant(b, f"entries of {form.kind} {form.zero}", kind, octets.view(f"<u{octets.shape[1]}").ravel().tolist())


def _constant(b: ir.IRBuilder, name: str, kind: ir.Type, numbers: list[int]) -> ir.Value:
    """Return a pointer to the first of the numbers of a constant array."""
    module = b.module
    if name not in module.globals:
        array = ir.GlobalVariable(module, ir.ArrayType(kind, len(numbers)), name)
        array.linkage, array.global_constant, array.align = "internal", True, 64
        array.initializer = ir.Constant(array.value_type, numbers)
    return b.bitcast(module.globals[name], I8.as_pointer())


def _looked_up(b: ir.IRBuilder, form: Form, words: list[ir.Value], high: ir.Value | None) -> list[ir.Value]:
    """Look up entries in registers: first two bytes with an entry's codes, then the value of each code."""
    spread = None if high is None else _in_lanes(b, b.bitcast(high, BYTES), [0] * 4)
    found = []
    for w, word in enumerate(words[:2] if form.bits == 3 else words[:1]):
        index = b.bitcast(word, BYTES)
        parts = [b.icmp_signed("<", index, splat(BYTES, 0))]
        if form.kind == "iq2_xs":
            parts.append(_tested(b, b.bitcast(words[1], BYTES), [1] * 4))
        elif form.kind == "iq3_s":
            parts.append(_tested(b, spread, [1 << 4 * w + k for k in range(4)]))
        first, second = (_select_part(b, octets, index, parts) for octets in _code_bytes(form.kind))
        if form.bits == 3:
            found += [_value(b, form, codes, bits) for codes in (first, second) for bits in (0, 3)]
            continue
        if form.group < CHUNK:
            first, second = _by_group(b, first, second)
        found += [_value(b, form, codes, bits) for codes in (first, second) for bits in (0, 2, 4, 6)]
    return found


def _tested(b: ir.IRBuilder, octets: ir.Value, bits: list[int]) -> ir.Value:
    return b.icmp_signed("!=", b.and_(octets, _repeated(bits)), splat(BYTES, 0))


def _by_group(b: ir.IRBuilder, first: ir.Value, second: ir.Value) -> list[ir.Value]:
    """Return the codes of two groups of two entries: those of their first four values, then of the others."""
    x, y, low = b.bitcast(first, INTS), b.bitcast(second, INTS), splat(INTS, 0xFFFF)
    both = (
        b.or_(b.and_(x, low), b.shl(y, splat(INTS, 16))),
        b.or_(b.lshr(x, splat(INTS, 16)), b.and_(y, splat(INTS, -0x10000))),
    )
    return [b.bitcast(each, BYTES) for each in both]


def _select_part(b: ir.IRBuilder, octets: np.ndarray, index: ir.Value, parts: list[ir.Value]) -> ir.Value:
    """Look up bytes by their lowest seven bits; `parts` are the bits above."""
    found = []
    for first in range(0, len(octets), PART):
        tables = [_byte_vector(octets[first + i : first + i + PART // 2]) for i in (0, PART // 2)]
        found.append(call(b, "llvm.x86.avx512.vpermi2var.qi.512", BYTES, tables[0], index, tables[1]))
    for part in parts:
        found = [b.select(part, y, x) for x, y in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def _byte_vector(octets: np.ndarray) -> ir.Constant:
    return ir.Constant(BYTES, octets.astype(np.int8).tolist())


@cache
def _levels(kind: str) -> np.ndarray:
    return np.unique(grids.table(kind).numpy())


@cache
def _code_bytes(kind: str) -> list[np.ndarray]:
    """Return the codes of an entry's first values and of its last in a byte each."""
    codes = np.searchsorted(_levels(kind), grids.table(kind).numpy()).astype(np.uint8)
    half, bits = codes.shape[1] // 2, grids.FORMATS[kind].bits
    return [(codes[:, i : i + half] << bits * np.arange(half, dtype=np.uint8)).sum(1).astype(np.uint8) for i in (0, half)]


def _value(b: ir.IRBuilder, form: Form, codes: ir.Value, low: int) -> ir.Value:
    """Return the value of the code from bit `low` of each byte on, plus `Form.zero`: by a table of six bits."""
    levels, bits = _levels(form.kind), form.bits
    if low + bits > 6:
        codes, low = b.bitcast(b.lshr(b.bitcast(codes, INTS), splat(INTS, 2)), BYTES), low - 2
    mask = (1 << bits) - 1
    entries = [int(levels[min(i >> low & mask, len(levels) - 1)]) + form.zero for i in range(64)]
    return call(b, "llvm.x86.avx512.permvar.qi.512", BYTES, ir.Constant(BYTES, entries), codes)
