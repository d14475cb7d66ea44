"""Unpacking of the codes and scales of `ISA.lanes` rows to vectors, for all products on CPU."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import cache

import torch
from llvmlite import ir
from numba.core import cgutils
from torch import Tensor

from auraflux.ops.linear.cpu.e4m3 import by_input, by_parity, eighth, half_codes
from auraflux.ops.linear.cpu.forms import BLOCK, BYTES, FLOATS, INTS, LEVELS, Form, half_floats
from auraflux.ops.linear.cpu.grid_codes import GridBlock, grid_order
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.vectors import I16, at, call, fma, kernel, load, pick, splat, store, vector
from auraflux.quant.packing import CHUNK, LANE_FIELDS, BitField
from auraflux.quant.super_blocks import SIZE, ZERO


def code_vectors(b: ir.IRBuilder, form: Form, codes: ir.Value) -> list[ir.Value]:
    """Load the codes of one chunk: eight vectors of bytes, four inputs of each row, in `activation_order`."""
    bits = form.bits
    words = [load(b, codes, 4 * BLOCK * i, INTS) for i in range(bits)]
    if bits == 8:
        return [b.bitcast(word, BYTES) for word in words]
    if bits in (2, 4):
        packed = [b.bitcast(word, BYTES) for word in words]
        mask = splat(BYTES, 2**bits - 1)
        found = [b.and_(b.lshr(v, splat(BYTES, shift)) if shift else v, mask) for v in packed for shift in range(0, 8, bits)]
        return [ISA.look_up(b, form.table, v) for v in found] if form.kind in LEVELS else found
    packed = [b.bitcast(word, BYTES) for word in words]
    return [_joined(b, packed, pieces, bits) for pieces in LANE_FIELDS[bits]]


def _joined(b: ir.IRBuilder, packed: list[ir.Value], pieces: tuple[BitField, ...], bits: int) -> ir.Value:
    """Assemble codes from bit fields, the highest bits at the top."""
    first, *others = pieces
    if not others:
        word = packed[first.word]
        return b.and_(b.lshr(word, splat(BYTES, first.low)) if first.low else word, splat(BYTES, 2**bits - 1))
    found, count = _at_top(b, packed, first), first.size
    for piece in others:
        found = ISA.shift_right_insert(b, found, _at_top(b, packed, piece), count)
        count += piece.size
    return b.lshr(found, splat(BYTES, 8 - bits))


def _at_top(b: ir.IRBuilder, packed: list[ir.Value], piece: BitField) -> ir.Value:
    above = 8 - piece.low - piece.size
    return b.shl(packed[piece.word], splat(BYTES, above)) if above else packed[piece.word]


def shifts_in_place(form: Form, tokens: int) -> tuple[int, ...]:
    """Return the bit shifts of codes left in place within their bytes: for one token, where a sum per shift pays off."""
    if tokens > 1 or form.grid is not None:
        return (0,)
    if form.bits == 2 and form.group > 16:
        return (0, 2, 4)
    return (0, 3) if form.bits == 3 and form.group > 32 else (0,)


def in_place(b: ir.IRBuilder, form: Form, codes: ir.Value, tokens: int) -> list[tuple[ir.Value, int]]:
    """Load the codes of one chunk without shifting some of them: each vector with the shift to apply to its sum."""
    shifts = shifts_in_place(form, tokens)
    if len(shifts) == 1:
        return [(v, 0) for v in code_vectors(b, form, codes)]
    packed = [b.bitcast(load(b, codes, 4 * BLOCK * i, INTS), BYTES) for i in range(form.bits)]
    masked = [[(b.and_(v, splat(BYTES, 2**form.bits - 1 << shift)), shift) for shift in shifts] for v in packed]
    if form.bits == 2:
        return [pair for v, low in zip(packed, masked, strict=True) for pair in (*low, (b.lshr(v, splat(BYTES, 6)), 0))]
    others = [(_joined(b, packed, pieces, form.bits), 0) for pieces in LANE_FIELDS[form.bits] if len(pieces) > 1]
    return [*(pair for low in masked for pair in low), *others]


def float_codes(b: ir.IRBuilder, form: Form, codes: ir.Value) -> list[ir.Value]:
    """Load the codes of one chunk: 32 vectors of floats, one input of each row, in natural order."""
    if form.bits in LANE_FIELDS:
        words, width = [b.bitcast(v, INTS) for v in code_vectors(b, form, codes)], 8
    else:
        words, width = [load(b, codes, 4 * BLOCK * i, INTS) for i in range(form.bits)], form.bits
    if form.by_halves:
        return [each for word in words for each in by_input(b, by_parity(b, word))]
    if form.kind == "e4m3":
        return [eighth(b, words[i // 4], i % 4) for i in range(CHUNK)]
    found = [b.and_(_field(b, words, i * width, width), splat(INTS, 2**width - 1)) for i in range(CHUNK)]
    if form.kind in LEVELS:
        levels = [b.bitcast(ISA.look_up(b, form.table, b.bitcast(v, BYTES)), INTS) for v in found]
        found = [b.and_(v, splat(INTS, 255)) for v in levels]
    return [b.sitofp(v, FLOATS) for v in found]


def floats_of_bytes(b: ir.IRBuilder, octets: list[ir.Value]) -> list[ir.Value]:
    """Widen vectors of signed bytes, four inputs of each row, to one vector of floats for each input."""
    found = []
    for vectors in octets:
        words = b.bitcast(vectors, INTS)
        found += [b.ashr(b.shl(words, splat(INTS, 24 - 8 * i)), splat(INTS, 24)) for i in range(4)]
    return [b.sitofp(v, FLOATS) for v in found]


def _field(b: ir.IRBuilder, words: list[ir.Value], start: int, width: int) -> ir.Value:
    """Return at least `width` bits from bit `start` of a stream of words."""
    word, shift = divmod(start, 32)
    if shift + width <= 32:
        return b.lshr(words[word], splat(INTS, shift)) if shift else words[word]
    return call(b, f"llvm.fshr.v{BLOCK}i32", INTS, words[word + 1], words[word], splat(INTS, shift))


def _to_bytes(b: ir.IRBuilder, field: ir.Value, bits: int) -> ir.Value:
    """Spread four adjacent codes at the bottom of each lane to one per byte, by moving halves, then quarters."""
    pair, one = 2 ** (2 * bits) - 1, 2**bits - 1
    low, high = b.and_(field, splat(INTS, pair)), b.shl(field, splat(INTS, 16 - 2 * bits))
    field = b.or_(low, b.and_(high, splat(INTS, pair << 16)))
    low, high = b.and_(field, splat(INTS, one * 0x10001)), b.shl(field, splat(INTS, 8 - bits))
    return b.or_(low, b.and_(high, splat(INTS, (one << 8) * 0x10001)))


def scale_and_bias(b: ir.IRBuilder, form: Form, scales: ir.Value, biases: ir.Value, group: ir.Value) -> list[ir.Value | None]:
    """Load one group's scales and biases for all rows, as float32, for the dot product's weight bytes.

    A format without biases has its scales in their place, or None if its numbers need none.
    """
    if not form.has_biases:
        scale = _scale(b, form, scales, group)
        return [scale, scale if form.zero else None]
    scale, bias = (_widen(b, form.kind, each, b.mul(group, at(BLOCK * form.scale_nbytes))) for each in (scales, biases))
    if form.digits and form.value_bits == 8 and ISA.signed_codes:
        bias = fma(b, scale, splat(FLOATS, 128.0), bias)
    return [scale, bias]


class SuperBlock:
    """Super-block of one block of rows: the factors of its group scales are loaded once.

    Scales and biases are scaled down by 2**`Form.lift`.
    """

    def __init__(self, b: ir.IRBuilder, form: Form, words: ir.Value):
        self.b, self.form, self.words = b, form, words
        first, unit = load(b, words, 0, INTS), ISA.small_unit * 2.0**form.lift
        if form.has_biases:
            halves = (half_floats(b, b.and_(first, splat(INTS, 0xFFFF))), half_floats(b, b.lshr(first, splat(INTS, 16))))
            # the upper half of a byte is sixteen times a scale
            units = (unit, 16 * unit if form.bits == 2 else unit)
            self.ends = [_times(b, half, 1 / each) for half, each in zip(halves, units, strict=True)]
            return
        if form.kind == "nvfp4":
            # FP8 becomes half precision, over 256
            self.ends = [_times(b, b.bitcast(first, FLOATS), 256.0)]
            return
        self.ends = [_times(b, b.bitcast(first, FLOATS), 1 / unit)]
        # bytes less ZERO, times the scale: both products and their difference are exact
        self.least = ISA.spill(b, [b.fmul(self.ends[0], splat(FLOATS, -ZERO * ISA.small_unit))] * 4)

    def four(self, number: ir.Value) -> Callable[[int], list[ir.Value | None]]:
        """Load the scales of four groups; return a function that computes scale and bias of each, like `scale_and_bias`."""
        b, form = self.b, self.form
        tables = [self._word(number)]
        if form.kind == "nvfp4":
            return lambda group: self._level_and_zero(b.fmul(_small_half(b, tables[0], group), self.ends[0]))
        if not form.has_biases:
            least = ISA.reload(b, self.least, number)

            def level(group: int) -> list[ir.Value | None]:
                return self._level_and_zero(fma(b, ISA.small_float(b, tables[0], group), self.ends[0], least[group]))

            return level
        if form.bits == 2:
            tables = [b.and_(tables[0], splat(INTS, 0x01010101 * mask)) for mask in (0x0F, 0xF0)]
        else:
            tables.append(self._word(b.add(number, at(form.words // 2))))

        def affine(group: int) -> list[ir.Value | None]:
            return [b.fmul(ISA.small_float(b, table, group), end) for table, end in zip(tables, self.ends, strict=True)]

        return affine

    def _level_and_zero(self, scale: ir.Value) -> list[ir.Value | None]:
        return [scale, scale if self.form.zero else None]

    def _word(self, number: ir.Value) -> ir.Value:
        return load(self.b, self.words, self.b.mul(self.b.add(number, at(1)), at(4 * BLOCK)), INTS)


def _small_half(b: ir.IRBuilder, words: ir.Value, byte: int) -> ir.Value:
    """Widen one of the four FP8 numbers of each lane, over 256: their bits are a half's with a smaller exponent."""
    top = b.shl(words, splat(INTS, 24 - 8 * byte)) if byte < 3 else words
    return half_floats(b, b.and_(b.ashr(top, splat(INTS, 17)), splat(INTS, 0xBF80)))


