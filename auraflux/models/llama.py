"""Dense transformers with grouped-query attention: Llama and its close relatives Mistral, Qwen2 and Qwen3."""

from dataclasses import dataclass
from typing import Any

from auraflux.cache import AttentionShape
from auraflux.models.attention import Attention, Heads
from auraflux.models.config import Keys
from auraflux.models.decoder import Decoder, FeedForward, Mixer, without_frequencies
from auraflux.models.mlp import MLP
from auraflux.models.rotation import Rotation, rope_settings, rotation
from auraflux.weights.loader import Weights


@dataclass(frozen=True, eq=False)
class Config:
    """hidden, inner, vocab are widths; heads of queries, kv_heads of keys; context is what the model was trained on."""

    hidden: int
    inner: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    window: int | None
    eps: float
    tied: bool
    head_norms: bool
    context: int
    rotation: Rotation

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.refuse("hidden_act", "silu")
        heads, hidden = keys["num_attention_heads"], keys["hidden_size"]
        width = keys.get("head_dim", hidden // heads)
        sliding = keys.kind == "mistral" or keys.get("use_sliding_window", False)
        return cls(
            hidden=hidden,
            inner=keys["intermediate_size"],
            vocab=keys["vocab_size"],
            layers=keys["num_hidden_layers"],
            heads=heads,
            kv_heads=keys.get("num_key_value_heads", heads),
            head_width=width,
            window=keys.get("sliding_window", None) if sliding else None,
            eps=keys["rms_norm_eps"],
            tied=keys.get("tie_word_embeddings", False),
            head_norms=keys.kind == "qwen3",
            context=keys.get("max_position_embeddings", 2048),
            rotation=rotation(keys, width, rope_settings(keys)),
        )


class Model(Decoder[Config]):
    """Attention and an MLP in every layer."""

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        heads, turn = Heads(config.heads, config.kv_heads, config.head_width), config.rotation.to(weights.device)
        eps = config.eps if config.head_norms else None
        return Attention(weights, f"{name}.self_attn", config.hidden, heads, turn, eps)

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        return MLP(weights, f"{name}.mlp", self.config.hidden, self.config.inner)


rename = without_frequencies


def make_caches(config: Config) -> list[AttentionShape]:
    return [AttentionShape(config.kv_heads, config.head_width, window=config.window)] * config.layers
