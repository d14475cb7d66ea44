"""The delta ops on CPU.

A single token is memory-bound: its state is read and written once, a strip of columns at a time. With many tokens a strip is
run through all of them while it is in the L1 cache, token by token: the chunked form (README.md) needs fewer operations, but
differs from single steps in the last bits, so that outputs would depend on how a prompt was split.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.delta.cpu.channels import channel_delta, channel_gates
from auraflux.ops.delta.cpu.selective import scan_gates, selective_scan
from auraflux.ops.delta.cpu.strips import LANES, STRIP, overlap, step_column, step_strip, step_vector
from auraflux.ops.delta.reference import LAYER_STEPS, layer_step_by
from auraflux.ops.simd.jit import Kernel, arguments, as_float, floats, int32s, jit, like, share, threads, workspace
from auraflux.ops.simd.math import exp, sigmoid, silu, softplus

__all__ = [
    "channel_delta",
    "channel_gates",
    "delta_gates",
    "delta_layer_step",
    "gated_delta_prefill",
    "gated_delta_step",
    "scan_gates",
    "selective_scan",
    "short_conv",
]

# below these, waking the threads costs more than the work
STATE_PARALLEL_FROM = 1 << 16  # elements of state, times tokens
PARALLEL_FROM = 1 << 13  # elements that need an exponential
SEVERAL = 4  # tokens from which copying a strip pays off: state rows at power-of-two strides share cache sets
TOKENS = 256  # per pass over a strip: their keys, queries and values stay in the L2 cache
CHANNELS = 1024  # of the convolution: 4 KiB of each of four rows, well inside the L1 cache


@jit
def _copy_strip(source, source_step, target, target_step, rows):
    for i in range(rows):
        these, those = floats(source + i * source_step, STRIP), floats(target + i * target_step, STRIP)
        for j in range(STRIP):
            those[j] = these[j]


@jit
def _run_head(state, inputs, out, n, steps, key_width, value_width, overlaps):
    """Run one head's state through n tokens; steps are byte strides of keys, values and gates."""
    q, k, v, decay, beta = inputs
    for t in range(n):
        overlap(q + t * steps[0], k + t * steps[0], key_width, overlaps + 4 * t)
    strips, vectorized = value_width - value_width % STRIP, value_width - value_width % LANES
    row, head = 4 * value_width, 4 * value_width * key_width
    for column in range(0, strips, STRIP):
        here = 4 * column
        inputs = q, k, v + here, decay, beta
        if n >= SEVERAL:
            strip = overlaps + 4 * TOKENS
            _copy_strip(state + here, row, strip, 4 * STRIP, key_width)
            step_strip(strip, inputs, overlaps, out + here, n, key_width, 4 * STRIP, steps, 0)
            _copy_strip(strip, 4 * STRIP, state + here, row, key_width)
            continue
        ahead = 4 * STRIP if column + 2 * STRIP <= value_width else head - here
        step_strip(state + here, inputs, overlaps, out + here, n, key_width, row, steps, ahead)
    for column in range(strips, vectorized, LANES):
        here = 4 * column
        step_vector(state + here, (q, k, v + here, decay, beta), overlaps, out + here, n, key_width, row, steps, 4 * LANES)
    for column in range(vectorized, value_width):
        here = 4 * column
        step_column(state + here, (q, k, v + here, decay, beta), overlaps, out + here, n, key_width, row, steps, 4)


@jit
def _run(job, starts, inputs, sizes, overlaps):
    """Run one head of one sequence, TOKENS tokens at a time."""
    # sequences vary fastest: threads take contiguous runs of jobs, and lengths differ where heads do not
    batch, heads, key_heads, key_width, value_width = sizes
    b, head = job % batch, job // batch
    places = int32s(starts, batch + 1)
    start, n = np.int64(places[b]), np.int64(places[b + 1]) - np.int64(places[b])
    state, q, k, v, decay, beta, out = inputs
    key, gate = 4 * key_width * (start * key_heads + head // (heads // key_heads)), 4 * (start * heads + head)
    memory = state + 4 * (b * heads + head) * key_width * value_width
    steps = 4 * key_heads * key_width, 4 * heads * value_width, 4 * heads
    for t in range(0, n, TOKENS):
        keys, gates = key + t * steps[0], gate + t * steps[2]
        values = value_width * gates
        mine = q + keys, k + keys, v + values, decay + gates, beta + gates
        _run_head(memory, mine, out + values, min(TOKENS, n - t), steps, key_width, value_width, overlaps)


@Kernel
def _prefill(args, job, jobs):
    starts, space, batch, heads, key_heads, key_width, value_width = arguments(args, 7)
    inputs, sizes = arguments(args + 56, 7), (batch, heads, key_heads, key_width, value_width)
    for part in share(batch * heads, job, jobs):
        _run(part, starts, inputs, sizes, space + 4 * (TOKENS + STRIP * key_width) * job)


def gated_delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    return gated_delta_prefill(state, q, k, v, decay, beta, _one_each(len(state)))


@cache
def _one_each(batch: int) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32)


