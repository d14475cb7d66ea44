"""ERNIE 4.5 mixtures: neighbouring channels are rotated together, experts chosen by softmax scores and a bias."""

from typing import Any

from auraflux.models import llama, qwen3_moe
from auraflux.models.config import Keys
from auraflux.models.decoder import FeedForward, text_name
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.rotation import rope_settings, rotation
from auraflux.ops import Routing
from auraflux.weights.loader import Weights

BIAS = "moe_statics.e_score_correction_bias"


class Config(qwen3_moe.Config):
    """The same as Qwen3's."""

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys, plain = Keys(config), llama.Config.from_hf(config)
        keys.refuse("use_bias", False)
        keys.refuse("moe_gate_act", "softmax")
        inner, settings = keys["moe_intermediate_size"], rope_settings(keys)
        routing = Routing(keys["moe_k"], "softmax", renormalize=True)
        mixture = MixtureConfig(keys["moe_num_experts"], inner, routing, inner * keys.get("moe_num_shared_experts", 0) or None)
        return cls(
            **vars(plain)
            | {"rotation": rotation(keys, plain.head_width, settings, interleaved=True)}
            | {"tied": keys.get("tie_word_embeddings", True)},
            mixture=mixture,
            sparse=_sparse(keys),
            home="mlp",
        )


def _sparse(keys: Keys) -> frozenset[int]:
    layers = keys["num_hidden_layers"]
    first, last, step = (keys.get(f"moe_layer_{key}", None) for key in ("start_index", "end_index", "interval"))
    last = layers - 1 if last in (None, -1) else last
    return frozenset(i for i in range(layers) if (i + 1) % (step or 1) == 0 and (first or 0) <= i <= last)


class Model(qwen3_moe.Model):
    """Qwen3's, with another choice of experts."""

    def make_mixture(self, weights: Weights, name: str, mixture: MixtureConfig) -> FeedForward:
        # mlx-lm leaves the bias out
        return biased_mixture(weights, name, self.config.hidden, mixture, BIAS if weights.has(f"{name}.{BIAS}") else None)


def rename(name: str) -> str | None:
    found = text_name(name)
    return None if found is None or ".mtp_" in found else found.replace(".gate.moe_statics.", ".moe_statics.")


make_caches = llama.make_caches
