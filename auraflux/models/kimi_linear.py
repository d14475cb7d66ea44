"""Kimi Linear: DeepSeek V3's mixtures, with a delta rule in place of most of its attention.

The rule is Gated DeltaNet's with a decay for every channel of a key. Every fourth layer or so attends to latents; no positions
are turned anywhere.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch, ChannelDeltaShape, LatentShape
from auraflux.errors import FormatError
from auraflux.models import deepseek_v3
from auraflux.models.config import Keys
from auraflux.models.decoder import Mixer, Stream
from auraflux.models.mtp import Place, after_last
from auraflux.models.qwen3_5_moe import ATTENTION, DELTA, TAPS, UNIT_EPS, taps_of
from auraflux.models.qwen3_moe import PARTS
from auraflux.models.rotation import Rotation
from auraflux.ops import add_norm_linears, channel_gates, linear, qk_norm, rms_norm, sigmoid_gate
from auraflux.weights.loader import Weights

# DeepSeek's words for what this family says otherwise
WORDS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "model_max_length": "max_position_embeddings",
}


@dataclass(frozen=True, eq=False)
class Config(deepseek_v3.Config):
    """DeepSeek V3's; layers are of two `kinds`, and delta heads have keys and values of one width."""

    kinds: tuple[str, ...]
    delta_heads: int
    delta_width: int

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys, known = Keys(config), {**config}
        keys.refuse("mla_use_nope", True)
        for ours, theirs in WORDS.items():
            if ours in keys:
                known[theirs] = keys[ours]
        known.setdefault("first_k_dense_replace", 1)
        base, inner = deepseek_v3.Config.from_hf(known), Keys({"model_type": keys.kind, **keys.get("linear_attn_config", {})})
        if (found := inner.get("short_conv_kernel_size", keys.get("linear_conv_kernel_dim", TAPS))) != TAPS:
            raise FormatError(f"config.json has a convolution over {found} tokens; only {TAPS} are supported.")
        heads = inner.get("num_heads", keys.get("linear_num_heads", 32))
        width = inner.get("head_dim", keys.get("linear_head_dim", 128))
        # a rotation by nothing
        still = Rotation(torch.zeros(base.widths.rope // 2))
        return cls(**vars(replace(base, rotation=still)), kinds=_kinds(keys, inner), delta_heads=heads, delta_width=width)


def _kinds(keys: Keys, inner: Keys) -> tuple[str, ...]:
    """The kind of each layer; published files list the numbers of those that attend, the first being 1."""
    if "layer_types" in keys:
        return keys.layer_types(DELTA, ATTENTION)
    listed, layers = {*inner["full_attn_layers"]}, range(1, keys["num_hidden_layers"] + 1)
    if listed | {*inner["kda_layers"]} != {*layers} or listed & {*inner["kda_layers"]}:
        raise FormatError(
            f"config.json lists layers of linear_attn_config that are not those of num_hidden_layers {len(layers)}."
        )
    return tuple(ATTENTION if number in listed else DELTA for number in layers)


class Model(deepseek_v3.Model):
    """DeepSeek V3's, with a delta rule in place of most attention."""

    config: Config

    @classmethod
    def mtp_place(cls, config: Config) -> Place | None:  # type: ignore[override]
        attends = [index for index, kind in enumerate(config.kinds) if kind == ATTENTION]
        return after_last(config.layers, config.extra, attends[-1]) if attends else None

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        if self.config.kinds[index] == ATTENTION:
            return super().make_mixer(weights, name, index)
        return Delta(weights, f"{name}.self_attn", self.config)


class Delta(Mixer):
    """Short convolutions of queries, keys and values, then a memory that is corrected at every token."""

    def __init__(self, weights: Weights, name: str, config: Config):
        self.heads, self.width, self.eps = config.delta_heads, config.delta_width, config.eps
        wide = self.heads * self.width
        rows = {**dict.fromkeys("qkv", wide), "f_a": self.width, "g_a": self.width, "b": self.heads}
        self.projections = [weights.matrix(f"{name}.{part}_proj", n, config.hidden) for part, n in rows.items()]
        self.taps = [taps_of(weights, f"{name}.{part}_conv1d.weight", wide) for part in "qkv"]
        self.fading, self.gate = (weights.matrix(f"{name}.{part}_b_proj", wide, self.width) for part in "fg")
        self.a_log = _rates(weights, f"{name}.A_log", self.heads)
        self.dt_bias = weights.vector(f"{name}.dt_bias", wide).view(self.heads, self.width)
        self.norm = weights.vector(f"{name}.o_norm.weight", self.width)
        self.out = weights.matrix(f"{name}.o_proj", config.hidden, wide)

    def __call__(self, stream: Stream, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Give the stream with all that was to be added to it, and what comes next, both [T, H]."""
        total, (*qkv, f, g, b) = add_norm_linears(*stream, self.projections)
        shape = len(b), self.heads, self.width
        q, k, v = (part.view(shape) for part in store.convolve_each(batch, qkv, self.taps))
        q, k = qk_norm(q, k, UNIT_EPS)
        decay, beta = channel_gates(linear(f, self.fading).view(shape), b, self.a_log, self.dt_bias)
        out = rms_norm(store.update(batch, q, k, v, decay, beta), self.norm, self.eps)
        out = sigmoid_gate(out, linear(g, self.gate).view(shape))
        return total, linear(out.flatten(1), self.out)

    remember = __call__  # a memory is what its result is made of


def _rates(weights: Weights, name: str, heads: int) -> Tensor:
    """Logarithms [H], which published files have as [1, 1, H, 1]."""
    shape = weights.shape(name) if weights.has(name) else (heads,)
    wide = (1, 1, heads, 1) if len(shape) == 4 else (heads,)
    return weights.vector(name, *wide).view(-1)


def rename(name: str) -> str | None:
    kept = deepseek_v3.rename(name)
    if kept is None:
        return None
    kept = kept.replace(".block_sparse_moe.", ".mlp.").replace(".mlp.e_score", ".mlp.gate.e_score")
    kept = re.sub(r"\.([qkv])_conv\.conv\.", r".\1_conv1d.", kept)
    return re.sub(r"\.experts\.(\d+)\.(w[123])\.", lambda found: f".experts.{found[1]}.{PARTS[found[2]]}.", kept)


def make_caches(config: Config) -> list[LatentShape | ChannelDeltaShape]:
    heads, width = config.delta_heads, config.delta_width
    attention = LatentShape(config.widths.latent, config.widths.rope)
    delta = ChannelDeltaShape(heads * width, heads, width, width)
    return [attention if kind == ATTENTION else delta for kind in config.kinds]
