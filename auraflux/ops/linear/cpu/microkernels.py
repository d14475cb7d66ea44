"""The inner loops of every quantized product on CPU: `ISA.lanes` rows of a weight against a few tokens.

A lane is a row (see `QTensor.interleave`), so nothing is summed across lanes and the scales of all rows are one vector. Two
contracts share the interface: *fast* rounds activations to int8 per group and uses the byte dot product; *exact* multiplies
float32, or, where the byte dot product is much the quicker (`ISA.digits`), rounds activations to 24 bits per group: three
digits of a byte each, whose sums are whole numbers and have no error. All use, per group, s * sum(code * x) + b * sum(x), the
second sum made once per token; where b is a number times s, that number is a factor of the sum.

When many tokens come, a block of rows is unpacked once (`unpack_rows`) and the `ready` form runs over all tokens. A result's
sums are made in the same order however many tokens there are.
"""

from contextlib import contextmanager
from functools import partial, reduce
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.simd.vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    ISA,
    MAGIC,
    MAGIC_BITS,
    at,
    call,
    fma,
    kernel,
    load,
    pick,
    prefetch,
    splat,
    spread,
    store,
    sum_four,
    variable,
    vector,
)
from auraflux.quant.levels import IQ4
from auraflux.quant.packing import CHUNK, PLACES, Piece


class Form(NamedTuple):
    """What a kernel is compiled for; `text` is how it travels through Numba as one compile-time constant.

    fast   int8 activations and the byte dot product, or float32
    bits, group  of the codes
    kind   how scales are held: bf16, f16, f32, or e8m0 (MXFP4 exponents, no biases); without biases and with scales in f32:
           e4m3 (FP8 codes), centred, iq4 and nvfp4 (see `quant/levels.py`)
    """

    fast: bool
    bits: int
    group: int
    kind: str

    @property
    def text(self) -> str:
        return f"{int(self.fast)} {self.bits} {self.group} {self.kind}"

    @classmethod
    def parse(cls, text: str) -> "Form":
        fast, bits, group, kind = text.split()
        return cls(fast == "1", int(bits), int(group), kind)

    @property
    def scale_nbytes(self) -> int:
        return {"bf16": 2, "f16": 2, "e8m0": 1}.get(self.kind, 4)

    @property
    def has_biases(self) -> bool:
        return self.kind in ("bf16", "f16", "f32")

    @property
    def digits(self) -> int:
        """Bytes of an activation, for the byte dot product; 0 where it stays float32."""
        if self.fast:
            return 1
        return 0 if self.kind == "e4m3" else ISA.digits

    @property
    def raw(self) -> bool:
        """Whether float32 activations are scaled, for weights that have e4m3's exponents."""
        return self.kind == "e4m3" and ISA.denormals

    @property
    def act_nbytes(self) -> int:
        return self.digits or 4

    @property
    def ready_nbytes(self) -> int:
        """Of an unpacked code."""
        return 1 if self.digits else 4

    @property
    def value_bits(self) -> int:
        """Of the bytes that the dot product takes."""
        return 8 if self.kind == "iq4" and not self.signed else self.bits

    @property
    def signed(self) -> bool:
        """Whether levels are looked up as they are, those below zero too."""
        return self.kind in LEVELS and ISA.by_lane and self.digits > 0

    @property
    def table(self) -> list[int]:
        """What is looked up for a code, as signed bytes."""
        least = 0 if self.signed else min(LEVELS[self.kind])
        return [(level - least + 128) % 256 - 128 for level in LEVELS[self.kind]]

    @property
    def zero(self) -> int:
        """Which of the numbers that the dot product takes stands for zero, without biases."""
        if self.kind in LEVELS:
            found = 0 if self.signed else -min(LEVELS[self.kind])
        else:
            found = 2 ** (self.bits - 1) if self.kind == "centred" else 0
        return found - 128 if self.digits and self.value_bits == 8 and ISA.signed_codes else found

    @property
    def unit(self) -> float:
        """What the levels of a table are multiples of, but for MXFP4, whose scales have that factor."""
        return 0.5 if self.kind == "nvfp4" else 1.0

    @property
    def span(self) -> int:
        """Inputs that the loops go through at a time: a group, or the groups of a chunk."""
        return max(self.group, CHUNK)

    @property
    def parts(self) -> int:
        """Groups of a span."""
        return self.span // self.group


