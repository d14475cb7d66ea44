"""Hunyuan 1 mixtures: Llama's attention with norms over rotated queries and keys, and a shared expert."""

from typing import Any

from torch import Tensor

from auraflux.cache import Batch
from auraflux.errors import FormatError
from auraflux.models import attention, llama, qwen3_moe
from auraflux.models.attention import Heads
from auraflux.models.config import Keys
from auraflux.models.layer import FeedForward, Mixer
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.qwen3_moe import Config as QwenConfig
from auraflux.models.rotation import no_rotation
from auraflux.ops import Routing, rms_norm
from auraflux.weights.fields import EXPERTS, FACTOR, THETA
from auraflux.weights.loader import Weights

NAMES = {
    ".mlp.gate.wg.": ".mlp.gate.",
    ".mlp.shared_mlp.": ".mlp.shared_experts.",
    ".self_attn.query_layernorm.": ".self_attn.q_norm.",
    ".self_attn.key_layernorm.": ".self_attn.k_norm.",
}


class Config(QwenConfig):
    """Qwen3's config."""

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.only("use_qk_norm", True)
        keys.only("use_cla", False)
        if keys.same("num_shared_expert", 1) != 1:
            raise FormatError(f"{keys.title} has layers without exactly one shared expert, which is not supported.")
        chosen = keys.same("moe_topk", keys.get("num_experts_per_tok", EXPERTS, 1))
        keys = _with_theta(keys.changed({"num_experts_per_tok": chosen}))
        plain = llama.Config.from_hf(keys.found)
        count, chosen = keys.experts("num_experts")
        mixture = MixtureConfig(count, plain.inner, Routing(chosen, "softmax", renormalize=True), plain.inner)
        return cls(**vars(plain), mixture=mixture, sparse=frozenset(range(keys.layers)), home="mlp")


def _with_theta(keys: Keys) -> Keys:
    """Return the keys with the base of RoPE that `alpha` makes, which stretches all frequencies."""
    for name in ("rope_parameters", "rope_scaling"):
        found = keys.section(name)
        alpha = found.get("alpha", FACTOR, None)
        if alpha:
            width = llama.Config.from_hf(keys.changed({name: None}).found).head_width
            theta = found.get("rope_theta", THETA, keys.theta()) * alpha ** (width / max(width - 2, 1))
            return keys.changed({name: None, "rope_theta": theta})
    return keys


class Model(qwen3_moe.Model):
    """Llama's layers with mixtures."""

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        heads, rotation = Heads(config.heads, config.kv_heads, config.head_width), config.rotation.to(weights.device)
        return Attention(weights, f"{name}.self_attn", config.hidden, heads, rotation, config.eps)

    def make_mixture(self, weights: Weights, name: str, mixture: MixtureConfig) -> FeedForward:
        return biased_mixture(weights, name, self.config.hidden, mixture, None)


class Attention(attention.Attention):
    """Attention whose queries and keys are rotated, then normalised."""

    def append(self, batch: Batch, store: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append keys and values of new tokens to the cache; return the queries, [T, Hq, D]."""
        assert self.norms is not None
        rotation = self.rotation.at(batch.context)
        q, k = (
            rms_norm(rotation(each, batch.positions), norm, self.eps) for each, norm in zip((q, k), self.norms, strict=True)
        )
        return store.rope_append(batch, q, k, v, no_rotation(self.heads.width).to(q.device), None, self.eps)


def rename(name: str) -> str | None:
    ours = qwen3_moe.rename(name)
    for theirs, mine in NAMES.items():
        ours = ours and ours.replace(theirs, mine)
    return ours


make_caches = qwen3_moe.make_caches
