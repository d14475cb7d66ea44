"""Arguments of the expert ops. A pair is a (token, expert) pair."""

from typing import NamedTuple

from torch import Tensor

from auraflux.ops.moe.cuda.stacks import NO_EPILOGUE, Epilogue
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.pool import ExpertPool
from auraflux.ops.moe.routing import Routing


class RouteCall(NamedTuple):
    """Arguments of `route`."""

    logits: Tensor
    routing: Routing
    bias: Tensor | None


class ExpertCall:
    """Tokens and their routed experts.

    x         [T, H]
    ids       [T, k]
    weights   [T, k]     of a token's expert outputs; None where they are not summed
    parts     [T, k, H]  output of each pair; None where only their sum is needed
    epilogue  added to the sums
    """

    __slots__ = ("epilogue", "experts", "ids", "k", "pairs", "parts", "tokens", "weights", "x")

    def __init__(
        self,
        x: Tensor,
        ids: Tensor,
        experts: Experts,
        *,
        weights: Tensor | None = None,
        parts: Tensor | None = None,
        epilogue: Epilogue = NO_EPILOGUE,
    ):
        self.x, self.ids, self.experts = x, ids, experts
        self.weights, self.parts, self.epilogue = weights, parts, epilogue
        self.tokens, self.k = ids.shape
        self.pairs = self.tokens * self.k


class MixtureCall:
    """Arguments of `mixture`, or with a pool those of `pooled_mixture`."""

    __slots__ = (
        "bias",
        "experts",
        "h",
        "k",
        "layer",
        "pairs",
        "pool",
        "routing",
        "scores",
        "shared",
        "shared_gate",
        "tokens",
        "x",
    )

    def __init__(
        self, x: Tensor, scores: Tensor, routing: Routing, experts: Experts, h: Tensor,
        bias: Tensor | None, shared: Tensor | SharedExpert | None, shared_gate: Tensor | None,
        pool: ExpertPool | None = None, layer: int = 0,
    ):  # fmt: skip
        self.x, self.scores, self.routing, self.experts, self.h = x, scores, routing, experts, h
        self.bias, self.shared, self.shared_gate = bias, shared, shared_gate
        self.pool, self.layer = pool, layer
        self.tokens, self.k = x.shape[0], routing.k
        self.pairs = self.tokens * self.k
