"""Elementary functions in Triton."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in float32; far out it is 0 or 1, never NaN."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """x / (1 + exp(-x)) in float32."""
    return x / (1.0 + tl.exp(-x))
