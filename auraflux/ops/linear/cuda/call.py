"""Arguments and results of one product on CUDA: tokens times weights of one width."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from auraflux.ops.linear.reference import Weight
from auraflux.quant import QTensor

DENSE_ROWS = 4096  # rows up to which a dense weight is small; above, cuBLAS is as fast for one token


class Norm(NamedTuple):
    """RMS norm applied to x + delta before the product.

    delta   [T, K]  or None
    weight  [K]
    """

    delta: Tensor | None
    weight: Tensor
    eps: float


class FusedNorm(NamedTuple):
    """Norm as kernels take it, which add and normalise the residual stream before they multiply.

    delta   [T, K]  added to x, or None
    weight  [K]     float32
    total   [T, K]  buffer for the sum, or None
    """

    delta: Tensor | None
    weight: Tensor
    total: Tensor | None
    eps: float


class NoNorm(NamedTuple):
    """Stand-in for `FusedNorm` without a norm: Triton 3.6 cannot compare a tuple argument with None."""

    delta: None = None
    weight: None = None
    total: None = None
    eps: None = None


NO_NORM = NoNorm()


class Call:
    """Tokens times weights.

    x             [T, K]
    weights       [N, K] each
    biases        one for each weight, or None
    gated         the result is silu(first product) * second
    norm          applied to x first
    needs_normed  the normalised activations are a result, too

    quantized     the weights if all are quantized in one format, otherwise none
    dense         the weights if all are dense, small and of one dtype, otherwise none
    """

    __slots__ = ("biased", "biases", "dense", "gated", "needs_normed", "norm", "quantized", "tokens", "weights", "width", "x")

    def __init__(
        self,
        x: Tensor,
        weights: Sequence[Weight],
        biases: Sequence[Tensor | None] | None = None,
        *,
        gated: bool = False,
        norm: Norm | None = None,
        needs_normed: bool = False,
    ):
        self.x, self.weights, self.gated, self.norm, self.needs_normed = x, list(weights), gated, norm, needs_normed
        self.tokens, self.width = x.shape
        self.biases: list[Tensor | None] = [None] * len(self.weights) if biases is None else list(biases)
        self.biased = any(bias is not None for bias in self.biases)
        self.quantized, self.dense = _of_one_format(self.weights), _small_dense(self.weights)

    @property
    def products_only(self) -> bool:
        """True if the call has neither norm nor gate."""
        return not self.gated and self.norm is None

    def outs(self) -> list[Tensor]:
        """Allocate the results."""
        weights = self.weights[:1] if self.gated else self.weights
        return [self.x.new_empty(self.tokens, weight.shape[0]) for weight in weights]


class Products(NamedTuple):
    """Results of a call.

    outs    [T, N] of each weight, or of gate and up together
    total   [T, K]  x + delta, where there is a norm
    normed  [T, K]  normalised activations, where requested
    """

    outs: list[Tensor]
    total: Tensor | None = None
    normed: Tensor | None = None


def _of_one_format(weights: Sequence[Weight]) -> list[QTensor]:
    held = [weight for weight in weights if isinstance(weight, QTensor)]
    return held if len(held) == len(weights) and len({weight.format for weight in held}) == 1 else []


def _small_dense(weights: Sequence[Weight]) -> list[Tensor]:
    found = [weight for weight in weights if isinstance(weight, Tensor) and 0 < weight.shape[0] <= DENSE_ROWS]
    return found if len(found) == len(weights) and len({weight.dtype for weight in found}) == 1 else []
