"""Mamba-2's rule on CPU, token by token: a strip of state columns runs through all tokens, its sums in registers."""

import numpy as np
import torch
from numba.core import cgutils
from torch import Tensor

from auraflux.ops.delta.cpu.strips import LANES, STRIP, STRIP_VECTORS
from auraflux.ops.delta.reference_scan import groups_of
from auraflux.ops.simd.jit import Kernel, arguments, as_float, floats, int32s, jit, like, share, threads
from auraflux.ops.simd.math import exp, softplus
from auraflux.ops.simd.vectors import F32, at, fma, kernel, load, splat, spread, store, variable, vector

# below these, waking the threads costs more than the work
STATE_PARALLEL_FROM = 1 << 16  # elements of state, times tokens
PARALLEL_FROM = 1 << 13  # elements that need an exponential


@kernel(2)
def _scan(
    b, vectors, lanes, state, value, key, query, decay, step, skip, out, n, depth, row_bytes, token_step, out_step, gate_step
):
    """Run `vectors` vectors of `lanes` columns through n tokens; steps are byte strides between tokens."""
    kind, size = vector(F32, lanes), 4 * lanes
    scaled, sums = ([variable(b, splat(kind, 0.0)) for _ in range(vectors)] for _ in range(2))
    skip_factor = spread(b, load(b, skip, 0, F32), lanes)

    def one(address, index):
        return spread(b, load(b, address, b.mul(index, at(4)), F32), lanes)

    with cgutils.for_range(b, n) as tokens:
        token, gate = b.mul(tokens.index, token_step), b.mul(tokens.index, gate_step)
        decay_now, strength = (spread(b, load(b, base, gate, F32), lanes) for base in (decay, step))
        keys, queries = b.add(key, token), b.add(query, token)
        for i in range(vectors):
            own = load(b, value, b.add(token, at(i * size)), kind)
            b.store(b.fmul(own, strength), scaled[i])
            b.store(b.fmul(own, skip_factor), sums[i])
        with cgutils.for_range(b, depth) as rows:
            row = b.add(state, b.mul(rows.index, row_bytes))
            k, q = one(keys, rows.index), one(queries, rows.index)
            for i in range(vectors):
                written = fma(b, k, b.load(scaled[i]), b.fmul(load(b, row, i * size, kind), decay_now))
                store(b, written, row, i * size)
                b.store(fma(b, q, written, b.load(sums[i])), sums[i])
        for i in range(vectors):
            store(b, b.load(sums[i]), out, b.add(b.mul(tokens.index, out_step), at(i * size)))


@jit
def _head(state, inputs, out, n, key_width, value_width, steps):
    """Run one head's state through n tokens; inputs are values, keys, queries, decays, steps and skip factors."""
    value, key, query, decay, step, skip = inputs
    strips, vectorized, row = value_width - value_width % STRIP, value_width - value_width % LANES, 4 * value_width
    for column in range(0, strips, STRIP):
        here = 4 * column
        mine = value + here, key, query, decay, step, skip
        _scan((STRIP_VECTORS, LANES, state + here, mine, out + here, n, key_width, row, steps))
    for column in range(strips, vectorized, LANES):
        here = 4 * column
        mine = value + here, key, query, decay, step, skip
        _scan((1, LANES, state + here, mine, out + here, n, key_width, row, steps))
    for column in range(vectorized, value_width):
        here = 4 * column
        mine = value + here, key, query, decay, step, skip
        _scan((1, 1, state + here, mine, out + here, n, key_width, row, steps))


@Kernel
def _run(args, job, jobs):
    starts, batch, heads, groups, key_width, value_width, state, xbc, decay, step, skip, out = arguments(args, 12)
    places, values, keys = int32s(starts, batch + 1), heads * value_width, groups * key_width
    steps = 4 * (values + 2 * keys), 4 * values, 4 * heads
    # sequences vary fastest: threads take contiguous runs of jobs, and lengths differ where heads do not
    for part in share(batch * heads, job, jobs):
        b, head = part % batch, part // batch
        first, n = np.int64(places[b]), np.int64(places[b + 1]) - np.int64(places[b])
        row, gate = xbc + first * steps[0], first * steps[2] + 4 * head
        key = row + 4 * (values + head // (heads // groups) * key_width)
        inputs = row + 4 * head * value_width, key, key + 4 * keys, decay + gate, step + gate, skip + 4 * head
        memory = state + 4 * (b * heads + head) * key_width * value_width
        _head(memory, inputs, out + gate * value_width, n, key_width, value_width, steps)


def selective_scan(state: Tensor, xbc: Tensor, decay: Tensor, step: Tensor, skip: Tensor, starts: Tensor) -> Tensor:
    batch, heads, key_width, value_width = state.shape
    wide = [as_float(x) for x in (xbc, decay, step, skip)]
    out = torch.empty(len(xbc), heads * value_width)
    if out.numel() == 0:
        return out.to(xbc.dtype)
    jobs = threads() if out.numel() * key_width >= STATE_PARALLEL_FROM else 1
    sizes = starts.data_ptr(), batch, heads, groups_of(state, xbc.shape[1]), key_width, value_width
    addresses = state.data_ptr(), *(x.data_ptr() for x in wide), out.data_ptr()
    _run(jobs, *sizes, *addresses)
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