BLOCK = ISA.lanes
FLOATS, INTS, BYTES = ISA.floats, ISA.ints, ISA.bytes

# twice the MXFP4 levels: whole numbers
TWICE = tuple(sign * v for sign in (1, -1) for v in (0, 1, 2, 3, 4, 6, 8, 12))
LEVELS = {"e8m0": TWICE, "nvfp4": TWICE, "iq4": IQ4}
# exponent of the largest activation of a group where e4m3 is over 2**120: products are far from both ends of float32
MIDDLE = 60


def activation_order(bits: int) -> list[int]:
    """Which of 32 inputs the bytes of eight consecutive code vectors belong to: shifts take words apart, nothing sorts them."""
    per_word = 32 // bits if 32 % bits == 0 else 4
    step = per_word // 4
    return [word + part + step * i for word in range(0, CHUNK, per_word) for part in range(step) for i in range(4)]


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
    return [_joined(b, packed, pieces, bits) for pieces in PLACES[bits]]


def _joined(b: ir.IRBuilder, packed: list[ir.Value], pieces: tuple[Piece, ...], bits: int) -> ir.Value:
    """Codes from the pieces they are in: the highest bits stay at the top, what follows is put below them."""
    first, *others = pieces
    if not others:
        word = packed[first.word]
        return b.and_(b.lshr(word, splat(BYTES, first.low)) if first.low else word, splat(BYTES, 2**bits - 1))
    found, count = _at_top(b, packed, first), first.size
    for piece in others:
        found = ISA.put_below(b, found, _at_top(b, packed, piece), count)
        count += piece.size
    return b.lshr(found, splat(BYTES, 8 - bits))


def _at_top(b: ir.IRBuilder, packed: list[ir.Value], piece: Piece) -> ir.Value:
    above = 8 - piece.low - piece.size
    return b.shl(packed[piece.word], splat(BYTES, above)) if above else packed[piece.word]


def kept_apart(form: Form, tokens: int) -> tuple[int, ...]:
    """By how many bits codes are shifted in their bytes when one token meets them, where groups repay a sum for each."""
    if tokens > 1:
        return (0,)
    if form.bits == 2 and form.group > 16:
        return (0, 2, 4)
    return (0, 3) if form.bits == 3 and form.group > 32 else (0,)


def in_place(b: ir.IRBuilder, form: Form, codes: ir.Value, tokens: int) -> list[tuple[ir.Value, int]]:
    """The same, where some codes stay where they are in a byte: sums are shifted by so much in their place."""
    shifts = kept_apart(form, tokens)
    if len(shifts) == 1:
        return [(v, 0) for v in code_vectors(b, form, codes)]
    packed = [b.bitcast(load(b, codes, 4 * BLOCK * i, INTS), BYTES) for i in range(form.bits)]
    masked = [[(b.and_(v, splat(BYTES, 2**form.bits - 1 << shift)), shift) for shift in shifts] for v in packed]
    if form.bits == 2:
        return [pair for v, low in zip(packed, masked, strict=True) for pair in (*low, (b.lshr(v, splat(BYTES, 6)), 0))]
    others = [(_joined(b, packed, pieces, form.bits), 0) for pieces in PLACES[form.bits] if len(pieces) > 1]
    return [*(pair for low in masked for pair in low), *others]