def gated_delta_prefill(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    batch, heads, key_width, value_width = state.shape
    wide = [as_float(x) for x in (q, k, v, decay, beta)]
    out = torch.empty_like(wide[2])
    if out.numel() == 0:
        return like(out, v)
    jobs = threads() if v.shape[0] * heads * key_width * value_width >= STATE_PARALLEL_FROM else 1
    sizes = (
        starts.data_ptr(),
        workspace(4 * (TOKENS + STRIP * key_width) * jobs),
        batch,
        heads,
        q.shape[1],
        key_width,
        value_width,
    )
    _prefill(jobs, *sizes, state.data_ptr(), *[x.data_ptr() for x in wide], out.data_ptr())
    return like(out, v)


@jit
def _conv_row(row0, row1, row2, row3, weight, bias, out, width, channels, plain):
    """Compute one token's outputs from four rows of inputs, oldest first."""
    x0, x1, x2, x3 = floats(row0, channels), floats(row1, channels), floats(row2, channels), floats(row3, channels)
    w0, w1 = floats(weight, channels), floats(weight + 4 * width, channels)
    w2, w3 = floats(weight + 8 * width, channels), floats(weight + 12 * width, channels)
    outs = floats(out, channels)
    for c in range(channels):
        outs[c] = x0[c] * w0[c] + x1[c] * w1[c] + x2[c] * w2[c] + x3[c] * w3[c]
    if bias:
        shift = floats(bias, channels)
        for c in range(channels):
            outs[c] += shift[c]
    if not plain:
        for c in range(channels):
            outs[c] = silu(outs[c])


@jit
def _conv_job(job, x, state, weight, bias, starts, out, batch, width, plain):
    """Convolve one sequence's tokens in CHANNELS channels; no other job touches their state."""
    b, first = job % batch, job // batch * CHANNELS
    channels = min(CHANNELS, width - first)
    places = int32s(starts, batch + 1)
    start, n = np.int64(places[b]), np.int64(places[b + 1]) - np.int64(places[b])
    row, before = 4 * width, state + 4 * (3 * b * width + first)
    inputs, outs = x + start * row + 4 * first, out + start * row + 4 * first
    taps, shift = weight + 4 * first, bias + 4 * first if bias else bias
    for t in range(n):
        row0 = inputs + (t - 3) * row if t >= 3 else before + t * row
        row1 = inputs + (t - 2) * row if t >= 2 else before + (t + 1) * row
        row2 = inputs + (t - 1) * row if t >= 1 else before + (t + 2) * row
        _conv_row(row0, row1, row2, inputs + t * row, taps, shift, outs + t * row, width, channels, plain)
    if n > 0:
        for i in range(3):
            # with n < 3 the source is a later row of the state itself, not yet overwritten
            at = inputs + (n + i - 3) * row if n + i >= 3 else before + (n + i) * row
            source, target = floats(at, channels), floats(before + i * row, channels)
            for c in range(channels):
                target[c] = source[c]


@Kernel
def _conv(args, job, jobs):
    parts, x, state, weight, bias, starts, out, batch, width, plain = arguments(args, 10)
    for part in share(parts, job, jobs):
        _conv_job(part, x, state, weight, bias, starts, out, batch, width, plain)


def short_conv(
    x: Tensor, state: Tensor, weight: Tensor, starts: Tensor, bias: Tensor | None = None, plain: bool = False
) -> Tensor:
    inputs, before, taps = as_float(x), as_float(state), as_float(weight)
    shift = None if bias is None else as_float(bias)
    batch, width = state.shape[0], x.shape[1]
    out = torch.empty_like(inputs)
    jobs = threads() if x.numel() >= PARALLEL_FROM else 1
    addresses = (
        *(t.data_ptr() for t in (inputs, before, taps)),
        0 if shift is None else shift.data_ptr(),
        starts.data_ptr(),
        out.data_ptr(),
    )
    _conv(jobs, batch * -(-width // CHANNELS), *addresses, batch, width, int(plain))
    if before is not state:
        state.copy_(before)
    return like(out, x)


@jit
def _gates_row(a_at, b_at, rate_at, bias_at, decay_at, beta_at, heads):
    a, b, rate, bias = floats(a_at, heads), floats(b_at, heads), floats(rate_at, heads), floats(bias_at, heads)
    decay, beta = floats(decay_at, heads), floats(beta_at, heads)
    for h in range(heads):
        decay[h] = exp(-exp(rate[h]) * softplus(a[h] + bias[h]))
    for h in range(heads):
        beta[h] = sigmoid(b[h])


@Kernel
def _gates(args, job, jobs):
    tokens, a, b, rate, bias, decay, beta, heads = arguments(args, 8)
    for t in share(tokens, job, jobs):
        at = 4 * t * heads
        _gates_row(a + at, b + at, rate, bias, decay + at, beta + at, heads)


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    wide = as_float(a), as_float(b), as_float(a_log), as_float(dt_bias)
    decay, beta = torch.empty_like(wide[0]), torch.empty_like(wide[0])
    tokens, heads = a.shape
    jobs = threads() if a.numel() >= PARALLEL_FROM else 1
    _gates(jobs, tokens, *[x.data_ptr() for x in wide], decay.data_ptr(), beta.data_ptr(), heads)
    return decay, beta


def delta_layer_step(
    qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, conv: Tensor, state: Tensor, taps: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm: Tensor, starts: Tensor, unit_eps: float, eps: float,
) -> Tensor:  # fmt: skip
    return layer_step_by(LAYER_STEPS, qkv, z, a, b, conv, state, taps, a_log, dt_bias, norm, starts, unit_eps, eps)
