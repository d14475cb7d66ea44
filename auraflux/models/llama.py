"""Dense transformers with grouped-query attention: Llama and its close relatives Mistral, Ministral 3, Qwen2 and Qwen3."""

from dataclasses import dataclass
from typing import Any

from auraflux.cache import AttentionShape
from auraflux.models.attention import Attention, Heads
from auraflux.models.config import Keys
from auraflux.models.decoder import Decoder, FeedForward, Mixer, text_name
from auraflux.models.mlp import MLP
from auraflux.models.rotation import Growth, Rotation, growth, rope_settings, rotation
from auraflux.weights.loader import Weights

EACH, ALL = "each", "all"
NORMS = {"qwen3": EACH, "qwen3_moe": EACH, "olmoe": ALL, "minimax_m2": ALL}
# their sliding_window holds without use_sliding_window
SLIDING = "mistral", "ministral3", "mixtral"


@dataclass(frozen=True, eq=False)
class Config:
    """hidden, inner, vocab are widths; heads of queries, kv_heads of keys; context is what the model was trained on.

    windows     of each layer, None for those that see everything
    head_norms  whether there are norms over EACH head's query and key, or one over those of ALL heads
    """

    hidden: int
    inner: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    windows: tuple[int | None, ...]
    eps: float
    tied: bool
    head_norms: str | None
    context: int
    rotation: Rotation
    growth: Growth | None

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.refuse("hidden_act", "silu")
        heads, hidden = keys["num_attention_heads"], keys["hidden_size"]
        width, settings = keys.get("head_dim", hidden // heads), rope_settings(keys)
        return cls(
            hidden=hidden,
            inner=keys["intermediate_size"],
            vocab=keys["vocab_size"],
            layers=keys["num_hidden_layers"],
            heads=heads,
            kv_heads=keys.get("num_key_value_heads", heads),
            head_width=width,
            windows=_windows(keys),
            eps=keys["rms_norm_eps"],
            tied=keys.get("tie_word_embeddings", False),
            head_norms=NORMS.get(keys.kind),
            context=keys.get("max_position_embeddings", 2048),
            rotation=rotation(keys, width, settings),
            growth=growth(settings),
        )


def _windows(keys: Keys) -> tuple[int | None, ...]:
    layers, window = range(keys["num_hidden_layers"]), keys.get("sliding_window", 0) or None
    if keys.kind in SLIDING:
        return (window,) * len(layers)
    # of Qwen the first layers see everything
    first = keys.get("max_window_layers", 28) if keys.get("use_sliding_window", False) else len(layers)
    return tuple(window if index >= first else None for index in layers)


class Model(Decoder[Config]):
    """Attention and an MLP in every layer."""

    again = beside = True

    @classmethod
    def unsliced(cls, config: Config) -> str | None:
        return "its norms of queries and keys are over all heads at once." if config.head_norms == ALL else None

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        heads, rotation = Heads(config.heads, config.kv_heads, config.head_width), config.rotation.to(weights.device)
        eps, across = config.eps if config.head_norms else None, config.head_norms == ALL
        options: dict[str, Any] = {"across": across, "growth": config.growth}
        return Attention(weights, f"{name}.self_attn", config.hidden, heads, rotation, eps, **options)

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        return MLP(weights, f"{name}.mlp", self.config.hidden, self.config.inner)


rename = text_name


def make_caches(config: Config) -> list[AttentionShape]:
    return [AttentionShape(config.kv_heads, config.head_width, window=window) for window in config.windows]
