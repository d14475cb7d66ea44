"""The inner loops of attention with one query per sequence, as LLVM IR: a vector holds neighbouring coordinates of one key.

A few query heads share each load of the cache. Rows are covered by whole vectors: the last one ends with the row, and overlaps
its neighbour where the width is not a multiple of LANES.

What memory holds is named by `like`: np.float32, np.float16, or np.uint16 for the bits of a bfloat16.
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
from auraflux.ops.simd.jit import LINE
from auraflux.ops.simd.processor import cpu_features, machine
from auraflux.ops.simd.vectors import (
    F32,
    I16,
    I32,
    I64,
    AsWritten,
    at,
    fma,
    kernel,
    load,
    pick,
    prefetch,
    splat,
    spread,
    store,
    variable,
    vector,
)

LANES = ISA.lanes
BYTES = 4 * LANES
# whether loops take several vectors of a key, or several positions, in a turn, and ask for what is needed next line by line:
# Neoverse-N1 forgets prefetches that come faster than memory does
IN_TURNS = LANES == 4

ELEMENTS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.float16}
SIZES = {types.float32: 4, types.float16: 2, types.uint16: 2}
WIDENS_HALVES = machine() != "x86_64" or "f16c" in cpu_features()
# where the dtype is known only when the kernel runs, a number stands for it
NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT = 0


def element_of(dtype: torch.dtype) -> Any:
    """What names elements of this dtype in jitted code."""
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
                build(AsWritten(b), like.dtype, *fixed, *cgutils.unpack_tuple(b, values[1])[constants:])
                return context.get_dummy_value()

            return types.void(like, args), codegen

        return emit

    return wrap


def widen(b, element, raw, kind):
    """Bits of an element, or a vector of them, as float32."""
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


def _load_floats(b, element, address, offset):
    raw = load(b, address, offset, vector(raw_bits(element), LANES))
    return widen(b, element, raw, ISA.floats)


@kernel(0)
def widen_row(b, number, source, width, target):
    """Copy `width` elements to float32; `number` is that of their dtype."""
    for dtype, mine in NUMBERS.items():
        if dtype is torch.float16 and not WIDENS_HALVES:
            continue
        with b.if_then(b.icmp_signed("==", number, at(mine))):
            _widen_row(b, numba.from_dtype(np.dtype(ELEMENTS[dtype])), source, width, target)


def _widen_row(b, element, source, width, target):
    size = SIZES[element]
    whole = b.sdiv(width, at(LANES))
    with cgutils.for_range(b, whole) as loop:
        raw = _load_floats(b, element, source, b.mul(loop.index, at(LANES * size)))
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


def _place(b, number, last):
    """Where a vector lies in a row, in elements: the last one ends with the row, and overlaps its neighbour if it must."""
    here = b.mul(number, at(LANES))
    return b.select(b.icmp_signed("<", here, last), here, last)


@typed(2)
def value_block(
    b, element, heads, wide, weights, weight_step, rows, count, first, last, out, out_step, keep, ahead, ahead_nbytes
):
    """Scale `wide` vectors of each head's sum by its `keep`, and add `count` weighted values.

    weights  [heads][count], out [heads][vectors * LANES]: rows `weight_step` and `out_step` bytes apart
    rows     [count]  addresses of the values
    first    number of the first of those vectors
    ahead    [count]  addresses of `ahead_nbytes` each that will be needed next; IN_TURNS, one where rows lie side by side
    """
    numbers = [b.add(first, at(v)) for v in range(wide)]
    places = [b.mul(_place(b, n, last), at(SIZES[element])) for n in numbers]
    slots = {(h, v): b.add(b.mul(out_step, at(h)), b.mul(numbers[v], at(BYTES))) for h in range(heads) for v in range(wide)}
    sums = {}
    for (h, v), slot in slots.items():
        factor = spread(b, load(b, keep, 4 * h, F32), LANES)
        sums[h, v] = variable(b, b.fmul(load(b, out, slot, ISA.floats), factor))

    def add(number, weigh):
        value = [_load_floats(b, element, load(b, rows, b.mul(number, at(8)), I64), place) for place in places]
        for h in range(heads):
            weight = weigh(h)
            for v in range(wide):
                b.store(fma(b, weight, value[v], b.load(sums[h, v])), sums[h, v])

    begun = at(0)
    if IN_TURNS:
        turns, soon = b.sdiv(count, at(LANES)), load(b, ahead, 0, I64)
        with cgutils.for_range(b, turns) as loop:
            turn = b.mul(loop.index, at(LANES))
            four = [load(b, weights, b.add(b.mul(weight_step, at(h)), b.mul(turn, at(4))), ISA.floats) for h in range(heads)]
            for n in range(LANES):
                number = b.add(turn, at(n))
                if n < SIZES[element]:
                    prefetch(b, [b.add(soon, b.add(b.mul(loop.index, at(SIZES[element] * LINE)), at(n * LINE)))], LINE)
                add(number, lambda h, n=n: pick(b, four[h], four[h], [n] * LANES))
        begun = b.mul(turns, at(LANES))
    with cgutils.for_range_slice(b, begun, count, at(1)) as (number, _):
        if not IN_TURNS:
            prefetch(b, [load(b, ahead, b.mul(number, at(8)), I64)], ahead_nbytes)
        offset = b.mul(number, at(4))
        add(number, lambda h: spread(b, load(b, weights, b.add(b.mul(weight_step, at(h)), offset), F32), LANES))
    for key, slot in slots.items():
        store(b, b.load(sums[key]), out, slot)
