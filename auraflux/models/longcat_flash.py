"""LongCat-Flash: two blocks of latent attention and an MLP per layer, and experts that run next to the second block.

The experts read the input of the first MLP; their output joins the residual stream after the second. A layer here is one block.
A token has two streams between layers, [T, 2, H]: the residual stream, and the output of experts on its way. Some experts are
no MLPs and return their input.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import linear, run_experts, shared_output
from auraflux.cache import Batch, MixedBatch
from auraflux.models import deepseek_v3
from auraflux.models.config import Keys
from auraflux.models.decoder import text_name
from auraflux.models.deepseek_v3 import make_caches
from auraflux.models.layer import Layer, LayerInput, Residual
from auraflux.models.mixture import Mixture
from auraflux.models.mlp import MLP, NoMLP
from auraflux.models.mtp import MTPNames
from auraflux.ops import Routing, SharedExpert, combine, route
from auraflux.weights.experts.load_layer import load_experts
from auraflux.weights.experts.resident import ExpertPredictor
from auraflux.weights.fields import EXPERTS, FACTOR, LAYER_COUNT, WIDTH
from auraflux.weights.loader import Weights

__all__ = ["Config", "Model", "make_caches", "rename"]

# DeepSeek's keys -> this family's
ALIASES = {
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
}
ONLY: dict[str, bool | str] = {
    "zero_expert_type": "identity",
    "router_bias": False,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}


@dataclass(frozen=True, eq=False)
class Config(deepseek_v3.Config):
    """DeepSeek V3's config, with a layer for each block.

    zero          experts that return their input, numbered after the others
    latent_scale  of normalised latents
    """

    zero: int
    latent_scale: float

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config, ALIASES)
        for key, accepted in ONLY.items():
            keys.only(key, accepted)
        keys.only("num_hidden_layers", blocks := 2 * keys.read("num_layers", LAYER_COUNT))
        keys.read("q_lora_rank", WIDTH)
        count, zero = keys.read("n_routed_experts", EXPERTS), keys.get("zero_expert_num", EXPERTS, 256)
        chosen = {
            "num_experts_per_tok": keys.same("moe_topk", keys.get("num_experts_per_tok", EXPERTS, 12)),
            "n_routed_experts": count + zero,
        }
        keys = keys.changed({"num_hidden_layers": blocks, **chosen})
        base = deepseek_v3.read_config(keys)
        widths = base.widths
        keys.only("qk_head_dim", widths.nope + widths.rope)
        assert widths.query is not None
        scale = keys.get("routed_scaling_factor", FACTOR, 6.0)
        routing = Routing(base.mixture.routing.k, deepseek_v3.SOFTMAX, renormalize=False, scale=scale)
        changed = replace(
            base,
            scale=base.scale * (base.hidden / widths.query) ** 0.5,
            mixture=replace(base.mixture, count=count, routing=routing),
        )
        return cls(**vars(changed), zero=zero, latent_scale=(base.hidden / widths.latent) ** 0.5)


class Model(deepseek_v3.Model):
    """DeepSeek V3's attention and MLPs, with experts next to every second layer."""

    config: Config

    @classmethod
    def no_tensor_parallel(cls, config: Config) -> str | None:  # type: ignore[override]
        return "outputs of its experts join the residual stream a layer later."

    @classmethod
    def no_pipeline_parallel(cls, config: Config) -> str | None:  # type: ignore[override]
        return "a token has two streams between layers, and tensors are named after pairs of layers."

    @classmethod
    def mtp_names(cls, config: Config) -> MTPNames | None:  # type: ignore[override]
        return None

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        name, half, config = f"model.layers.{index // 2}", index % 2, self.config
        mixer_norm, mlp_norm = (self.make_norm(weights, f"{name}.{norm}.{half}") for norm in self.norms)
        mixer = Attention(config, weights, f"{name}.self_attn.{half}")
        dense = MLP(weights, f"{name}.mlps.{half}", config.hidden, config.inner).as_expert()
        experts = None if half else self._experts(weights, f"{name}.mlp")
        return Block(mixer_norm, mixer, mlp_norm, NoMLP(), config.eps, dense=dense, experts=experts)

    def _link_prefetch(self) -> None:
        predictor: ExpertPredictor | None = None
        for layer in reversed(self.layers):
            if layer.experts is not None:  # type: ignore[attr-defined]
                predictor = layer.experts.link_prefetch(predictor, layer.mlp_norm, layer.eps)  # type: ignore[attr-defined]

    def _experts(self, weights: Weights, name: str) -> "ZeroMixture":
        hidden, mixture, zero = self.config.hidden, self.config.mixture, self.config.zero
        for index in range(mixture.count, mixture.count + zero):
            # files written by transformers
            weights.skip_prefix(f"{name}.experts.{index}.")
        every = mixture.count + zero
        return ZeroMixture(
            mixture.routing,
            weights.matrix(f"{name}.gate", every, hidden),
            load_experts(weights, name, mixture.count, hidden, mixture.inner),
            choice_bias=weights.vector(f"{name}.gate.e_score_correction_bias", every),
            count=mixture.count,
        )

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Start the streams: [T] -> [T, 2, H]."""
        found = super().embed_tokens(ids)
        return torch.stack((found, torch.zeros_like(found)), 1)

    def final_norm(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Normalise the output of the last layer: [T, 2, H] -> [T, H]."""
        return super().final_norm(x[:, 0].contiguous())


