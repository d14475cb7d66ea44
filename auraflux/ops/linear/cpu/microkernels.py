"""Inner loops of all quantized products on CPU: `ISA.lanes` rows of a weight times a few tokens.

A lane is a row (see `QTensor.interleave`), so nothing is summed across lanes and the scales of all rows are one vector.
`Form.activation_bits` chooses how activations enter a product: 8 and 16 round them to int8 and int16 per group and use the
byte dot product, int16 as two digits of a byte each; 32 multiplies float32, or, where the byte dot product is much faster
(`ISA.digits`), quantizes activations to 24 bits per group: three digits, whose integer sums are exact. FP8 codes are not
integers: their products with 8 are in half precision (`ISA.half_products`). All compute, per group,
s * sum(code * x) + b * sum(x), the second sum once per token; where b is a constant times s, that constant is a factor of the
sum.

For many tokens, a block of rows is unpacked once (`unpack_rows`) and the `unpacked` variant runs over all tokens. The order of
summation does not depend on the number of tokens.
"""

from functools import partial, reduce

from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.linear.cpu.e4m3_products import dots_by_parity, dots_of_eighths, dots_of_halves
from auraflux.ops.linear.cpu.forms import BLOCK, BYTES, FLOATS, INTS, MIDDLE, Form, float_order
from auraflux.ops.linear.cpu.grid_codes import GridBlock
from auraflux.ops.linear.cpu.unpack import (
    SuperBlock,
    chunks,
    float_codes,
    floats_of_bytes,
    in_place,
    scale_and_bias,
    shifts_in_place,
    spans,
)
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.portable import Term
from auraflux.ops.simd.vectors import (
    F32,
    I64,
    at,
    fma,
    kernel,
    load,
    prefetch,
    splat,
    spread,
    store,
    variable,
)
from auraflux.quant.packing import CHUNK
from auraflux.quant.super_blocks import SIZE


