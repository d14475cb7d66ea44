"""Inner loops of experts in row-major order, the layout of the GPU: four rows times one or two tokens in bf16.

A vector holds consecutive words of one row, so a lane has the codes of 32 / bits consecutive inputs: part p of a vector is code
p of every word, and activations are permuted to match (`arrange`). A group covers some lanes of a vector, or some vectors.

All arithmetic is float32: per group, scale * sum(code * x) + bias * sum(x), the second sum once per token. Codes are converted
to float32, by a table look-up where one instruction has the table, or to bf16 where the processor multiplies pairs of bf16 into
float32 (AVX512-BF16). Codes of 4 bits are exact in both.
"""

from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.moe.cpu.row_form import HAS_BF16, HAS_TABLES, LANES, RowForm
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.vectors import (
    F32,
    I16,
    I32,
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

ROWS = 4  # of one call: two neighbours at each of two addresses
FLOATS, INTS = ISA.floats, ISA.ints
HALVES = vector(I16, 2 * LANES)
FOUR = vector(F32, 4)
PREFETCH_NBYTES = ISA.prefetch_nbytes


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _add_pairs(b: Any, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """Add to each lane the products of its two bf16 codes with its two bf16 activations."""
    if HAS_BF16:
        # releases of LLVM before 16 type the operands as 32-bit lanes
        kind = vector(_BFloat(), 2 * LANES) if llvm.llvm_version_info[0] >= 16 else INTS
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, b.bitcast(codes, kind), b.bitcast(x, kind))
    # the same products in the same order, for tests on other processors
    codes, x = b.bitcast(codes, INTS), b.bitcast(x, INTS)
    high, low = splat(INTS, -65536), splat(INTS, 16)
    for change in (lambda v: b.and_(v, high), lambda v: b.shl(v, low)):
        total = fma(b, b.bitcast(change(codes), FLOATS), b.bitcast(change(x), FLOATS), total)
    return total


def _values(b: Any, form: RowForm, words: ir.Value, part: int) -> ir.Value:
    """Convert code `part` of each word, or half word, to float32 or bf16."""
    shift, mask = form.bits * part, 2**form.bits - 1
    if form.bf16:
        halves = b.bitcast(words, HALVES)
        halves = b.lshr(halves, splat(HALVES, shift)) if shift else halves
        # an index has 5 bits; those above the code do not matter
        table = ir.Constant(HALVES, [_bf16_bits(i & mask) for i in range(32)])
        return call(b, "llvm.x86.avx512.permvar.hi.512", HALVES, table, halves)
    words = b.lshr(words, splat(INTS, shift)) if shift else words
    if HAS_TABLES and form.bits <= 4:
        table = ir.Constant(FLOATS, [float(i & mask) for i in range(16)])
        return call(b, "llvm.x86.avx512.permvar.sf.512", FLOATS, table, words)
    return b.sitofp(words if shift + form.bits == 32 else b.and_(words, splat(INTS, mask)), FLOATS)


def _bf16_bits(number: int) -> int:
    """Return the bits of a small integer as bf16."""
    if number == 0:
        return 0
    exponent = number.bit_length() - 1
    return 127 + exponent << 7 | (number << 7 >> exponent) - 128


def _floats(b: Any, form: RowForm, address: ir.Value, offset: ir.Value, count: int) -> ir.Value:
    """Load `count` scales or biases as a vector of float32."""
    wide = vector(F32, count)
    if form.kind == "f32":
        return load(b, address, offset, wide)
    if form.kind == "f16":
        return b.fpext(load(b, address, offset, vector(ir.HalfType(), count)), wide)
    return _from_bf16(b, load(b, address, offset, vector(I16, count)))


def _from_bf16(b: Any, bits: ir.Value) -> ir.Value:
    kind = vector(I32, bits.type.count)
    return b.bitcast(b.shl(b.zext(bits, kind), splat(kind, 16)), vector(F32, bits.type.count))


class _Row(NamedTuple):
    """Addresses of one row's arrays."""

    codes: ir.Value
    scales: ir.Value
    biases: ir.Value


def _rows(b: Any, form: RowForm, first: _Row, second: _Row, groups: ir.Value) -> list[_Row]:
    """Return two neighbouring rows at each of two addresses."""
    code_nbytes = b.mul(groups, at(form.group * form.bits // 8))
    scale_nbytes = b.mul(groups, at(form.scale_nbytes))
    steps = code_nbytes, scale_nbytes, scale_nbytes
    found = []
    for row in (first, second):
        found += [row, _Row(*(b.add(address, step) for address, step in zip(row, steps, strict=True)))]
    # scales are as far ahead of their use as codes
    ahead = at(PREFETCH_NBYTES * form.scale_nbytes * 8 // (form.group * form.bits))
    prefetch(b, [b.add(address, ahead) for row in (first, second) for address in row[1:]], b.mul(scale_nbytes, at(2)))
    return found


@kernel(constants=2, outlined=True)
def rows_times_tokens(b, form, tokens, groups, sums_offset, out, *addresses):
    """Multiply four rows, two neighbours at each of two places, by `tokens` tokens.

    sums_offset  bytes from a token's activations to its sums
    out          float32 [tokens, 4]
    addresses    of codes, scales and biases at the first place, the same at the second, then of each token, see `arrange`
    """
    form, first, second, xs = RowForm.parse(form), _Row(*addresses[:3]), _Row(*addresses[3:6]), addresses[6:]
    rows = _rows(b, form, first, second, groups)
    totals = [[variable(b, splat(FLOATS, 0.0)) for _ in xs] for _ in rows]
    with cgutils.for_range(b, b.sdiv(groups, at(form.unit_groups))) as loop:
        _add_unit(b, form, rows, xs, totals, loop.index, None)
    if form.unit_groups > 1:
        rest = b.srem(groups, at(form.unit_groups))
        with b.if_then(b.icmp_signed("!=", rest, at(0))):
            _add_unit(b, form, rows, xs, totals, b.sdiv(groups, at(form.unit_groups)), groups)
    found = _add_biases(b, form, rows, [b.add(x, sums_offset) for x in xs], totals, groups)
    for t, result in enumerate(found):
        store(b, result, out, 16 * t)


def _add_unit(b, form, rows, xs, totals, unit, groups):
    """Add the products of a unit; `groups` is the number of a row's groups if it ends within the unit."""
    words_each = form.unit // form.step
    dots = [[None] * len(xs) for _ in rows]
    for v in range(words_each):
        step = b.add(b.mul(unit, at(words_each)), at(v))
        codes_at = b.mul(step, at(4 * LANES))
        words = [_words(b, form, row.codes, codes_at, step, groups) for row in rows]
        if PREFETCH_NBYTES:
            prefetch(b, [b.add(b.add(row.codes, codes_at), at(PREFETCH_NBYTES)) for row in rows], 4 * LANES)
        for part in range(form.parts):
            offset = b.add(b.mul(step, at(form.step_nbytes)), at(4 * LANES * part))
            inputs = [load(b, x, offset, HALVES if form.bf16 else FLOATS) for x in xs]
            for word, row_dots in zip(words, dots, strict=True):
                value = _values(b, form, word, part)
                for t, x in enumerate(inputs):
                    row_dots[t] = _product(b, form, row_dots[t], value, x)
    for row, row_dots, row_totals in zip(rows, dots, totals, strict=True):
        scale = _scales(b, form, row.scales, b.mul(unit, at(form.unit_groups)), groups)
        for dot, total in zip(row_dots, row_totals, strict=True):
            b.store(fma(b, dot, scale, b.load(total)), total)


def _product(b, form, total, value, x):
    if form.bf16:
        return _add_pairs(b, splat(FLOATS, 0.0) if total is None else total, value, x)
    return b.fmul(value, x) if total is None else fma(b, value, x, total)


def _words(b, form, codes, offset, step, groups):
    """Load a vector of a row's words; words after its end are 0."""
    if groups is None:
        return load(b, codes, offset, INTS)
    left = b.sub(b.mul(groups, at(form.group * form.bits // 32)), b.mul(step, at(LANES)))
    here = b.icmp_signed("<", ir.Constant(INTS, list(range(LANES))), spread(b, b.trunc(left, I32), LANES))
    pointer = b.inttoptr(b.add(codes, offset), INTS.as_pointer())
    # releases of LLVM before 22 take the alignment as an argument
    alignment = [] if llvm.llvm_version_info[0] >= 22 else [ir.Constant(I32, 1)]
    return call(b, f"llvm.masked.load.v{LANES}i32.p0", INTS, pointer, *alignment, here, splat(INTS, 0))


def _scales(b, form, scales, first, groups):
    """Load the scales of a unit, one for each lane."""
    count = form.unit_groups
    if groups is None:
        found = _floats(b, form, scales, b.mul(first, at(form.scale_nbytes)), count)
    else:
        # groups past the end repeat the last
        found, last = splat(vector(F32, count), 0.0), b.sub(groups, at(1))
        for i in range(count):
            place = b.add(first, at(i))
            place = b.select(b.icmp_signed("<", place, last), place, last)
            one = _floats(b, form, scales, b.mul(place, at(form.scale_nbytes)), 1)
            found = b.insert_element(found, b.extract_element(one, ir.Constant(I32, 0)), ir.Constant(I32, i))
    return pick(b, found, found, [lane * count // LANES for lane in range(LANES)])


def _add_biases(b, form, rows, sums, totals, groups):
    """Return the rows' results for each token: totals plus biases times sums."""
    done = at(0)
    narrow = [[variable(b, splat(FOUR, 0.0)) for _ in sums] for _ in rows]
    for count, into in ((LANES, totals), (4, narrow)) if LANES > 4 else ((4, narrow),):
        start = done
        with cgutils.for_range(b, b.sdiv(b.sub(groups, start), at(count))) as loop:
            group = b.add(start, b.mul(loop.index, at(count)))
            _add_bias(b, form, rows, sums, into, group, count)
        done = b.add(start, b.mul(b.sdiv(b.sub(groups, start), at(count)), at(count)))
    single = [[variable(b, splat(vector(F32, 1), 0.0)) for _ in sums] for _ in rows]
    with cgutils.for_range(b, b.sub(groups, done)) as loop:
        _add_bias(b, form, rows, sums, single, b.add(done, loop.index), 1)
    found = []
    for t in range(len(sums)):
        result = b.fadd(*(sum_four(b, [b.load(row[t]) for row in each]) for each in (totals, narrow)))
        last = splat(FOUR, 0.0)
        for i, row in enumerate(single):
            one = b.extract_element(b.load(row[t]), ir.Constant(I32, 0))
            last = b.insert_element(last, one, ir.Constant(I32, i))
        found.append(b.fadd(result, last))
    return found


def _add_bias(b, form, rows, sums, into, group, count):
    offset = b.mul(group, at(form.scale_nbytes))
    inputs = [load(b, each, b.mul(group, at(4)), vector(F32, count)) for each in sums]
    for row, row_totals in zip(rows, into, strict=True):
        bias = _floats(b, form, row.biases, offset, count)
        for x, total in zip(inputs, row_totals, strict=True):
            b.store(fma(b, bias, x, b.load(total)), total)


@kernel(constants=1, outlined=True)
def arrange(b, form, source, groups, target, sums):
    """Permute a token's activations to the order of a row's codes, and sum them by group.

    source  bf16 [units, unit]; 0 after the last group
    target  float32 or bf16 [steps, parts, values of a part]
    sums    float32 [groups]
    """
    form = RowForm.parse(form)
    stride, count = form.parts, form.step // form.parts
    steps = b.mul(b.sdiv(b.add(groups, at(form.unit_groups - 1)), at(form.unit_groups)), at(form.unit // form.step))
    with cgutils.for_range(b, steps) as loop:
        inputs = load(b, source, b.mul(loop.index, at(2 * form.step)), vector(I16, form.step))
        for part in range(form.parts):
            some = pick(b, inputs, inputs, list(range(part, part + stride * count, stride)))
            offset = b.add(b.mul(loop.index, at(form.step_nbytes)), at(4 * LANES * part))
            store(b, some if form.bf16 else _from_bf16(b, some), target, offset)
    with cgutils.for_range(b, groups) as loop:
        at_group = b.mul(loop.index, at(2 * form.group))
        total = None
        for i in range(form.group // LANES):
            values = _from_bf16(b, load(b, source, b.add(at_group, at(2 * LANES * i)), vector(I16, LANES)))
            total = values if total is None else b.fadd(total, values)
        while total.type.count > 1:
            half = total.type.count // 2
            total = b.fadd(pick(b, total, total, list(range(half))), pick(b, total, total, list(range(half, 2 * half))))
        store(b, total, sums, b.mul(loop.index, at(4)))
