"""A mixture of experts, whatever its family chooses them by."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from auraflux.models.decoder import FeedForward, Given, Residual, Stream
from auraflux.models.mlp import MLP, SquareMLP
from auraflux.ops import Activation, ReluSquare, Routing, SharedExpert, combine, linear, rms_norm, route
from auraflux.ops.moe.reference import shared_result
from auraflux.weights.experts import load_experts
from auraflux.weights.loader import Weights
from auraflux.weights.stored import Stored
from auraflux.weights.streamed import Guess, LayerExperts, Mix


@dataclass(frozen=True)
class MixtureConfig:
    """count experts of width `inner`, and one of width `shared` that all tokens go to, or None.

    latent  how wide the vectors are that experts take and give, where that is not the stream's width
    """

    count: int
    inner: int
    routing: Routing
    shared: int | None = None
    latent: int | None = None


@dataclass(frozen=True, eq=False)
class Mixture(FeedForward):
    """Experts of which each token goes to a few, and an MLP that all tokens go to where there is one.

    router       [E, H]  scores the experts; router_bias [E] or None
    choice_bias  [E]     or None, see `route`
    shared_gate  [1, H]  weighs the shared MLP, token by token; None adds it as it is
    """

    routing: Routing
    router: Stored
    experts: LayerExperts
    router_bias: Tensor | None = None
    choice_bias: Tensor | None = None
    shared: SharedExpert | None = None
    shared_gate: Stored | None = None

    def __call__(self, stream: Stream | Given) -> Residual:
        """Give the stream with all that is added to it, [T, H]."""
        weights = (self.router,) if self.shared_gate is None else (self.router, self.shared_gate)
        biases = (self.router_bias, None)[: len(weights)]
        h, residual, products = stream.scores(weights, biases)
        gate = None if self.shared_gate is None else products[1].view(-1)
        return self.experts.mix(Mix(h, products[0], self.routing, self.choice_bias, residual, self.shared, gate)), None

    def announce(self, following: Guess | None, norm: Tensor, eps: float) -> Guess:
        """Hear how to guess the experts of the next mixture; give how to guess those of this one."""
        self.experts.announce(following)
        return lambda residual: self.choose(rms_norm(residual, norm, eps))

    def choose(self, x: Tensor) -> Tensor:
        """The experts that x [T, H] goes to: [T, k]."""
        return route(linear(x, self.router, self.router_bias), self.routing, self.choice_bias)[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class LatentMixture(Mixture):
    """A mixture whose experts take a narrower vector than the stream has, and give one.

    narrow  [L, H], wide  [H, L]
    join    adds up what ranks have of the shared expert
    """

    narrow: Stored
    wide: Stored
    join: Callable[[Tensor], Tensor]

    def __call__(self, stream: Stream | Given) -> Residual:
        """Give the stream with all that is added to it, [T, H]."""
        h, residual, (scores,) = stream.scores((self.router,), (self.router_bias,))
        ids, weights = route(scores, self.routing, self.choice_bias)
        found = linear(self.experts(linear(h, self.narrow), ids, weights), self.wide)
        shared = shared_result(h, self.shared)
        return combine(residual, found, None if shared is None else self.join(shared)), None


def biased_mixture(
    weights: Weights, name: str, hidden: int, config: MixtureConfig, bias: str | None, activation: Activation | None = None
) -> Mixture:
    """The mixture of DeepSeek V3 and of those who took it over: a bias in the choice, a shared expert that is added as it is.

    bias  its name within the mixture; None where there is none
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
    return LatentMixture(**vars(made), narrow=narrow, wide=wide, join=weights.slices.join)


def _flat(weights: Weights, name: str, count: int) -> Tensor:
    """A bias [E], which ERNIE has as [1, E]."""
    row = weights.has(name) and len(weights.shape(name)) == 2
    return weights.vector(name, 1, count).view(-1) if row else weights.vector(name, count)
