"""Attention, MLPs and mixtures whose output is normalised before it joins the residual stream."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from auraflux.adapters.linears import run_experts, shared_output
from auraflux.cache import Batch, MixedBatch
from auraflux.models import attention
from auraflux.models.layer import FeedForward, LayerInput, PreparedInput, Residual
from auraflux.models.mixture import Mixture
from auraflux.ops import combine, rms_norm, route


class Attention(attention.Attention):
    """Attention with a normalised output.

    output_norm  [H]
    output_eps   of that norm
    """

    output_norm: Tensor
    output_eps: float

    def __call__(self, inputs: LayerInput, batch: Batch | MixedBatch, store: Any) -> tuple[Tensor, Tensor]:
        total, attended = super().__call__(inputs, batch, store)
        return total, rms_norm(attended, self.output_norm, self.output_eps)


@dataclass(frozen=True, eq=False)
class NormedMLP(FeedForward):
    """An MLP with a normalised output.

    norm  [H]
    """

    mlp: FeedForward
    norm: Tensor
    eps: float

    def __call__(self, inputs: LayerInput) -> Residual:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        total, found = self.mlp(inputs)
        assert found is not None
        return total, rms_norm(found, self.norm, self.eps)


@dataclass(frozen=True, eq=False, kw_only=True)
class NormedMixture(Mixture):
    """A mixture whose output, the shared expert's included, is normalised.

    norm  [H]
    join  sums the shared expert over ranks
    """

    norm: Tensor
    eps: float
    join: Callable[[Tensor], Tensor]

    def __call__(self, inputs: LayerInput | PreparedInput) -> Residual:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        h, residual, (scores,) = inputs.scores((self.router,), (self.router_bias,))
        ids, weights = route(scores, self.routing, self.choice_bias)
        found, shared = run_experts(self.experts, h, ids, weights), shared_output(h, self.shared)
        total = found if shared is None else combine(self.join(shared), found)
        return residual, rms_norm(total, self.norm, self.eps)
