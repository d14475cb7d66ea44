"""Activations on CPU: one pass over the elements, split between the jobs."""

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.simd.jit import Kernel, arguments, as_float, empty, floats, jit, like, octets, real, share, threads
from auraflux.ops.simd.math import sigmoid, silu, softplus

PARALLEL_FROM = 1 << 13  # elements that need an exponential; below this, waking the threads costs more than the work
PARALLEL_COPY_FROM = 1 << 20  # bytes

ZERO, ONE, LOWEST = np.float32(0), np.float32(1), np.float32(-np.inf)
# gelu's tanh form: x * sigmoid(x * (GELU_SLOPE + GELU_CUBE * x * x)), as (1 + tanh(y)) / 2 = sigmoid(2 * y)
GELU_SLOPE = np.float32(2 * np.sqrt(2 / np.pi))
GELU_CUBE = np.float32(2 * np.sqrt(2 / np.pi) * 0.044715)


@jit
def _part(args, job, jobs):
    """Return this job's slices of two inputs and the output."""
    x, other, out, n = arguments(args, 4)
    mine = share(n, job, jobs)
    # arrays start at index 0: otherwise Numba checks for negative indices, and the loop takes twice as long
    at, count = 4 * mine.start, len(mine)
    return floats(x + at, count), floats(other + at, count), floats(out + at, count)


def _elementwise(kernel: Kernel, x: Tensor, other: Tensor, *constants: float) -> Tensor:
    """Run a kernel over two tensors, element by element; the result has the first one's shape and dtype."""
    wide, second = as_float(x), as_float(other)
    out = empty(*wide.shape)
    n = wide.numel()
    jobs = threads() if n >= PARALLEL_FROM else 1
    kernel(jobs, wide.data_ptr(), second.data_ptr(), out.data_ptr(), n, *constants)
    return like(out, x)


@Kernel
def _swiglu(args, job, jobs):
    gate, up, out = _part(args, job, jobs)
    for i in range(len(out)):
        out[i] = silu(gate[i]) * up[i]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _elementwise(_swiglu, gate, up)


@Kernel
def _geglu(args, job, jobs):
    gate, up, out = _part(args, job, jobs)
    for i in range(len(out)):
        g = gate[i]
        out[i] = g * sigmoid(g * (GELU_SLOPE + GELU_CUBE * g * g)) * up[i]


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return _elementwise(_geglu, gate, up)


@jit
def _clamp(x, least, most):
    # these comparisons propagate NaN, as torch's clamp does
    x = most if x > most else x
    return least if x < least else x


@Kernel
def _clip(args, job, jobs):
    x, _, out = _part(args, job, jobs)
    most = real(arguments(args, 5)[4])
    for i in range(len(out)):
        out[i] = _clamp(x[i], -most, most)


def clip(x: Tensor, limit: float) -> Tensor:
    return _elementwise(_clip, x, x, float(limit))


@jit
def _clamped(g, u, alpha, limit):
    g = _clamp(g, LOWEST, limit)
    return (_clamp(u, -limit, limit) + ONE) * g * sigmoid(alpha * g)


@Kernel
def _clamped_swiglu(args, job, jobs):
    gate, up, out = _part(args, job, jobs)
    alpha, limit = arguments(args, 6)[4:]
    steep, most = real(alpha), real(limit)
    for i in range(len(out)):
        out[i] = _clamped(gate[i], up[i], steep, most)


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    return _elementwise(_clamped_swiglu, gate, up, float(alpha), float(limit))


@Kernel
def _limited_swiglu(args, job, jobs):
    gate, up, out = _part(args, job, jobs)
    limit, gate_limit = arguments(args, 6)[4:]
    most, highest = real(limit), real(gate_limit)
    for i in range(len(out)):
        out[i] = silu(_clamp(gate[i], LOWEST, highest)) * _clamp(up[i], -most, most)


def limited_swiglu(gate: Tensor, up: Tensor, limit: float, gate_limit: float | None = None) -> Tensor:
    return _elementwise(_limited_swiglu, gate, up, float(limit), float(limit if gate_limit is None else gate_limit))


@Kernel
def _relu_square(args, job, jobs):
    x, _, out = _part(args, job, jobs)
    for i in range(len(out)):
        # this comparison propagates NaN, as in torch
        positive = ZERO if x[i] < ZERO else x[i]
        out[i] = positive * positive


def relu_square(x: Tensor) -> Tensor:
    return _elementwise(_relu_square, x, x)


@Kernel
def _sigmoid_gate(args, job, jobs):
    x, gate, out = _part(args, job, jobs)
    for i in range(len(out)):
        out[i] = x[i] * sigmoid(gate[i])


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return _elementwise(_sigmoid_gate, x, gate.contiguous())


@Kernel
def _gate_heads(args, job, jobs):
    x_at, gate_at, out_at, heads, width, soft = arguments(args, 6)
    gate = floats(gate_at, heads)
    for head in share(heads, job, jobs):
        factor = softplus(gate[head]) if soft else sigmoid(gate[head])
        x, out = floats(x_at + 4 * head * width, width), floats(out_at + 4 * head * width, width)
        for i in range(width):
            out[i] = x[i] * factor


def gate_heads(x: Tensor, gate: Tensor, soft: bool = False) -> Tensor:
    wide, second = as_float(x), as_float(gate)
    out = torch.empty_like(wide)
    jobs = threads() if wide.numel() >= PARALLEL_FROM else 1
    heads, width = gate.numel(), x.shape[2]
    _gate_heads(jobs, wide.data_ptr(), second.data_ptr(), out.data_ptr(), heads, width, int(soft))
    return like(out, x)


@jit
def _copy(source_at, target_at, nbytes):
    source, target = octets(source_at, nbytes), octets(target_at, nbytes)
    for i in range(nbytes):
        target[i] = source[i]


@Kernel
def _split(args, job, jobs):
    x, queries, gates, heads, nbytes = arguments(args, 5)
    for head in share(heads, job, jobs):
        at = head * nbytes
        _copy(x + 2 * at, queries + at, nbytes)
        _copy(x + 2 * at + nbytes, gates + at, nbytes)


def split_q_gate(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    tokens, width = x.shape[0], x.shape[1] // (2 * heads)
    queries = torch.empty(tokens, heads, width, dtype=x.dtype, device=x.device)
    gates = torch.empty_like(queries)
    jobs = threads() if x.nbytes >= PARALLEL_COPY_FROM else 1
    _split(jobs, x.data_ptr(), queries.data_ptr(), gates.data_ptr(), tokens * heads, width * x.element_size())
    return queries, gates
