"""Granite 3 mixtures: Llama's attention, experts in every layer, and multipliers of embeddings, residuals, scores and logits.

A layer adds m times the outputs of its attention and its experts. The residual stream here is divided by m instead: embeddings
are, outputs are added as they come, and norms, which do not depend on the stream's scale, have eps / m². Granite Swash has
windows, a RoPE base for each layer, and attention sinks.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from auraflux.models import llama, qwen3_moe
from auraflux.models.attention import Attention, Heads
from auraflux.models.config import Keys
from auraflux.models.layer import FeedForward, Mixer
from auraflux.models.mixture import Mixture, MixtureConfig
from auraflux.models.mlp import FusedMLP
from auraflux.models.muse_glimmer_text import THETAS
from auraflux.models.rotation import no_rotation, rope_settings, rotation
from auraflux.ops import Routing
from auraflux.weights.experts.load_layer import load_experts
from auraflux.weights.fields import EXPERTS, FACTOR, WIDTH_OR_NONE
from auraflux.weights.loader import Weights

# names in files -> ours
NAMES = {
    ".block_sparse_moe.router.layer.": ".block_sparse_moe.gate.",
    ".block_sparse_moe.router.": ".block_sparse_moe.gate.",
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
}


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """Qwen3's config; eps is divided by the square of the residual multiplier, as the module says.

    embedding_scale  of embeddings, divided by the residual multiplier
    scale            of the attention scores
    logit_divisor    of logits
    sinks            each head has an attention sink
    """

    embedding_scale: float
    scale: float
    logit_divisor: float
    sinks: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        plain, experts = llama.Config.from_hf(config), None
        hybrid, shared = keys.kind == "granitemoehybrid", 0
        if keys.kind != "granitemoe":
            shared = keys.get("shared_intermediate_size", WIDTH_OR_NONE, 1024 if hybrid else 0)
        if not hybrid or keys.get("num_local_experts", EXPERTS, 8):
            count, chosen = keys.experts("num_local_experts")
            experts = MixtureConfig(count, plain.inner, Routing(chosen, "chosen", renormalize=True), shared or None)
        residual, swash = keys.get("residual_multiplier", FACTOR, 1.0), keys.kind == "granitemoe_swa"
        if swash:
            plain = replace(plain, **_by_layer(keys, plain.head_width))
        return cls(
            **vars(replace(plain, eps=plain.eps / residual**2)),
            mixture=experts,
            sparse=frozenset(range(keys.layers)),
            home="block_sparse_moe",
            embedding_scale=keys.get("embedding_multiplier", FACTOR, 1.0) / residual,
            scale=keys.get("attention_multiplier", FACTOR, 1.0),
            logit_divisor=keys.get("logits_scaling", FACTOR, 1.0),
            sinks=swash,
        )


def _by_layer(keys: Keys, width: int) -> dict[str, Any]:
    """Return the windows of layers, and the rotations of those with a base of their own; a base of 0 means none."""
    usual = tuple(llama.SLIDING if index % 4 else llama.FULL for index in range(keys.layers))
    kinds = keys.layer_types(llama.SLIDING, llama.FULL) if "layer_types" in keys else usual
    keys, thetas = keys.changed({"sliding_window": keys.sliding_window() or 128}), keys.get("layer_rope_theta", THETAS, None)
    settings = rope_settings(keys)
    others = {
        index: rotation(keys, width, replace(settings, rope_theta=theta), by_context=True) if theta else no_rotation(width)
        for index, theta in enumerate(thetas or [])
    }
    return {"windows": llama.windows_of(keys, kinds), "others": others}


class Model(qwen3_moe.Model):
    """Llama's layers with mixtures and multipliers."""

    config: Config

    @classmethod
    def no_tensor_parallel(cls, config: Config) -> str | None:  # type: ignore[override]
        shared = config.mixture is None or config.mixture.shared is not None
        return "the gate and up projections of its shared experts are one tensor." if shared else None

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        heads, turned = Heads(config.heads, config.kv_heads, config.head_width), config.rotation_of(index)
        sizes = config.hidden, heads, turned.to(weights.device)
        return Attention(weights, f"{name}.self_attn", *sizes, scale=config.scale, sinks=config.sinks)

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        hidden, mixture, home = self.config.hidden, self.config.mixture, f"{name}.{self.config.home}"
        assert mixture is not None
        shared = None if mixture.shared is None else FusedMLP(weights, f"{name}.shared_mlp", hidden, mixture.shared).as_expert()
        router = weights.matrix(f"{home}.gate", mixture.count, hidden)
        return Mixture(
            mixture.routing, router, load_experts(weights, home, mixture.count, hidden, mixture.inner), shared=shared
        )

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return super().embed_tokens(ids) * self.config.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / self.config.logit_divisor


def rename(name: str) -> str | None:
    ours = qwen3_moe.rename(name)
    for theirs, mine in NAMES.items():
        ours = ours and ours.replace(theirs, mine)
    return ours


make_caches = qwen3_moe.make_caches
