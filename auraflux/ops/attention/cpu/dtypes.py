"""Cache dtypes in kernels: which dtypes there are, and how their elements become float32.

Jitted code names a dtype by `like`: np.float32, np.float16, or np.uint16 for the bits of a bfloat16. Where the dtype is known
only when a kernel runs, a number stands for it.
"""

from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from auraflux.ops._dispatch import Declined
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.processor import has_feature, machine
from auraflux.ops.simd.vectors import F32, I16, I32, I64, StrictBuilder, at, kernel, load, pick, splat, store, vector

LANES = ISA.lanes
BYTES = 4 * LANES

ELEMENTS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.float16}
SIZES = {types.float32: 4, types.float16: 2, types.uint16: 2}
WIDENS_HALVES = machine() != "x86_64" or has_feature("f16c")
NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT = 0


def element_of(dtype: torch.dtype) -> Any:
    """Return the `like` of a dtype in jitted code."""
    if dtype is torch.float16 and not WIDENS_HALVES:
        raise Declined("this processor has no instruction to widen float16")
    return ELEMENTS[dtype]


@cache
def number_of(dtype: torch.dtype) -> int:
    element_of(dtype)
    return NUMBERS[dtype]


def typed(constants):
    """Make `build(b, element type, *constants, *values)` callable from jitted code as f(like, (*constants, *values))."""

    def wrap(build):
        @intrinsic(prefer_literal=True)
        def emit(typingctx, like, args):
            fixed = [t.literal_value for t in args.types[:constants]]

            def codegen(context, b, signature, values):
                build(StrictBuilder(b), like.dtype, *fixed, *cgutils.unpack_tuple(b, values[1])[constants:])
                return context.get_dummy_value()

            return types.void(like, args), codegen

        return emit

    return wrap


def widen(b, element, raw, kind):
    """Convert the bits of an element, or a vector of them, to float32."""
    if element is types.float32:
        return b.bitcast(raw, kind)
    if element is types.float16:
        half = ir.HalfType() if kind == F32 else vector(ir.HalfType(), kind.count)
        return b.fpext(b.bitcast(raw, half), kind)
    if kind != F32 and LANES == 4:
        # ARM interleaves two registers twice as often in a cycle as it shifts
        return b.bitcast(pick(b, splat(raw.type, 0), raw, [n for i in range(kind.count) for n in (i, kind.count + i)]), kind)
    wide = I32 if kind == F32 else vector(I32, kind.count)
    shift = ir.Constant(I32, 16) if kind == F32 else splat(wide, 16)
    return b.bitcast(b.shl(b.zext(raw, wide), shift), kind)


def raw_bits(element):
    return I32 if element is types.float32 else I16


def load_floats(b, element, address, offset):
    raw = load(b, address, offset, vector(raw_bits(element), LANES))
    return widen(b, element, raw, ISA.floats)


@kernel(0)
def widen_row(b, number, source, width, target):
    """Copy `width` elements to float32; `number` is that of their dtype."""
    for dtype, mine in NUMBERS.items():
        if dtype is torch.float16 and not WIDENS_HALVES:
            continue
        with b.if_then(b.icmp_signed("==", number, at(mine))):
            _widen_elements(b, numba.from_dtype(np.dtype(ELEMENTS[dtype])), source, width, target)


def _widen_elements(b, element, source, width, target):
    size = SIZES[element]
    whole = b.sdiv(width, at(LANES))
    with cgutils.for_range(b, whole) as loop:
        raw = load_floats(b, element, source, b.mul(loop.index, at(LANES * size)))
        store(b, raw, target, b.mul(loop.index, at(BYTES)))
    with cgutils.for_range_slice(b, b.mul(whole, at(LANES)), width, at(1)) as (index, _):
        raw = load(b, source, b.mul(index, at(size)), raw_bits(element))
        store(b, widen(b, element, raw, F32), target, b.mul(index, at(4)))


@intrinsic
def size_of(typingctx, like):
    size = SIZES[like.dtype]
    return types.int64(like), lambda context, b, signature, args: at(size)


@intrinsic
def fetch_add(typingctx, address, amount):
    """Add to an integer that other threads change too; give what it was."""

    def codegen(context, b, signature, args):
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen
