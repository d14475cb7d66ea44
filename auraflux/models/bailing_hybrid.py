"""Ling 3: Kimi Linear's layers with RoPE and head gates in latent attention, and gates of KDA from one matrix each."""

import re
from dataclasses import replace
from typing import Any

from auraflux.errors import FormatError
from auraflux.models import deepseek_v3, kimi_linear
from auraflux.models.config import Keys
from auraflux.models.kimi_linear import ALIASES, make_caches
from auraflux.models.layer import Mixer
from auraflux.models.mtp import MTPNames
from auraflux.models.qwen3_5_moe import ATTENTION, DELTA, TAPS
from auraflux.weights import fields
from auraflux.weights.fields import COUNT, HEAD, LAYER_INTERVAL, LAYERS
from auraflux.weights.formats.untrusted import FLAG, number
from auraflux.weights.loader import Weights

__all__ = ["Config", "Model", "make_caches", "rename"]

THETA = 6000000.0
FLOOR = number(-100, -1e-6)
# names in published files -> ours
NAMES = (
    (re.compile(r"^model\.word_embeddings\."), "model.embed_tokens."),
    (re.compile(r"\.attention\."), ".self_attn."),
    (re.compile(r"\.self_attn\.dense\."), ".self_attn.o_proj."),
    (re.compile(r"\.self_attn\.forget_gate\."), ".self_attn."),
    (re.compile(r"\.mlp\.gate\.expert_bias$"), ".mlp.gate.e_score_correction_bias"),
)


class Config(kimi_linear.Config):
    """Kimi Linear's config."""

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config, ALIASES)
        first = keys.get("first_k_dense_replace", LAYERS, 2)
        usual = {"first_k_dense_replace": first, "rope_theta": keys.theta(THETA)}
        base = deepseek_v3.read_config(keys.changed(usual))
        # transformers writes the longer names
        taps = keys.get("linear_conv_kernel_dim", fields.TAPS, keys.get("short_conv_kernel_size", fields.TAPS, TAPS))
        if taps != TAPS:
            raise FormatError(f"config.json has a convolution over {taps} tokens; only {TAPS} are supported.")
        every = keys.get("layer_group_size", LAYER_INTERVAL, 6)
        ruled = tuple(DELTA if (index + 1) % every else ATTENTION for index in range(keys.layers))
        width = keys.get("linear_head_dim", HEAD, keys.get("head_dim", HEAD, 128))
        floor = keys.get("kda_lower_bound", FLOOR, -5.0)
        return cls(
            # the heads of its MTP layer are not known
            **vars(replace(base, extra=0)),
            kinds=keys.layer_types(DELTA, ATTENTION) if "layer_types" in keys else ruled,
            delta_heads=keys.get("linear_num_heads", COUNT, base.heads),
            delta_width=width,
            low_rank=False,
            floor=floor if keys.get("kda_safe_gate", FLAG, True) else None,
        )


class Model(kimi_linear.Model):
    """Kimi Linear's model with gated latent attention."""

    def __init__(self, config: Config, weights: Weights):
        weights.skip_prefix(f"model.layers.{config.layers}.")
        super().__init__(config, weights)

    @classmethod
    def mtp_names(cls, config: kimi_linear.Config) -> MTPNames | None:  # type: ignore[override]
        return None

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        made, config = super().make_mixer(weights, name, index), self.config
        if isinstance(made, deepseek_v3.Attention):
            mine = weights.slices.heads(config.heads)
            made.gate = deepseek_v3.Projection(weights, f"{name}.self_attn.g_proj", config.heads, config.hidden, mine)
        return made


def rename(name: str) -> str | None:
    found = kimi_linear.rename(name)
    for pattern, ours in NAMES:
        found = found and pattern.sub(ours, found)
    return found
