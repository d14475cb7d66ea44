"""Softplus in float32."""

import numpy as np

from auraflux.ops.simd.jit import jit
from auraflux.ops.simd.math import exp

ZERO, TWO = np.float32(0), np.float32(2)


@jit
def softplus(x):
    """Return log(1 + e**x) = max(x, 0) + log(1 + u), u = e**-|x| in (0, 1], with log(1 + u) = 2 artanh(u / (2 + u))."""
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