class Attention(deepseek_v3.Attention):
    """Latent attention whose latents are scaled after their norm."""

    def __init__(self, config: Config, weights: Weights, name: str):
        super().__init__(config, weights, name)
        self.latent_norm = self.latent_norm * config.latent_scale


@dataclass(frozen=True, eq=False, kw_only=True)
class ZeroMixture(Mixture):
    """A mixture whose experts from `count` on return their input."""

    count: int

    def output(self, x: Tensor) -> Tensor:
        """Return the output of normalised inputs: [T, H] -> [T, H]."""
        ids, weights = route(linear(x, self.router), self.routing, self.choice_bias)
        real = ids < self.count
        found = run_experts(self.experts, x, self._real(ids), weights.where(real, 0))
        kept = weights.where(~real, 0).sum(1, keepdim=True)
        return combine(found, (x.float() * kept).to(x.dtype))

    def choose(self, x: Tensor) -> Tensor:
        """Return the expert ids of x [T, H]: [T, k]."""
        return self._real(super().choose(x))

    def _real(self, ids: Tensor) -> Tensor:
        """Replace the experts that are no MLPs by another of the same token, so that no further expert is read."""
        real = ids < self.count
        other = ids.where(real, 0).amax(1, keepdim=True)
        return ids.where(real, other)


@dataclass(frozen=True, eq=False, kw_only=True)
class Block(Layer):
    """Attention, then an MLP, `dense`; the streams are the residual stream and the output of experts on its way.

    experts  of the first block of a layer
    """

    dense: SharedExpert
    experts: ZeroMixture | None

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Batch | MixedBatch, store: Any) -> Residual:
        total, out = self.mixer(self._input(x), batch, store)
        total, h = LayerInput(total, out, self.mlp_norm, self.eps).normed()
        found = shared_output(h, self.dense)
        assert found is not None
        if self.experts is None:
            streams = combine(total, found, x[:, 1].contiguous()), torch.zeros_like(total)
        else:
            streams = combine(total, found), self.experts.output(h)
        return torch.stack(streams, 1), None

    def update_cache(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> None:
        """Append new tokens to the cache; the output is not needed."""
        self.mixer.update_cache(self._input(x), batch, store)

    def _input(self, x: Tensor) -> LayerInput:
        return LayerInput(x[:, 0].contiguous(), None, self.mixer_norm, self.eps)


def rename(name: str) -> str | None:
    if name.startswith("model.mtp."):
        return None
    ours = text_name(name)
    return ours and ours.replace(".mlp.router.classifier.", ".mlp.gate.").replace(".mlp.router.", ".mlp.gate.")
