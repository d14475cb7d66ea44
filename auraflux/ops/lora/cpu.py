"""Adapters on a CPU: each row reads its adapter's two matrices once.

Jobs share the rows; a single row is shared by columns of the output, and each job then computes the short inner vector itself.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.activation.cpu import swiglu
from auraflux.ops.linear.adapters import Adapters
from auraflux.ops.linear.reference import Weight, add_norm_linears, linears
from auraflux.ops.lora.inputs import LinearInput
from auraflux.ops.lora.reference import add_lora as add_lora_op
from auraflux.ops.norm.cpu import add_rms_norm, rms_norm
from auraflux.ops.simd.jit import LINE, Kernel, arguments, floats, int32s, jit, share, threads, workspace

PARALLEL_FROM = 1 << 17  # products; below this, waking the threads costs more than the work


@jit
def _dot(x, y):
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@jit
def _add_scaled(out, row, scale):
    for i in range(len(out)):
        out[i] += scale * row[i]


@Kernel
def _add_lora(args, job, jobs):
    y, x, slots_at, a, b, scratch, inner_nbytes, tokens, count, rank, width, height = arguments(args, 12)
    slots = int32s(slots_at, tokens)
    rows, columns = share(tokens, job, jobs), range(height)
    if tokens == 1:
        rows, columns = range(tokens), share(height, job, jobs)
    inner = floats(scratch + job * inner_nbytes, rank)
    for row in rows:
        slot = slots[row]
        if slot < 0 or slot >= count:
            continue
        source = floats(x + 4 * row * width, width)
        for r in range(rank):
            inner[r] = _dot(source, floats(a + 4 * (slot * rank + r) * width, width))
        out = floats(y + 4 * (row * height + columns.start), len(columns))
        for r in range(rank):
            _add_scaled(out, floats(b + 4 * ((slot * rank + r) * height + columns.start), len(columns)), inner[r])


def add_lora(inputs: LinearInput, ys: Sequence[Tensor], adapters: Adapters, overlap: bool = False) -> None:
    if not all(each.dtype is torch.float32 for each in (inputs.x, *ys, *(each for pair in adapters.pairs for each in pair))):
        raise Declined("activations or adapters are not float32")
    h, _ = _normed(inputs)
    for y, a, b in zip(ys, adapters.a, adapters.b, strict=True):
        if a is not None and b is not None:
            _add(h, adapters.slots, y, a, b)


def _normed(inputs: LinearInput) -> tuple[Tensor, Tensor]:
    """Return the rows that weights multiply, and x + delta."""
    x, delta, norm, eps = inputs.x, inputs.delta, inputs.norm, inputs.eps
    if norm is None:
        return x, x
    return (rms_norm(x, norm, eps), x) if delta is None else add_rms_norm(delta, x, norm, eps)


def lora_linears(
    inputs: LinearInput, weights: Sequence[Weight], adapters: Adapters, biases: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    x, delta, norm, eps = inputs.x, inputs.delta, inputs.norm, inputs.eps
    if norm is None:
        total, found = x, linears(x, weights, biases)
    else:
        total, found = add_norm_linears(x, delta, norm, eps, weights, biases)
    add_lora_op(inputs, found, adapters)
    return total, found


def lora_gate_up(inputs: LinearInput, gate: Weight, up: Weight, adapters: Adapters) -> tuple[Tensor, Tensor]:
    total, products = lora_linears(inputs, (gate, up), adapters)
    return total, swiglu(*products)


def _add(x: Tensor, slots: Tensor, y: Tensor, a: Tensor, b: Tensor) -> None:
    tokens, (count, rank, width), height = len(x), a.shape, y.shape[1]
    jobs = threads() if tokens * rank * (width + height) >= PARALLEL_FROM else 1
    inner_nbytes = -(-4 * rank // LINE) * LINE
    at = (tensor.data_ptr() for tensor in (y, x, slots, a, b))
    scratch = workspace(jobs * inner_nbytes)
    _add_lora(jobs, *at, scratch, inner_nbytes, tokens, count, rank, width, height)
