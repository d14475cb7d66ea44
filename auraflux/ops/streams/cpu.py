"""Hyper-connections on CPU: a token at a time, its few weights first, then one pass over all streams."""

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.simd.jit import Kernel, arguments, as_float, floats, jit, like, octets, real, share, threads
from auraflux.ops.simd.math import exp, sigmoid

PARALLEL_FROM = 1 << 16  # elements; below this, waking the threads costs more than the work


@jit
def _softmax(row):
    highest, total = row[0], np.float32(0)
    for i in range(len(row)):
        highest = max(highest, row[i])
    for i in range(len(row)):
        row[i] = exp(row[i] - highest)
        total += row[i]
    for i in range(len(row)):
        row[i] = row[i] / total


@jit
def _balance_columns(mix, n, eps):
    for k in range(n):
        total = np.float32(0)
        for j in range(n):
            total += mix[j * n + k]
        total += eps
        for j in range(n):
            mix[j * n + k] /= total


@jit
def _balance_rows(mix, n, eps):
    for j in range(n):
        total = np.float32(0)
        for k in range(n):
            total += mix[j * n + k]
        total += eps
        for k in range(n):
            mix[j * n + k] /= total


@jit
def _sum(x_at, weights, n, hidden, out_at):
    """Sum n weighted streams, in their order."""
    out = floats(out_at, hidden)
    out[:] = np.float32(0)
    for j in range(n):
        x, weight = floats(x_at + 4 * j * hidden, hidden), weights[j]
        for i in range(hidden):
            out[i] += weight * x[i]


