"""N-gram gates and convolutions on CPU: gates by stream and token, convolutions by sequence and block of channels."""

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.ngram.reference import LEAST
from auraflux.ops.simd.jit import Kernel, arguments, as_float, floats, int32s, jit, like, share, threads
from auraflux.ops.simd.math import sigmoid, silu

PARALLEL_FROM = 1 << 14  # elements; below this, waking the threads costs more than the work
CHANNELS = 1024  # of the convolution in one block
LEAST_ROOT = np.float32(LEAST)


@Kernel
def _values(args, job, jobs):
    keys_at, queries_at, values_at, out_at, rows, n, hidden = arguments(args, 7)
    for row in share(rows, job, jobs):
        at = 4 * row * hidden
        keys, queries, out = floats(keys_at + at, hidden), floats(queries_at + at, hidden), floats(out_at + at, hidden)
        values, total = floats(values_at + 4 * (row // n) * hidden, hidden), np.float32(0)
        for i in range(hidden):
            total += keys[i] * queries[i]
        product = np.float32(total / np.sqrt(np.float64(hidden)))
        root = np.float32(np.sqrt(max(abs(product), LEAST_ROOT)))
        gate = np.float32(0)
        if product > 0:
            gate = root
        elif product < 0:
            gate = -root
        weight = sigmoid(gate)
        for i in range(hidden):
            out[i] = weight * values[i]


def gate_values(keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
    wide = [as_float(each) for each in (keys, queries, values)]
    tokens, n, hidden = keys.shape
    out = torch.empty(tokens, n, hidden)
    jobs = threads() if keys.numel() >= PARALLEL_FROM else 1
    _values(jobs, *(each.data_ptr() for each in (*wide, out)), tokens * n, n, hidden)
    return like(out, values)


@jit
def _conv_block(block, x, state, weight, starts, out, batch, width, taps, step):
    """Convolve one sequence in one block of channels; no other job accesses their state."""
    b, first = block % batch, block // batch * CHANNELS
    channels, history = min(CHANNELS, width - first), (taps - 1) * step
    places = int32s(starts, batch + 1)
    start, n = np.int64(places[b]), np.int64(places[b + 1]) - np.int64(places[b])
    row, before = 4 * width, state + 4 * (history * b * width + first)
    inputs, outs = x + start * row + 4 * first, out + start * row + 4 * first
    for t in range(n):
        made = floats(outs + t * row, channels)
        made[:] = np.float32(0)
        for tap in range(taps):
            back = t - (taps - 1 - tap) * step
            source = floats(inputs + back * row if back >= 0 else before + (back + history) * row, channels)
            factors = floats(weight + tap * row + 4 * first, channels)
            for c in range(channels):
                made[c] += source[c] * factors[c]
        for c in range(channels):
            made[c] = silu(made[c])
    if n > 0:
        for i in range(history):
            # with few tokens the source is a later row of the state itself, not yet overwritten
            at = inputs + (n + i - history) * row if n + i >= history else before + (n + i) * row
            source, target = floats(at, channels), floats(before + i * row, channels)
            for c in range(channels):
                target[c] = source[c]


@Kernel
def _conv(args, job, jobs):
    blocks, x, state, weight, starts, out, batch, width, taps, step = arguments(args, 10)
    for block in share(blocks, job, jobs):
        _conv_block(block, x, state, weight, starts, out, batch, width, taps, step)


def far_conv(x: Tensor, state: Tensor, weight: Tensor, starts: Tensor, step: int) -> Tensor:
    inputs, before, factors = as_float(x), as_float(state), as_float(weight)
    batch, width, taps = state.shape[0], x.shape[1], weight.shape[0]
    out = torch.empty_like(inputs)
    jobs = threads() if x.numel() >= PARALLEL_FROM else 1
    addresses = (each.data_ptr() for each in (inputs, before, factors, starts, out))
    _conv(jobs, batch * -(-width // CHANNELS), *addresses, batch, width, taps, step)
    if before is not state:
        state.copy_(before)
    return like(out, x)
