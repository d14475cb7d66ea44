"""GLM 4 mixtures and relatives: grouped-query attention, in some with partial RoPE, and DeepSeek V3's routing.

MiniMax M2, Solar Open, dots.llm1, Hunyuan 3 and K-EXAONE differ in norms, windows and names.
"""

import re
from dataclasses import dataclass
from typing import Any

from auraflux.models import deepseek_v3, llama, qwen3_moe
from auraflux.models.config import Keys
from auraflux.models.layer import FeedForward
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.mtp import MTPNames, after_last
from auraflux.models.rotation import no_rotation, rope_settings, rotated_share, rotation
from auraflux.ops import Routing
from auraflux.weights.fields import FACTOR, HEAD, LAYER_INTERVAL, LAYERS, SHARED_EXPERTS
from auraflux.weights.formats.untrusted import FLAG, integer
from auraflux.weights.loader import Weights

# names within a mixture of Hunyuan 3 and K-EXAONE, as published and in transformers
EXPERT_BIAS = "expert_bias"
HUNYUAN_NAMES = {"router.gate.": "gate.", "e_score_correction_bias": EXPERT_BIAS, "shared_mlp.": "shared_experts."}
HUNYUAN = re.compile(r"\.mlp\.(router\.gate\.|e_score_correction_bias|shared_mlp\.)")

# DeepSeek's keys -> K-EXAONE's
EXAONE = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


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
        keys = Keys(config)
        if keys.kind == "solar_open":
            # all of its layers are mixtures
            keys = keys.changed({"intermediate_size": keys.expert_inner, "first_k_dense_replace": 0})
        plain = llama.Config.from_hf(keys.found)
        keys.only("scoring_func", "sigmoid")
        width = _rotated_channels(keys, plain.head_width)
        its_rotation = rotation(keys, width, rope_settings(keys), by_context=True)
        return cls(**vars(plain) | OF_KIND.get(keys.kind or "", _deepseek)(keys) | {"rotation": its_rotation})


def _glm(keys: Keys) -> dict[str, Any]:
    return {**_deepseek(keys), "head_norms": llama.EACH if keys.get("use_qk_norm", FLAG, False) else None}


def _deepseek(keys: Keys) -> dict[str, Any]:
    return {
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


def _hunyuan(keys: Keys) -> dict[str, Any]:
    count, chosen = keys.experts("num_experts")
    routing = Routing(chosen, "sigmoid", renormalize=True, scale=keys.get("router_scaling_factor", FACTOR, 2.826))
    inner, layers = keys.expert_inner, range(keys.layers)
    sparse = deepseek_v3.sparse_layers(keys) if "mlp_layer_types" in keys else [index > 0 for index in layers]
    return {
        "mixture": MixtureConfig(count, inner, routing, inner * _shared(keys) or None),
        "sparse": frozenset(index for index in layers if sparse[index]),
        "home": "mlp",
        "bias": EXPERT_BIAS,
        "extra": 0,
    }


def _exaone(keys: Keys) -> dict[str, Any]:
    found = _deepseek(Keys(keys.changed({"num_shared_experts": _shared(keys)}).found, EXAONE))
    # some files have a pattern of letters beside their list
    every = 1 if "layer_types" in keys else keys.get("sliding_window_pattern", LAYER_INTERVAL, 4)
    kinds = llama.listed_kinds(keys, every)
    still = no_rotation(keys.get("head_dim", HEAD, keys.hidden // keys.heads))
    full = {index: still for index, kind in enumerate(kinds) if kind == llama.FULL}
    return {**found, "windows": llama.windows_of(keys, kinds), "others": full, "bias": EXPERT_BIAS, "extra": 0}


def _shared(keys: Keys) -> int:
    return keys.get("num_shared_experts", SHARED_EXPERTS, 1)


OF_KIND = {"glm4_moe": _glm, "minimax_m2": _minimax, "hy_v3": _hunyuan, "exaone_moe": _exaone}


def _rotated_channels(keys: Keys, width: int) -> int:
    """Return the number of channels of a head that RoPE rotates."""
    part = rotated_share(keys, rope_settings(keys))
    if part is None and keys.kind == "minimax_m2":
        return keys.get("rotary_dim", integer(0, 1 << 16), width)
    if part is None:
        return width // 2 if keys.kind == "glm4_moe" else width
    return int(width * part)


class Model(qwen3_moe.Model):
    """Qwen3's model with biased routing."""

    config: Config

    def __init__(self, config: Config, weights: Weights):
        if config.bias == EXPERT_BIAS:
            # an MTP layer, which transformers does not run either
            weights.skip_prefix(f"model.layers.{config.layers}.")
        super().__init__(config, weights)

    @classmethod
    def mtp_names(cls, config: Config) -> MTPNames | None:  # type: ignore[override]
        return after_last(config.layers, config.extra, config.layers - 1)

    def make_mixture(self, weights: Weights, name: str, mixture: MixtureConfig) -> FeedForward:
        return biased_mixture(weights, name, self.config.hidden, mixture, self.config.bias)


def rename(name: str) -> str | None:
    ours = qwen3_moe.rename(name)
    return None if ours is None else HUNYUAN.sub(lambda match: f".mlp.{HUNYUAN_NAMES[match[1]]}", ours)


make_caches = qwen3_moe.make_caches
