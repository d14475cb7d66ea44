"""Mamba-2's rule, token by token: the state of a head is read and written once."""

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.delta.cpu.softplus import softplus
from auraflux.ops.delta.reference_scan import groups_of
from auraflux.ops.simd.jit import Kernel, arguments, as_float, floats, int32s, jit, like, share, threads, workspace
from auraflux.ops.simd.math import exp

# below these, waking the threads costs more than the work
STATE_PARALLEL_FROM = 1 << 16  # elements of state, times tokens
PARALLEL_FROM = 1 << 13  # elements that need an exponential


@jit
def _step(state, inputs, gates, out_at, scaled_at, key_width, value_width):
    """Take one head's state through one token."""
    value_at, key_at, query_at = inputs
    fade, step, skip = gates
    value, key, query = floats(value_at, value_width), floats(key_at, key_width), floats(query_at, key_width)
    out, scaled = floats(out_at, value_width), floats(scaled_at, value_width)
    for j in range(value_width):
        scaled[j] = value[j] * step
        out[j] = value[j] * skip
    for i in range(key_width):
        row, k, q = floats(state + 4 * i * value_width, value_width), key[i], query[i]
        for j in range(value_width):
            written = row[j] * fade + k * scaled[j]
            row[j] = written
            out[j] += q * written


@Kernel
def _run(args, job, jobs):
    starts, batch, heads, groups, key_width, value_width, state, xbc, decay_at, step_at, skip_at, out, space = arguments(
        args, 13
    )
    places, scaled = int32s(starts, batch + 1), space + 4 * value_width * job
    values, keys = heads * value_width, groups * key_width
    channels = values + 2 * keys
    skips = floats(skip_at, heads)
    # sequences vary fastest: threads take contiguous runs of jobs, and lengths differ where heads do not
    for part in share(batch * heads, job, jobs):
        b, head = part % batch, part // batch
        memory = state + 4 * (b * heads + head) * key_width * value_width
        key = 4 * (values + head // (heads // groups) * key_width)
        for t in range(places[b], places[b + 1]):
            token, gate = np.int64(t), 4 * (np.int64(t) * heads + head)
            row = xbc + 4 * token * channels
            inputs = row + 4 * head * value_width, row + key, row + key + 4 * keys
            gates = floats(decay_at + gate, 1)[0], floats(step_at + gate, 1)[0], skips[head]
            _step(memory, inputs, gates, out + gate * value_width, scaled, key_width, value_width)


def selective_scan(state: Tensor, xbc: Tensor, decay: Tensor, step: Tensor, skip: Tensor, starts: Tensor) -> Tensor:
    batch, heads, key_width, value_width = state.shape
    wide = [as_float(x) for x in (xbc, decay, step, skip)]
    out = torch.empty(len(xbc), heads * value_width)
    if out.numel() == 0:
        return out.to(xbc.dtype)
    jobs = threads() if out.numel() * key_width >= STATE_PARALLEL_FROM else 1
    sizes = starts.data_ptr(), batch, heads, groups_of(state, xbc.shape[1]), key_width, value_width
    addresses = state.data_ptr(), *(x.data_ptr() for x in wide), out.data_ptr()
    _run(jobs, *sizes, *addresses, workspace(4 * value_width * jobs))
    return like(out, xbc)


@jit
def _gates_row(dt_at, rate_at, bias_at, decay_at, step_at, heads):
    dt, rate, bias = floats(dt_at, heads), floats(rate_at, heads), floats(bias_at, heads)
    decay, step = floats(decay_at, heads), floats(step_at, heads)
    for h in range(heads):
        step[h] = softplus(dt[h] + bias[h])
    for h in range(heads):
        decay[h] = exp(-exp(rate[h]) * step[h])


@Kernel
def _gates(args, job, jobs):
    tokens, heads, dt, rate, bias, decay, step = arguments(args, 7)
    for t in share(tokens, job, jobs):
        at = 4 * t * heads
        _gates_row(dt + at, rate, bias, decay + at, step + at, heads)


def scan_gates(dt: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    wide = [as_float(x) for x in (dt, a_log, dt_bias)]
    decay, step = torch.empty_like(wide[0]), torch.empty_like(wide[0])
    jobs = threads() if dt.numel() >= PARALLEL_FROM else 1
    _gates(jobs, *dt.shape, *(x.data_ptr() for x in wide), decay.data_ptr(), step.data_ptr())
    return decay, step
