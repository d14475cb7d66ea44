"""One token in bf16 times weights whose codes stand for whole numbers, on Hopper: any bits, groups and scales, and any rows.

How a program multiplies its rows is in `hopper/dot_whole.py`. Codes are asked for before the kernel before has ended
(programmatic dependent launch), x after.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.hopper.codes import constants, operands
from auraflux.ops.hopper.device import multiprocessors
from auraflux.ops.hopper.dot_whole import whole_row_sums
from auraflux.ops.hopper.elementwise import silu
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.hopper.whole import FORMS, UNIT
from auraflux.ops.linear.cuda.matvec import Biased
from auraflux.quant import QTensor

MOST_WEIGHTS = 4  # that one launch multiplies one token by
# rows and warps of a program, for few rows and for many. Measured on an H200, 4096 x 14336 and 14336 x 4096
MANY_ROWS = 8192
USUAL = (4, 2), (8, 2)
SHAPES = {("iq4", 4): ((8, 4), (8, 2)), ("affine", 2): ((8, 4), (8, 2))}
FEWEST = 4  # programs of a multiprocessor, or they have fewer rows


@triton.jit
def _multiply_rows(
    x, codes, bias, out, rows, program, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    EVEN: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Make some results of a weight. The last program shares rows with the one before, so that all its rows are there."""
    first = tl.minimum(program * ROWS, rows - ROWS)
    total = whole_row_sums(x, codes, first, rows, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, EARLY)
    row = first + tl.arange(0, ROWS)
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)
    tl.store(out + row, total)


@triton.jit
def matvec_whole(
    x, products, COUNT: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    EVEN: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """COUNT weights, which have their programs one after the other."""
    program = tl.program_id(0)
    for n in tl.static_range(COUNT):
        codes, bias, out, rows = products[n].codes, products[n].bias, products[n].out, products[n].rows
        if COUNT == 1:
            _multiply_rows(x, codes, bias, out, rows, program, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, EARLY)
        else:
            if (program >= 0) & (program < tl.cdiv(rows, ROWS)):
                _multiply_rows(x, codes, bias, out, rows, program, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, EARLY)
            program -= tl.cdiv(rows, ROWS)


@triton.jit
def matvec_whole_gated(
    x, gate, up, out, rows, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """silu(gate x) * up x."""
    first = tl.minimum(tl.program_id(0) * ROWS, rows - ROWS)
    left = whole_row_sums(x, gate, first, rows, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, EARLY)
    right = whole_row_sums(x, up, first, rows, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, False)
    tl.store(out + first + tl.arange(0, ROWS), silu(left) * right)


def _options(weight: QTensor, rows: int, fewest: int, device: torch.device) -> dict[str, Any]:
    """Constants of a kernel for so many rows in all: a program has fewer where there would be too few to fill the GPU."""
    width = weight.shape[1]
    block, warps = SHAPES.get((weight.kind, weight.bits), USUAL)[rows >= MANY_ROWS]
    warps = min(warps, power_of_two(cdiv(width, 32 * UNIT)))
    block = max(1, min(block, power_of_two(rows // (FEWEST * multiprocessors(device)) or 1)))
    while block > max(1, fewest):
        block //= 2
    shape = {"EVEN": width % (32 * warps * UNIT) == 0, "UNITS": 32 * warps, "ROWS": block, "num_warps": warps}
    return {**constants(weight), **shape, "EARLY": True, "launch_pdl": True}


def multiply(x: Tensor, weights: Sequence[QTensor], outs: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    """One token times up to MOST_WEIGHTS weights of one width and format in one launch."""
    rows = [weight.shape[0] for weight in weights]
    options = _options(weights[0], sum(rows), min(rows), x.device)
    each = [Biased(operands(w), bias, out, w.shape[0]) for w, bias, out in zip(weights, biases, outs, strict=True)]
    grid = (sum(cdiv(count, options["ROWS"]) for count in rows),)
    launch(matvec_whole, grid)(x, tuple(each), len(each), weights[0].shape[1], **options)


def multiply_gated(x: Tensor, gate: QTensor, up: QTensor, out: Tensor) -> None:
    rows, width = gate.shape
    options = _options(gate, 2 * rows, rows, x.device)
    launch(matvec_whole_gated, (cdiv(rows, options["ROWS"]),))(x, operands(gate), operands(up), out, rows, width, **options)


def not_served(x: Tensor, weight: QTensor) -> str | None:
    """Why one token is not multiplied by a weight here."""
    if x.dtype is not torch.bfloat16:
        return "activations are not bf16"
    return None if weight.kind in FORMS else f"codes of {weight.kind} are not whole numbers"
