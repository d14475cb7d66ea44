"""LLVM IR that splits GGUF's blocks into codes, scales and biases, one function for each type.

A function gets the words of the same block of `LANES` rows and returns what `quant/gguf_blocks.py` computes with numpy: the
codes of each chunk, four in a word, and the words of scales and biases. Bits of a code that lie apart are joined by masks and
shifts of all rows at once.
"""

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from auraflux.ops.layout.words import (
    FLOATS,
    WORDS,
    column,
    columns,
    field,
    masked,
    narrowed,
    shifted,
    widened_halves,
)
from auraflux.ops.simd.vectors import I8, I16, at, splat
from auraflux.quant.super_blocks import FORMATS, ZERO

Vectors = list[ir.Value]


class Rows(NamedTuple):
    """The position of a block in `LANES` rows.

    addresses  address of the rows' addresses
    offset     of the block in bytes
    """

    b: ir.IRBuilder
    addresses: ir.Value
    offset: ir.Value

    def words(self, start: int, count: int) -> Vectors:
        return columns(self.b, self.addresses, self.b.add(self.offset, at(start)), count)

    def half(self, start: int) -> ir.Value:
        return column(self.b, self.addresses, self.b.add(self.offset, at(start)), I16)

    def octet(self, start: int) -> ir.Value:
        return column(self.b, self.addresses, self.b.add(self.offset, at(start)), I8)

    def nibbles(self, start: int, words: int) -> Vectors:
        """Return the low nibbles of some words, then the high ones."""
        found = self.words(start, words)
        return [field(self.b, word, low, 4) for low in (0, 4) for word in found]


class Split(NamedTuple):
    """A block's parts.

    codes     of its weights in order, four in a word; of a grid, the words of its chunks
    scales    words of a super-block, halves of a grid's, or one number
    biases    one number, or nothing
    overflow  nonzero where the bias does not fit in half precision; None where it always does
    """

    codes: Vectors
    scales: Vectors
    biases: Vectors
    overflow: ir.Value | None = None


def _with_top(b: ir.IRBuilder, low: Vectors, top: Vectors, bits: int) -> Vectors:
    """Join the low bits of codes with those above."""
    return [b.or_(code, shifted(b, high, -bits)) for code, high in zip(low, top, strict=True)]


def _bit_per_code(b: ir.IRBuilder, word: ir.Value) -> Vectors:
    """Spread 32 bits to the lowest bits of 32 bytes."""
    found = []
    for first in range(0, 32, 4):
        four = b.and_(shifted(b, word, first), splat(WORDS, 15))
        # copies at distances of 7 bits: bit i of copy i is at the bottom of byte i
        found.append(masked(b, b.mul(four, splat(WORDS, 0x00204081)), 1))
    return found


def _centred(rows: Rows, codes: Vectors, power: int) -> Split:
    """Split a type whose code 2**power is 0."""
    b, scale = rows.b, rows.half(0)
    bias = b.fmul(widened_halves(b, scale), splat(FLOATS, -(2.0**power)))
    size = b.and_(b.bitcast(bias, WORDS), splat(WORDS, 0x7FFFFFFF))
    # as an infinite scale, 2**16 is not finite in half precision
    overflow = b.sext(b.icmp_unsigned(">=", size, splat(WORDS, (127 + 16) << 23)), WORDS)
    return Split(codes, [scale], [narrowed(b, bias)], overflow)


def _q4_0(rows: Rows) -> Split:
    return Split(rows.nibbles(2, 4), [rows.half(0)], [])


def _q4_1(rows: Rows) -> Split:
    return Split(rows.nibbles(4, 4), [rows.half(0)], [rows.half(2)])


def _fives(rows: Rows, start: int) -> Vectors:
    (top,) = rows.words(start, 1)
    return _with_top(rows.b, rows.nibbles(start + 4, 4), _bit_per_code(rows.b, top), 4)


def _q5_0(rows: Rows) -> Split:
    return _centred(rows, _fives(rows, 2), 4)


def _q5_1(rows: Rows) -> Split:
    return Split(_fives(rows, 4), [rows.half(0)], [rows.half(2)])


def _q8_0(rows: Rows) -> Split:
    codes = [rows.b.xor(word, splat(WORDS, 0x80808080)) for word in rows.words(2, 8)]
    return _centred(rows, codes, 7)


