"""One token times quantized weights of any format, by `gpu/blocks/dot_codes.py`, for one weight or several.

With programmatic dependent launch, codes are requested before the previous kernel has ended, x after.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.codes import Codes, constants, operands
from auraflux.ops.gpu.blocks.dot_codes import program_shape, row_sums
from auraflux.ops.gpu.blocks.elementwise import silu
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.quant import QTensor


class Biased(NamedTuple):
    """A weight with its bias, result and number of rows."""

    codes: Codes
    bias: Tensor | None
    out: Tensor
    rows: int


@triton.jit
def _finish(total, bias, out, first, rows, ROWS: tl.constexpr):
    row = first + tl.arange(0, ROWS)
    if bias is not None:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + row, total, mask=row < rows)


@triton.jit
def one_token(
    x, product, K, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS
    total = row_sums(x, product.codes, row, product.rows, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, HOPPER, HOPPER)
    _finish(total, product.bias, product.out, row, product.rows, ROWS)


@triton.jit
def one_token_gated(
    x, weights, out, rows, K, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS
    first = row_sums(x, weights[0], row, rows, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, HOPPER, HOPPER)
    second = row_sums(x, weights[1], row, rows, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, HOPPER, False)
    _finish(silu(first) * second, None, out, row, rows, ROWS)


@triton.jit
def one_token_three(
    x, first, second, third, K, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """Multiply by three weights of one format in one launch, such as the query, key and value projections."""
    program = tl.program_id(0)
    programs0, programs1 = tl.cdiv(first.rows, ROWS), tl.cdiv(second.rows, ROWS)
    if program < programs0:
        row = program * ROWS
        total = row_sums(x, first.codes, row, first.rows, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, HOPPER, HOPPER)
        _finish(total, first.bias, first.out, row, first.rows, ROWS)
    elif program < programs0 + programs1:
        row = (program - programs0) * ROWS
        total = row_sums(x, second.codes, row, second.rows, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, HOPPER, HOPPER)
        _finish(total, second.bias, second.out, row, second.rows, ROWS)
    else:
        row = (program - programs0 - programs1) * ROWS
        total = row_sums(x, third.codes, row, third.rows, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, HOPPER, HOPPER)
        _finish(total, third.bias, third.out, row, third.rows, ROWS)


def _options(rows: int, weight: QTensor, device: torch.device) -> dict[str, Any]:
    shape = program_shape(rows, weight, device)
    return {**constants(weight), **shape, "launch_pdl": shape["HOPPER"]}


def multiply(x: Tensor, weight: QTensor, bias: Tensor | None, out: Tensor) -> None:
    rows, width = weight.shape
    options = _options(rows, weight, x.device)
    launch(one_token, (cdiv(rows, options["ROWS"]),))(x, Biased(operands(weight), bias, out, rows), width, **options)


def multiply_gated(x: Tensor, gate: QTensor, up: QTensor, out: Tensor) -> None:
    rows, width = gate.shape
    options = _options(2 * rows, gate, x.device)
    launch(one_token_gated, (cdiv(rows, options["ROWS"]),))(x, (operands(gate), operands(up)), out, rows, width, **options)


def multiply_three(x: Tensor, weights: list[QTensor], biases: list[Tensor | None], outs: list[Tensor]) -> None:
    options = _options(sum(weight.shape[0] for weight in weights), weights[0], x.device)
    each = [Biased(operands(w), bias, out, w.shape[0]) for w, bias, out in zip(weights, biases, outs, strict=True)]
    grid = (sum(cdiv(weight.shape[0], options["ROWS"]) for weight in weights),)
    launch(one_token_three, grid)(x, *each, weights[0].shape[1], **options)