def _float(b: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    return spread(b, load(b, address, b.mul(index, at(4)), F32), BLOCK)


@kernel(constants=3, outlined=True)
def rows_times_tokens(
    b, form, tokens, unpacked, codes, scales, biases, acts, stride, act_scales, act_sums, index, groups, out, out_stride
):
    """Multiply one block of rows with `tokens` tokens.

    codes    [K*bits/32, BLOCK] words; unpacked: [K, BLOCK] bytes (four inputs of a row together) or floats (exact)
    scales, biases  [groups, BLOCK]; scales of super-blocks are their words, and there are no biases
    acts     int8 digits or float32, a token every `stride` bytes; act_scales, act_sums float32, a token every `groups`
    index    int64 [tokens], indices of tokens in acts
    out      float32, a token every `out_stride` bytes, BLOCK rows written
    """
    form = Form.parse(form)
    totals = [variable(b, splat(FLOATS, 0.0)) for _ in range(tokens)]
    chosen = [load(b, index, 8 * t, I64) for t in range(tokens)]
    mine = [b.add(acts, b.mul(stride, token)) for token in chosen]
    meta_at = [b.mul(b.mul(groups, at(4)), token) for token in chosen]
    sums = [[b.add(address, offset) for offset in meta_at] for address in (act_scales, act_sums)]
    code_bits = 8 * form.unpacked_nbytes if unpacked else form.bits
    inner = _dots_of_bytes if form.digits else _dots_of_floats
    if form.halves:
        inner = dots_of_halves
    elif form.raw and not unpacked:
        inner = dots_of_eighths
    elif form.by_halves and not unpacked:
        inner = dots_by_parity
    count, at_once = spans(b, form, groups), _spans_at_once(form, tokens)

    # for one token, register copies are too slow where sums restart often
    often = form.lowest_precision and form.digits and tokens == 1 and (form.group <= CHUNK or form.bits == 2)
    starts = ISA.spill(b, _starts(form, tokens) * at_once) if often else None

    def begins(step):
        return [] if starts is None else ISA.reload(b, starts, step)

    def multiply_span(number, scales_of=None, begin=None, read=None):
        code_at = b.add(codes, b.mul(number, at(form.span * BLOCK * code_bits // 8)))
        acts_at = [b.add(address, b.mul(number, at(form.span * form.act_nbytes))) for address in mine]
        if form.digits and tokens == 1 and at_once == 1 and ISA.prefetch_nbytes:
            # one token is memory-bound
            prefetch(b, [b.add(code_at, at(ISA.prefetch_nbytes))], form.span * BLOCK * form.bits // 8)
        dots_of = inner if read is None else partial(inner, read=read)
        for part, dots in enumerate(dots_of(b, form, unpacked, code_at, acts_at, begin)):
            group = b.add(b.mul(number, at(form.parts)), at(part))
            # after the products, to relieve register pressure
            scale, bias = scale_and_bias(b, form, scales, biases, group) if scales_of is None else scales_of(part)
            for dot, act_scale, act_sum, total in zip(dots, *sums, totals, strict=True):
                if form.raw:
                    dot = b.fmul(dot, splat(FLOATS, 2.0 ** (120 - MIDDLE)))
                if form.digits or form.raw or form.halves:
                    value = fma(b, b.fmul(dot, scale), _float(b, act_scale, group), b.load(total))
                else:
                    value = fma(b, dot, scale, b.load(total))
                b.store(value if bias is None else fma(b, bias, _float(b, act_sum, group), value), total)

    def multiply_super_blocks():
        """Multiply four groups per iteration, whose scales share a word."""
        size, rounds = 4 // form.parts, SIZE // (4 * form.group)
        held_starts = ISA.spill(b, [splat(INTS, form.magic[0])] * 4)
        with cgutils.for_range(b, b.sdiv(count, at(size * rounds))) as loop:
            here = b.add(scales, b.mul(loop.index, at(form.scale_nbytes * BLOCK * form.words)))
            if form.grid is None:
                super_block = SuperBlock(b, form, here)
            else:
                super_block = GridBlock(b, form, b.add(codes, b.mul(loop.index, at(SIZE * BLOCK * form.bits // 8))), here)
            with cgutils.for_range(b, at(rounds)) as step:
                scales_of = super_block.four(step.index)
                first = b.mul(b.add(b.mul(loop.index, at(rounds)), step.index), at(size))
                begin = ISA.reload(b, held_starts, first)
                for i in range(size):
                    here = i * form.parts
                    read = None if form.grid is None else partial(super_block.chunk, step.index, i)
                    multiply_span(b.add(first, at(i)), partial(_later, scales_of, here), begin[here:], read)
                    if i % 2:
                        # registers hold the codes of two spans at a time
                        first = ISA.ordered_after(b, first, [b.load(total) for total in totals])

    done = at(0)
    if form.words and not unpacked:
        multiply_super_blocks()
    elif at_once > 1:
        rounds = b.sdiv(count, at(at_once))
        with cgutils.for_range(b, rounds) as loop:
            begin = begins(loop.index)
            for i in range(at_once):
                here = slice(i * len(begin) // at_once, None)
                multiply_span(b.add(b.mul(loop.index, at(at_once)), at(i)), begin=begin[here])
        done = b.mul(rounds, at(at_once))
    if not form.words or unpacked:
        with cgutils.for_range(b, b.sub(count, done)) as loop:
            multiply_span(b.add(done, loop.index), begin=begins(loop.index))
    for t, total in enumerate(totals):
        store(b, b.load(total), out, b.mul(out_stride, at(t)))


def _starts(form, tokens):
    """Return the initial sums of a span, by group: `magic`, and zero for codes that are not shifted."""
    return [splat(INTS, 0 if shift else form.magic[0]) for shift in shifts_in_place(form, tokens)] * form.parts


def _spans_at_once(form, tokens):
    """Return the spans per iteration: several for a single token and short spans, so that unpacking overlaps."""
    if not form.lowest_precision or tokens > 1:
        return 1
    return max(1, (ISA.inputs_per_step_2bit if form.bits == 2 else ISA.inputs_per_step) // form.span)


def _later(scales_of, first, part):
    return scales_of(first + part)


def _dots_of_bytes(b, form, unpacked, codes, acts, begin=None, read=None):
    """Sum codes times activations, for each group of a span and each token.

    begin  initial sums of each group, if already in registers
    read   returns the codes of a grid's chunk at an address
    """
    shifts, begin = shifts_in_place(form, len(acts)), begin or _starts(form, len(acts))
    starts = [dict(zip(shifts, begin[part * len(shifts) :], strict=False)) for part in range(form.parts)]
    dots = [
        [[{shift: variable(b, value) for shift, value in start.items()} for _ in range(form.digits)] for _ in acts]
        for start in starts
    ]
    with chunks(b, form) as chunk:
        if unpacked:
            code_at = b.add(codes, b.mul(chunk, at(CHUNK * BLOCK)))
            found = [(b.bitcast(load(b, code_at, 4 * BLOCK * i, INTS), BYTES), 0) for i in range(8)]
        else:
            code_at = b.add(codes, b.mul(chunk, at(4 * BLOCK * form.bits)))
            found = in_place(b, form, code_at, len(acts)) if read is None else [(v, 0) for v in read(code_at)]
        places = [b.add(address, b.mul(chunk, at(CHUNK))) for address in acts]
        x = [[ISA.quads(b, b.add(place, at(form.span * digit)), 8) for digit in range(form.digits)] for place in places]
        size = len(found) // form.parts
        for part, tokens in enumerate(dots):
            here = slice(part * size, part * size + size)
            for slots, quads in (
                (slots, quads) for token in zip(tokens, x, strict=True) for slots, quads in zip(*token, strict=True)
            ):
                sums = {shift: b.load(slot) for shift, slot in slots.items()}
                terms = [Term(v, shift, quad) for (v, shift), quad in zip(found[here], quads[here], strict=True)]
                ISA.dots(b, sums, terms, form.value_bits, bool(unpacked))
                for shift, slot in slots.items():
                    b.store(sums[shift], slot)
    return [
        [reduce(partial(add_digit, b, form), [_whole(b, slots) for slots in reversed(digits)], None) for digits in tokens]
        for tokens in dots
    ]


def _whole(b, slots):
    """Combine the sums of differently shifted codes to one integer sum."""
    whole = b.load(slots[0])
    for shift in slots:
        if shift:
            whole = b.add(whole, b.ashr(b.load(slots[shift]), splat(INTS, shift)))
    return whole


def add_digit(b: ir.IRBuilder, form: Form, lower: ir.Value | None, total: ir.Value) -> ir.Value:
    """Convert sums of one activation digit, which start at `magic`, to floats, and add those of lower digits."""
    found = b.fsub(b.bitcast(total, FLOATS), splat(FLOATS, form.magic[1]))
    return found if lower is None else fma(b, lower, splat(FLOATS, 1 / 256), found)


def _dots_of_floats(b, form, unpacked, codes, acts, begin=None, read=None):
    dots = [[variable(b, splat(FLOATS, 0.0)) for _ in acts] for _ in range(form.parts)]
    size = CHUNK // form.parts
    with chunks(b, form) as chunk:
        if unpacked:
            code_at = b.add(codes, b.mul(chunk, at(4 * BLOCK * CHUNK)))
            values = [load(b, code_at, 4 * BLOCK * i, FLOATS) for i in range(CHUNK)]
        else:
            here = b.add(codes, b.mul(chunk, at(4 * BLOCK * form.bits)))
            values = float_codes(b, form, here) if read is None else floats_of_bytes(b, read(here))
        where = [b.add(address, b.mul(chunk, at(4 * CHUNK))) for address in acts]
        for first, totals in zip(range(0, CHUNK, size), dots, strict=True):
            _add_products(b, form, values, range(first, first + size), where, totals)
    return [[b.load(dot) for dot in totals] for totals in dots]


def _add_products(b, form, values, inputs, acts, totals):
    """Add weights times each token's activations of some inputs, in four partial sums that are then added in pairs.

    The order is the same for any number of tokens. A single sum would be latency-bound with one token.
    """
    parts, ways = [], 4
    places = [4 * i for i in float_order(form)]
    for way in range(ways):
        sums = [splat(FLOATS, 0.0)] * len(totals)
        for i in inputs[way::ways]:
            found = [spread(b, load(b, address, places[i], F32), BLOCK) for address in acts]
            sums = [fma(b, values[i], x, total) for x, total in zip(found, sums, strict=True)]
        parts.append(sums)
    while len(parts) > 1:
        parts = [[b.fadd(x, y) for x, y in zip(*parts[i : i + 2], strict=True)] for i in range(0, len(parts), 2)]
    for value, total in zip(parts[0], totals, strict=True):
        b.store(b.fadd(b.load(total), value), total)