@Kernel
def _start(args, job, jobs):
    x_at, out_at, rows, n, nbytes = arguments(args, 5)
    for row in share(rows, job, jobs):
        x, out = octets(x_at + row // n * nbytes, nbytes), octets(out_at + row * nbytes, nbytes)
        for i in range(nbytes):
            out[i] = x[i]


def start_streams(x: Tensor, count: int) -> Tensor:
    tokens, hidden = x.shape
    out = x.new_empty(tokens, count, hidden)
    _start(_jobs(out), x.data_ptr(), out.data_ptr(), tokens * count, count, hidden * x.itemsize)
    return out


@Kernel
def _collapse(args, job, jobs):
    x, mixes_at, base_at, scale_at, out, write_at, mix_at, tokens, n, hidden, rounds, smallest = arguments(args, 12)
    width, eps = n * (n + 2), np.float32(real(smallest))
    base, scale = floats(base_at, width), floats(scale_at, 3)
    read = np.empty(n, np.float32)
    for token in share(tokens, job, jobs):
        mixes = floats(mixes_at + 4 * token * width, width)
        write, mix = floats(write_at + 4 * token * n, n), floats(mix_at + 4 * token * n * n, n * n)
        for j in range(n):
            read[j] = sigmoid(mixes[j] * scale[0] + base[j]) + eps
            write[j] = np.float32(2) * sigmoid(mixes[n + j] * scale[1] + base[n + j])
        for j in range(n * n):
            mix[j] = mixes[2 * n + j] * scale[2] + base[2 * n + j]
        for j in range(n):
            _softmax(floats(mix_at + 4 * (token * n + j) * n, n))
        for j in range(n * n):
            mix[j] += eps
        _balance_columns(mix, n, eps)
        for _ in range(rounds - 1):
            _balance_rows(mix, n, eps)
            _balance_columns(mix, n, eps)
        _sum(x + 4 * token * n * hidden, read, n, hidden, out + 4 * token * hidden)


def collapse_streams(
    x: Tensor, mixes: Tensor, base: Tensor, scale: Tensor, eps: float, rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    wide, (tokens, n, hidden) = as_float(x), x.shape
    out, write, mix = torch.empty(tokens, hidden), torch.empty(tokens, n), torch.empty(tokens, n, n)
    given = (each.data_ptr() for each in (wide, mixes, base, scale, out, write, mix))
    _collapse(_jobs(x), *given, tokens, n, hidden, rounds, float(eps))
    return like(out, x), write, mix


@Kernel
def _read(args, job, jobs):
    x, mixes_at, base_at, scale_at, out, write_at, tokens, n, hidden, smallest, largest = arguments(args, 11)
    eps, most = np.float32(real(smallest)), np.float32(real(largest))
    base, scale, read = floats(base_at, 2 * n), floats(scale_at, 2), np.empty(n, np.float32)
    for token in share(tokens, job, jobs):
        mixes, write = floats(mixes_at + 8 * token * n, 2 * n), floats(write_at + 4 * token * n, n)
        for j in range(n):
            read[j] = sigmoid(mixes[j] * scale[0] + base[j]) + eps
            write[j] = most * sigmoid(mixes[n + j] * scale[1] + base[n + j]) + eps
        _sum(x + 4 * token * n * hidden, read, n, hidden, out + 4 * token * hidden)


def read_streams(x: Tensor, mixes: Tensor, base: Tensor, scale: Tensor, eps: float, most: float) -> tuple[Tensor, Tensor]:
    wide, (tokens, n, hidden) = as_float(x), x.shape
    out, write = torch.empty(tokens, hidden), torch.empty(tokens, n)
    given = (each.data_ptr() for each in (wide, mixes, base, scale, out, write))
    _read(_jobs(x), *given, tokens, n, hidden, float(eps), float(most))
    return like(out, x), write


@Kernel
def _sums(args, job, jobs):
    x, mixes_at, base_at, scale_at, out, tokens, n, hidden, smallest = arguments(args, 9)
    base, scale, read = floats(base_at, n), floats(scale_at, 1), np.empty(n, np.float32)
    for token in share(tokens, job, jobs):
        mixes = floats(mixes_at + 4 * token * n, n)
        for j in range(n):
            read[j] = sigmoid(mixes[j] * scale[0] + base[j]) + np.float32(real(smallest))
        _sum(x + 4 * token * n * hidden, read, n, hidden, out + 4 * token * hidden)


def sum_streams(x: Tensor, mixes: Tensor, base: Tensor, scale: Tensor, eps: float) -> Tensor:
    wide, (tokens, n, hidden) = as_float(x), x.shape
    out = torch.empty(tokens, hidden)
    given = (each.data_ptr() for each in (wide, mixes, base, scale, out))
    _sums(_jobs(x), *given, tokens, n, hidden, float(eps))
    return like(out, x)


@Kernel
def _expand(args, job, jobs):
    x_at, found_at, write_at, mix_at, out_at, tokens, n, hidden = arguments(args, 8)
    for part in share(tokens * n, job, jobs):
        token, k = part // n, part % n
        weight = floats(write_at, tokens * n)[part]
        found, out = floats(found_at + 4 * token * hidden, hidden), floats(out_at + 4 * part * hidden, hidden)
        if not mix_at:
            x = floats(x_at + 4 * part * hidden, hidden)
            for i in range(hidden):
                out[i] = weight * found[i] + x[i]
            continue
        mix = floats(mix_at + 4 * token * n * n, n * n)
        for i in range(hidden):
            out[i] = weight * found[i]
        for j in range(n):
            x, factor = floats(x_at + 4 * (token * n + j) * hidden, hidden), mix[j * n + k]
            for i in range(hidden):
                out[i] += factor * x[i]


def expand_streams(x: Tensor, found: Tensor, write: Tensor, mix: Tensor | None = None) -> Tensor:
    wide, added, (tokens, n, hidden) = as_float(x), as_float(found), x.shape
    out = torch.empty_like(wide)
    mixing = 0 if mix is None else mix.data_ptr()
    _expand(_jobs(x), wide.data_ptr(), added.data_ptr(), write.data_ptr(), mixing, out.data_ptr(), tokens, n, hidden)
    return like(out, x)


@Kernel
def _norm(args, job, jobs):
    x_at, weight_at, out_at, rows, n, hidden, eps = arguments(args, 7)
    for row in share(rows, job, jobs):
        x, out = floats(x_at + 4 * row * hidden, hidden), floats(out_at + 4 * row * hidden, hidden)
        weight, total = floats(weight_at + 4 * (row % n) * hidden, hidden), np.float32(0)
        for i in range(hidden):
            total += x[i] * x[i]
        factor = np.float32(1 / np.sqrt(total * (1 / hidden) + real(eps)))
        for i in range(hidden):
            out[i] = x[i] * factor * weight[i]


def norm_streams(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide, scale, (tokens, n, hidden) = as_float(x), as_float(weight), x.shape
    out = torch.empty_like(wide)
    given = (each.data_ptr() for each in (wide, scale, out))
    _norm(_jobs(x), *given, tokens * n, n, hidden, float(eps))
    return like(out, x)


@Kernel
def _gate(args, job, jobs):
    x_at, gates_at, out_at, tokens, n, hidden = arguments(args, 6)
    for token in share(tokens, job, jobs):
        out = floats(out_at + 4 * token * hidden, hidden)
        out[:] = np.float32(0)
        for j in range(n):
            at = 4 * (token * n + j) * hidden
            x, gates = floats(x_at + at, hidden), floats(gates_at + at, hidden)
            for i in range(hidden):
                out[i] += sigmoid(gates[i]) * x[i]
        share_of_each = np.float32(1 / n)
        for i in range(hidden):
            out[i] *= share_of_each


def gate_streams(x: Tensor, gates: Tensor) -> Tensor:
    wide, other, (tokens, n, hidden) = as_float(x), as_float(gates), x.shape
    out = torch.empty(tokens, hidden)
    given = (each.data_ptr() for each in (wide, other, out))
    _gate(_jobs(x), *given, tokens, n, hidden)
    return like(out, x)


@Kernel
def _write(args, job, jobs):
    x_at, found_at, mixes_at, out_at, tokens, n, hidden = arguments(args, 7)
    for part in share(tokens * n, job, jobs):
        weight = np.float32(2) * sigmoid(floats(mixes_at, tokens * n)[part] * np.float32(1 / n))
        x, out = floats(x_at + 4 * part * hidden, hidden), floats(out_at + 4 * part * hidden, hidden)
        found = floats(found_at + 4 * (part // n) * hidden, hidden)
        for i in range(hidden):
            out[i] = x[i] + weight * found[i]


def write_streams(x: Tensor, found: Tensor, mixes: Tensor) -> Tensor:
    wide, added, weights, (tokens, n, hidden) = as_float(x), as_float(found), as_float(mixes), x.shape
    out = torch.empty_like(wide)
    given = (each.data_ptr() for each in (wide, added, weights, out))
    _write(_jobs(x), *given, tokens, n, hidden)
    return like(out, x)


def _jobs(x: Tensor) -> int:
    return threads() if x.numel() >= PARALLEL_FROM else 1
