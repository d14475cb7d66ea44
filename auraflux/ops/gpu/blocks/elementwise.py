"""Elementary functions in Triton."""

import triton
import triton.language as tl

GELU_SLOPE = tl.constexpr(2 * (2 / 3.141592653589793) ** 0.5)
GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) in float32; 0 or 1 for large |x|, never NaN."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """Return x / (1 + exp(-x)) in float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) in float32."""
    # dividing by the rounded (1 + e) - 1 preserves the digits of a small e
    e = tl.exp(-tl.abs(x))
    sum = 1.0 + e
    return tl.maximum(x, 0.0) + tl.where(sum == 1.0, e, tl.log(sum) * (e / tl.where(sum == 1.0, 1.0, sum - 1.0)))


@triton.jit
def gelu(x):
    """Return the tanh form of GELU, by (1 + tanh(u)) / 2 = sigmoid(2 u)."""
    return x * sigmoid(GELU_SLOPE * (x + GELU_CUBE * x * x * x))
