"""A.X K2: DeepSeek V3.2's sparse latent attention with gated outputs, and norms with low-rank gates."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.adapters.linears import linear
from auraflux.cache import Batch, MixedBatch
from auraflux.models import deepseek_v3, deepseek_v32
from auraflux.models.config import Keys
from auraflux.models.deepseek_v3 import LATENT_EPS, LowRank
from auraflux.models.deepseek_v32 import Indexer, make_caches
from auraflux.models.layer import Layer, LayerInput, Mixer, NormedInput, Residual
from auraflux.models.mtp import MTPNames
from auraflux.ops import rms_norm, sigmoid_gate
from auraflux.weights.fields import LAYERS, WIDTH
from auraflux.weights.formats.stored import Stored
from auraflux.weights.loader import Weights

__all__ = ["Config", "Model", "make_caches", "rename"]

# names in transformers -> in published files
NAMES = {".mlp.fc1.": ".W_down.", ".mlp.fc2.": ".W_up.", ".q_gate_proj.": ".q_b_proj."}


@dataclass(frozen=True, eq=False)
class Config(deepseek_v32.Config):
    """DeepSeek V3.2's config; `gate_rank` is the rank of the norms' gates."""

    gate_rank: int

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys = keys.changed({"first_k_dense_replace": keys.get("first_k_dense_replace", LAYERS, 1)})
        return cls(**vars(deepseek_v32.Config.from_hf(keys.found)), gate_rank=keys.get("gated_norm_rank", WIDTH, 16))


class Model(deepseek_v32.Model):
    """Gated sparse latent attention, then an MLP in the first layers and experts in the others."""

    config: Config

    @classmethod
    def no_tensor_parallel(cls, config: Config) -> str | None:  # type: ignore[override]
        return "its queries and gates share a projection, which was not tried."

    @classmethod
    def mtp_names(cls, config: Config) -> MTPNames | None:  # type: ignore[override]
        return None

    def make_attention(self, weights: Weights, name: str, indexer: Indexer, chooses: bool) -> Mixer:
        return Attention(self.config, weights, name, indexer, chooses)

    def make_norm(self, weights: Weights, name: str) -> Tensor:
        """Load the weight of a norm over the residual stream, [H]."""
        return super().make_norm(weights, f"{name}.norm" if weights.has(f"{name}.norm.weight") else name)

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        config, made = self.config, super()._layer(weights, name, index)
        mixer_gate, mlp_gate = (
            NormGate(
                weights.matrix(f"{name}.{norm}.W_down", config.gate_rank, config.hidden),
                weights.matrix(f"{name}.{norm}.W_up", config.hidden, config.gate_rank),
            )
            if gated
            else None
            for norm, gated in zip(self.norms, (True, config.sparse[index]), strict=True)
        )
        assert mixer_gate is not None
        return GatedLayer(**vars(made), mixer_gate=mixer_gate, mlp_gate=mlp_gate)


class NormGate(NamedTuple):
    """The gate of a norm: x * sigmoid(up(silu(down x)))."""

    down: Stored
    up: Stored

    def __call__(self, x: Tensor) -> Tensor:
        inner = linear(x, self.down)
        # silu
        return sigmoid_gate(x, linear(sigmoid_gate(inner, inner), self.up))


@dataclass(frozen=True, eq=False, kw_only=True)
class GatedLayer(Layer):
    """A mixer, then an MLP, each after a norm with a gate; `mlp_gate` is None where the second has none."""

    mixer_gate: NormGate
    mlp_gate: NormGate | None

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Batch | MixedBatch, store: Any) -> Residual:
        mixed = self.mixer(self._input(x, delta), batch, store)
        inputs = LayerInput(*mixed, self.mlp_norm, self.eps)
        return self.mlp(inputs if self.mlp_gate is None else _gated(inputs, self.mlp_gate))

    def update_cache(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> None:
        """Append new tokens to the cache; the output is not needed."""
        self.mixer.update_cache(self._input(x, delta), batch, store)

    def _input(self, x: Tensor, delta: Tensor | None) -> NormedInput:
        return _gated(LayerInput(x, delta, self.mixer_norm, self.eps), self.mixer_gate)


def _gated(inputs: LayerInput, gate: NormGate) -> NormedInput:
    total, h = inputs.normed()
    return NormedInput(gate(h), total)


class Attention(deepseek_v32.Attention):
    """Sparse latent attention whose queries and output gates are one projection of low-rank queries, normalised and not."""

    def make_query(self, config: deepseek_v3.Config, weights: Weights, name: str, mine: range) -> LowRank:
        """Load the projection of queries and gates."""
        widths, rank = config.widths, config.widths.query
        assert rank is not None
        self.width = widths.nope + widths.rope
        rows = config.heads * (self.width + widths.value)
        return LowRank(weights, f"{name}.q", rows, range(rows), rank, config.hidden, 2 * rank)

    def queries(self, q: Tensor, selects: bool) -> tuple[Tensor, list[Tensor]]:
        """Return the queries, and those of the indexer if it is to select; keep the gates."""
        low, own = rms_norm(q, self.query.norm, LATENT_EPS), self.query.b
        found = linear(torch.cat((low, q), 1), own.weight).unflatten(1, (self.heads, -1))
        self.gates = found[:, :, self.width :].flatten(1)
        return found[:, :, : self.width].flatten(1), [self.indexer.query(low)] if selects else []

    def output(self, mixed: Tensor) -> Tensor:
        """Return the gated output of all heads: [T, H, latent] -> [T, H * value]."""
        return sigmoid_gate(super().output(mixed), self.gates)


def rename(name: str) -> str | None:
    found = deepseek_v32.rename(name)
    for theirs, published in NAMES.items():
        found = found and found.replace(theirs, published)
    return found
