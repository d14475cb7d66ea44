"""gpt-oss: experts with a clamped activation, attention with sinks, every other layer within a window, biases everywhere."""

from dataclasses import dataclass
from typing import Any

from auraflux.cache import AttentionShape
from auraflux.models.attention import Attention, Heads
from auraflux.models.config import Keys
from auraflux.models.decoder import Decoder, FeedForward, Mixer, text_name
from auraflux.models.mixture import Mixture
from auraflux.models.rotation import Rotation, rope_settings, rotation
from auraflux.ops import Clamp, Routing
from auraflux.weights.experts import load_experts
from auraflux.weights.loader import Weights

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, eq=False)
class Config:
    """hidden, inner, vocab are widths, inner that of one expert; kinds says which layers have the window."""

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
        keys.refuse("hidden_act", "silu")
        heads, width = keys["num_attention_heads"], keys.get("head_dim", 64)
        return cls(
            hidden=keys["hidden_size"],
            inner=keys["intermediate_size"],
            vocab=keys["vocab_size"],
            layers=keys["num_hidden_layers"],
            heads=heads,
            kv_heads=keys.get("num_key_value_heads", heads),
            head_width=width,
            window=keys.window(),
            kinds=keys.layer_types(SLIDING, FULL),
            experts=keys["num_local_experts"],
            routing=Routing(keys["num_experts_per_tok"], "chosen", renormalize=False),
            clamp=Clamp(keys.get("swiglu_alpha", 1.702), keys.get("swiglu_limit", 7.0)),
            eps=keys["rms_norm_eps"],
            tied=keys.get("tie_word_embeddings", False),
            context=keys.get("max_position_embeddings", 131072),
            rotation=rotation(keys, width, rope_settings(keys)),
        )


class Model(Decoder[Config]):
    """Attention with sinks, then experts with biases."""

    beside = True

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
