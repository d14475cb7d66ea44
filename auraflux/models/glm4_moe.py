"""GLM 4 mixtures and MiniMax M2: grouped-query attention that turns a part of each head, DeepSeek V3's choice of experts."""

from dataclasses import dataclass
from typing import Any

from auraflux.models import deepseek_v3, llama, qwen3_moe
from auraflux.models.config import Keys
from auraflux.models.decoder import FeedForward
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.mtp import Place, after_last
from auraflux.models.rotation import rope_settings, rotation
from auraflux.ops import Routing
from auraflux.weights.loader import Weights


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """The same as Qwen3's.

    bias   what checkpoints call the bias in the choice of experts, within a mixture
    extra  layers after the last, which predict further tokens
    """

    bias: str
    extra: int

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys, plain = Keys(config), llama.Config.from_hf(config)
        keys.refuse("scoring_func", "sigmoid")
        its_rotation = rotation(keys, _rotated_channels(keys, plain.head_width), rope_settings(keys))
        return cls(**vars(plain) | (_minimax(keys) if keys.kind == "minimax_m2" else _glm(keys)) | {"rotation": its_rotation})


def _glm(keys: Keys) -> dict[str, Any]:
    return {
        "head_norms": llama.EACH if keys.get("use_qk_norm", False) else None,
        "mixture": deepseek_v3.mixture(keys),
        "sparse": frozenset(index for index, sparse in enumerate(deepseek_v3.sparse_layers(keys)) if sparse),
        "home": "mlp",
        "bias": "gate.e_score_correction_bias",
        "extra": keys.get("num_nextn_predict_layers", 0),
    }


def _minimax(keys: Keys) -> dict[str, Any]:
    keys.refuse("shared_intermediate_size", 0)
    keys.refuse("use_qk_norm", True)
    routing = Routing(keys["num_experts_per_tok"], "sigmoid", renormalize=True)
    return {
        "mixture": MixtureConfig(keys["num_local_experts"], keys["intermediate_size"], routing),
        "sparse": frozenset(range(keys["num_hidden_layers"])),
        "home": "block_sparse_moe",
        "bias": "e_score_correction_bias",
        "extra": 0,
    }


def _rotated_channels(keys: Keys, width: int) -> int:
    """How many channels of a head are rotated."""
    part = rope_settings(keys).get("partial_rotary_factor", keys.get("partial_rotary_factor", None))
    if part is None:
        return keys.get("rotary_dim", width) if keys.kind == "minimax_m2" else width // 2
    return int(width * part)


class Model(qwen3_moe.Model):
    """Qwen3's, with another choice of experts."""

    config: Config

    @classmethod
    def mtp_place(cls, config: Config) -> Place | None:  # type: ignore[override]
        return after_last(config.layers, config.extra, config.layers - 1)

    def make_mixture(self, weights: Weights, name: str, mixture: MixtureConfig) -> FeedForward:
        return biased_mixture(weights, name, self.config.hidden, mixture, self.config.bias)


rename, make_caches = qwen3_moe.rename, qwen3_moe.make_caches
