"""Qwen3 with a mixture of experts in most layers.

`Model`, `Layer` and `Mixture` also serve other families of mixtures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from auraflux.cache import AttentionShape, Batch, Cache
from auraflux.models import llama
from auraflux.models.config import Keys
from auraflux.models.llama import MLP, Attention, Heads, Stream, rename
from auraflux.ops import Routing, SharedExpert, add_norm_scores, combine, linear, rms_norm, route
from auraflux.weights.checkpoint import Stored
from auraflux.weights.experts import load_experts
from auraflux.weights.loader import Weights
from auraflux.weights.streamed import Guess, LayerExperts, Mix

__all__ = ["Config", "Model", "make_caches", "rename"]


class Mixer(Protocol):
    """Attention, or what takes its place."""

    def __call__(self, stream: Stream, batch: Batch, store: Any) -> tuple[Tensor, Tensor]: ...
    def remember(self, stream: Stream, batch: Batch, store: Any) -> Any: ...


@dataclass(frozen=True)
class MixtureConfig:
    """count experts of width `inner`, and one of width `shared` that all tokens go to, or None."""

    count: int
    inner: int
    routing: Routing
    shared: int | None = None


@dataclass(frozen=True, eq=False)
class Config(llama.Config):
    """As Llama's; the layers in `sparse` have a mixture instead of an MLP."""

    mixture: MixtureConfig | None
    sparse: frozenset[int]

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys, plain = Keys(config), llama.Config.from_hf(config)
        # transformers writes the second name
        count = keys["num_experts" if "num_experts" in keys else "num_local_experts"]
        routing = Routing(keys["num_experts_per_tok"], "softmax", renormalize=keys.get("norm_topk_prob", False))
        mixture = MixtureConfig(count, keys["moe_intermediate_size"], routing)
        return cls(**{**vars(plain), "head_norms": True}, mixture=mixture, sparse=sparse_layers(keys))


def sparse_layers(keys: Keys) -> frozenset[int]:
    """Every so manieth layer, less those that are named."""
    step, dense = keys.get("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    return frozenset(range(step - 1, keys["num_hidden_layers"], step)) - frozenset(dense)


class Model(llama.Model):
    """Embedding, layers, norm and head."""

    def __init__(self, config: Any, weights: Weights):
        super().__init__(config, weights)
        announce(self.layers)

    def make_layer(self, weights: Weights, index: int) -> "Layer":
        config, name = self.config, f"model.layers.{index}"
        heads, turn = Heads(config.heads, config.kv_heads, config.head_width), config.rotation.to(weights.device)
        attention = Attention(weights, f"{name}.self_attn", config.hidden, heads, turn, config.eps)
        return Layer(weights, name, config.hidden, config.eps, attention, load_mlp(config, weights, index))

    def __call__(self, ids: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Run the new tokens of a batch: ids [T] -> [T, H], after the last norm."""
        x, _ = self.through(ids, batch, cache, len(self.layers))
        return rms_norm(x, self.norm, self.config.eps)

    def through(self, ids: Tensor, batch: Batch, cache: Cache, count: int) -> tuple[Tensor, None]:
        """Run tokens through the first layers: the stream [T, H], to which nothing is still to be added."""
        x = self.embedded(ids)
        for layer, store in zip(self.layers[:count], cache.layers, strict=False):
            x = layer(x, batch, store)
        return x, None


class Layer:
    """Attention, or what takes its place, then an MLP or a mixture; each with a norm before it and added to the stream.

    mixer  (stream, batch, the layer's part of the cache) -> the stream and what is to be added to it, both [T, H]
    mlp    (stream) -> the stream with all that is added to it, [T, H]
    shift  of the norms' weights, see `Weights.vector`
    """

    def __init__(
        self, weights: Weights, name: str, hidden: int, eps: float, mixer: Mixer, mlp: "Mixture | Plain", shift: float = 0.0
    ):
        self.eps, self.mixer, self.mlp = eps, mixer, mlp
        self.mixer_norm = weights.vector(f"{name}.input_layernorm.weight", hidden, shift=shift)
        self.mlp_norm = weights.vector(f"{name}.post_attention_layernorm.weight", hidden, shift=shift)

    def __call__(self, x: Tensor, batch: Batch, store: Any) -> Tensor:
        x, delta = self.mixer(Stream(x, None, self.mixer_norm, self.eps), batch, store)
        return self.mlp(Stream(x, delta, self.mlp_norm, self.eps))

    def remember(self, x: Tensor, delta: None, batch: Batch, store: Any) -> None:
        """Run the part that keeps something."""
        self.mixer.remember(Stream(x, delta, self.mixer_norm, self.eps), batch, store)

    def guess(self, residual: Tensor) -> Tensor:
        """The experts that would be chosen if the stream came here as it is: [T, H] -> [T, k]."""
        return self.mlp.choose(rms_norm(residual, self.mlp_norm, self.eps))


def announce(layers: Sequence[Layer]) -> None:
    """Tell each mixture how to guess what the next one will ask for."""
    guess: Guess | None = None
    for layer in reversed(layers):
        guess = layer.mlp.announce(guess, layer.guess)


@dataclass(frozen=True, eq=False)
class Plain:
    """An MLP where other layers have a mixture."""

    mlp: MLP

    def __call__(self, stream: Stream) -> Tensor:
        return combine(*self.mlp.of_stream(stream))

    def announce(self, following: Guess | None, mine: Guess) -> Guess | None:
        """How to guess the experts of the next mixture, seen from before this layer."""
        return following

    def choose(self, x: Tensor) -> Tensor:
        """Nobody."""
        return x.new_empty(len(x), 0, dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class Mixture:
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

    def __call__(self, stream: Stream) -> Tensor:
        """Give the stream with all that is added to it, [T, H]."""
        weights = (self.router,) if self.shared_gate is None else (self.router, self.shared_gate)
        biases = (self.router_bias, None)[: len(weights)]
        h, residual, products = add_norm_scores(*stream, weights, biases)
        gate = None if self.shared_gate is None else products[1].view(-1)
        return self.experts.mix(Mix(h, products[0], self.routing, self.choice_bias, residual, self.shared, gate))

    def announce(self, following: Guess | None, mine: Guess) -> Guess:
        """Hear how to guess the experts of the next mixture; give how to guess those of this one."""
        self.experts.announce(following)
        return mine

    def choose(self, x: Tensor) -> Tensor:
        """The experts that x [T, H] goes to: [T, k]."""
        return route(linear(x, self.router, self.router_bias), self.routing, self.choice_bias)[0]


def load_mlp(config: Config, weights: Weights, index: int) -> Mixture | Plain:
    """What a layer has after its attention, under Qwen's names."""
    name, hidden, mixture = f"model.layers.{index}.mlp", config.hidden, config.mixture
    if mixture is None or index not in config.sparse:
        return Plain(MLP(weights, name, hidden, config.inner))
    shared = shared_gate = None
    if mixture.shared is not None:
        shared = MLP(weights, f"{name}.shared_expert", hidden, mixture.shared).as_expert()
        shared_gate = weights.matrix(f"{name}.shared_expert_gate", 1, hidden)
    return Mixture(
        mixture.routing,
        weights.matrix(f"{name}.gate", mixture.count, hidden),
        load_experts(weights, name, mixture.count, hidden, mixture.inner),
        shared=shared,
        shared_gate=shared_gate,
    )


def make_caches(config: Config) -> list[AttentionShape]:
    return llama.make_caches(config)
