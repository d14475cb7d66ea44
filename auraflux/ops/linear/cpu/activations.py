"""Activations of a token in the formats of the product kernels: float32, half precision, or digits of a byte each."""

from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.linear.cpu.forms import HALF_MIDDLE, MIDDLE, Form, activation_order, float_order
from auraflux.ops.linear.cpu.grid_codes import grid_order
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.vectors import F32, I8, I32, MAGIC, at, call, fma, kernel, load, pick, splat, spread, store, vector
from auraflux.quant.packing import CHUNK


@kernel(constants=1, outlined=True)
def prepare_token(b, form, x, groups, acts, scales, sums):
    """Convert one token's float32 activations: to digits in the order of the codes, highest first within a span, to half
    precision with four of them repeated, or by a copy."""
    form = Form.parse(form)
    group = form.group
    with cgutils.for_range(b, groups) as loop:
        values = load(b, x, b.mul(loop.index, at(4 * group)), vector(F32, group))
        slot = b.mul(loop.index, at(4))
        if form.digits:
            digits, scale, total = _round_group(b, values) if form.digits == 1 else _split_group(b, values, form.digits)
            in_chunk = activation_order(form.bits) if form.grid is None else grid_order(form)
            order = [chunk + i for chunk in range(0, group, CHUNK) for i in in_chunk[:group]]
            place = b.mul(b.sdiv(loop.index, at(form.parts)), at(form.span * form.digits))
            place = b.add(place, b.mul(b.srem(loop.index, at(form.parts)), at(group)))
            for i, digit in enumerate(digits):
                store(b, pick(b, digit, digit, order), acts, b.add(place, at(form.span * i)))
            store(b, _times(b, scale, form.unit), scales, slot)
        else:
            add = ir.FunctionType(F32, [F32, values.type])
            reduce = cgutils.get_or_insert_function(b.module, add, f"llvm.vector.reduce.fadd.v{group}f32")
            total = b.call(reduce, [ir.Constant(F32, -0.0), values], fastmath=("reassoc",))
            if form.raw or form.halves:
                values, scale = _centre_group(b, values, MIDDLE if form.raw else HALF_MIDDLE)
                store(b, scale, scales, slot)
            if form.halves:
                rounded = b.fptrunc(values, vector(ir.HalfType(), group))
                values = pick(b, rounded, rounded, [4 * (i // 8) + i % 4 for i in range(2 * group)])
            if form.by_halves:
                values = pick(b, values, values, [first + i for first in range(0, group, CHUNK) for i in float_order(form)])
            store(b, _times(b, values, form.unit), acts, b.mul(loop.index, at(4 * group)))
        store(b, _times(b, total, form.unit * 2.0**form.lift * (1.0 if form.has_biases else -form.zero)), sums, slot)


def _times(b: ir.IRBuilder, value: ir.Value, factor: float) -> ir.Value:
    if factor == 1:
        return value
    return b.fmul(value, ir.Constant(F32, factor) if value.type == F32 else splat(value.type, factor))


def _largest(b: ir.IRBuilder, values: ir.Value) -> ir.Value:
    """Return the bits of the largest magnitude. They compare like integers, with NaN above all: a single NaN is the largest."""
    whole = vector(I32, values.type.count)
    sizes = b.and_(b.bitcast(values, whole), splat(whole, 0x7FFFFFFF))
    return call(b, f"llvm.vector.reduce.umax.v{whole.count}i32", I32, sizes)


def _round_group(b: ir.IRBuilder, values: ir.Value) -> tuple[list[ir.Value], ir.Value, ir.Value]:
    """Quantize a group to int8 with one scale, and sum the dequantized values."""
    group = values.type.count
    whole = vector(I32, group)
    # a NaN makes the scale NaN, and with it every result
    top = b.bitcast(_largest(b, values), F32)
    nothing = b.fcmp_ordered("<", top, ir.Constant(F32, 1e-30))
    factor = b.select(nothing, ir.Constant(F32, 0.0), b.fdiv(ir.Constant(F32, 127.0), top))
    scale = b.fmul(top, ir.Constant(F32, 1 / 127))
    moved = fma(b, values, spread(b, factor, group), splat(values.type, MAGIC))
    rounded = b.trunc(b.bitcast(moved, whole), vector(I8, group))
    # sum of the rounded values, not of x: the rounding error is then multiplied by code * scale + bias, half of code * scale
    return [rounded], scale, b.fmul(scale, b.sitofp(ISA.sum_bytes(b, rounded), F32))


def _split_group(b: ir.IRBuilder, values: ir.Value, count: int) -> tuple[list[ir.Value], ir.Value, ir.Value]:
    """Quantize a group to integers of `count` signed base-256 digits, highest first, with one scale, and sum the values.

    The scale is a power of two, so only rounding changes a number: with three digits by at most one unit in the last place of
    the largest, with two by a 32,768th of the largest.
    """
    group, top_bit = values.type.count, 8 * count - 2
    whole = vector(I32, group)
    top = _largest(b, values)
    # the exponent of the largest; one more if the first digit would be 128
    exponent = b.lshr(b.add(top, ir.Constant(I32, 0x20000)), ir.Constant(I32, 23))
    # below, the power of two would underflow, and fewer bits remain: at 1e-31 with three digits
    least = ir.Constant(I32, top_bit + 1)
    exponent = b.select(b.icmp_unsigned("<", exponent, least), least, exponent)
    factor, unit, scale = (
        b.bitcast(b.shl(bits, ir.Constant(I32, 23)), F32)
        for bits in (
            b.sub(ir.Constant(I32, 127 + 127 + top_bit), exponent),
            b.sub(exponent, ir.Constant(I32, top_bit)),
            b.sub(exponent, ir.Constant(I32, 6)),
        )
    )
    # NaN makes the scale NaN, and with it every result
    broken = b.icmp_unsigned(">=", top, ir.Constant(I32, 0x7F800000))
    unit, scale = (b.select(broken, b.bitcast(top, F32), each) for each in (unit, scale))
    moved = call(b, f"llvm.roundeven.v{group}f32", values.type, b.fmul(values, spread(b, factor, group)))
    parts = [call(b, f"llvm.fptosi.sat.v{group}i32.v{group}f32", whole, moved)]
    for _ in range(count - 1):
        parts.insert(0, b.ashr(b.add(parts[0], splat(whole, 128)), splat(whole, 8)))
    total = call(b, f"llvm.vector.reduce.add.v{group}i32", I32, parts[-1])
    return [b.trunc(each, vector(I8, group)) for each in parts], scale, b.fmul(unit, b.sitofp(total, F32))


def _centre_group(b: ir.IRBuilder, values: ir.Value, middle: int) -> tuple[ir.Value, ir.Value]:
    """Scale a group by a power of two so that its largest exponent is `middle`; return 2**middle over that power as well."""
    exponent = b.lshr(_largest(b, values), ir.Constant(I32, 23))
    # below 2**(middle - 127) the power of two would underflow, and exponents are smaller; NaN stays NaN
    exponent = b.select(b.icmp_unsigned("<", exponent, ir.Constant(I32, middle)), ir.Constant(I32, middle), exponent)
    exponent = b.select(b.icmp_unsigned(">", exponent, ir.Constant(I32, 254)), ir.Constant(I32, 254), exponent)
    factor, scale = (
        b.bitcast(b.shl(bits, ir.Constant(I32, 23)), F32)
        for bits in (b.sub(ir.Constant(I32, 2 * 127 + middle), exponent), exponent)
    )
    return b.fmul(values, spread(b, factor, values.type.count)), scale
