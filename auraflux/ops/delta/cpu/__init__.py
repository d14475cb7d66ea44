"""The delta layer on CPU.

A single token is bound by memory: its state is read and written once, a strip of columns at a time. From SHORT tokens on chunks
(README.md) win: they touch the state once for 16 tokens, and arithmetic is the limit. Per token and head of 128 x 128, measured
on two x86 AVX-512 cores, one at work: 3.2 microseconds one by one, 0.8 in chunks, at 0.8 of what that core can multiply.
"""

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.delta.cpu.chunks import run_chunks, scratch_floats
from auraflux.ops.delta.cpu.decode_strips import LANES, STRIP, step_strip, step_vector
from auraflux.ops.delta.reference import LAYER_STEPS, layer_step_by
from auraflux.ops.simd.jit import Kernel, arguments, as_float, floats, int32s, jit, like, share, threads, workspace
from auraflux.ops.simd.math import exp, sigmoid, silu

# below these, waking the threads costs more than the work
STATE_PARALLEL_FROM = 1 << 16  # elements of state, times tokens
PARALLEL_FROM = 1 << 13  # elements that need an exponential
GROUP = 1 << 17  # elements of state that one thread takes through a sequence together
SHORT = 7  # tokens; fewer go one by one
CHANNELS = 1024  # of the convolution: 4 KiB of each of four rows, well inside the first cache

ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)


@jit
def _step_head(state, q, k, v, decay, beta, out, key_width, value_width):
    keys, queries = floats(k, key_width), floats(q, key_width)
    overlap = ZERO
    for c in range(key_width):
        overlap += keys[c] * queries[c]
    strips, whole = value_width - value_width % STRIP, value_width - value_width % LANES
    row, head = 4 * value_width, 4 * value_width * key_width
    for column in range(0, strips, STRIP):
        here = 4 * column
        ahead = 4 * STRIP if column + 2 * STRIP <= value_width else head - here
        step_strip(state + here, q, k, v + here, decay, beta, overlap, out + here, key_width, row, ahead)
    for column in range(strips, whole, LANES):
        here = 4 * column
        step_vector(state + here, q, k, v + here, decay, beta, overlap, out + here, key_width, row, 4 * LANES)
    memory, values, outs = floats(state, key_width * value_width), floats(v, value_width), floats(out, value_width)
    for j in range(whole, value_width):
        at_key, at_query = ZERO, ZERO
        for c in range(key_width):
            at_key += keys[c] * memory[c * value_width + j]
            at_query += queries[c] * memory[c * value_width + j]
        change = (values[j] - decay * at_key) * beta
        outs[j] = decay * at_query + overlap * change
        for c in range(key_width):
            memory[c * value_width + j] = decay * memory[c * value_width + j] + keys[c] * change


