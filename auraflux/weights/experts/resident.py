"""Interface of a layer's experts as models call it, and `ResidentExperts`, which are all in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from auraflux.ops import Experts, Routing, SharedExpert, expert_mlp, expert_parts, mixture, sum_parts

ExpertPredictor = Callable[[Tensor], Tensor]  # residual stream [T, H] -> ids [T, k]


@dataclass(frozen=True, eq=False)
class MixtureInput:
    """Inputs of a mixture layer.

    x         [T, H]
    scores    [T, E]  of the router
    bias      [E]     or None, see `route`
    residual  [T, H]  stream that the result is added to
    shared    shared expert, its output [T, H], or None
    gate      [T]     weight of the shared expert, or None
    """

    x: Tensor
    scores: Tensor
    routing: Routing
    bias: Tensor | None
    residual: Tensor
    shared: SharedExpert | Tensor | None
    gate: Tensor | None


class LayerExperts(Protocol):
    """Experts of one mixture layer."""

    def prefetch_with(self, predictor: ExpertPredictor | None) -> None:
        """Set the predictor of the next mixture's experts; None if there is no next mixture."""

    def forward(self, inputs: MixtureInput) -> Tensor:
        """Route tokens, run their experts and add the result to the residual stream: [T, H]."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of every token's experts: x [T, H], ids and weights [T, k] -> [T, H]."""


@dataclass(frozen=True, eq=False)
class ResidentExperts:
    """Experts that are all in memory, or in a memory-mapped file."""

    experts: Experts

    def prefetch_with(self, predictor: ExpertPredictor | None) -> None:
        """Do nothing: resident experts need no prefetch."""

    def forward(self, inputs: MixtureInput) -> Tensor:
        shared = inputs.shared, inputs.gate
        return mixture(inputs.x, inputs.scores, inputs.routing, self.experts, inputs.residual, inputs.bias, *shared)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return expert_mlp(x, ids, weights, self.experts)

    def fetch(self, ids: Tensor) -> None:
        """Do nothing: resident experts need no reads."""

    def partial_sum(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts whose ids are not negative: [T, H] float32."""
        parts = x.new_zeros(*ids.shape, x.shape[1], dtype=torch.float32)
        expert_parts(x, ids, self.experts, parts)
        return sum_parts(parts, weights, torch.float32)
