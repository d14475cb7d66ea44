"""The codebooks of int8 attention: the levels of each number of bits as bytes.

Kernels read codes of 4 or 8 bits. Rows of 2 and 3 bits are widened to 4 first, rows of 6 to 8. Four bits are looked up in one
table of bytes, at the scale where the levels fall nearest to integers; eight in two, of high and of low bytes.

Where tables are small, keys of eight bits are not looked up so: a code is nearly its level, and the rest is interpolated
(`Straight`).
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.processor import has_feature
from auraflux.ops.simd.vectors import I8, I32, at, call, kernel, load, pick, splat, store, vector
from auraflux.ops.simd.x86 import Avx512
from auraflux.ops.turboquant.codebook import BITS, index_of_rank, normal_levels

HIGH = 128  # what one step of a high byte is worth in steps of the low one

# one instruction looks up bytes in 64 entries, or in twice as many
WIDE_LOOK_UP = isinstance(ISA, Avx512) and has_feature("avx512vbmi")


class Code(NamedTuple):
    """A number of bits.

    wide    bits of a code where kernels read it
    tables  signed bytes by code: the levels of N(0, 1) in steps, or their high and low bytes
    unit    what a step of a product with (high, low) bytes is worth: the low bytes' product is left out
    """

    bits: int
    wide: int
    tables: list[list[int]]
    unit: float

    @property
    def vectors(self) -> int:
        """Return how many codes a byte holds; a vector of words splits into as many vectors of bytes."""
        return 8 // self.wide

    def split(self, b, words):
        """Split the words of each lane into vectors of codes in bytes, the lowest codes of all bytes first."""
        packed = b.bitcast(words, ISA.bytes)
        if self.wide == 8:
            return [packed]
        return [b.and_(packed, splat(ISA.bytes, 15)), b.lshr(packed, splat(ISA.bytes, 4))]

    @property
    def straight(self) -> bool:
        """Return whether keys are a straight line and a rest."""
        return ISA.small_tables and self.wide == 8

    def key_levels(self, b, codes, plus):
        """Return the levels of keys' codes in one or two bytes, plus a constant, for products with queries."""
        return straight_line(self.bits).levels(b, codes) if self.straight else self.look_up(b, codes, plus)

    @property
    def key_unit(self) -> float:
        return straight_line(self.bits).unit if self.straight else self.unit

    def look_up(self, b, codes, plus=0):
        """Return the levels of codes by each table, plus a constant."""
        return _look_up(b, [[(level + plus + 128) % 256 - 128 for level in table] for table in self.tables], codes)


