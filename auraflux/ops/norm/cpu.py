"""Norms on CPU: a row at a time, one pass for the sum of squares and one to apply it."""

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import Kernel, arguments, as_float, empty, floats, jit, like, real, share, threads
from auraflux.ops.simd.math import silu

# elements; below this, waking the threads costs more than the work
PARALLEL_FROM = 1 << 12 if ISA.lanes == 4 else 1 << 16


@jit
def _factor(x, scale, inside):
    """Return 1 / sqrt(scale * sum of squares + inside)."""
    total = np.float32(0)
    # indexed: a loop over the array's values is not vectorized
    for i in range(len(x)):
        total += x[i] * x[i]
    return np.float32(1 / np.sqrt(total * scale + inside))


@jit
def _row(x_at, weight_at, eps, out_at, width):
    x, weight, out = floats(x_at, width), floats(weight_at, width), floats(out_at, width)
    factor = _factor(x, 1 / width, eps)
    for i in range(width):
        out[i] = x[i] * factor * weight[i]


@Kernel
def _rows(args, job, jobs):
    x, weight, out, rows, width, eps = arguments(args, 6)
    for row in share(rows, job, jobs):
        at = 4 * row * width
        _row(x + at, weight, real(eps), out + at, width)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide, scale = as_float(x), as_float(weight)
    out = empty(*wide.shape)
    n, width = x.numel(), x.shape[-1]
    jobs = threads() if n >= PARALLEL_FROM else 1
    _rows(jobs, wide.data_ptr(), scale.data_ptr(), out.data_ptr(), n // width, width, float(eps))
    return like(out, x)


@Kernel
def _centred_rows(args, job, jobs):
    x_at, weight_at, bias_at, out_at, rows, width, eps = arguments(args, 7)
    weight, bias = floats(weight_at, width), floats(bias_at, width)
    for row in share(rows, job, jobs):
        x, out = floats(x_at + 4 * row * width, width), floats(out_at + 4 * row * width, width)
        total = np.float32(0)
        for i in range(width):
            total += x[i]
        mean = total * np.float32(1 / width)
        for i in range(width):
            out[i] = x[i] - mean
        factor = _factor(out, 1 / width, real(eps))
        for i in range(width):
            out[i] = out[i] * factor * weight[i] + bias[i]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide, scale, shift = as_float(x), as_float(weight), as_float(bias)
    out = torch.empty_like(wide)
    n, width = x.numel(), x.shape[-1]
    jobs = threads() if n >= PARALLEL_FROM else 1
    addresses = wide.data_ptr(), scale.data_ptr(), shift.data_ptr(), out.data_ptr()
    _centred_rows(jobs, *addresses, n // width, width, float(eps))
    return like(out, x)


@Kernel
def _add_rows(args, job, jobs):
    x_at, residual_at, weight, out, total_at, rows, width, eps = arguments(args, 8)
    for row in share(rows, job, jobs):
        at = 4 * row * width
        x, residual, total = floats(x_at + at, width), floats(residual_at + at, width), floats(total_at + at, width)
        for i in range(width):
            total[i] = x[i] + residual[i]
        _row(total_at + at, weight, real(eps), out + at, width)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.dtype is not torch.float32:
        # the sum is rounded to the narrow type before it is normalised, as the next layer reads it
        total = (x.float() + residual.float()).to(x.dtype)
        return rms_norm(total, weight, eps), total
    other, scale = as_float(residual), as_float(weight)
    out, total = empty(*x.shape), empty(*x.shape)
    n, width = x.numel(), x.shape[-1]
    jobs = threads() if n >= PARALLEL_FROM else 1
    addresses = x.data_ptr(), other.data_ptr(), scale.data_ptr(), out.data_ptr(), total.data_ptr()
    _add_rows(jobs, *addresses, n // width, width, float(eps))
    return out, total


@Kernel
def _gated_rows(args, job, jobs):
    x_at, z_at, weight_at, out_at, rows, width, eps = arguments(args, 7)
    weight = floats(weight_at, width)
    for row in share(rows, job, jobs):
        at = 4 * row * width
        x, z, out = floats(x_at + at, width), floats(z_at + at, width), floats(out_at + at, width)
        factor = _factor(x, 1 / width, real(eps))
        for i in range(width):
            out[i] = x[i] * factor * weight[i] * silu(z[i])


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide, gate, scale = as_float(x), as_float(z), as_float(weight)
    out = torch.empty_like(wide)
    n, width = x.numel(), x.shape[-1]
    jobs = threads() if n >= PARALLEL_FROM else 1
    addresses = wide.data_ptr(), gate.data_ptr(), scale.data_ptr(), out.data_ptr()
    _gated_rows(jobs, *addresses, n // width, width, float(eps))
    return like(out, x)


@Kernel
def _group_rows(args, job, jobs):
    x_at, z_at, weight_at, out_at, rows, groups, width, eps = arguments(args, 8)
    for row in share(rows, job, jobs):
        at = 4 * row * width
        x, z, out = floats(x_at + at, width), floats(z_at + at, width), floats(out_at + at, width)
        weight = floats(weight_at + 4 * (row % groups) * width, width)
        for i in range(width):
            out[i] = x[i] * silu(z[i])
        factor = _factor(out, 1 / width, real(eps))
        for i in range(width):
            out[i] = out[i] * factor * weight[i]


def group_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide, gate, scale = as_float(x), as_float(z), as_float(weight)
    out = torch.empty_like(wide)
    tokens, groups, width = x.shape
    jobs = threads() if x.numel() >= PARALLEL_FROM else 1
    addresses = wide.data_ptr(), gate.data_ptr(), scale.data_ptr(), out.data_ptr()
    _group_rows(jobs, *addresses, tokens * groups, groups, width, float(eps))
    return like(out, x)


@jit
def _unit_rows(x_at, out_at, width, inside, length, part):
    for row in part:
        x, out = floats(x_at + 4 * row * width, width), floats(out_at + 4 * row * width, width)
        factor = _factor(x, np.float32(1), inside) * length
        for i in range(width):
            out[i] = x[i] * factor


@Kernel
def _both_units(args, job, jobs):
    q, q_out, q_rows, k, k_out, k_rows, width, inside, q_length = arguments(args, 9)
    _unit_rows(q, q_out, width, real(inside), real(q_length), share(q_rows, job, jobs))
    _unit_rows(k, k_out, width, real(inside), np.float32(1), share(k_rows, job, jobs))


def qk_norm(q: Tensor, k: Tensor, eps: float, mean: bool = False) -> tuple[Tensor, Tensor]:
    queries, keys = as_float(q), as_float(k)
    q_out, k_out = torch.empty_like(queries), torch.empty_like(keys)
    n, width = q.numel(), q.shape[-1]
    jobs = threads() if n >= PARALLEL_FROM else 1
    read_q = queries.data_ptr(), q_out.data_ptr(), n // width
    read_k = keys.data_ptr(), k_out.data_ptr(), k.numel() // width
    _both_units(jobs, *read_q, *read_k, width, float(eps * width if mean else eps), width**-0.5)
    return like(q_out, q), like(k_out, k)


@Kernel
def _layer_rows(args, job, jobs):
    projected_at, embedded_at, weight_at, out_at, tokens, layers, width, eps, part = arguments(args, 9)
    weight = floats(weight_at, width)
    for row in share(tokens * layers, job, jobs):
        token, layer = row // layers, row % layers
        x, embedded = floats(projected_at + 4 * row * width, width), floats(embedded_at + 4 * row * width, width)
        out = floats(out_at + 4 * (layer * tokens + token) * width, width)
        factor = _factor(x, 1 / width, real(eps))
        for i in range(width):
            out[i] = x[i] * factor * weight[i] + real(part) * embedded[i]


def per_layer_inputs(projected: Tensor, embedded: Tensor, weight: Tensor, eps: float, share: float) -> Tensor:
    wide, table, scale = as_float(projected), as_float(embedded), as_float(weight)
    (tokens, row), width = projected.shape, len(weight)
    out = torch.empty(row // width, tokens, width)
    jobs = threads() if wide.numel() >= PARALLEL_FROM else 1
    addresses = wide.data_ptr(), table.data_ptr(), scale.data_ptr(), out.data_ptr()
    _layer_rows(jobs, *addresses, tokens, row // width, width, float(eps), float(share))
    return like(out, projected)
