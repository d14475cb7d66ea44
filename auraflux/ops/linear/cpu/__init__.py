"""Products with weights on CPU. Quantized weights run compiled drivers (`products.py`), dense ones torch's BLAS.

The exception are dense weights met by few tokens, as routers are: they are read row by row, bf16 widened on the way.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.activation.cpu import swiglu
from auraflux.ops.linear.cpu.embedding import embed
from auraflux.ops.linear.cpu.products import BLOCK, driver_for, padded, token_indices
from auraflux.ops.linear.reference import Weight
from auraflux.ops.norm.cpu import add_rms_norm, rms_norm
from auraflux.ops.simd.jit import Kernel, arguments, as_float, floats, halves, held, like, share, threads
from auraflux.ops.simd.math import float_of_bits
from auraflux.quant import QTensor

__all__ = [
    "add_norm_gate_up",
    "add_norm_linears",
    "add_norm_scores",
    "embed",
    "gate_up_swiglu",
    "linear",
    "linears",
]

FEW_TOKENS = 8  # up to here a dense weight is read once, row by row
PARALLEL_FROM = 1 << 16  # weights; below this, waking the threads costs more than the work


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    flat = rows_of(x)
    out = multiply(flat, weight)[0] if isinstance(weight, QTensor) else multiply_dense(flat, weight)
    if bias is not None:
        out += bias
    return shaped(out, x)


def linears(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
    products = multiply_all(rows_of(x), weights)
    for out, bias in zip(products, biases or (), strict=False):
        if bias is not None:
            out += bias
    return tuple([shaped(out, x) for out in products])


def add_norm_linears(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    h, total = _normed(x, delta, norm, eps)
    return total, linears(h, weights, biases)


def add_norm_scores(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    h, total = _normed(x, delta, norm, eps)
    return h, total, linears(h, weights, biases)


def add_norm_gate_up(
    x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, gate: Weight, up: Weight
) -> tuple[Tensor, Tensor]:
    _check_alike(gate, up)
    h, total = _normed(x, delta, norm, eps)
    return total, gate_up_swiglu(h, gate, up)


def _normed(x: Tensor, delta: Tensor | None, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of a stream to which delta is added, and their sum."""
    return (rms_norm(x, norm, eps), x) if delta is None else add_rms_norm(delta, x, norm, eps)


def gate_up_swiglu(x: Tensor, gate: Weight, up: Weight) -> Tensor:
    _check_alike(gate, up)
    gated, other = multiply_all(rows_of(x), (gate, up))
    return shaped(swiglu(gated, other), x)


def _check_alike(gate: Weight, up: Weight) -> None:
    if isinstance(gate, QTensor) is not isinstance(up, QTensor):
        raise Declined("one of gate and up is quantized, the other dense")


def rows_of(x: Tensor) -> Tensor:
    """x as float32 [T, K]."""
    wide = as_float(x)
    return wide if wide.dim() == 2 else wide.view(-1, wide.shape[-1])


def shaped(out: Tensor, x: Tensor) -> Tensor:
    """Results [T, N] with the leading axes and the dtype of x."""
    return like(out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1]), x)


def multiply_all(x: Tensor, weights: Sequence[Weight]) -> list[Tensor]:
    """Multiply x [T, K] by each weight; quantized ones of one format in one go."""
    together = [weight for weight in weights if isinstance(weight, QTensor)]
    if len(together) == len(weights) and all(weight.format == together[0].format for weight in together):
        return multiply(x, *together)
    return [multiply(x, w)[0] if isinstance(w, QTensor) else multiply_dense(x, w) for w in weights]


def multiply(x: Tensor, *weights: QTensor) -> list[Tensor]:
    """Multiply one stack of tokens by weights of one width and format.

    x       [T, K]  float32
    returns [T, N] for each weight
    """
    first = weights[0]
    if first.lanes not in (1, BLOCK):
        raise Declined(f"rows lie {first.lanes} side by side; these kernels take 1 or {BLOCK}")
    tokens = x.shape[0]
    index, products, results = token_indices(tokens), array("q"), []
    for weight in weights:
        rows = weight.shape[0]
        wide = padded(rows)
        out = torch.empty(tokens, wide)
        products.extend((*weight.addresses, index, tokens, out.data_ptr(), rows, 4 * wide))
        results.append(out)
    driver_for(first)(x.data_ptr(), tokens, first, held(products), len(weights))
    return [
        out if out.shape[1] == w.shape[0] else out[:, : w.shape[0]].contiguous()
        for out, w in zip(results, weights, strict=True)
    ]


@Kernel
def _bf16_rows(args, job, jobs):
    x, tokens, width, weight, rows, out = arguments(args, 6)
    for row in share(rows, job, jobs):
        w = halves(weight + 2 * row * width, width)
        for token in range(tokens):
            acts = floats(x + 4 * token * width, width)
            total = np.float32(0)
            for i in range(width):
                total += float_of_bits(np.uint32(w[i]) << np.uint32(16)) * acts[i]
            floats(out + 4 * token * rows, rows)[row] = total


@Kernel
def _f32_rows(args, job, jobs):
    x, tokens, width, weight, rows, out = arguments(args, 6)
    for row in share(rows, job, jobs):
        w = floats(weight + 4 * row * width, width)
        for token in range(tokens):
            acts = floats(x + 4 * token * width, width)
            total = np.float32(0)
            for i in range(width):
                total += w[i] * acts[i]
            floats(out + 4 * token * rows, rows)[row] = total


ROWS_OF = {torch.bfloat16: _bf16_rows, torch.float32: _f32_rows}


def multiply_dense(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] float32, weight [N, K] -> [T, N]."""
    if weight.dtype in ROWS_OF and x.shape[0] <= FEW_TOKENS:
        out = torch.empty(x.shape[0], weight.shape[0])
        jobs = threads() if weight.numel() >= PARALLEL_FROM else 1
        ROWS_OF[weight.dtype](jobs, x.data_ptr(), *x.shape, weight.data_ptr(), weight.shape[0], out.data_ptr())
        return out
    return torch.nn.functional.linear(x, as_float(weight))
