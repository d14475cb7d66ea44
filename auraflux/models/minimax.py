"""MiniMax-Text-01: lightning attention, a state that fades at a rate of its head and layer, and attention; Mixtral's experts.

A layer adds to its normalised input, not to the residual stream, and both parts of a sum have factors.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.adapters.linears import linear
from auraflux.cache import AttentionShape, Batch, MixedBatch, ScanShape
from auraflux.errors import FormatError
from auraflux.models import llama, qwen3_moe
from auraflux.models.config import Keys
from auraflux.models.layer import Layer, LayerInput, Mixer, NormedInput, PartMixer, PreparedInput, Residual
from auraflux.models.mixture import MixtureConfig
from auraflux.models.qwen3_5_moe import ATTENTION, DELTA
from auraflux.models.rotation import rope_settings, rotation
from auraflux.ops import Routing, rms_norm, sigmoid_gate
from auraflux.weights.fields import FACTOR, HEAD
from auraflux.weights.formats.untrusted import integer
from auraflux.weights.loader import Weights

THETA = 1000000.0
RATES = (".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay")
OUTPUT_EPS = 1e-6  # of the norm within lightning attention, independent of rms_norm_eps


class Factors(NamedTuple):
    """The factors of a layer's normalised input (alpha) and of what is added to it (beta)."""

    alpha: float
    beta: float

    def sum(self, x: Tensor, found: Tensor) -> Tensor:
        return x * self.alpha + found * self.beta


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """Qwen3's config; layers are of two `kinds`, with factors of their own, and `mlp` has those of experts."""

    kinds: tuple[str, ...]
    mixers: dict[str, Factors]
    mlp: Factors

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        head = keys.get("head_dim", HEAD, None) or keys.hidden // keys.heads
        keys = keys.changed({"head_dim": head, "rope_theta": keys.theta(THETA)})
        plain = llama.Config.from_hf(keys.found)
        # transformers ignores this key of published files
        turned = keys.get("rotary_dim", integer(0, 1 << 16), head)
        count, chosen = keys.experts("num_local_experts")
        ruled = tuple(DELTA if index % 2 else ATTENTION for index in range(keys.layers))
        if plain.layers < 2:
            raise FormatError(f"{keys.title} has {plain.layers} layer; the rates of fading need two or more.")
        return cls(
            **vars(plain) | {"rotation": rotation(keys, turned, rope_settings(keys), by_context=True)},
            mixture=MixtureConfig(count, plain.inner, Routing(chosen, "softmax", renormalize=True)),
            sparse=frozenset(range(keys.layers)),
            home="block_sparse_moe",
            kinds=keys.layer_types(DELTA, ATTENTION) if "layer_types" in keys else ruled,
            mixers={ATTENTION: _factors(keys, "full_attn"), DELTA: _factors(keys, "linear_attn")},
            mlp=_factors(keys, "mlp"),
        )


def _factors(keys: Keys, name: str) -> Factors:
    return Factors(*(keys.get(f"{name}_{part}_factor", FACTOR, 1.0) for part in ("alpha", "beta")))


class Model(qwen3_moe.Model):
    """Lightning attention or attention, then experts."""

    config: Config

    @classmethod
    def no_tensor_parallel(cls, config: Config) -> str | None:  # type: ignore[override]
        return "its states are normalised over all heads at once."

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        if self.config.kinds[index] == ATTENTION:
            return super().make_mixer(weights, name, index)
        return Lightning(weights, f"{name}.self_attn", self.config, index)

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        config = self.config
        made = super()._layer(weights, name, index)
        return FactorLayer(**vars(made), mixer_factors=config.mixers[config.kinds[index]], mlp_factors=config.mlp)


class Lightning(PartMixer):
    """Linear attention: the state of a head fades, takes a token's key times its value, and is read with its query."""

    def __init__(self, weights: Weights, name: str, config: Config, index: int):
        self.heads, wide = config.heads, config.heads * config.head_width
        # the file has the query, the key and the value of a head together; the scan takes values, keys and queries of all
        rows = torch.arange(3 * wide).view(config.heads, 3, -1).transpose(0, 1).flip(0).flatten()
        self.vkq = weights.matrix(f"{name}.qkv_proj", 3 * wide, config.hidden, take=rows)
        self.gate = weights.matrix(f"{name}.output_gate", wide, config.hidden)
        self.norm = weights.vector(f"{name}.norm.weight", wide)
        self.out = weights.matrix(f"{name}.out_proj", config.hidden, wide)
        share = 1 - index / (config.layers - 1 + 1e-5) + 1e-5
        rates = (0.5 ** (8 / config.heads)) ** torch.arange(1, config.heads + 1) * share
        self.decay, self.skip = torch.exp(-rates).to(weights.device), torch.zeros(config.heads, device=weights.device)

    def mix(self, inputs: NormedInput, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the output, both [T, H]."""
        total, (vkq, gate) = inputs.linears((self.vkq, self.gate))
        decay = self.decay.expand(len(vkq), -1).contiguous()
        # silu
        out = store.scan(batch, sigmoid_gate(vkq, vkq), decay, torch.ones_like(decay), self.skip)
        return total, linear(sigmoid_gate(rms_norm(out, self.norm, OUTPUT_EPS), gate), self.out)


@dataclass(frozen=True, eq=False, kw_only=True)
class FactorLayer(Layer):
    """A mixer, then experts; each is added to its normalised input, with factors."""

    mixer_factors: Factors
    mlp_factors: Factors

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Batch | MixedBatch, store: Any) -> Residual:
        inputs = self._input(x, delta)
        h = rms_norm(self.mixer_factors.sum(*self.mixer(inputs, batch, store)), self.mlp_norm, self.eps)
        return self.mlp_factors.sum(h, self.mlp(PreparedInput(h))[0]), None

    def update_cache(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> None:
        """Append new tokens to the cache; the output is not needed."""
        self.mixer.update_cache(self._input(x, delta), batch, store)

    def _input(self, x: Tensor, delta: Tensor | None) -> NormedInput:
        h = LayerInput(x, delta, self.mixer_norm, self.eps).normed()[1]
        return NormedInput(h, h)


def rename(name: str) -> str | None:
    # the rates of fading follow from the numbers of heads and layers
    return None if name.endswith(RATES) else qwen3_moe.rename(name)


def make_caches(config: Config) -> list[AttentionShape | ScanShape]:
    width = config.head_width
    lightning = ScanShape(0, config.heads, width, width)
    attending = [AttentionShape(config.kv_heads, width, window=window) for window in config.windows]
    return [made if kind == ATTENTION else lightning for made, kind in zip(attending, config.kinds, strict=True)]
