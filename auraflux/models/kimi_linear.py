"""Kimi Linear: DeepSeek V3's mixtures, with Kimi Delta Attention (KDA) in most layers.

KDA is Gated DeltaNet with a decay per key channel. About every fourth layer has latent attention; no layer has RoPE.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from auraflux.adapters.linears import linear
from auraflux.cache import Batch, ChannelDeltaShape, LatentShape
from auraflux.errors import FormatError
from auraflux.models import deepseek_v3
from auraflux.models.config import Keys
from auraflux.models.layer import LayerInput, Mixer, PartMixer
from auraflux.models.mtp import MTPNames, after_last
from auraflux.models.qwen3_5_moe import ATTENTION, DELTA, TAPS, UNIT_EPS, taps_of
from auraflux.models.qwen3_moe import PARTS
from auraflux.models.rotation import no_rotation
from auraflux.ops import channel_gates, qk_norm, rms_norm, sigmoid_gate
from auraflux.weights import fields
from auraflux.weights.fields import COUNT, HEAD, LAYERS, MOST_LAYERS, Fields
from auraflux.weights.formats.stored import Stored
from auraflux.weights.formats.untrusted import list_of
from auraflux.weights.loader import Weights

# DeepSeek's keys -> this family's
ALIASES = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "scoring_func": "moe_router_activation_func",
    "max_position_embeddings": "model_max_length",
}


@dataclass(frozen=True, eq=False)
class Config(deepseek_v3.Config):
    """DeepSeek V3's config; layers are of two `kinds`, and KDA heads have keys and values of one width.

    low_rank  gates of KDA come from two matrices each, not from one
    floor     of the decay's logarithm, see `channel_gates`; None for none
    """

    kinds: tuple[str, ...]
    delta_heads: int
    delta_width: int
    low_rank: bool = True
    floor: float | None = None

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config, ALIASES)
        keys.only("mla_use_nope", True)
        first = keys.get("first_k_dense_replace", LAYERS, 1)
        base, inner = (
            deepseek_v3.read_config(keys.changed({"first_k_dense_replace": first})),
            keys.section("linear_attn_config"),
        )
        taps = inner.get("short_conv_kernel_size", fields.TAPS, keys.get("linear_conv_kernel_dim", fields.TAPS, TAPS))
        if taps != TAPS:
            raise FormatError(f"config.json has a convolution over {taps} tokens; only {TAPS} are supported.")
        heads = inner.get("num_heads", COUNT, keys.get("linear_num_heads", COUNT, 32))
        width = inner.get("head_dim", HEAD, keys.get("linear_head_dim", HEAD, 128))
        # a rotation by nothing
        still = no_rotation(base.widths.rope)
        return cls(**vars(replace(base, rotation=still)), kinds=_kinds(keys, inner), delta_heads=heads, delta_width=width)


def _kinds(keys: Keys, inner: Fields) -> tuple[str, ...]:
    """The kind of each layer; published files list the numbers of those that attend, the first being 1."""
    if "layer_types" in keys:
        return keys.layer_types(DELTA, ATTENTION)
    listed, others = ({*inner.read(key, list_of(LAYERS, MOST_LAYERS))} for key in ("full_attn_layers", "kda_layers"))
    layers = range(1, keys.layers + 1)
    if listed | others != {*layers} or listed & others:
        raise FormatError(
            f"config.json lists layers of linear_attn_config that are not those of num_hidden_layers {len(layers)}."
        )
    return tuple(ATTENTION if number in listed else DELTA for number in layers)


class Model(deepseek_v3.Model):
    """DeepSeek V3's model with KDA in most layers."""

    config: Config

    @classmethod
    def mtp_names(cls, config: Config) -> MTPNames | None:  # type: ignore[override]
        attends = [index for index, kind in enumerate(config.kinds) if kind == ATTENTION]
        return after_last(config.layers, config.extra, attends[-1]) if attends else None

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        if self.config.kinds[index] == ATTENTION:
            return super().make_mixer(weights, name, index)
        return Delta(weights, f"{name}.self_attn", self.config)


class Delta(PartMixer):
    """KDA: short convolutions of queries, keys and values, then a recurrent state with a delta rule."""

    def __init__(self, weights: Weights, name: str, config: Config):
        self.heads, self.width, self.eps = config.delta_heads, config.delta_width, config.eps
        wide = self.heads * self.width
        gates = dict.fromkeys(("f_a", "g_a"), self.width) if config.low_rank else dict.fromkeys("fg", wide)
        rows = {**dict.fromkeys("qkv", wide), **gates, "b": self.heads}
        self.projections = [weights.matrix(f"{name}.{part}_proj", n, config.hidden) for part, n in rows.items()]
        self.taps = [taps_of(weights, f"{name}.{part}_conv1d.weight", wide) for part in "qkv"]
        second = [weights.matrix(f"{name}.{part}_b_proj", wide, self.width) for part in "fg" if config.low_rank]
        self.fading: Stored | None = second[0] if second else None
        self.gate: Stored | None = second[1] if second else None
        self.floor = config.floor
        self.a_log = _rates(weights, f"{name}.A_log", self.heads)
        self.dt_bias = weights.vector(f"{name}.dt_bias", wide).view(self.heads, self.width)
        self.norm = weights.vector(f"{name}.o_norm.weight", self.width)
        self.out = weights.matrix(f"{name}.o_proj", config.hidden, wide)

    def mix(self, inputs: LayerInput, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        total, (*qkv, f, g, b) = inputs.linears(self.projections)
        shape = len(b), self.heads, self.width
        q, k, v = (part.view(shape) for part in store.convolve_each(batch, qkv, self.taps))
        q, k = qk_norm(q, k, UNIT_EPS)
        f, g = (x if second is None else linear(x, second) for x, second in ((f, self.fading), (g, self.gate)))
        decay, beta = channel_gates(f.view(shape), b, self.a_log, self.dt_bias, self.floor)
        out = rms_norm(store.update(batch, q, k, v, decay, beta), self.norm, self.eps)
        out = sigmoid_gate(out, g.view(shape))
        return total, linear(out.flatten(1), self.out)


def _rates(weights: Weights, name: str, heads: int) -> Tensor:
    """Load A_log as [H]; published files have [1, 1, H, 1]."""
    shape = weights.shape(name) if weights.has(name) else (heads,)
    wide = (1, 1, heads, 1) if len(shape) == 4 else (heads,)
    return weights.vector(name, *wide).view(-1)


def rename(name: str) -> str | None:
    found = deepseek_v3.rename(name)
    if found is None:
        return None
    found = found.replace(".block_sparse_moe.", ".mlp.").replace(".mlp.e_score", ".mlp.gate.e_score")
    found = re.sub(r"\.([qkv])_conv\.conv\.", r".\1_conv1d.", found)
    return re.sub(r"\.experts\.(\d+)\.(w[123])\.", lambda match: f".experts.{match[1]}.{PARTS[match[2]]}.", found)


def make_caches(config: Config) -> list[LatentShape | ChannelDeltaShape]:
    heads, width = config.delta_heads, config.delta_width
    attention = LatentShape(config.widths.latent, config.widths.rope)
    delta = ChannelDeltaShape(heads * width, heads, width, width)
    return [attention if kind == ATTENTION else delta for kind in config.kinds]