def float_codes(b: ir.IRBuilder, form: Form, codes: ir.Value) -> list[ir.Value]:
    """Load the codes of one chunk: 32 vectors of floats, one input of each row, in natural order."""
    if form.bits in PLACES:
        words, width = [b.bitcast(v, INTS) for v in code_vectors(b, form, codes)], 8
    else:
        words, width = [load(b, codes, 4 * BLOCK * i, INTS) for i in range(form.bits)], form.bits
    if form.kind == "e4m3":
        return [_eighth(b, words[i // 4], i % 4) for i in range(CHUNK)]
    found = [b.and_(_field(b, words, i * width, width), splat(INTS, 2**width - 1)) for i in range(CHUNK)]
    if form.kind in LEVELS:
        levels = [b.bitcast(ISA.look_up(b, form.table, b.bitcast(v, BYTES)), INTS) for v in found]
        found = [b.and_(v, splat(INTS, 255)) for v in levels]
    return [b.sitofp(v, FLOATS) for v in found]


def _eighth(b: ir.IRBuilder, word: ir.Value, byte: int) -> ir.Value:
    """Widen e4m3: its exponent, 7 from the middle, is raised to float32's 127 by a product, which denormals survive.

    Or by the activations (`Form.raw`): then numbers are over 2**120 here.
    """
    top = b.shl(word, splat(INTS, 24 - 8 * byte)) if byte < 3 else word
    # the sign stays in place, and the bits between it and the exponent are copies of it that go
    moved = b.and_(b.ashr(top, splat(INTS, 4)), splat(INTS, 0x87F00000))
    found = b.bitcast(moved, FLOATS)
    return found if ISA.denormals else b.fmul(found, splat(FLOATS, 2.0**120))


def _field(b: ir.IRBuilder, words: list[ir.Value], start: int, width: int) -> ir.Value:
    """At least `width` bits from bit `start` of a stream of words."""
    word, shift = divmod(start, 32)
    if shift + width <= 32:
        return b.lshr(words[word], splat(INTS, shift)) if shift else words[word]
    return call(b, f"llvm.fshr.v{BLOCK}i32", INTS, words[word + 1], words[word], splat(INTS, shift))


def _to_bytes(b: ir.IRBuilder, field: ir.Value, bits: int) -> ir.Value:
    """Four adjacent codes at the bottom of each lane -> one in each byte, by moving halves, then quarters."""
    pair, one = 2 ** (2 * bits) - 1, 2**bits - 1
    low, high = b.and_(field, splat(INTS, pair)), b.shl(field, splat(INTS, 16 - 2 * bits))
    field = b.or_(low, b.and_(high, splat(INTS, pair << 16)))
    low, high = b.and_(field, splat(INTS, one * 0x10001)), b.shl(field, splat(INTS, 8 - bits))
    return b.or_(low, b.and_(high, splat(INTS, (one << 8) * 0x10001)))


def scale_and_bias(b: ir.IRBuilder, form: Form, scales: ir.Value, biases: ir.Value, group: ir.Value) -> list[ir.Value | None]:
    """Load one group's scales and biases for all rows, as float32, for the codes as the dot product takes them.

    A format without biases has its scales in their place, or None if its numbers need none.
    """
    if not form.has_biases:
        scale = _scale(b, form, scales, group)
        return [scale, scale if form.zero else None]
    scale, bias = (_widen(b, form.kind, each, b.mul(group, at(BLOCK * form.scale_nbytes))) for each in (scales, biases))
    if form.digits and form.value_bits == 8 and ISA.signed_codes:
        bias = fma(b, scale, splat(FLOATS, 128.0), bias)
    return [scale, bias]


def _scale(b: ir.IRBuilder, form: Form, scales: ir.Value, group: ir.Value) -> ir.Value:
    if form.kind != "e8m0":
        return load(b, scales, b.mul(group, at(4 * BLOCK)), FLOATS)
    found = ISA.powers(b, scales, b.mul(group, at(BLOCK)))
    # the table holds twice the levels, hence a half; 255 stands for NaN, which infinity less a half of it is
    return fma(b, found, splat(FLOATS, -0.5), found)


def _widen(b: ir.IRBuilder, kind: str, address: ir.Value, offset: ir.Value) -> ir.Value:
    if kind == "f32":
        return load(b, address, offset, FLOATS)
    if kind == "f16" and ISA.widens_halves:
        return b.fpext(load(b, address, offset, vector(ir.HalfType(), BLOCK)), FLOATS)
    bits = b.zext(load(b, address, offset, vector(I16, BLOCK)), INTS)
    if kind == "bf16":
        return b.bitcast(b.shl(bits, splat(INTS, 16)), FLOATS)
    # f16 by integer steps: processors without a conversion instruction would need a library call
    size = b.shl(b.and_(bits, splat(INTS, 0x7FFF)), splat(INTS, 13))
    value = b.bitcast(b.fmul(b.bitcast(size, FLOATS), splat(FLOATS, 2.0**112)), INTS)
    special = b.icmp_unsigned(">=", size, splat(INTS, 0x7C00 << 13))
    value = b.select(special, b.or_(size, splat(INTS, 0x7F800000)), value)
    return b.bitcast(b.or_(value, b.shl(b.and_(bits, splat(INTS, 0x8000)), splat(INTS, 16))), FLOATS)


def _float(b: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    return spread(b, load(b, address, b.mul(index, at(4)), F32), BLOCK)


@kernel(constants=3)
def rows_times_tokens(
    b, form, tokens, ready, codes, scales, biases, acts, stride, act_scales, act_sums, index, groups, out, out_stride
):
    """Multiply one block of rows with `tokens` tokens.

    codes    [K*bits/32, BLOCK] words; ready: [K, BLOCK] bytes (four inputs of a row together) or floats (exact)
    scales, biases  [groups, BLOCK]
    acts     int8 digits or float32, a token every `stride` bytes; act_scales, act_sums float32, a token every `groups`
    index    int64 [tokens], which tokens of acts
    out      float32, a token every `out_stride` bytes, BLOCK rows written
    """
    form = Form.parse(form)
    totals = [variable(b, splat(FLOATS, 0.0)) for _ in range(tokens)]
    chosen = [load(b, index, 8 * t, I64) for t in range(tokens)]
    mine = [b.add(acts, b.mul(stride, token)) for token in chosen]
    meta_at = [b.mul(b.mul(groups, at(4)), token) for token in chosen]
    sums = [[b.add(address, offset) for offset in meta_at] for address in (act_scales, act_sums)]
    code_bits = 8 * form.ready_nbytes if ready else form.bits
    inner = _dots_of_bytes if form.digits else _dots_of_floats
    if form.raw and not ready:
        inner = _dots_of_eighths
    count, at_once = spans(b, form, groups), _spans_at_once(form, tokens)

    def multiply_span(number):
        code_at = b.add(codes, b.mul(number, at(form.span * BLOCK * code_bits // 8)))
        acts_at = [b.add(address, b.mul(number, at(form.span * form.act_nbytes))) for address in mine]
        if form.digits and tokens == 1 and at_once == 1 and ISA.ahead:
            # one token waits for memory
            prefetch(b, [b.add(code_at, at(ISA.ahead))], form.span * BLOCK * form.bits // 8)
        for part, dots in enumerate(inner(b, form, ready, code_at, acts_at)):
            group = b.add(b.mul(number, at(form.parts)), at(part))
            # after the products, so that it takes no registers from them
            scale, bias = scale_and_bias(b, form, scales, biases, group)
            for dot, act_scale, act_sum, total in zip(dots, *sums, totals, strict=True):
                if form.raw:
                    dot = b.fmul(dot, splat(FLOATS, 2.0 ** (120 - MIDDLE)))
                if form.digits or form.raw:
                    value = fma(b, b.fmul(dot, scale), _float(b, act_scale, group), b.load(total))
                else:
                    value = fma(b, dot, scale, b.load(total))
                b.store(value if bias is None else fma(b, bias, _float(b, act_sum, group), value), total)

    done = at(0)
    if at_once > 1:
        turns = b.sdiv(count, at(at_once))
        with cgutils.for_range(b, turns) as loop:
            for i in range(at_once):
                multiply_span(b.add(b.mul(loop.index, at(at_once)), at(i)))
        done = b.mul(turns, at(at_once))
    with cgutils.for_range(b, b.sub(count, done)) as loop:
        multiply_span(b.add(done, loop.index))
    for t, total in enumerate(totals):
        store(b, b.load(total), out, b.mul(out_stride, at(t)))


def _spans_at_once(form, tokens):
    """Spans that a turn of the loop takes: where a token is alone and spans are short, unpacking starts long before it ends."""
    if not form.fast or tokens > 1:
        return 1
    return max(1, (ISA.small_codes if form.bits == 2 else ISA.small_spans) // form.span)


def spans(b, form, groups):
    return b.sdiv(groups, at(form.parts)) if form.parts > 1 else groups


def _dots_of_bytes(b, form, ready, codes, acts):
    """Sums of codes times activations, for each group of a span and each token."""
    shifts = kept_apart(form, len(acts))
    dots = [
        [
            [{shift: variable(b, splat(INTS, 0 if shift else MAGIC_BITS)) for shift in shifts} for _ in range(form.digits)]
            for _ in acts
        ]
        for _ in range(form.parts)
    ]
    dot = ISA.dot_unpacked if ready else ISA.dot
    with _chunks(b, form) as chunk:
        if ready:
            code_at = b.add(codes, b.mul(chunk, at(CHUNK * BLOCK)))
            found = [(b.bitcast(load(b, code_at, 4 * BLOCK * i, INTS), BYTES), 0) for i in range(8)]
        else:
            code_at = b.add(codes, b.mul(chunk, at(4 * BLOCK * form.bits)))
            found = in_place(b, form, code_at, len(acts))
        places = [b.add(address, b.mul(chunk, at(CHUNK))) for address in acts]
        x = [[ISA.quads(b, b.add(place, at(form.span * digit)), 8) for digit in range(form.digits)] for place in places]
        size = len(found) // form.parts
        for part, tokens in enumerate(dots):
            here = slice(part * size, part * size + size)
            for slots, quads in (
                (slots, quads) for token in zip(tokens, x, strict=True) for slots, quads in zip(*token, strict=True)
            ):
                sums = {shift: b.load(slot) for shift, slot in slots.items()}
                for (v, shift), quad in zip(found[here], quads[here], strict=True):
                    sums[shift] = dot(b, sums[shift], v, quad, form.value_bits)
                for shift, slot in slots.items():
                    b.store(sums[shift], slot)
    return [
        [reduce(partial(add_digit, b), [_whole(b, slots) for slots in reversed(digits)], None) for digits in tokens]
        for tokens in dots
    ]


def _whole(b, slots):
    """A sum of integers, from sums that are kept apart."""
    whole = b.load(slots[0])
    for shift in slots:
        if shift:
            whole = b.add(whole, b.ashr(b.load(slots[shift]), splat(INTS, shift)))
    return whole


def add_digit(b: ir.IRBuilder, lower: ir.Value | None, total: ir.Value) -> ir.Value:
    """Sums of products with one digit of the activations, which start at MAGIC, as floats; with those of lower digits."""
    found = b.fsub(b.bitcast(total, FLOATS), splat(FLOATS, MAGIC))
    return found if lower is None else fma(b, lower, splat(FLOATS, 1 / 256), found)


def _dots_of_floats(b, form, ready, codes, acts):
    dots = [[variable(b, splat(FLOATS, 0.0)) for _ in acts] for _ in range(form.parts)]
    size = CHUNK // form.parts
    with _chunks(b, form) as chunk:
        if ready:
            code_at = b.add(codes, b.mul(chunk, at(4 * BLOCK * CHUNK)))
            values = [load(b, code_at, 4 * BLOCK * i, FLOATS) for i in range(CHUNK)]
        else:
            values = float_codes(b, form, b.add(codes, b.mul(chunk, at(4 * BLOCK * form.bits))))
        where = [b.add(address, b.mul(chunk, at(4 * CHUNK))) for address in acts]
        for first, totals in zip(range(0, CHUNK, size), dots, strict=True):
            _add_products(b, values, range(first, first + size), where, totals, 4 if form.kind == "e4m3" else 1)
    return [[b.load(dot) for dot in totals] for totals in dots]


def _dots_of_eighths(b, form, ready, codes, acts):
    """The same straight from e4m3 codes that need no product.

    Lanes are four inputs of one row here, as they lie in a word: they are the sums that `_add_products` adds in pairs.
    """
    dots = [variable(b, splat(FLOATS, 0.0)) for _ in acts]
    with _chunks(b, form) as chunk:
        code_at = b.add(codes, b.mul(chunk, at(4 * BLOCK * form.bits)))
        where = [b.add(address, b.mul(chunk, at(4 * CHUNK))) for address in acts]
        sums = [[splat(FLOATS, 0.0)] * BLOCK for _ in acts]
        for word in range(form.bits):
            octets = b.bitcast(load(b, code_at, 4 * BLOCK * word, INTS), BYTES)
            rows = [
                row for half in range(2) for row in _widened(b, pick(b, octets, octets, list(range(8 * half, 8 * half + 8))))
            ]
            for t, address in enumerate(where):
                x = load(b, address, 16 * word, FLOATS)
                sums[t] = [fma(b, row, x, total) for row, total in zip(rows, sums[t], strict=True)]
        for found, total in zip(sums, dots, strict=True):
            b.store(b.fadd(b.load(total), sum_four(b, found)), total)
    return [[b.load(dot) for dot in dots]]


@contextmanager
def _chunks(b, form):
    with cgutils.for_range(b, at(form.span // CHUNK)) as loop:
        yield loop.index


def _add_products(b, values, inputs, acts, totals, ways):
    """Add vectors of weights times each token's activations of some inputs, in `ways` sums that are then added in pairs.

    The order is the same for any number of tokens. One sum waits for itself at every step, which costs time where codes are
    unpacked quickly and the token is alone.
    """
    parts = []
    for way in range(ways):
        sums = [splat(FLOATS, 0.0) if ways > 1 else b.load(total) for total in totals]
        for i in inputs[way::ways]:
            found = [spread(b, load(b, address, 4 * i, F32), BLOCK) for address in acts]
            sums = [fma(b, values[i], x, total) for x, total in zip(found, sums, strict=True)]
        parts.append(sums)
    while len(parts) > 1:
        parts = [[b.fadd(x, y) for x, y in zip(*parts[i : i + 2], strict=True)] for i in range(0, len(parts), 2)]
    for value, total in zip(parts[0], totals, strict=True):
        b.store(b.fadd(b.load(total), value) if ways > 1 else value, total)


def _widened(b, octets):
    """Eight e4m3 codes as floats over 2**120, four at a time: copies of the sign go, zeros come below."""
    wide = vector(I16, 8)
    moved = b.and_(b.shl(b.sext(octets, wide), splat(wide, 4)), splat(wide, 0x87FF - 0x10000))
    places = [[first + n // 2 + (8 if n % 2 else 0) for n in range(8)] for first in (0, 4)]
    return [b.bitcast(pick(b, splat(wide, 0), moved, each), FLOATS) for each in places]


@kernel(constants=1)
def unpack_rows(b, form, codes, groups, tile):
    """Unpack one block of rows: the codes as bytes for the dot product, or as float32."""
    form = Form.parse(form)
    with cgutils.for_range(b, spans(b, form, groups)) as loop:
        code_at = b.add(codes, b.mul(loop.index, at(form.span * BLOCK * form.bits // 8)))
        tile_at = b.add(tile, b.mul(loop.index, at(form.span * BLOCK * form.ready_nbytes)))
        with _chunks(b, form) as chunk:
            chunk_at = b.add(code_at, b.mul(chunk, at(4 * BLOCK * form.bits)))
            to = b.add(tile_at, b.mul(chunk, at(CHUNK * BLOCK * form.ready_nbytes)))
            found = code_vectors(b, form, chunk_at) if form.digits else float_codes(b, form, chunk_at)
            values = [ISA.unpacked(b, v, form.value_bits) for v in found] if form.digits else found
            for i, v in enumerate(values):
                store(b, v, to, 4 * BLOCK * i)


@kernel(constants=1)
def place_codes(b, form, codes, groups):
    """Move the codes of one block of rows from a stream of bits to the places they have in an interleaved weight."""
    form = Form.parse(form)
    bits = form.bits
    with cgutils.for_range(b, b.mul(spans(b, form, groups), at(form.span // CHUNK))) as loop:
        here = b.add(codes, b.mul(loop.index, at(4 * BLOCK * bits)))
        words = [load(b, here, 4 * BLOCK * i, INTS) for i in range(bits)]
        found = [b.bitcast(_to_bytes(b, _field(b, words, 4 * bits * i, 4 * bits), bits), BYTES) for i in range(8)]
        made = [splat(BYTES, 0)] * bits
        for v, pieces in zip(found, PLACES[bits], strict=True):
            left = bits
            for piece in pieces:
                left -= piece.size
                bits_of = b.and_(b.lshr(v, splat(BYTES, left)), splat(BYTES, 2**piece.size - 1))
                made[piece.word] = b.or_(made[piece.word], b.shl(bits_of, splat(BYTES, piece.low)))
        for i, v in enumerate(made):
            store(b, v, here, 4 * BLOCK * i)


@kernel(constants=1)
def prepare_token(b, form, x, groups, acts, scales, sums):
    """Ready one token's float32 activations: as they are, or as digits in the order of the codes, the first of a span first."""
    form = Form.parse(form)
    group = form.group
    with cgutils.for_range(b, groups) as loop:
        values = load(b, x, b.mul(loop.index, at(4 * group)), vector(F32, group))
        slot = b.mul(loop.index, at(4))
        if form.digits:
            digits, scale, total = (_round_group if form.digits == 1 else _split_group)(b, values)
            order = [chunk + i for chunk in range(0, group, CHUNK) for i in activation_order(form.bits)[:group]]
            place = b.mul(b.sdiv(loop.index, at(form.parts)), at(form.span * form.digits))
            place = b.add(place, b.mul(b.srem(loop.index, at(form.parts)), at(group)))
            for i, digit in enumerate(digits):
                store(b, pick(b, digit, digit, order), acts, b.add(place, at(form.span * i)))
            store(b, _times(b, scale, form.unit), scales, slot)
        else:
            add = ir.FunctionType(F32, [F32, values.type])
            reduce = cgutils.get_or_insert_function(b.module, add, f"llvm.vector.reduce.fadd.v{group}f32")
            total = b.call(reduce, [ir.Constant(F32, -0.0), values], fastmath=("reassoc",))
            if form.raw:
                values, scale = _centre_group(b, values)
                store(b, scale, scales, slot)
            store(b, _times(b, values, form.unit), acts, b.mul(loop.index, at(4 * group)))
        store(b, _times(b, total, form.unit * (1.0 if form.has_biases else -form.zero)), sums, slot)


def _times(b: ir.IRBuilder, value: ir.Value, factor: float) -> ir.Value:
    if factor == 1:
        return value
    return b.fmul(value, ir.Constant(F32, factor) if value.type == F32 else splat(value.type, factor))


def _largest(b: ir.IRBuilder, values: ir.Value) -> ir.Value:
    """The bits of the largest size among floats. They order like integers, NaN above all: one NaN is the largest."""
    whole = vector(I32, values.type.count)
    sizes = b.and_(b.bitcast(values, whole), splat(whole, 0x7FFFFFFF))
    return call(b, f"llvm.vector.reduce.umax.v{whole.count}i32", I32, sizes)


def _scaled_sum(b: ir.IRBuilder, values: ir.Value, scale: ir.Value) -> ir.Value:
    # of the rounded values, not of x: the rounding error then meets code * scale + bias, half as large as code * scale
    total = call(b, f"llvm.vector.reduce.add.v{values.type.count}i32", I32, values)
    return b.fmul(scale, b.sitofp(total, F32))


def _round_group(b: ir.IRBuilder, values: ir.Value) -> tuple[list[ir.Value], ir.Value, ir.Value]:
    """Round a group to int8 with one scale; also the scaled sum of what was rounded."""
    group = values.type.count
    whole = vector(I32, group)
    # a NaN makes the scale NaN, and with it every result
    top = b.bitcast(_largest(b, values), F32)
    nothing = b.fcmp_ordered("<", top, ir.Constant(F32, 1e-30))
    factor = b.select(nothing, ir.Constant(F32, 0.0), b.fdiv(ir.Constant(F32, 127.0), top))
    scale = b.fmul(top, ir.Constant(F32, 1 / 127))
    moved = fma(b, values, spread(b, factor, group), splat(values.type, MAGIC))
    rounded = b.trunc(b.bitcast(moved, whole), vector(I8, group))
    return [rounded], scale, _scaled_sum(b, b.sext(rounded, whole), scale)


def _split_group(b: ir.IRBuilder, values: ir.Value) -> tuple[list[ir.Value], ir.Value, ir.Value]:
    """Round a group to whole numbers of three signed digits to the base 256, highest first, and one scale; also the scaled sum.

    The scale is a power of two, so that nothing but the rounding changes a number: by half of the last bit that the largest has
    in float32, or by the whole of it.
    """
    group = values.type.count
    whole = vector(I32, group)
    top = _largest(b, values)
    # the exponent of the largest; one more where the first digit would be 128
    exponent = b.lshr(b.add(top, ir.Constant(I32, 0x20000)), ir.Constant(I32, 23))
    # below 1e-31 powers of two run out, and fewer bits are left
    tiny = b.icmp_unsigned("<", exponent, ir.Constant(I32, 23))
    exponent = b.select(tiny, ir.Constant(I32, 23), exponent)
    factor, unit, scale = (
        b.bitcast(b.shl(bits, ir.Constant(I32, 23)), F32)
        for bits in (
            b.sub(ir.Constant(I32, 127 + 127 + 22), exponent),
            b.sub(exponent, ir.Constant(I32, 22)),
            b.sub(exponent, ir.Constant(I32, 22 - 16)),
        )
    )
    # what is no number makes the scale none, and with it every result
    broken = b.icmp_unsigned(">=", top, ir.Constant(I32, 0x7F800000))
    unit, scale = (b.select(broken, b.bitcast(top, F32), each) for each in (unit, scale))
    moved = call(b, f"llvm.roundeven.v{group}f32", values.type, b.fmul(values, spread(b, factor, group)))
    last = call(b, f"llvm.fptosi.sat.v{group}i32.v{group}f32", whole, moved)
    middle = b.ashr(b.add(last, splat(whole, 128)), splat(whole, 8))
    first = b.ashr(b.add(middle, splat(whole, 128)), splat(whole, 8))
    digits = [b.trunc(each, vector(I8, group)) for each in (first, middle, last)]
    return digits, scale, _scaled_sum(b, last, unit)


def _centre_group(b: ir.IRBuilder, values: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Multiply a group by a power of two, so that the exponent of its largest is `MIDDLE`; also one over it times 2**MIDDLE."""
    exponent = b.lshr(_largest(b, values), ir.Constant(I32, 23))
    # below 2**-67 powers of two run out, and exponents are smaller; what is no number stays so
    exponent = b.select(b.icmp_unsigned("<", exponent, ir.Constant(I32, MIDDLE)), ir.Constant(I32, MIDDLE), exponent)
    exponent = b.select(b.icmp_unsigned(">", exponent, ir.Constant(I32, 254)), ir.Constant(I32, 254), exponent)
    factor, scale = (
        b.bitcast(b.shl(bits, ir.Constant(I32, 23)), F32)
        for bits in (b.sub(ir.Constant(I32, 2 * 127 + MIDDLE), exponent), exponent)
    )
    return b.fmul(values, spread(b, factor, values.type.count)), scale
