"""Adapters on a CPU: each row reads its adapter's two matrices once.

Jobs share the rows; a single row is shared by columns of the output, and each job then computes the short inner vector itself.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.activation.cpu import swiglu
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


def add_lora(
    x: Tensor,
    ys: Sequence[Tensor],
    slots: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    delta: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    overlap: bool = False,
) -> None:
    if not all(tensor.dtype is torch.float32 for tensor in (x, *ys, *a, *b)):
        raise Declined("activations or adapters are not float32")
    h = x if norm is None else rms_norm(x, norm, eps) if delta is None else add_rms_norm(delta, x, norm, eps)[0]
    for each in zip(ys, a, b, strict=True):
        _add(h, slots, *each)


def _add(x: Tensor, slots: Tensor, y: Tensor, a: Tensor, b: Tensor) -> None:
    tokens, (count, rank, width), height = len(x), a.shape, y.shape[1]
    jobs = threads() if tokens * rank * (width + height) >= PARALLEL_FROM else 1
    inner_nbytes = -(-4 * rank // LINE) * LINE
    at = (tensor.data_ptr() for tensor in (y, x, slots, a, b))
    scratch = workspace(jobs * inner_nbytes)
    _add_lora(jobs, *at, scratch, inner_nbytes, tokens, count, rank, width, height)


def add_lora_swiglu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    slots: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    delta: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    overlap: bool = False,
) -> Tensor:
    add_lora(x, (gate, up), slots, a, b, delta, norm, eps)
    return swiglu(gate, up)
