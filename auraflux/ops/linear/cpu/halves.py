"""Vectors of half-precision numbers widened."""

from llvmlite import ir

from auraflux.ops.linear.cpu.forms import BLOCK, FLOATS, INTS
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.vectors import I16, splat, vector


def half_floats(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Widen f16 in 32-bit lanes."""
    if ISA.widens_halves:
        return b.fpext(b.bitcast(b.trunc(bits, vector(I16, BLOCK)), vector(ir.HalfType(), BLOCK)), FLOATS)
    # by integer operations: processors without a conversion instruction would need a library call
    size = b.shl(b.and_(bits, splat(INTS, 0x7FFF)), splat(INTS, 13))
    value = b.bitcast(b.fmul(b.bitcast(size, FLOATS), splat(FLOATS, 2.0**112)), INTS)
    special = b.icmp_unsigned(">=", size, splat(INTS, 0x7C00 << 13))
    value = b.select(special, b.or_(size, splat(INTS, 0x7F800000)), value)
    return b.bitcast(b.or_(value, b.shl(b.and_(bits, splat(INTS, 0x8000)), splat(INTS, 16))), FLOATS)