def _mxfp4(rows: Rows) -> Split:
    return Split(rows.nibbles(1, 4), [rows.octet(0)], [])


def _iq4_nl(rows: Rows) -> Split:
    return Split(rows.nibbles(2, 4), [rows.half(0)], [])


def _float_bits(rows: Rows, start: int) -> ir.Value:
    return rows.b.bitcast(widened_halves(rows.b, rows.half(start)), WORDS)


def _ends(rows: Rows, start: int) -> ir.Value:
    """Return the first word of a super-block with biases: its scale, and the negative of its least."""
    b, (word,) = rows.b, rows.words(start, 1)
    return b.xor(word, splat(WORDS, 0x80000000))


def _six_bit_steps(rows: Rows, start: int) -> Vectors:
    """Return the steps of eight scales, then of eight biases."""
    b, (low, high, rest) = rows.b, rows.words(start, 3)
    upper = [shifted(b, field(b, word, 6, 2), -4) for word in (low, high)]
    second = b.or_(field(b, rest, 0, 4), upper[0]), b.or_(field(b, rest, 4, 4), upper[1])
    return [field(b, low, 0, 6), second[0], field(b, high, 0, 6), second[1]]


def _nibble_groups(rows: Rows, start: int) -> Vectors:
    """Return the codes of groups of 32: the low nibbles of 32 bytes are one, and their high nibbles the next."""
    return [code for group in range(4) for code in rows.nibbles(start + 32 * group, 8)]


def _q4_k(rows: Rows) -> Split:
    return Split(_nibble_groups(rows, 16), [_ends(rows, 0), *_six_bit_steps(rows, 4)], [])


def _q5_k(rows: Rows) -> Split:
    fifth = rows.words(16, 8)
    top = [field(rows.b, word, group, 1) for group in range(8) for word in fifth]
    return Split(_with_top(rows.b, _nibble_groups(rows, 48), top, 4), [_ends(rows, 0), *_six_bit_steps(rows, 4)], [])


def _q6_k(rows: Rows) -> Split:
    codes: Vectors = []
    for half in range(2):
        low, high = rows.nibbles(64 * half, 16), rows.words(128 + 32 * half, 8)
        top = [field(rows.b, word, 2 * quarter, 2) for quarter in range(4) for word in high]
        codes += _with_top(rows.b, low, top, 4)
    steps = [rows.b.xor(word, splat(WORDS, 0x01010101 * ZERO)) for word in rows.words(192, 4)]
    return Split(codes, [_float_bits(rows, 208), *steps], [])


def _twos(rows: Rows, start: int) -> Vectors:
    """Return codes of two bits: the lowest of 32 bytes, then those above them."""
    halves = [rows.words(start + 32 * half, 8) for half in range(2)]
    return [field(rows.b, word, 2 * quarter, 2) for words in halves for quarter in range(4) for word in words]


def _q3_k(rows: Rows) -> Split:
    b, high = rows.b, rows.words(0, 8)
    top = [field(b, word, group, 1) for group in range(8) for word in high]
    low, above, rest = rows.words(96, 3)
    fours = [field(b, word, nibble, 4) for nibble in (0, 4) for word in (low, above)]
    steps = _with_top(b, fours, [field(b, rest, 2 * i, 2) for i in range(4)], 4)
    # a step minus 32 is stored as a byte minus ZERO
    steps = [b.add(word, splat(WORDS, 0x01010101 * (ZERO - 32))) for word in steps]
    return Split(_with_top(b, _twos(rows, 32), top, 2), [_float_bits(rows, 108), *steps], [])


def _q2_k(rows: Rows) -> Split:
    return Split(_twos(rows, 16), [_ends(rows, 80), *rows.words(0, 4)], [])


def _iq4_xs(rows: Rows) -> Split:
    b, high, (low,) = rows.b, rows.half(2), rows.words(4, 1)
    steps = []
    for first in (0, 4):
        word = splat(WORDS, 0x01010101 * (ZERO - 32))
        for i in range(4):
            nibble = b.and_(shifted(b, low, 4 * (first + i)), splat(WORDS, 15))
            top = b.and_(shifted(b, high, 2 * (first + i)), splat(WORDS, 3))
            word = b.add(word, shifted(b, b.or_(nibble, shifted(b, top, -4)), -8 * i))
        steps.append(word)
    codes = [code for group in range(8) for code in rows.nibbles(8 + 16 * group, 4)]
    return Split(codes, [_float_bits(rows, 0), *steps], [])