def _times(b: ir.IRBuilder, value: ir.Value, factor: float) -> ir.Value:
    return value if factor == 1 else b.fmul(value, splat(FLOATS, factor))


def _scale(b: ir.IRBuilder, form: Form, scales: ir.Value, group: ir.Value) -> ir.Value:
    if form.kind in ("iq4_nl", "q4_0"):
        return _widen(b, "f16", scales, b.mul(group, at(2 * BLOCK)))
    if form.kind != "e8m0":
        return load(b, scales, b.mul(group, at(4 * BLOCK)), FLOATS)
    found = ISA.powers(b, scales, b.mul(group, at(BLOCK)))
    # the table holds twice the levels, hence a half; 255 is NaN, computed as infinity minus half of it
    return fma(b, found, splat(FLOATS, -0.5), found)


def _widen(b: ir.IRBuilder, kind: str, address: ir.Value, offset: ir.Value) -> ir.Value:
    if kind == "f32":
        return load(b, address, offset, FLOATS)
    if kind == "f16" and ISA.widens_halves:
        return b.fpext(load(b, address, offset, vector(ir.HalfType(), BLOCK)), FLOATS)
    bits = b.zext(load(b, address, offset, vector(I16, BLOCK)), INTS)
    return b.bitcast(b.shl(bits, splat(INTS, 16)), FLOATS) if kind == "bf16" else half_floats(b, bits)


