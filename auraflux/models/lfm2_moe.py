"""LFM2 mixtures: gated short convolutions in most layers, attention in the others, then an MLP or experts."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from auraflux.adapters.linears import add_norm_linears, linear
from auraflux.cache import AttentionShape, Batch, ConvShape
from auraflux.errors import FormatError
from auraflux.models import llama, qwen3_moe
from auraflux.models.config import Keys
from auraflux.models.layer import FeedForward, LayerInput, Mixer, PartMixer
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.qwen3_5_moe import TAPS
from auraflux.models.qwen3_moe import PARTS
from auraflux.ops import Routing
from auraflux.weights import fields
from auraflux.weights.fields import EPS, FACTOR, LAYERS
from auraflux.weights.formats.stored import dense
from auraflux.weights.formats.untrusted import FLAG
from auraflux.weights.loader import Weights

CONV = "conv"
# names in files -> ours
NAMES = {
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    "model.embedding_norm.": "model.norm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".self_attn.q_layernorm.": ".self_attn.q_norm.",
    ".self_attn.k_layernorm.": ".self_attn.k_norm.",
    ".feed_forward.": ".mlp.",
}


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """Qwen3's config.

    attends  the layers with attention
    taps     inputs that a convolution reads
    bias     experts have a bias where they are chosen
    """

    attends: tuple[bool, ...]
    taps: int
    bias: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        usual = {
            "rms_norm_eps": keys.get("norm_eps", EPS, keys.get("rms_norm_eps", EPS, 1e-5)),
            "rope_theta": keys.theta(1e6),
            "tie_word_embeddings": keys.get("tie_embedding", FLAG, keys.tied(True)),
        }
        plain = llama.Config.from_hf(keys.changed(usual).found)
        count, chosen = keys.experts("num_experts")
        scale = keys.get("routed_scaling_factor", FACTOR, 1.0)
        routing = Routing(chosen, "sigmoid", renormalize=keys.get("norm_topk_prob", FLAG, True), scale=scale)
        taps = keys.get("conv_L_cache", fields.TAPS, 3)
        if taps > TAPS:
            raise FormatError(f"{keys.title} has a convolution over {taps} tokens; up to {TAPS} are supported.")
        return cls(
            **vars(plain),
            mixture=MixtureConfig(count, keys.expert_inner, routing),
            sparse=frozenset(range(keys.get("num_dense_layers", LAYERS, 2), keys.layers)),
            home="mlp",
            attends=tuple(kind == llama.FULL for kind in keys.layer_types(CONV, llama.FULL)),
            taps=taps,
            bias=keys.get("use_expert_bias", FLAG, True),
        )


class Model(qwen3_moe.Model):
    """Qwen3's model with convolutions instead of attention in most layers, and biased routing."""

    config: Config

    @classmethod
    def no_tensor_parallel(cls, config: Config) -> str | None:  # type: ignore[override]
        return "its convolutions read all channels."

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        if self.config.attends[index]:
            return super().make_mixer(weights, name, index)
        return ShortConv(weights, f"{name}.conv", self.config.hidden, self.config.taps)

    def make_mixture(self, weights: Weights, name: str, mixture: MixtureConfig) -> FeedForward:
        return biased_mixture(weights, name, self.config.hidden, mixture, "expert_bias" if self.config.bias else None)


class ShortConv(PartMixer):
    """out(c * conv(b * x)), with b, c and x projections of the input."""

    def __init__(self, weights: Weights, name: str, hidden: int, taps: int):
        parts = torch.arange(3 * hidden).split(hidden)
        self.projections = [weights.matrix(f"{name}.in_proj", hidden, hidden, take=part) for part in parts]
        bias = weights.bias(f"{name}.in_proj", 3 * hidden)
        self.biases = [None] * 3 if bias is None else [each.contiguous() for each in bias.split(hidden)]
        self.taps = _taps(weights, f"{name}.conv.weight", hidden, taps)
        self.taps_bias = weights.bias(f"{name}.conv", hidden)
        self.out, self.out_bias = weights.matrix(f"{name}.out_proj", hidden, hidden), weights.bias(f"{name}.out_proj", hidden)

    def mix(self, inputs: LayerInput, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        total, (b, c, x) = add_norm_linears(*inputs, self.projections, self.biases)
        return total, linear(c * store.convolve(batch, b * x, self.taps, self.taps_bias), self.out, self.out_bias)


def _taps(weights: Weights, name: str, channels: int, taps: int) -> Tensor:
    """Load a convolution, [C, 1, K] or mlx-lm's [C, K, 1], as `short_conv` has it: with zeros for the oldest inputs."""
    turned = weights.has(name) and weights.shape(name)[-1] == 1
    found = dense(weights.stored(name, channels, *((taps, 1) if turned else (1, taps)))).reshape(channels, taps, 1)
    made = weights.complete(name, found).to(weights.device, torch.float32).view(channels, taps)
    return pad(made, (TAPS - taps, 0)).T.contiguous()


def rename(name: str) -> str | None:
    ours = qwen3_moe.rename(name)
    if ours is None:
        return None
    for theirs, mine in NAMES.items():
        ours = ours.replace(theirs, mine)
    return re.sub(r"(\.mlp\.|\.experts\.\d+\.)(w[123])\.", lambda match: f"{match[1]}{PARTS[match[2]]}.", ours)


def make_caches(config: Config) -> list[AttentionShape | ConvShape]:
    attention, memory = AttentionShape(config.kv_heads, config.head_width), ConvShape(config.hidden)
    return [attention if attends else memory for attends in config.attends]
