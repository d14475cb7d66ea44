"""gpt-oss: experts with a clamped activation, attention sinks, a sliding window in every other layer, biases everywhere."""

from dataclasses import dataclass
from typing import Any

from auraflux.cache import AttentionShape
from auraflux.models.attention import Attention, Heads
from auraflux.models.config import Keys
from auraflux.models.decoder import Decoder, text_name
from auraflux.models.layer import FeedForward, Mixer
from auraflux.models.mixture import Mixture
from auraflux.models.rotation import Rotation, rope_settings, rotation
from auraflux.ops import Clamp, Routing
from auraflux.weights.experts.load_layer import load_experts
from auraflux.weights.fields import FACTOR, HEAD
from auraflux.weights.loader import Weights

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, eq=False)
class Config:
    """hidden, inner, vocab are widths, inner that of one expert; kinds names the attention of each layer."""

    hidden: int
    inner: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    window: int
    kinds: tuple[str, ...]
    experts: int
    routing: Routing
    clamp: Clamp
    eps: float
    tied: bool
    context: int
    rotation: Rotation

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.only("hidden_act", "silu")
        heads, width = keys.heads, keys.get("head_dim", HEAD, 64)
        experts, chosen = keys.experts("num_local_experts")
        return cls(
            hidden=keys.hidden,
            inner=keys.inner,
            vocab=keys.vocab(),
            layers=keys.layers,
            heads=heads,
            kv_heads=keys.kv_heads(heads),
            head_width=width,
            window=keys.window(),
            kinds=keys.layer_types(SLIDING, FULL),
            experts=experts,
            routing=Routing(chosen, "chosen", renormalize=False),
            clamp=Clamp(keys.get("swiglu_alpha", FACTOR, 1.702), keys.get("swiglu_limit", FACTOR, 7.0)),
            eps=keys.eps(),
            tied=keys.tied(),
            context=keys.context(131072),
            rotation=rotation(keys, width, rope_settings(keys), by_context=True),
        )


class Model(Decoder[Config]):
    """Attention with sinks, then experts with biases."""

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        heads, rotation = Heads(config.heads, config.kv_heads, config.head_width), config.rotation.to(weights.device)
        return Attention(weights, f"{name}.self_attn", config.hidden, heads, rotation, sinks=True)

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        config, name = self.config, f"{name}.mlp"
        count, hidden = config.experts, config.hidden
        return Mixture(
            config.routing,
            weights.matrix(f"{name}.router", count, hidden),
            load_experts(weights, name, count, hidden, config.inner, config.clamp),
            router_bias=weights.bias(f"{name}.router", count),
        )


rename = text_name


def make_caches(config: Config) -> list[AttentionShape]:
    windows = {SLIDING: config.window, FULL: None}
    return [AttentionShape(config.kv_heads, config.head_width, window=windows[kind]) for kind in config.kinds]
