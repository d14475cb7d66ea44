"""Online softmax of attention in float32: soft-capped scores, and the merge of split-K partial results."""

import numpy as np

from auraflux.ops.simd.jit import floats, jit
from auraflux.ops.simd.math import exp

ONE, TWO, ZERO = np.float32(1), np.float32(2), np.float32(0)
NOTHING = np.float32(-np.inf)
SMALL = np.float32(0.625)
T0, T1, T2 = np.float32(-5.70498872745e-3), np.float32(2.06390887954e-2), np.float32(-5.37397155531e-2)
T3, T4 = np.float32(1.33314422036e-1), np.float32(-3.33332819422e-1)


@jit
def softcapped(score, cap):
    """Return cap * tanh(score / cap), by a polynomial near 0 where the exponential form cancels."""
    x = score / cap
    square = x * x
    near = x + x * square * ((((T0 * square + T1) * square + T2) * square + T3) * square + T4)
    far = ONE - TWO / (ONE + exp(TWO * x))
    return cap * (near if abs(x) < SMALL else far)


@jit
def fill(address, count, value):
    target = floats(address, count)
    for i in range(count):
        target[i] = value


@jit
def divide(address, count, value):
    target = floats(address, count)
    for i in range(count):
        target[i] /= value


@jit
def join_row(o, o_step, m, l, step, blocks, width, sink, out_at):  # noqa: E741
    """Merge a row's partial results and an attention sink; return the largest score, the sum of weights and whether any exist.

    o, o_step     partial outputs and the bytes between them
    m, l, step    partial maxima and sums, and the bytes between them
    sink          its score; -inf for none
    """
    out = floats(out_at, width)
    fill(out_at, width, ZERO)
    peak, live = sink, sink != NOTHING
    for i in range(blocks):
        if floats(l + i * step, 1)[0] != ZERO:
            top = floats(m + i * step, 1)[0]
            live = True
            # propagate NaN: no later comparison replaces it
            peak = top if top > peak or top != top else peak
    if not live:
        return NOTHING, ZERO, False
    base = peak if peak != NOTHING else ZERO
    total = exp(sink - base)
    for i in range(blocks):
        share = floats(l + i * step, 1)[0]
        if share != ZERO:
            weight = exp(floats(m + i * step, 1)[0] - base)
            total += weight * share
            part = floats(o + i * o_step, width)
            for d in range(width):
                out[d] += weight * part[d]
    return peak, total, True


@jit
def merge_row(o, o_step, m, l, step, blocks, width, sink, out_at):  # noqa: E741
    """Merge a row's partial results and an attention sink into the normalized output; zeros without any score."""
    _, total, live = join_row(o, o_step, m, l, step, blocks, width, sink, out_at)
    if live:
        divide(out_at, width, total)
