"""What the ops on weights ask of the kernels: tokens times weights of one width."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from auraflux.ops.linear.reference import Weight
from auraflux.quant import QTensor

DENSE_ROWS = 4096  # of dense weights; for more, cuBLAS is as good at one token


class Norm(NamedTuple):
    """x is first added to and normalised.

    delta   [T, K]  what is added, or None
    weight  [K]
    """

    delta: Tensor | None
    weight: Tensor
    eps: float


class Normed(NamedTuple):
    """The stream that a kernel adds to and normalises before it multiplies.

    delta   [T, K]  what is added, or None
    weight  [K]     float32
    total   [T, K]  where the sum goes, or None
    """

    delta: Tensor | None
    weight: Tensor
    total: Tensor | None
    eps: float


class Plain(NamedTuple):
    """Tokens as they are, in the place of `Normed`: Triton 3.6 cannot ask whether a tuple is None where one of it is."""

    delta: None = None
    weight: None = None
    total: None = None
    eps: None = None


PLAIN = Plain()


class Call:
    """Tokens times weights.

    x        [T, K]
    weights  [N, K] each
    biases   one for each weight, None where it has none
    gated    the result is silu(first product) * second
    norm     what x goes through first
    scored   what is normalised is a result, too

    coded    the weights where all are quantized, and alike; else none
    dense    the weights where all are dense, small and of one dtype; else none
    """

    __slots__ = ("biased", "biases", "coded", "dense", "gated", "norm", "scored", "tokens", "weights", "width", "x")

    def __init__(
        self,
        x: Tensor,
        weights: Sequence[Weight],
        biases: Sequence[Tensor | None] | None = None,
        *,
        gated: bool = False,
        norm: Norm | None = None,
        scored: bool = False,
    ):
        self.x, self.weights, self.gated, self.norm, self.scored = x, list(weights), gated, norm, scored
        self.tokens, self.width = x.shape
        self.biases: list[Tensor | None] = [None] * len(self.weights) if biases is None else list(biases)
        self.biased = any(bias is not None for bias in self.biases)
        self.coded, self.dense = _alike(self.weights), _small(self.weights)

    @property
    def plain(self) -> bool:
        """Whether it is products and nothing else."""
        return not self.gated and self.norm is None

    def outs(self) -> list[Tensor]:
        """Where results go."""
        weights = self.weights[:1] if self.gated else self.weights
        return [self.x.new_empty(self.tokens, weight.shape[0]) for weight in weights]


class Made(NamedTuple):
    """Results of a call.

    outs    [T, N] of each weight, or of both where they are gated
    total   [T, K]  x with what was added to it, where there is a norm
    normed  [T, K]  what was multiplied, where that is wanted
    """

    outs: list[Tensor]
    total: Tensor | None = None
    normed: Tensor | None = None


def _alike(weights: Sequence[Weight]) -> list[QTensor]:
    held = [weight for weight in weights if isinstance(weight, QTensor)]
    return held if len(held) == len(weights) and len({weight.format for weight in held}) == 1 else []


def _small(weights: Sequence[Weight]) -> list[Tensor]:
    found = [weight for weight in weights if isinstance(weight, Tensor) and 0 < weight.shape[0] <= DENSE_ROWS]
    return found if len(found) == len(weights) and len({weight.dtype for weight in found}) == 1 else []
