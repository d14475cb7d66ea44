"""MiMo-V2-Flash: windows with attention sinks and twice the KV heads, values narrower than keys, and DeepSeek V3's routing."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from auraflux.cache import AttentionShape
from auraflux.models import attention, deepseek_v3, llama, qwen3_moe
from auraflux.models.attention import Heads
from auraflux.models.config import Keys
from auraflux.models.layer import FeedForward, LayerInput, Mixer
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.rotation import RopeSettings, rotations
from auraflux.weights.fields import FACTOR, HEAD, TOKEN_COUNT
from auraflux.weights.loader import Weights

ROPE = {
    llama.SLIDING: RopeSettings(partial_rotary_factor=0.334),
    llama.FULL: RopeSettings(rope_theta=5000000.0, partial_rotary_factor=0.334),
}
FULL_EVERY = 6  # and the first layer


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """Qwen3's config.

    value_width  of a head; keys have `head_width`
    value_scale  of all values
    """

    value_width: int
    value_scale: float

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.only("scoring_func", "sigmoid")
        keys = keys.changed({"head_dim": keys.get("head_dim", HEAD, 192), "sliding_window": _window(keys)})
        plain, mixture, kinds = llama.Config.from_hf(keys.found), deepseek_v3.mixture(keys), _kinds(keys)
        by_kind = rotations(keys, plain.head_width, ROPE)
        changes = {
            "windows": llama.windows_of(keys, kinds),
            "others": {index: by_kind[kind] for index, kind in enumerate(kinds)},
        }
        return cls(
            **vars(plain) | changes,
            mixture=replace(mixture, shared=None),
            sparse=_sparse(keys),
            home="mlp",
            value_width=keys.get("v_head_dim", HEAD, 128),
            value_scale=keys.get("attention_value_scale", FACTOR, 1.0),
        )

    def heads_of(self, index: int) -> Heads:
        """Return the heads of a layer."""
        return Heads(self.heads, self.kv_heads * (1 if self.windows[index] is None else 2), self.head_width, self.value_width)


def _window(keys: Keys) -> int:
    before = keys.get("sliding_window_size", TOKEN_COUNT, None)
    return (keys.sliding_window() or 129) if before is None else before + 1


def _kinds(keys: Keys) -> tuple[str, ...]:
    if "layer_types" in keys:
        return keys.layer_types(llama.SLIDING, llama.FULL)
    return tuple(llama.SLIDING if i and (i + 1) % FULL_EVERY else llama.FULL for i in range(keys.layers))


def _sparse(keys: Keys) -> frozenset[int]:
    if "mlp_layer_types" not in keys:
        return frozenset(range(1, keys.layers))
    return frozenset(index for index, sparse in enumerate(deepseek_v3.sparse_layers(keys)) if sparse)


class Model(qwen3_moe.Model):
    """Attention with narrow values, then an MLP or experts."""

    config: Config

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        return Attention(self.config, weights, f"{name}.self_attn", index)

    def make_mixture(self, weights: Weights, name: str, mixture: MixtureConfig) -> FeedForward:
        return biased_mixture(weights, name, self.config.hidden, mixture, "gate.e_score_correction_bias")


class Attention(attention.Attention):
    """Attention with scaled values."""

    def __init__(self, config: Config, weights: Weights, name: str, index: int):
        rotation, sinks = config.rotation_of(index).to(weights.device), config.windows[index] is not None
        super().__init__(weights, name, config.hidden, config.heads_of(index), rotation, sinks=sinks)
        self.value_scale = config.value_scale

    def project(self, inputs: LayerInput) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """Return the residual stream with its delta added, the queries, keys and scaled values, and no gates."""
        total, (q, k, v), gate = super().project(inputs)
        return total, (q, k, v if self.value_scale == 1.0 else v * self.value_scale), gate


def rename(name: str) -> str | None:
    if name.startswith("model.mtp."):
        return None
    ours = qwen3_moe.rename(name)
    return None if ours is None else ours.replace(".attention_sink_bias", ".sinks")


def make_caches(config: Config) -> list[AttentionShape]:
    heads = [config.heads_of(index) for index in range(config.layers)]
    windows = zip(heads, config.windows, strict=True)
    return [AttentionShape(each.kv, each.width, each.value_width, window=window) for each, window in windows]
