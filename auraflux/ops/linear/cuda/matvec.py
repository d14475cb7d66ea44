"""One token times quantized weights: rows by blocks, units of codes across the threads, float32 throughout.

A program reads `ROWS` rows. With codes c, scales s and biases b of a group, its part of the sum is s Σ c x + b Σ x; as codes
come out with an offset of 2**BITS, (b - 2**BITS s) stands for b. A small kernel first brings x into the order in which units
are taken apart, the first elements of all units, then the second ones, and adds the sums of units: every program reads them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.hopper.codes import HALF_SHIFT, UNITS, Codes, code_value, constants, operands, unit_bits, weight_line
from auraflux.ops.hopper.device import multiprocessors
from auraflux.ops.hopper.elementwise import silu
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.quant import QTensor

MOST_ROWS = 4  # of a program
# units read at a time, and warps, by bits: a single warp keeps values where they are read, but streams want more loads in
# flight. On an H200, 8192 x 8192: 29, 38, 26, 41, 58 and 35 µs for 2, 3, 4, 5, 6 and 8 bits, MXFP4 34
COLUMNS = {2: (64, 1), 3: (64, 4), 4: (128, 1), 5: (64, 4), 6: (64, 4), 8: (128, 1)}
ORDERED = 64  # units a program brings into order


class Biased(NamedTuple):
    """A weight, what is added to its products, where they go, and how many they are."""

    codes: Codes
    bias: Tensor | None
    out: Tensor
    rows: int


@triton.jit
def order_x(x, out, units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < units
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(UNIT):
        value = tl.load(x + unit * UNIT + j, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + j * units + unit, value, mask=inside)
        total += value
    tl.store(out + UNIT * units + unit, total, mask=inside)


@triton.jit
def _sums(
    x, codes, row, rows, K, BITS: tl.constexpr, GROUP: tl.constexpr, AFFINE: tl.constexpr, EVEN: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Products of x with some rows of a weight, float32 [ROWS]; rows past the last give the last one's."""
    UNIT: tl.constexpr = 4 if BITS == 6 or BITS == 8 else 16 if BITS == 2 else 8
    units = K // UNIT
    wide = tl.minimum(row, rows - 1).to(tl.int64)[:, None]
    line = codes.packed + wide * (K // 32 * BITS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, units, COLUMNS):
        unit = start + tl.arange(0, COLUMNS)[None, :]
        inside = tl.full([1, COLUMNS], 1, tl.int1) if EVEN else unit < units
        low, high = unit_bits(line, unit, inside, BITS)
        slope, intercept = weight_line(
            codes.scales, codes.biases, wide * (K // GROUP) + unit * UNIT // GROUP, inside, BITS, AFFINE
        )
        part = tl.zeros([ROWS, COLUMNS], tl.float32)
        for j in tl.static_range(UNIT):
            part += code_value(low, high, j, BITS, AFFINE) * tl.load(x + j * units + unit, mask=inside, other=0.0)
        if AFFINE:
            total += part * slope + intercept * tl.load(x + UNIT * units + unit, mask=inside, other=0.0)
        else:
            total += part * HALF_SHIFT * slope
    return tl.sum(total, 1)


@triton.jit
def _finish(total, bias, out, row, rows):
    if bias is not None:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + row, total, mask=row < rows)


@triton.jit
def one_token(
    x, codes, bias, out, rows, K, BITS: tl.constexpr, GROUP: tl.constexpr, AFFINE: tl.constexpr, EVEN: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = _sums(x, codes, row, rows, K, BITS, GROUP, AFFINE, EVEN, COLUMNS, ROWS)
    _finish(total, bias, out, row, rows)


@triton.jit
def one_token_gated(
    x, gate, up, out, rows, K, BITS: tl.constexpr, GROUP: tl.constexpr, AFFINE: tl.constexpr, EVEN: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = _sums(x, gate, row, rows, K, BITS, GROUP, AFFINE, EVEN, COLUMNS, ROWS)
    second = _sums(x, up, row, rows, K, BITS, GROUP, AFFINE, EVEN, COLUMNS, ROWS)
    _finish(silu(first) * second, None, out, row, rows)


@triton.jit
def one_token_three(
    x, first, second, third, K, BITS: tl.constexpr, GROUP: tl.constexpr, AFFINE: tl.constexpr, EVEN: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Three weights of one format in one launch, as queries, keys and values are."""
    program, lane = tl.program_id(0), tl.arange(0, ROWS)
    programs0, programs1 = tl.cdiv(first.rows, ROWS), tl.cdiv(second.rows, ROWS)
    if program < programs0:
        row = program * ROWS + lane
        total = _sums(x, first.codes, row, first.rows, K, BITS, GROUP, AFFINE, EVEN, COLUMNS, ROWS)
        _finish(total, first.bias, first.out, row, first.rows)
    elif program < programs0 + programs1:
        row = (program - programs0) * ROWS + lane
        total = _sums(x, second.codes, row, second.rows, K, BITS, GROUP, AFFINE, EVEN, COLUMNS, ROWS)
        _finish(total, second.bias, second.out, row, second.rows)
    else:
        row = (program - programs0 - programs1) * ROWS + lane
        total = _sums(x, third.codes, row, third.rows, K, BITS, GROUP, AFFINE, EVEN, COLUMNS, ROWS)
        _finish(total, third.bias, third.out, row, third.rows)


def _shape(rows: int, weight: QTensor, device: torch.device) -> dict[str, int]:
    """Rows, units and warps of a program: fewer rows where there would be too few programs to fill the GPU."""
    units = weight.shape[1] // UNITS[weight.bits]
    columns, warps = COLUMNS[weight.bits]
    columns = min(columns, power_of_two(units))
    block = max(1, min(MOST_ROWS, power_of_two(rows // (8 * multiprocessors(device)) or 1)))
    return {"EVEN": units % columns == 0, "COLUMNS": columns, "ROWS": block, "num_warps": warps}


def _ordered(x: Tensor, bits: int) -> Tensor:
    unit = UNITS[bits]
    units = x.numel() // unit
    out = x.new_empty(unit + 1, units, dtype=torch.float32)
    launch(order_x, (cdiv(units, ORDERED),))(x, out, units, unit, ORDERED, num_warps=ORDERED // 32)
    return out


def multiply(x: Tensor, weight: QTensor, bias: Tensor | None, out: Tensor) -> None:
    rows, width = weight.shape
    shape = _shape(rows, weight, x.device)
    grid = (cdiv(rows, shape["ROWS"]),)
    ordered = _ordered(x, weight.bits)
    launch(one_token, grid)(ordered, operands(weight), bias, out, rows, width, **constants(weight), **shape)


def multiply_gated(x: Tensor, gate: QTensor, up: QTensor, out: Tensor) -> None:
    rows, width = gate.shape
    shape = _shape(2 * rows, gate, x.device)
    grid = (cdiv(rows, shape["ROWS"]),)
    ordered = _ordered(x, gate.bits)
    launch(one_token_gated, grid)(ordered, operands(gate), operands(up), out, rows, width, **constants(gate), **shape)


def multiply_three(x: Tensor, weights: list[QTensor], biases: list[Tensor | None], outs: list[Tensor]) -> None:
    shape = _shape(sum(weight.shape[0] for weight in weights), weights[0], x.device)
    each = [Biased(operands(w), bias, out, w.shape[0]) for w, bias, out in zip(weights, biases, outs, strict=True)]
    grid = (sum(cdiv(weight.shape[0], shape["ROWS"]) for weight in weights),)
    width, options = weights[0].shape[1], {**constants(weights[0]), **shape}
    ordered = _ordered(x, weights[0].bits)
    launch(one_token_three, grid)(ordered, *each, width, **options)
