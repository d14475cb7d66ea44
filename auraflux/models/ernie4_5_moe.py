"""ERNIE 4.5 mixtures: interleaved RoPE, and experts routed by softmax scores and a bias."""

from typing import Any

from auraflux.models import llama, qwen3_moe
from auraflux.models.config import Keys
from auraflux.models.decoder import text_name
from auraflux.models.layer import FeedForward
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.rotation import rope_settings, rotation
from auraflux.ops import Routing
from auraflux.weights.fields import LAYERS, SHARED_EXPERTS
from auraflux.weights.formats.untrusted import either, integer, number
from auraflux.weights.loader import Weights

NORM_FLOOR = number(0, 2**-10)
LAST = either(integer(-1, -1), LAYERS)  # -1 for the last layer
BIAS = "moe_statics.e_score_correction_bias"


class Config(qwen3_moe.Config):
    """Qwen3's config."""

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys, plain = Keys(config), llama.Config.from_hf(config)
        keys.only("use_bias", False)
        keys.only("moe_gate_act", "softmax")
        # a floor of the sum of router weights: below 1/1024 no sum of a softmax over up to 1024 experts reaches it
        keys.get("moe_norm_min", NORM_FLOOR, None)
        inner, settings = keys.expert_inner, rope_settings(keys)
        count, chosen = keys.experts("moe_num_experts", "moe_k")
        shared = inner * keys.get("moe_num_shared_experts", SHARED_EXPERTS, 0) or None
        mixture = MixtureConfig(count, inner, Routing(chosen, "softmax", renormalize=True), shared)
        return cls(
            **vars(plain)
            | {"rotation": rotation(keys, plain.head_width, settings, interleaved=True, by_context=True)}
            | {"tied": keys.tied(True)},
            mixture=mixture,
            sparse=_sparse(keys),
            home="mlp",
        )


def _sparse(keys: Keys) -> frozenset[int]:
    layers, step = keys.layers, keys.get("moe_layer_interval", LAYERS, 1) or 1
    first, last = keys.get("moe_layer_start_index", LAYERS, 0), keys.get("moe_layer_end_index", LAST, -1)
    last = layers - 1 if last == -1 else last
    return frozenset(i for i in range(layers) if (i + 1) % step == 0 and first <= i <= last)


class Model(qwen3_moe.Model):
    """Qwen3's model with biased routing."""

    def make_mixture(self, weights: Weights, name: str, mixture: MixtureConfig) -> FeedForward:
        # mlx-lm leaves the bias out
        return biased_mixture(weights, name, self.config.hidden, mixture, BIAS if weights.has(f"{name}.{BIAS}") else None)


def rename(name: str) -> str | None:
    found = text_name(name)
    return None if found is None or ".mtp_" in found else found.replace(".gate.moe_statics.", ".moe_statics.")


make_caches = llama.make_caches
