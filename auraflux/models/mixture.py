"""A mixture of experts (MoE) with any family's routing."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from auraflux.adapters.linears import linear, run_experts, run_mixture, shared_output
from auraflux.models.layer import FeedForward, LayerInput, PreparedInput, Residual
from auraflux.models.mlp import MLP, ActivatedMLP, SquareMLP
from auraflux.ops import Activation, Clamp, Limit, ReluSquare, Routing, SharedExpert, combine, rms_norm, route
from auraflux.weights.experts.load_layer import load_experts
from auraflux.weights.experts.resident import ExpertPredictor, LayerExperts, MixtureInput
from auraflux.weights.formats.stored import Stored
from auraflux.weights.loader import Weights


@dataclass(frozen=True)
class MixtureConfig:
    """count experts of width `inner`, and a shared expert of width `shared` or None.

    latent  the width of the experts' inputs and outputs; None for the hidden width
    """

    count: int
    inner: int
    routing: Routing
    shared: int | None = None
    latent: int | None = None


@dataclass(frozen=True, eq=False)
class Mixture(FeedForward):
    """Routed experts, and a shared expert or None.

    router       [E, H]  scores the experts; router_bias [E] or None
    choice_bias  [E]     or None, see `route`
    shared_gate  [1, H]  gates the shared expert per token; None for weight 1
    """

    routing: Routing
    router: Stored
    experts: LayerExperts
    router_bias: Tensor | None = None
    choice_bias: Tensor | None = None
    shared: SharedExpert | None = None
    shared_gate: Stored | None = None

    def __call__(self, inputs: LayerInput | PreparedInput) -> Residual:
        """Return the residual stream with the output added, [T, H], and no delta."""
        weights = (self.router,) if self.shared_gate is None else (self.router, self.shared_gate)
        biases = (self.router_bias, None)[: len(weights)]
        h, residual, products = inputs.scores(weights, biases)
        gate = None if self.shared_gate is None else products[1].view(-1)
        rest = self.routing, self.choice_bias, residual, self.shared, gate
        return run_mixture(self.experts, MixtureInput(h, products[0], *rest)), None

    def link_prefetch(self, following: ExpertPredictor | None, norm: Tensor, eps: float) -> ExpertPredictor:
        """Take the predictor of the next mixture's experts; return that of this mixture's."""
        self.experts.prefetch_with(following)
        return lambda residual: self.choose(rms_norm(residual, norm, eps))

    def choose(self, x: Tensor) -> Tensor:
        """Return the expert ids of x [T, H]: [T, k]."""
        return route(linear(x, self.router, self.router_bias), self.routing, self.choice_bias)[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class LatentMixture(Mixture):
    """A mixture whose experts work in a narrower latent space.

    narrow  [L, H]  into the latent space
    wide    [H, L]  out of it
    join    sums the shared expert over ranks
    """

    narrow: Stored
    wide: Stored
    join: Callable[[Tensor], Tensor]

    def __call__(self, inputs: LayerInput | PreparedInput) -> Residual:
        """Return the residual stream with the output added, [T, H], and no delta."""
        h, residual, (scores,) = inputs.scores((self.router,), (self.router_bias,))
        ids, weights = route(scores, self.routing, self.choice_bias)
        found = linear(run_experts(self.experts, linear(h, self.narrow), ids, weights), self.wide)
        shared = shared_output(h, self.shared)
        return combine(residual, found, None if shared is None else self.join(shared)), None


@dataclass(frozen=True, eq=False, kw_only=True)
class ActivatedMixture(Mixture):
    """A mixture whose shared expert, `always`, has an activation of its own."""

    always: ActivatedMLP

    def __call__(self, inputs: LayerInput | PreparedInput) -> Residual:
        """Return the residual stream with the output added, [T, H], and no delta."""
        h, residual, (scores,) = inputs.scores((self.router,))
        ids, weights = route(scores, self.routing, self.choice_bias)
        return combine(residual, run_experts(self.experts, h, ids, weights), self.always.output(h)), None


def activated_mixture(
    weights: Weights, name: str, hidden: int, config: MixtureConfig, bias: str, own: Activation | None, other: Clamp | Limit
) -> Mixture:
    """Make a mixture as `biased_mixture` does, with the experts' own activation and another of the shared expert."""
    assert config.shared is not None
    made = biased_mixture(weights, name, hidden, replace(config, shared=None), bias, own)
    always = ActivatedMLP(weights, f"{name}.shared_experts", hidden, config.shared, other)
    return ActivatedMixture(**vars(made), always=always)


def biased_mixture(
    weights: Weights, name: str, hidden: int, config: MixtureConfig, bias: str | None, activation: Activation | None = None
) -> Mixture:
    """Make the mixture of DeepSeek V3 and its relatives: a routing bias, and a shared expert without a gate.

    bias  its name within the mixture; None for no bias
    """
    kind = SquareMLP if isinstance(activation, ReluSquare) else MLP
    shared = None if config.shared is None else kind(weights, f"{name}.shared_experts", hidden, config.shared).as_expert()
    width = config.latent or hidden
    made = Mixture(
        config.routing,
        weights.matrix(f"{name}.gate", config.count, hidden),
        load_experts(weights, name, config.count, width, config.inner, activation),
        choice_bias=None if bias is None else _flat(weights, f"{name}.{bias}", config.count),
        shared=shared,
    )
    if config.latent is None:
        return made
    narrow = weights.matrix(f"{name}.fc1_latent_proj", width, hidden)
    wide = weights.matrix(f"{name}.fc2_latent_proj", hidden, width)
    return LatentMixture(**vars(made), narrow=narrow, wide=wide, join=weights.slices.all_reduce)


def _flat(weights: Weights, name: str, count: int) -> Tensor:
    """Load a bias [E]; ERNIE has [1, E]."""
    row = weights.has(name) and len(weights.shape(name)) == 2
    return weights.vector(name, 1, count).view(-1) if row else weights.vector(name, count)