@jit
def _step_job(job, state, q, k, v, decay, beta, out, shared, key_width, value_width):
    g, strength = floats(decay + 4 * job, 1)[0], floats(beta + 4 * job, 1)[0]
    key, row = 4 * key_width * (job // shared), 4 * value_width * job
    _step_head(state + row * key_width, q + key, k + key, v + row, g, strength, out + row, key_width, value_width)


@Kernel
def _step(args, job, jobs):
    heads, state, q, k, v, decay, beta, out, shared, key_width, value_width = arguments(args, 11)
    for head in share(heads, job, jobs):
        _step_job(head, state, q, k, v, decay, beta, out, shared, key_width, value_width)


def gated_delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    batch, heads, key_width, value_width = state.shape
    q, k, values, decay, beta = as_float(q), as_float(k), as_float(v), as_float(decay), as_float(beta)
    out = torch.empty_like(values)
    jobs = threads() if state.numel() >= STATE_PARALLEL_FROM else 1
    addresses = state.data_ptr(), q.data_ptr(), k.data_ptr(), values.data_ptr(), decay.data_ptr(), beta.data_ptr()
    _step(jobs, batch * heads, *addresses, out.data_ptr(), heads // q.shape[1], key_width, value_width)
    return like(out, v)


@jit
def _run_steps(inputs, n, first, count, sizes):
    state, q, k, v, decay, beta, out = inputs
    _, heads, key_heads, key_width, value_width = sizes
    for head in range(first, first + count):
        memory = state + 4 * head * key_width * value_width
        for t in range(n):
            gate, key = 4 * (t * heads + head), 4 * key_width * (t * key_heads + head // (heads // key_heads))
            row = value_width * gate
            g, strength = floats(decay + gate, 1)[0], floats(beta + gate, 1)[0]
            _step_head(memory, q + key, k + key, v + row, g, strength, out + row, key_width, value_width)


@jit
def _prefill_job(job, inputs, starts, count, sizes, scratch):
    # sequences vary fastest: threads take contiguous runs of jobs, and lengths differ where heads do not
    batch, heads, key_heads, key_width, value_width = sizes
    b, first = job % batch, job // batch * count
    count = min(count, heads - first)
    places = int32s(starts, batch + 1)
    start, n = np.int64(places[b]), np.int64(places[b + 1]) - np.int64(places[b])
    if n == 0:
        return
    state, q, k, v, decay, beta, out = inputs
    keys, gates = 4 * start * key_heads * key_width, 4 * start * heads
    values = gates * value_width
    memory = state + 4 * b * heads * key_width * value_width
    mine = memory, q + keys, k + keys, v + values, decay + gates, beta + gates, out + values
    if n < SHORT:
        _run_steps(mine, n, first, count, sizes)
    else:
        run_chunks(mine, n, first, count, sizes, scratch)


@Kernel
def _prefill(args, job, jobs):
    parts, starts, count, scratch, size, batch, heads, key_heads, key_width, value_width = arguments(args, 10)
    inputs, sizes = arguments(args + 80, 7), (batch, heads, key_heads, key_width, value_width)
    for part in share(parts, job, jobs):
        _prefill_job(part, inputs, starts, count, sizes, scratch + 4 * size * job)


def gated_delta_prefill(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    batch, heads, key_width, value_width = state.shape
    key_heads, jobs = q.shape[1], threads()
    wide = [as_float(x) for x in (q, k, v, decay, beta)]
    out = torch.empty_like(wide[2])
    if out.numel() == 0:
        return like(out, v)
    # heads side by side, whose inputs lie together, as many as the second cache holds and the threads leave to one
    groups = max(-(-heads * key_width * value_width // GROUP), -(-jobs // batch))
    count = -(-heads // groups)
    size = scratch_floats(key_width, value_width, count)
    if v.shape[0] * heads * key_width * value_width < STATE_PARALLEL_FROM:
        jobs = 1
    plan = batch * -(-heads // count), starts.data_ptr(), count, workspace(4 * jobs * size), size
    inputs = state.data_ptr(), *[x.data_ptr() for x in wide], out.data_ptr()
    _prefill(jobs, *plan, batch, heads, key_heads, key_width, value_width, *inputs)
    return like(out, v)


@jit
def _conv_row(row0, row1, row2, row3, weight, out, width, channels):
    """One token's outputs from four rows of inputs, oldest first."""
    x0, x1, x2, x3 = floats(row0, channels), floats(row1, channels), floats(row2, channels), floats(row3, channels)
    w0, w1 = floats(weight, channels), floats(weight + 4 * width, channels)
    w2, w3 = floats(weight + 8 * width, channels), floats(weight + 12 * width, channels)
    outs = floats(out, channels)
    for c in range(channels):
        outs[c] = x0[c] * w0[c] + x1[c] * w1[c] + x2[c] * w2[c] + x3[c] * w3[c]
    for c in range(channels):
        outs[c] = silu(outs[c])


@jit
def _conv_job(job, x, state, weight, starts, out, batch, width):
    """One sequence's tokens in CHANNELS channels; nobody else touches their state."""
    b, first = job % batch, job // batch * CHANNELS
    channels = min(CHANNELS, width - first)
    places = int32s(starts, batch + 1)
    start, n = np.int64(places[b]), np.int64(places[b + 1]) - np.int64(places[b])
    row, before = 4 * width, state + 4 * (3 * b * width + first)
    inputs, outs = x + start * row + 4 * first, out + start * row + 4 * first
    for t in range(n):
        row0 = inputs + (t - 3) * row if t >= 3 else before + t * row
        row1 = inputs + (t - 2) * row if t >= 2 else before + (t + 1) * row
        row2 = inputs + (t - 1) * row if t >= 1 else before + (t + 2) * row
        _conv_row(row0, row1, row2, inputs + t * row, weight + 4 * first, outs + t * row, width, channels)
    if n > 0:
        for i in range(3):
            # with n < 3 the source is a later row of the state itself, not yet overwritten
            at = inputs + (n + i - 3) * row if n + i >= 3 else before + (n + i) * row
            source, target = floats(at, channels), floats(before + i * row, channels)
            for c in range(channels):
                target[c] = source[c]


@Kernel
def _conv(args, job, jobs):
    parts, x, state, weight, starts, out, batch, width = arguments(args, 8)
    for part in share(parts, job, jobs):
        _conv_job(part, x, state, weight, starts, out, batch, width)


def short_conv(x: Tensor, state: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    inputs, before, taps = as_float(x), as_float(state), as_float(weight)
    batch, width = state.shape[0], x.shape[1]
    out = torch.empty_like(inputs)
    jobs = threads() if x.numel() >= PARALLEL_FROM else 1
    addresses = inputs.data_ptr(), before.data_ptr(), taps.data_ptr(), starts.data_ptr(), out.data_ptr()
    _conv(jobs, batch * -(-width // CHANNELS), *addresses, batch, width)
    if before is not state:
        state.copy_(before)
    return like(out, x)


@jit
def _softplus(x):
    """log(1 + e**x) as max(x, 0) + log(1 + u) with u = e**-|x| in (0, 1], and log(1 + u) = 2 artanh(u / (2 + u))."""
    u = exp(-abs(x))
    s = u / (TWO + u)
    w = s * s
    series = w * np.float32(1 / 15) + np.float32(1 / 13)
    series = series * w + np.float32(1 / 11)
    series = series * w + np.float32(1 / 9)
    series = series * w + np.float32(1 / 7)
    series = series * w + np.float32(1 / 5)
    series = series * w + np.float32(1 / 3)
    return max(x, ZERO) + TWO * (s + s * w * series)


@jit
def _gates_row(a_at, b_at, rate_at, bias_at, decay_at, beta_at, heads):
    a, b, rate, bias = floats(a_at, heads), floats(b_at, heads), floats(rate_at, heads), floats(bias_at, heads)
    decay, beta = floats(decay_at, heads), floats(beta_at, heads)
    for h in range(heads):
        decay[h] = exp(-exp(rate[h]) * _softplus(a[h] + bias[h]))
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
