"""What the ops on experts ask of the kernels. A pair is a token and one of the experts that it goes to."""

from typing import NamedTuple

from torch import Tensor

from auraflux.ops.moe.cuda.stacks import NOTHING, Added
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.routing import Routing


class Choice(NamedTuple):
    """`route`: what it is called with."""

    logits: Tensor
    routing: Routing
    bias: Tensor | None


class Pairs:
    """Tokens through the experts that are given for them.

    x        [T, H]
    ids      [T, k]
    weights  [T, k]     of the pairs' results in a token's sum; None where there is no sum
    parts    [T, k, H]  where the results of pairs are wanted; None where their sums are
    added    what is added to the sums
    """

    __slots__ = ("added", "experts", "ids", "k", "pairs", "parts", "tokens", "weights", "x")

    def __init__(
        self,
        x: Tensor,
        ids: Tensor,
        experts: Experts,
        *,
        weights: Tensor | None = None,
        parts: Tensor | None = None,
        added: Added = NOTHING,
    ):
        self.x, self.ids, self.experts = x, ids, experts
        self.weights, self.parts, self.added = weights, parts, added
        self.tokens, self.k = ids.shape
        self.pairs = self.tokens * self.k


class Mixture:
    """`mixture`: what it is called with."""

    __slots__ = ("bias", "experts", "h", "k", "pairs", "routing", "scores", "shared", "shared_gate", "tokens", "x")

    def __init__(
        self, x: Tensor, scores: Tensor, routing: Routing, experts: Experts, h: Tensor,
        bias: Tensor | None, shared: Tensor | SharedExpert | None, shared_gate: Tensor | None,
    ):  # fmt: skip
        self.x, self.scores, self.routing, self.experts, self.h = x, scores, routing, experts, h
        self.bias, self.shared, self.shared_gate = bias, shared, shared_gate
        self.tokens, self.k = x.shape[0], routing.k
        self.pairs = self.tokens * self.k
