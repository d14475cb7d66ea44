"""One token in bf16 times weights with integer codes, on Hopper: any bits, groups, scales and number of rows.

The product of a program's rows is in `gpu/blocks/dot_integer.py`. With programmatic dependent launch, codes are requested
before the previous kernel has ended, x after.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.codes import constants, form_of, operands
from auraflux.ops.gpu.blocks.dot_integer import integer_row_sums
from auraflux.ops.gpu.blocks.elementwise import silu
from auraflux.ops.gpu.blocks.integer_products import FORMS, UNIT
from auraflux.ops.gpu.device import multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.linear.cuda.matvec.any_format import Biased
from auraflux.quant import QTensor

MOST_WEIGHTS = 4  # per launch
# (rows, warps) per program, below MANY_ROWS and from it on. Fastest of those measured on an H200, 4096 x 14336 and 14336 x 4096
MANY_ROWS = 8192
DEFAULT_SHAPE = (4, 2), (8, 2)
SHAPES = {("iq4", 4): ((8, 4), (8, 2)), ("affine", 2): ((8, 4), (8, 2))}
LEAST_PROGRAMS = 4  # per multiprocessor; below, programs take fewer rows


@triton.jit
def _multiply_rows(
    x, product, program, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    EVEN: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one program's results of a weight; the last program overlaps the one before, so that all its rows exist."""
    first = tl.minimum(program * ROWS, product.rows - ROWS)
    total = integer_row_sums(x, product.codes, first, product.rows, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, EARLY)
    row = first + tl.arange(0, ROWS)
    if product.bias is not None:
        total += tl.load(product.bias + row).to(tl.float32)
    tl.store(product.out + row, total)


@triton.jit
def matvec_integer(
    x, products, COUNT: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    EVEN: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply by COUNT weights, whose programs follow each other."""
    program = tl.program_id(0)
    for n in tl.static_range(COUNT):
        if COUNT == 1:
            _multiply_rows(x, products[n], program, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, EARLY)
        else:
            if (program >= 0) & (program < tl.cdiv(products[n].rows, ROWS)):
                _multiply_rows(x, products[n], program, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, EARLY)
            program -= tl.cdiv(products[n].rows, ROWS)


@triton.jit
def matvec_integer_gated(
    x, weights, out, rows, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute silu(gate x) * up x."""
    first = tl.minimum(tl.program_id(0) * ROWS, rows - ROWS)
    left = integer_row_sums(x, weights[0], first, rows, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, EARLY)
    right = integer_row_sums(x, weights[1], first, rows, K, BITS, GROUP, FORM, EVEN, UNITS, ROWS, False)
    tl.store(out + first + tl.arange(0, ROWS), silu(left) * right)


def _options(weight: QTensor, rows: int, fewest: int, device: torch.device) -> dict[str, Any]:
    """Return constants of the kernel for `rows` rows over all weights.

    Fewer rows per program where the GPU would not be filled.
    """
    width = weight.shape[1]
    block, warps = SHAPES.get((form_of(weight), weight.bits), DEFAULT_SHAPE)[rows >= MANY_ROWS]
    warps = min(warps, power_of_two(cdiv(width, 32 * UNIT)))
    block = max(1, min(block, power_of_two(rows // (LEAST_PROGRAMS * multiprocessors(device)) or 1)))
    while block > max(1, fewest):
        block //= 2
    shape = {"EVEN": width % (32 * warps * UNIT) == 0, "UNITS": 32 * warps, "ROWS": block, "num_warps": warps}
    return {**constants(weight), **shape, "EARLY": True, "launch_pdl": True}


def multiply(x: Tensor, weights: Sequence[QTensor], outs: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    """Multiply one token by up to MOST_WEIGHTS weights of one width and format in one launch."""
    rows = [weight.shape[0] for weight in weights]
    options = _options(weights[0], sum(rows), min(rows), x.device)
    each = [Biased(operands(w), bias, out, w.shape[0]) for w, bias, out in zip(weights, biases, outs, strict=True)]
    grid = (sum(cdiv(count, options["ROWS"]) for count in rows),)
    launch(matvec_integer, grid)(x, tuple(each), len(each), weights[0].shape[1], **options)


def multiply_gated(x: Tensor, gate: QTensor, up: QTensor, out: Tensor) -> None:
    rows, width = gate.shape
    options = _options(gate, 2 * rows, rows, x.device)
    launch(matvec_integer_gated, (cdiv(rows, options["ROWS"]),))(x, (operands(gate), operands(up)), out, rows, width, **options)


def refuses(x: Tensor, weight: QTensor) -> str | None:
    """Return why the kernel does not take a weight; None if it does."""
    if x.dtype is not torch.bfloat16:
        return "activations are not bf16"
    return None if form_of(weight) in FORMS else f"codes of {weight.kind} are not integers"
