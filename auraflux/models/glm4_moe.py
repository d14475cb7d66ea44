"""GLM 4 mixtures and MiniMax M2: grouped-query attention with partial RoPE, and DeepSeek V3's routing."""

from dataclasses import dataclass
from typing import Any

from auraflux.models import deepseek_v3, llama, qwen3_moe
from auraflux.models.config import Keys
from auraflux.models.layer import FeedForward
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.mtp import MTPNames, after_last
from auraflux.models.rotation import rope_settings, rotated_share, rotation
from auraflux.ops import Routing
from auraflux.weights.fields import LAYERS
from auraflux.weights.formats.untrusted import FLAG, integer
from auraflux.weights.loader import Weights


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """Qwen3's config.

    bias   the name of the routing bias within a mixture
    extra  MTP heads after the last layer
    """

    bias: str
    extra: int

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys, plain = Keys(config), llama.Config.from_hf(config)
        keys.only("scoring_func", "sigmoid")
        width = _rotated_channels(keys, plain.head_width)
        its_rotation = rotation(keys, width, rope_settings(keys), by_context=True)
        return cls(**vars(plain) | (_minimax(keys) if keys.kind == "minimax_m2" else _glm(keys)) | {"rotation": its_rotation})


def _glm(keys: Keys) -> dict[str, Any]:
    return {
        "head_norms": llama.EACH if keys.get("use_qk_norm", FLAG, False) else None,
        "mixture": deepseek_v3.mixture(keys),
        "sparse": frozenset(index for index, sparse in enumerate(deepseek_v3.sparse_layers(keys)) if sparse),
        "home": "mlp",
        "bias": "gate.e_score_correction_bias",
        "extra": keys.get("num_nextn_predict_layers", LAYERS, 0),
    }


def _minimax(keys: Keys) -> dict[str, Any]:
    keys.only("shared_intermediate_size", 0)
    keys.only("use_qk_norm", True)
    count, chosen = keys.experts("num_local_experts")
    return {
        "mixture": MixtureConfig(count, keys.inner, Routing(chosen, "sigmoid", renormalize=True)),
        "sparse": frozenset(range(keys.layers)),
        "home": "block_sparse_moe",
        "bias": "e_score_correction_bias",
        "extra": 0,
    }


def _rotated_channels(keys: Keys, width: int) -> int:
    """Return the number of channels of a head that RoPE rotates."""
    part = rotated_share(keys, rope_settings(keys))
    if part is None:
        return keys.get("rotary_dim", integer(0, 1 << 16), width) if keys.kind == "minimax_m2" else width // 2
    return int(width * part)


class Model(qwen3_moe.Model):
    """Qwen3's model with biased routing."""

    config: Config

    @classmethod
    def mtp_names(cls, config: Config) -> MTPNames | None:  # type: ignore[override]
        return after_last(config.layers, config.extra, config.layers - 1)

    def make_mixture(self, weights: Weights, name: str, mixture: MixtureConfig) -> FeedForward:
        return biased_mixture(weights, name, self.config.hidden, mixture, self.config.bias)


rename, make_caches = qwen3_moe.rename, qwen3_moe.make_caches
