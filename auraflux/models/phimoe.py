"""Phi-3.5-MoE: LayerNorm with biases, and two experts per token, each weighed against those with nearly as high a score."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import linear, run_experts
from auraflux.cache import Batch, MixedBatch
from auraflux.errors import FormatError
from auraflux.models import llama, qwen3_moe
from auraflux.models.config import Keys
from auraflux.models.layer import FeedForward, Layer, LayerInput, NormedInput, PreparedInput, Residual
from auraflux.models.mixture import Mixture, MixtureConfig
from auraflux.models.qwen3_moe import make_caches, rename
from auraflux.models.rotation import RopeSettings, Rotation, rope_settings
from auraflux.ops import Routing, combine, layer_norm
from auraflux.weights.fields import EPS, FACTOR
from auraflux.weights.formats.untrusted import number
from auraflux.weights.loader import Weights

__all__ = ["Config", "Model", "make_caches", "rename"]

THETA = 1000000.0
CHOSEN = 2  # experts of a token, whatever a config says
JITTER = number(0, 1)


@dataclass(frozen=True, eq=False)
class ScaledRotation(Rotation):
    """A rotation with a scale of its own where the KV cache is longer than the original context."""

    original: int = 0
    long_mscale: float = 1.0

    def at(self, context: int) -> Rotation:
        """Return the rotation for a KV cache of so many tokens per sequence."""
        found = super().at(context)
        return Rotation(found.frequencies, self.long_mscale) if context > self.original else found


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """Qwen3's config.

    tolerance  of scores, relative to the best: those further below it do not count when an expert is weighed
    """

    tolerance: float

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys = keys.changed({"rope_theta": keys.theta(THETA), "rms_norm_eps": keys.get("rms_norm_eps", EPS, 1e-5)})
        keys.only("num_experts_per_tok", CHOSEN)
        settings = rope_settings(keys)
        if settings.rope_type not in ("default", "longrope"):
            raise FormatError(f"{keys.title} has {settings.rope_type!r} RoPE; 'default' and 'longrope' are supported.")
        plain = llama.Config.from_hf(keys.found)
        count, chosen = keys.experts("num_local_experts", default=16)
        return cls(
            **vars(plain) | {"rotation": _scaled(keys, plain.rotation, settings)},
            mixture=MixtureConfig(count, keys.inner, Routing(chosen, "softmax", renormalize=False)),
            sparse=frozenset(range(keys.layers)),
            home="block_sparse_moe",
            tolerance=2 * keys.get("router_jitter_noise", JITTER, 0.01),
        )


def _scaled(keys: Keys, plain: Rotation, settings: RopeSettings) -> Rotation:
    """Return LongRoPE with the scales that a config gives it."""
    if settings.rope_type == "default":
        return plain
    found = keys.section("rope_parameters") or keys.section("rope_scaling")
    short, long = (found.read(f"{name}_mscale", FACTOR) for name in ("short", "long"))
    original = settings.need("original_max_position_embeddings")
    return ScaledRotation(plain.frequencies, short, by_context=plain.by_context, original=original, long_mscale=long)


class Model(qwen3_moe.Model):
    """Attention, then experts, each after a LayerNorm."""

    config: Config
    norm_bias: Tensor
    head_bias: Tensor | None

    @classmethod
    def no_tensor_parallel(cls, config: Config) -> str | None:  # type: ignore[override]
        return "its norms and its head have biases, which was not tried."

    no_pipeline_parallel = no_tensor_parallel  # type: ignore[assignment]

    def make_mixture(self, weights: Weights, name: str, mixture: MixtureConfig) -> FeedForward:
        made = super().make_mixture(weights, name, mixture)
        return NearlyBestMixture(**vars(made), tolerance=self.config.tolerance)

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        biases = [weights.vector(f"{name}.{norm}.bias", self.config.hidden) for norm in self.norms]
        return CentredLayer(**vars(super()._layer(weights, name, index)), mixer_bias=biases[0], mlp_bias=biases[1])

    def make_final_norm(self, weights: Weights) -> None:
        """Load the norm before the head, and the head's bias."""
        super().make_final_norm(weights)
        self.norm_bias = weights.vector("model.norm.bias", self.config.hidden)
        self.head_bias = weights.bias("lm_head", self.config.vocab)

    def final_norm(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Normalise the output of the last layer: [T, H]."""
        return layer_norm(_sum(x, delta), self.norm, self.norm_bias, self.config.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token: [N, H] -> [N, V] float32."""
        return linear(hidden, self.head, self.head_bias).float()


@dataclass(frozen=True, eq=False, kw_only=True)
class CentredLayer(Layer):
    """A mixer, then a mixture, each after a LayerNorm.

    mixer_bias, mlp_bias  [H]
    """

    mixer_bias: Tensor
    mlp_bias: Tensor

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Batch | MixedBatch, store: Any) -> Residual:
        total = _sum(*self.mixer(self._input(_sum(x, delta)), batch, store))
        return self.mlp(NormedInput(layer_norm(total, self.mlp_norm, self.mlp_bias, self.eps), total))

    def update_cache(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> None:
        """Append new tokens to the cache; the output is not needed."""
        self.mixer.update_cache(self._input(_sum(x, delta)), batch, store)

    def _input(self, total: Tensor) -> NormedInput:
        return NormedInput(layer_norm(total, self.mixer_norm, self.mixer_bias, self.eps), total)


@dataclass(frozen=True, eq=False, kw_only=True)
class NearlyBestMixture(Mixture):
    """A mixture that chooses the best expert, then the next one.

    The weight of either is its softmax among the experts that were left and whose scores are within `tolerance` of its own.
    """

    tolerance: float

    def __call__(self, inputs: LayerInput | PreparedInput) -> Residual:
        """Return the residual stream, and the output as its delta, both [T, H]."""
        h, residual, (logits,) = inputs.scores((self.router,))
        ids, weights = self._route(logits.float())
        return residual, run_experts(self.experts, h, ids, weights)

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, int32 [T, 2], and their weights, float32 [T, 2]."""
        left, ids, weights = logits, [], []
        for _ in range(CHOSEN):
            best, chosen = left.max(1, keepdim=True)
            behind = (best - logits) / logits.abs().clamp(min=best) > self.tolerance
            ids.append(chosen)
            weights.append(left.masked_fill(behind, -torch.inf).softmax(1).gather(1, chosen))
            left = left.scatter(1, chosen, -torch.inf)
        return torch.cat(ids, 1).int(), torch.cat(weights, 1)


def _sum(x: Tensor, delta: Tensor | None) -> Tensor:
    return x if delta is None else combine(x, delta)