def _halves(rows: Rows, *fields: tuple[int, int]) -> Vectors:
    """Return halves: for each field its first byte and how many it has."""
    return [rows.half(start + 2 * i) for start, count in fields for i in range(count)]


def _chunks(rows: Rows, *fields: tuple[int, int]) -> Vectors:
    """Return the words of each chunk: for each field its first byte and its words per chunk."""
    found = [rows.words(start, 8 * each) for start, each in fields]
    sizes = [each for _, each in fields]
    return [word for i in range(8) for words, n in zip(found, sizes, strict=True) for word in words[i * n : i * n + n]]


def _iq1_s(rows: Rows) -> Split:
    return Split(_chunks(rows, (2, 1)), _halves(rows, (0, 1), (34, 8)), [])


def _iq1_m(rows: Rows) -> Split:
    return Split(_chunks(rows, (0, 1)), _halves(rows, (48, 4), (32, 8)), [])


def _iq2_xxs(rows: Rows) -> Split:
    return Split(_chunks(rows, (2, 2)), _halves(rows, (0, 1)), [])


def _iq2_xs(rows: Rows) -> Split:
    b, made, found = rows.b, [], rows.words(2, 16)
    for first, second in zip(found[::2], found[1::2], strict=True):
        # four entries of 16 bits: their low bytes, then their high bytes
        for low in (0, 8):
            x, y = (b.and_(shifted(b, word, low), splat(WORDS, 0x00FF00FF)) for word in (first, second))
            x, y = (b.and_(b.or_(word, shifted(b, word, 8)), splat(WORDS, 0xFFFF)) for word in (x, y))
            made.append(b.or_(x, shifted(b, y, -16)))
    return Split(made, _halves(rows, (0, 1), (66, 4)), [])


def _iq2_s(rows: Rows) -> Split:
    return Split(_chunks(rows, (2, 1), (34, 1)), _halves(rows, (0, 1), (74, 4), (66, 4)), [])


def _iq3_xxs(rows: Rows) -> Split:
    return Split(_chunks(rows, (2, 2), (66, 1)), _halves(rows, (0, 1)), [])


def _iq3_s(rows: Rows) -> Split:
    return Split(_chunks(rows, (2, 2), (74, 1)), _halves(rows, (0, 1), (106, 2), (66, 4)), [])


SPLITS: dict[str, Callable[[Rows], Split]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def expanded(b: ir.IRBuilder, kind: str, words: Vectors) -> tuple[Vectors, Vectors]:
    """Return the float32 scale, and bias, of each group of a super-block, as `super_blocks.expand_scales`."""
    form = FORMATS[kind.lower()]
    if not form.has_biases:
        scale = b.bitcast(words[0], FLOATS)
        steps = [b.fsub(_step(b, words[1:], i, 0, 8), splat(FLOATS, float(ZERO))) for i in range(form.groups)]
        return [b.bitcast(b.fmul(scale, step), WORDS) for step in steps], []
    scale = widened_halves(b, b.and_(words[0], splat(WORDS, 0xFFFF)))
    bias = widened_halves(b, shifted(b, words[0], 16))
    if form.has_nibbles:
        scales = [_step(b, words[1:], i, 0, 4) for i in range(form.groups)]
        biases = [_step(b, words[1:], i, 4, 4) for i in range(form.groups)]
    else:
        both = [_step(b, words[1:], i, 0, 8) for i in range(2 * form.groups)]
        scales, biases = both[: form.groups], both[form.groups :]

    def times(factor: ir.Value, steps: Vectors) -> Vectors:
        return [b.bitcast(b.fmul(factor, step), WORDS) for step in steps]

    return times(scale, scales), times(bias, biases)


def _step(b: ir.IRBuilder, words: Vectors, number: int, low: int, bits: int) -> ir.Value:
    """Return a step as a float: `bits` bits of its byte from bit `low` on."""
    word, byte = divmod(number, 4)
    return b.uitofp(b.and_(shifted(b, words[word], 8 * byte + low), splat(WORDS, 2**bits - 1)), FLOATS)
