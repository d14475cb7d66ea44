"""Rotation of rows: signs and a Walsh-Hadamard transform, or a matrix where the width is no power of two.

Codes must equal those of the reference to the last bit, so these functions keep the order of its float32 operations: they are
compiled without reassociation, except for sums in float64, which give the same float32 in any order.
"""

from functools import cache
from typing import NamedTuple

import numba
import numpy as np
from llvmlite import ir
from torch import Tensor

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import (
    Kernel,
    arguments,
    doubles,
    floats,
    jit,
    share,
    strict,
)
from auraflux.ops.simd.vectors import F32, I32, call, fma, kernel, load, pick, splat, spread, store, vector
from auraflux.ops.turboquant.cpu.quantize import F64
from auraflux.ops.turboquant.rotation import rotation


@kernel(constants=2)
def hadamard_row(b, width, inverse, x, signs, y):
    """Apply the signs and the Walsh-Hadamard transform, or undo them. Emit nothing where the width is no power of two."""
    if width & (width - 1):
        return
    lanes = min(ISA.lanes, width)
    kind = vector(F32, lanes)
    rows = [load(b, x, 4 * lanes * i, kind) for i in range(width // lanes)]
    sign = [load(b, signs, 4 * lanes * i, kind) for i in range(width // lanes)]
    if inverse:
        rows = [b.fmul(v, s) for v, s in zip(_hadamard(b, rows), sign, strict=True)]
    else:
        rows = _hadamard(b, [b.fmul(v, s) for v, s in zip(rows, sign, strict=True)])
    for i, v in enumerate(rows):
        store(b, v, y, 4 * lanes * i)


@kernel(constants=1)
def length_row(b, width, x, length_at):
    """Write the length of a row, summed in float64."""
    lanes = min(ISA.lanes, width)
    kind, wide = vector(F32, lanes), vector(F64, lanes)
    sums = [splat(wide, 0.0)] * 2
    for i in range(width // lanes):
        v = b.fpext(load(b, x, 4 * lanes * i, kind), wide)
        sums[i % 2] = call(b, f"llvm.fma.v{lanes}f64", wide, v, v, sums[i % 2])
    total = b.fadd(*sums)
    while total.type.count > 2:
        n = total.type.count // 2
        total = b.fadd(pick(b, total, total, list(range(n))), pick(b, total, total, list(range(n, 2 * n))))
    total = b.fadd(*(b.extract_element(total, ir.Constant(I32, i)) for i in range(2)))
    store(b, call(b, "llvm.sqrt.f64", F64, total), length_at, 0)


@kernel(constants=1)
def unit_hadamard_row(b, width, x, length_at, signs, y):
    """Rotate the direction of a row of known length, as `hadamard_row` does. A row of zeros stays one."""
    if width & (width - 1):
        return
    lanes = min(ISA.lanes, width)
    kind, wide, length = vector(F32, lanes), vector(F64, lanes), load(b, length_at, 0, F64)
    zero, one = ir.Constant(F64, 0.0), ir.Constant(F64, 1.0)
    inverse = spread(b, b.select(b.fcmp_ordered("==", length, zero), zero, b.fdiv(one, length)), lanes)
    rows = []
    for i in range(width // lanes):
        v = b.fptrunc(b.fmul(b.fpext(load(b, x, 4 * lanes * i, kind), wide), inverse), kind)
        rows.append(b.fmul(v, load(b, signs, 4 * lanes * i, kind)))
    for i, v in enumerate(_hadamard(b, rows)):
        store(b, v, y, 4 * lanes * i)


def _hadamard(b, rows):
    """Return the Walsh-Hadamard transform of a row in registers, divided by the square root of the width."""
    kind, lanes = rows[0].type, rows[0].type.count
    width = lanes * len(rows)
    span = 1
    while span < lanes:
        # the second of a pair becomes partner - itself
        butterfly = ir.Constant(kind, [-1.0 if i & span else 1.0 for i in range(lanes)])
        rows = [fma(b, v, butterfly, pick(b, v, v, [i ^ span for i in range(lanes)])) for v in rows]
        span *= 2
    span = 1
    while span < len(rows):
        pairs = [(rows[i & ~span], rows[i | span]) for i in range(len(rows))]
        rows = [b.fsub(*pair) if i & span else b.fadd(*pair) for i, pair in enumerate(pairs)]
        span *= 2
    factor = splat(kind, float(np.float32(width**-0.5)))
    return [b.fmul(v, factor) for v in rows]


@strict
def matrix_row(x_at, table, y_at, width, sums_at):
    """Write y = x @ table, summed in float64."""
    x, y, sums = floats(x_at, width), floats(y_at, width), doubles(sums_at, width)
    for d in range(width):
        sums[d] = 0.0
    for k in range(width):
        factor, row = np.float64(x[k]), doubles(table + 8 * k * width, width)
        for d in range(width):
            sums[d] += factor * row[d]
    for d in range(width):
        y[d] = np.float32(sums[d])


@numba.njit(inline="always")
def rotate_row(width, inverse, x, table, y, sums):
    """Rotate one row; `width` and `inverse` are known when this is compiled."""
    if width & (width - 1):
        matrix_row(x, table, y, width, sums)
    else:
        hadamard_row((width, inverse, x, table, y))


@jit
def _sum_of_squares(x):
    total = 0.0
    for i in range(len(x)):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@strict
def unit_row(x_at, unit_at, width):
    """Return the length of a row, and write its direction to `unit_at`."""
    x, unit = floats(x_at, width), floats(unit_at, width)
    length = np.sqrt(_sum_of_squares(x))
    inverse = 1.0 / length if length != 0 else 0.0
    for i in range(width):
        unit[i] = np.float32(np.float64(x[i]) * inverse)
    return length


class Rotation(NamedTuple):
    """A rotation as kernels take it: addresses of its table and of its inverse, and the tensors that hold them."""

    forward: int
    back: int
    held: tuple[Tensor, ...]


@cache
def rotation_for(width: int, seed: int) -> Rotation:
    """Return the rotation of a width and a seed."""
    found = rotation(width, seed)
    if found.signs is not None:
        return Rotation(found.signs.data_ptr(), found.signs.data_ptr(), (found.signs,))
    assert found.matrix is not None
    back = found.matrix.double().contiguous()
    forward = back.T.contiguous()
    return Rotation(forward.data_ptr(), back.data_ptr(), (forward, back))


@cache
def build_rotate(width: int, inverse: int) -> Kernel:
    @Kernel
    def rotate_rows(args, job, jobs):
        x, rows, table, y, space, scratch = arguments(args, 6)
        for row in share(rows, job, jobs):
            at = 4 * row * width
            rotate_row(width, inverse, x + at, table, y + at, space + job * scratch)

    return rotate_rows
