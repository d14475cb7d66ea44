"""Kimi Linear's delta rule on CPU, token by token: the state of a head is read and written twice."""

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.simd.jit import Kernel, arguments, as_float, floats, int32s, jit, like, real, share, threads, workspace
from auraflux.ops.simd.math import exp, sigmoid, softplus

# below these, waking the threads costs more than the work
STATE_PARALLEL_FROM = 1 << 16  # elements of state, times tokens
PARALLEL_FROM = 1 << 13  # elements that need an exponential
ZERO = np.float32(0)


@jit
def _step(state, inputs, out_at, sums_at, key_width, value_width):
    """Run one head's state through one token."""
    q_at, k_at, v_at, decay_at, beta_at = inputs
    q, k, decay = floats(q_at, key_width), floats(k_at, key_width), floats(decay_at, key_width)
    v, out, sums = floats(v_at, value_width), floats(out_at, value_width), floats(sums_at, value_width)
    beta = floats(beta_at, 1)[0]
    for j in range(value_width):
        sums[j] = ZERO
    for i in range(key_width):
        row, decay_i, key = floats(state + 4 * i * value_width, value_width), decay[i], k[i]
        for j in range(value_width):
            decayed = row[j] * decay_i
            row[j] = decayed
            sums[j] += key * decayed
    for j in range(value_width):
        sums[j] = (v[j] - sums[j]) * beta
        out[j] = ZERO
    for i in range(key_width):
        row, query, key = floats(state + 4 * i * value_width, value_width), q[i], k[i]
        for j in range(value_width):
            written = row[j] + key * sums[j]
            row[j] = written
            out[j] += query * written


@Kernel
def _run(args, job, jobs):
    starts, batch, heads, key_width, value_width, state, q, k, v, decay, beta, out, space = arguments(args, 13)
    places, sums = int32s(starts, batch + 1), space + 4 * value_width * job
    # sequences vary fastest: threads take contiguous runs of jobs, and lengths differ where heads do not
    for part in share(batch * heads, job, jobs):
        b, head = part % batch, part // batch
        memory = state + 4 * (b * heads + head) * key_width * value_width
        for t in range(places[b], places[b + 1]):
            gate = 4 * (np.int64(t) * heads + head)
            key, value = gate * key_width, gate * value_width
            inputs = q + key, k + key, v + value, decay + key, beta + gate
            _step(memory, inputs, out + value, sums, key_width, value_width)


def channel_delta(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    batch, heads, key_width, value_width = state.shape
    wide = [as_float(x) for x in (q, k, v, decay, beta)]
    out = torch.empty_like(wide[2])
    if out.numel() == 0:
        return like(out, v)
    jobs = threads() if v.shape[0] * heads * key_width * value_width >= STATE_PARALLEL_FROM else 1
    sizes = starts.data_ptr(), batch, heads, key_width, value_width
    addresses = state.data_ptr(), *(x.data_ptr() for x in wide), out.data_ptr()
    _run(jobs, *sizes, *addresses, workspace(4 * value_width * jobs))
    return like(out, v)


@jit
def _decays(f_at, bias_at, rate, floor, out_at, width):
    f, bias, out = floats(f_at, width), floats(bias_at, width), floats(out_at, width)
    if floor < ZERO:
        for i in range(width):
            out[i] = exp(floor * sigmoid(rate * (f[i] + bias[i])))
    else:
        for i in range(width):
            out[i] = exp(-rate * softplus(f[i] + bias[i]))


@Kernel
def _gates(args, job, jobs):
    tokens, heads, width, f, b_at, a_log, bias, decay, beta_at, floor = arguments(args, 10)
    rates, least = floats(a_log, heads), real(floor)
    for row in share(tokens * heads, job, jobs):
        head = row % heads
        _decays(f + 4 * row * width, bias + 4 * head * width, exp(rates[head]), least, decay + 4 * row * width, width)
        floats(beta_at + 4 * row, 1)[0] = sigmoid(floats(b_at + 4 * row, 1)[0])


def channel_gates(f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, floor: float | None = None) -> tuple[Tensor, Tensor]:
    wide = [as_float(x) for x in (f, b, a_log, dt_bias)]
    decay, beta = torch.empty_like(wide[0]), torch.empty_like(wide[1])
    jobs = threads() if f.numel() >= PARALLEL_FROM else 1
    _gates(jobs, *f.shape, *(x.data_ptr() for x in wide), decay.data_ptr(), beta.data_ptr(), float(floor or 0.0))
    return decay, beta
