"""Elementary functions in float32 that LLVM can vectorise, and bit casts."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from auraflux.ops.simd.jit import jit, strict


@intrinsic
def float_of_bits(typingctx, bits):
    """Reinterpret 32 bits as a float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.trunc(args[0], ir.IntType(32)) if args[0].type.width > 32 else args[0], ir.FloatType())

    return types.float32(bits), codegen


@intrinsic
def bits_of_float(typingctx, value):
    """Reinterpret a float32 as 32 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def rint(typingctx, x):
    """Round a float32 to the nearest integer, halves to even."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.f32"), args)

    return types.float32(types.float32), codegen


LOG2E, LN2_HIGH, LN2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
TOP, BOTTOM = np.float32(88.37626), np.float32(-87.33654)
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
P0, P1, P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
P3, P4, P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


# explicit flags: without any, Numba uses those of the first caller, which would merge the two steps of the range reduction
@strict
def exp(x):
    """Return e**x in float32 to 2 ulp; 0 below -87.3, infinity above 88.3."""
    clipped = min(max(x, BOTTOM), TOP)
    n = rint(clipped * LOG2E)
    r = (clipped - n * LN2_HIGH) - n * LN2_LOW
    y = ((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5
    y = y * r * r + r + ONE
    y = y * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    y = np.float32(0) if x < BOTTOM else y
    y = np.float32(np.inf) if x > TOP else y
    return y if x == x else x


@strict
def sigmoid(x):
    return ONE / (ONE + exp(-x))


@strict
def silu(x):
    return x / (ONE + exp(-x))


@jit
def softplus(x):
    """Return log(1 + e**x) = max(x, 0) + log(1 + u), u = e**-|x| in (0, 1], with log(1 + u) = 2 artanh(u / (2 + u))."""
    u = exp(-abs(x))
    s = u / (TWO + u)
    w = s * s
    series = w * np.float32(1 / 15) + np.float32(1 / 13)
    series = series * w + np.float32(1 / 11)
    series = series * w + np.float32(1 / 9)
    series = series * w + np.float32(1 / 7)
    series = series * w + np.float32(1 / 5)
    series = series * w + np.float32(1 / 3)
    return max(x, ZERO) + TWO * (s + s * w * series)