def code_of(bits: int) -> Code:
    levels = np.empty(1 << bits)
    levels[index_of_rank(bits).numpy()] = normal_levels(bits)
    if bits > 4:
        unit = float(np.abs(levels).max()) / (127 * HIGH)
        steps = np.rint(levels / unit).astype(int)
        high = (steps + HIGH // 2) // HIGH
        return Code(bits, 8, [high.tolist(), (steps - HIGH * high).tolist()], unit * HIGH)
    # a level is as frequent as its cell is wide and dense
    order = np.sort(levels)
    weight = np.exp(-(order**2) / 2) * np.gradient(order)
    scales = np.linspace(76, 127, 4000) / order[-1]
    errors = np.sum(weight * (np.rint(order * scales[:, None]) / scales[:, None] - order) ** 2, 1)
    scale = scales[int(np.argmin(errors))]
    steps = np.rint(levels * scale).astype(int).tolist()
    return Code(bits, 4, [steps + [0] * (16 - len(steps))], float(1 / scale))


class Straight(NamedTuple):
    """Levels as unit * (step + rest / REST), both of them bytes plus a half: the mirror image of n is then ~n.

    unit           what a step is worth
    bases, slopes  the rest of 32 levels from the middle on, or of every fourth and from each to the next
    """

    bits: int
    unit: float
    bases: list[int]
    slopes: list[int] | None

    def levels(self, b, codes):
        step = b.sub(codes, splat(ISA.bytes, 1 << (self.bits - 1)))
        negative = b.ashr(step, splat(ISA.bytes, 7))
        place = b.xor(step, negative)
        if self.slopes is None:
            rest = ISA.look_up_more(b, self.bases, place)
        else:
            part, within = b.lshr(place, splat(ISA.bytes, 2)), b.and_(place, splat(ISA.bytes, 3))
            slope = ISA.look_up_more(b, self.slopes, part)
            rest = b.add(ISA.look_up_more(b, self.bases, part), b.mul(slope, within))
        return [step, b.xor(rest, negative)]


REST = 4  # parts of a step; more would be finer, but the rest of the outermost levels passes a byte


@cache
def straight_line(bits: int) -> Straight:
    """Return the line with the least error, weighted by how frequent levels are; rare ones count a little too."""
    levels = normal_levels(bits)[1 << (bits - 1) :].reshape(32, -1)
    weight = np.exp(-(levels**2) / 2) * np.gradient(levels.ravel()).reshape(levels.shape)
    weight += 1e-3 * weight.max()
    places = np.arange(levels.size).reshape(levels.shape)
    offset = np.arange(levels.shape[1])
    share = weight / weight.sum(1, keepdims=True)
    middle = (share * offset).sum(1, keepdims=True)
    spread = np.maximum((share * (offset - middle) ** 2).sum(1), 1e-9)
    best = None
    for unit in np.linspace(0.5, 2, 200) * levels.max() / levels.size:
        rest = (levels / unit - places - 0.5) * REST - 0.5
        slopes = np.rint((share * (offset - middle) * rest).sum(1) / spread)
        bases = np.clip(np.rint((share * (rest - slopes[:, None] * offset)).sum(1)), -127, 127)
        slopes = np.minimum(slopes, (127 - bases) // max(offset[-1], 1))
        error = (weight * (bases[:, None] + slopes[:, None] * offset - rest) ** 2).sum() * unit**2
        if best is None or error < best[0]:
            best = error, float(unit), bases.astype(int).tolist(), slopes.astype(int).tolist()
    assert best is not None
    return Straight(bits, *best[1:3], best[3] if levels.shape[1] > 1 else None)


CODES = {bits: code_of(bits) for bits in BITS}
KEY_UNITS = np.array([CODES[bits].key_unit if bits in CODES else 0.0 for bits in range(9)], np.float32)
UNITS = np.array([CODES[bits].unit if bits in CODES else 0.0 for bits in range(9)], np.float32)
WIDE_BITS = np.array([CODES[bits].wide if bits in CODES else 0 for bits in range(9)], np.int64)


def _look_up(b, tables, codes):
    size = len(tables[0])
    if size == 16:
        return [ISA.look_up(b, table, codes) for table in tables]
    if size == 64 and WIDE_LOOK_UP:
        name = "llvm.x86.avx512.permvar.qi.512"
        return [call(b, name, ISA.bytes, ir.Constant(ISA.bytes, table), codes) for table in tables]
    if not _mirrored(size):
        return [_look_up_parts(b, table, codes) for table in tables]
    # one half of the levels is enough: a code of the other half has the level of its mirror image, negative
    half = size // 2
    negative = b.icmp_unsigned("<", codes, splat(ISA.bytes, half))
    place = b.xor(codes, b.select(negative, splat(ISA.bytes, half - 1), splat(ISA.bytes, half)))
    found = [_look_up_parts(b, table[half:], place) for table in tables]
    return [b.select(negative, b.sub(splat(ISA.bytes, 0), level), level) for level in found]


def _mirrored(size):
    order = index_of_rank(size.bit_length() - 1)
    return torch.equal(order, size - 1 - order.flip(0)) and int(order[0]) < size // 2


def _look_up_parts(b, table, codes):
    """Replace each byte by that entry of a table of up to 128, or more without the instruction for it."""
    if WIDE_LOOK_UP and len(table) == 2 * ISA.bytes.count:
        low, high = (ir.Constant(ISA.bytes, table[i : i + 64]) for i in (0, 64))
        return call(b, "llvm.x86.avx512.vpermi2var.qi.512", ISA.bytes, low, codes, high)
    return ISA.look_up_more(b, table, codes)


@kernel(constants=0)
def widen_codes(b, bits, source, chunks, target):
    """Copy chunks of 32 codes to `wide` bits each, where that is more."""
    for code in CODES.values():
        if code.wide > code.bits:
            with b.if_then(b.icmp_signed("==", bits, at(code.bits))):
                fours = b.sdiv(chunks, at(4))
                with cgutils.for_range(b, fours) as loop:
                    _widen(b, code, 4, source, target, b.mul(loop.index, at(4)))
                with cgutils.for_range_slice(b, b.mul(fours, at(4)), chunks, at(1)) as (index, _):
                    _widen(b, code, 1, source, target, index)


def _widen(b, code, chunks, source, target, first):
    nbytes, lanes = chunks * 4 * code.bits, chunks * code.wide
    packed = load(b, source, b.mul(first, at(4 * code.bits)), vector(I8, nbytes))
    # the bytes of a lane's codes, and any others above them
    each = nbytes // lanes
    spread = pick(b, packed, packed, [each * lane + min(i, each - 1) for lane in range(lanes) for i in range(4)])
    words = b.bitcast(spread, vector(I32, lanes))
    span = 32
    while span > code.wide:
        # within every `span` bits the codes of the upper half move to where that begins
        half = span // 2
        used = half // code.wide * code.bits
        low = sum(((1 << used) - 1) << start for start in range(0, 32, span))
        stay = b.and_(words, splat(words.type, low))
        move = b.and_(b.shl(words, splat(words.type, half - used)), splat(words.type, low << half))
        words, span = b.or_(stay, move), half
    store(b, words, target, b.mul(first, at(4 * code.wide)))