def spans(b, form, groups):
    """Return the number of spans of the groups."""
    return b.sdiv(groups, at(form.parts)) if form.parts > 1 else groups


@contextmanager
def chunks(b, form):
    """Iterate over the chunks of a span."""
    with cgutils.for_range(b, at(form.span // CHUNK)) as loop:
        yield loop.index


def _pairs(b: ir.IRBuilder, first: ir.Value, second: ir.Value) -> list[ir.Value]:
    """Combine four inputs of each of four rows and the next four: all eight of two rows, and of the other two."""
    x, y = b.bitcast(first, INTS), b.bitcast(second, INTS)
    return [pick(b, x, y, [row, row + 4, row + 1, row + 5]) for row in (0, 2)]


@kernel(constants=1, outlined=True)
def unpack_rows(b, form, codes, words, groups, tile):
    """Unpack one block of rows: the codes as bytes for the dot product, as float32 or, of e4m3, in half precision.

    Four bytes of a row are contiguous; eight of each of two rows where rows are paired (`ISA.by_pair`).

    words  of super-blocks, which only grids need
    """
    form = Form.parse(form)
    if form.grid is not None:
        _unpack_grid(b, form, codes, words, groups, tile)
        return
    with cgutils.for_range(b, spans(b, form, groups)) as loop:
        code_at = b.add(codes, b.mul(loop.index, at(form.span * BLOCK * form.bits // 8)))
        tile_at = b.add(tile, b.mul(loop.index, at(form.span * BLOCK * form.unpacked_nbytes)))
        with chunks(b, form) as chunk:
            chunk_at = b.add(code_at, b.mul(chunk, at(4 * BLOCK * form.bits)))
            to = b.add(tile_at, b.mul(chunk, at(CHUNK * BLOCK * form.unpacked_nbytes)))
            if form.halves:
                found = half_codes(b, chunk_at)
            else:
                found = code_vectors(b, form, chunk_at) if form.digits else float_codes(b, form, chunk_at)
            _store_unpacked(b, form, found, to)


def _store_unpacked(b: ir.IRBuilder, form: Form, found: list[ir.Value], to: ir.Value) -> None:
    """Store the codes of a chunk."""
    values = [ISA.unpacked(b, v, form.value_bits) for v in found] if form.digits else found
    if form.digits and ISA.by_pair:
        values = [each for i in range(0, len(values), 2) for each in _pairs(b, *values[i : i + 2])]
    for i, v in enumerate(values):
        store(b, v, to, 4 * BLOCK * i)


def _unpack_grid(b: ir.IRBuilder, form: Form, codes: ir.Value, words: ir.Value, groups: ir.Value, tile: ir.Value) -> None:
    rounds, size = SIZE // (4 * form.group), 4 * form.group // CHUNK
    with grid_blocks(b, form, codes, words, groups) as (block, number), cgutils.for_range(b, at(rounds)) as step:
        first = b.mul(b.add(b.mul(number, at(rounds)), step.index), at(size))
        for i in range(size):
            chunk = b.add(first, at(i))
            found = block.chunk(step.index, i, b.add(codes, b.mul(chunk, at(4 * BLOCK * form.bits))))
            to = b.add(tile, b.mul(chunk, at(CHUNK * BLOCK * form.unpacked_nbytes)))
            _store_unpacked(b, form, found if form.digits else floats_of_bytes(b, found), to)


@cache
def unpacked_places(form: Form) -> Tensor:
    """Return the byte of each input of a grid's unpacked chunk in each row: int32 [CHUNK, BLOCK]."""
    made = torch.empty(CHUNK, BLOCK, dtype=torch.int32)
    for place, number in enumerate(grid_order(form)):
        v, octet = divmod(place, 4)
        for row in range(BLOCK):
            at_row = 4 * (BLOCK * v + row) + octet
            if ISA.by_pair:
                at_row = 4 * BLOCK * (v // 2 * 2 + row // 2) + 8 * (row % 2) + 4 * (v % 2) + octet
            made[number, row] = at_row
    return made


@contextmanager
def grid_blocks(b, form, codes, words, groups):
    """Iterate over the super-blocks of a grid format, with their numbers."""
    with cgutils.for_range(b, b.sdiv(groups, at(SIZE // form.group))) as loop:
        here = b.add(codes, b.mul(loop.index, at(SIZE * BLOCK * form.bits // 8)))
        yield GridBlock(b, form, here, b.add(words, b.mul(loop.index, at(2 * BLOCK * form.words)))), loop.index


@kernel(constants=1, outlined=True)
def widen_scales(b, form, codes, words, groups, scales, biases):
    """Dequantize the scales and biases of one block of rows in super-blocks: [groups, BLOCK] float32 each.

    codes  which hold steps in some grids
    """
    form = Form.parse(form)
    size = SIZE // form.group
    if form.grid is not None:
        with grid_blocks(b, form, codes, words, groups) as (block, number):
            to = b.mul(number, at(4 * BLOCK * size))
            for first in range(0, size, 4):
                found = block.four(at(first // 4))
                for group in range(4):
                    store(b, found(group)[0], b.add(scales, to), 4 * BLOCK * (first + group))
        return
    with cgutils.for_range(b, b.sdiv(groups, at(size))) as loop:
        super_block = SuperBlock(b, form, b.add(words, b.mul(loop.index, at(4 * BLOCK * form.words))))
        to = b.mul(loop.index, at(4 * BLOCK * size))
        for first in range(0, size, 4):
            found = super_block.four(at(first // 4))
            for group in range(4):
                scale, bias = found(group)
                store(b, scale, b.add(scales, to), 4 * BLOCK * (first + group))
                if form.has_biases:
                    store(b, bias, b.add(biases, to), 4 * BLOCK * (first + group))


@kernel(constants=1, outlined=True)
def place_codes(b, form, codes, groups):
    """Rearrange the codes of one block of rows from a bit stream to the layout of an interleaved weight."""
    form = Form.parse(form)
    bits = form.bits
    with cgutils.for_range(b, b.mul(spans(b, form, groups), at(form.span // CHUNK))) as loop:
        here = b.add(codes, b.mul(loop.index, at(4 * BLOCK * bits)))
        words = [load(b, here, 4 * BLOCK * i, INTS) for i in range(bits)]
        found = [b.bitcast(_to_bytes(b, _field(b, words, 4 * bits * i, 4 * bits), bits), BYTES) for i in range(8)]
        made = [splat(BYTES, 0)] * bits
        for v, pieces in zip(found, LANE_FIELDS[bits], strict=True):
            left = bits
            for piece in pieces:
                left -= piece.size
                bits_of = b.and_(b.lshr(v, splat(BYTES, left)), splat(BYTES, 2**piece.size - 1))
                made[piece.word] = b.or_(made[piece.word], b.shl(bits_of, splat(BYTES, piece.low)))
        for i, v in enumerate(made):
            store(b, v, here, 4 * BLOCK * i)
