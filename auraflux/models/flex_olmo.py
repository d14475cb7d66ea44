"""FlexOlmo: OLMoE's layers with norms after attention and experts, and none before them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from auraflux.cache import Batch, MixedBatch
from auraflux.models import output_norms, qwen3_moe
from auraflux.models.attention import Heads
from auraflux.models.config import Keys
from auraflux.models.layer import FeedForward, Layer, Mixer, NormedInput, Residual
from auraflux.models.mixture import MixtureConfig
from auraflux.models.output_norms import NormedMixture
from auraflux.models.qwen3_moe import rename
from auraflux.ops import combine
from auraflux.weights.experts.resident import ExpertPredictor
from auraflux.weights.loader import Weights

__all__ = ["Config", "Model", "make_caches", "rename"]

THETA = 500000.0


class Config(qwen3_moe.Config):
    """Qwen3's config."""

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        found = super().from_hf(keys.changed({"rope_theta": keys.theta(THETA)}).found)
        return cls(**vars(found))


class Model(qwen3_moe.Model):
    """Attention, then experts, each before a norm."""

    norms = "post_attention_layernorm", "post_feedforward_layernorm"

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        heads, rotation = Heads(config.heads, config.kv_heads, config.head_width), config.rotation.to(weights.device)
        sizes = config.hidden, heads, rotation, config.eps
        return output_norms.Attention(weights, f"{name}.self_attn", *sizes, across=True)

    def make_mixture(self, weights: Weights, name: str, mixture: MixtureConfig) -> FeedForward:
        norm = self.make_norm(weights, f"{name.removesuffix('.mlp')}.{self.norms[1]}")
        made = super().make_mixture(weights, name, mixture)
        return UnnormedMixture(**vars(made), norm=norm, eps=self.config.eps, join=weights.slices.all_reduce)

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        made = super()._layer(weights, name, index)
        assert isinstance(made.mixer, output_norms.Attention)
        made.mixer.output_norm, made.mixer.output_eps = made.mixer_norm, made.eps
        return UnnormedLayer(**vars(made))


@dataclass(frozen=True, eq=False, kw_only=True)
class UnnormedMixture(NormedMixture):
    """A mixture with a normalised output, whose input is not."""

    def link_prefetch(self, following: ExpertPredictor | None, norm: Tensor, eps: float) -> ExpertPredictor:
        """Take the predictor of the next mixture's experts; return that of this mixture's."""
        self.experts.prefetch_with(following)
        return self.choose


class UnnormedLayer(Layer):
    """A mixer and a mixture that read the residual stream and normalise their outputs."""

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Batch | MixedBatch, store: Any) -> Residual:
        total, found = self.mixer(_input(x, delta), batch, store)
        return self.mlp(_input(total, found))

    def update_cache(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> None:
        """Append new tokens to the cache; the output is not needed."""
        self.mixer.update_cache(_input(x, delta), batch, store)


def _input(x: Tensor, delta: Tensor | None) -> NormedInput:
    total = x if delta is None else combine(x, delta)
    return NormedInput(total, total)


make_caches = qwen3_moe.make_caches
