"""DBRX: attention with clipped queries, keys and values, then experts, each after a LayerNorm without a bias."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.models import attention, qwen3_moe
from auraflux.models.attention import Heads
from auraflux.models.config import NESTED, Keys
from auraflux.models.layer import Layer, LayerInput, Mixer
from auraflux.models.mixture import MixtureConfig
from auraflux.models.phimoe import CentredLayer
from auraflux.models.qwen3_moe import make_caches
from auraflux.models.rotation import rope_settings, rotation
from auraflux.ops import Routing, clip, combine, layer_norm
from auraflux.weights.fields import COUNT, EXPERTS, FACTOR, THETA, WIDTH
from auraflux.weights.formats.stored import Stored
from auraflux.weights.formats.untrusted import number
from auraflux.weights.loader import Weights

__all__ = ["Config", "Model", "make_caches", "rename"]

EPS = 1e-5  # of norms, which no config has
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
}
POWER = "moe_normalize_expert_weights"
# published names -> ours
NAMES = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.norm_f.": "model.norm.",
    "transformer.blocks.": "model.layers.",
    ".norm_attn_norm.norm_1.": ".input_layernorm.",
    ".norm_attn_norm.norm_2.": ".post_attention_layernorm.",
    ".norm_attn_norm.attn.Wqkv.": ".self_attn.qkv_proj.",
    ".norm_attn_norm.attn.out_proj.": ".self_attn.o_proj.",
    ".ffn.router.layer.": ".mlp.gate.",
    ".ffn.experts.mlp.": ".mlp.experts.",
}
# mlx-lm's names of an expert's projections
PARTS = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """Qwen3's config; `limit` clips queries, keys and values, None for no limit."""

    limit: float | None

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config, ALIASES)
        keys.only("tie_word_embeddings", False)
        attn, ffn = keys.section("attn_config"), keys.section(NESTED)
        ffn.section("ffn_act_fn").only("name", "silu")
        heads, kv_heads = keys.heads, attn.get("kv_n_heads", COUNT, 1)
        if heads % kv_heads:
            raise FormatError(f"{keys.title} has {heads} n_heads, which {kv_heads} kv_n_heads cannot share.")
        width, inner = keys.hidden // heads, ffn.get("ffn_hidden_size", WIDTH, 3584)
        turning = keys.changed({"rope_theta": attn.get("rope_theta", THETA, keys.theta())})
        count, chosen = ffn.get("moe_num_experts", EXPERTS, 4), ffn.get("moe_top_k", EXPERTS, 1)
        if not 1 <= chosen <= count:
            raise FormatError(f"{keys.title} has moe_top_k {chosen} of moe_num_experts {count}.")
        # weights are divided by their sum, unless the power of their norm is null
        ffn.get(POWER, number(1, 1), 1)
        sums_to_one = not ffn.is_null(POWER)
        return cls(
            hidden=keys.hidden,
            inner=inner,
            vocab=keys.vocab(),
            layers=keys.layers,
            heads=heads,
            kv_heads=kv_heads,
            head_width=width,
            windows=(None,) * keys.layers,
            eps=EPS,
            tied=False,
            head_norms=None,
            context=keys.context(2048),
            rotation=rotation(keys, width, rope_settings(turning), by_context=True),
            growth=None,
            others={},
            mixture=MixtureConfig(count, inner, Routing(chosen, "softmax", renormalize=sums_to_one)),
            sparse=frozenset(range(keys.layers)),
            home="mlp",
            limit=attn.get("clip_qkv", FACTOR, None),
        )


class Model(qwen3_moe.Model):
    """Attention, then experts, each after a LayerNorm."""

    config: Config

    @classmethod
    def no_tensor_parallel(cls, config: Config) -> str | None:  # type: ignore[override]
        return "its queries, keys and values share a projection, which was not tried."

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        return Attention(self.config, weights, f"{name}.self_attn")

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        made = super()._layer(weights, name, index)
        return CentredLayer(
            **vars(made), mixer_bias=torch.zeros_like(made.mixer_norm), mlp_bias=torch.zeros_like(made.mlp_norm)
        )

    def final_norm(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Normalise the output of the last layer: [T, H]."""
        return layer_norm(x if delta is None else combine(x, delta), self.norm, torch.zeros_like(self.norm), self.config.eps)


class Attention(attention.Attention):
    """Attention whose queries, keys and values are one projection, clipped."""

    def __init__(self, config: Config, weights: Weights, name: str):
        self.limit = config.limit
        heads = Heads(config.heads, config.kv_heads, config.head_width)
        super().__init__(weights, name, config.hidden, heads, config.rotation.to(weights.device))

    def load_qkv(self, weights: Weights, hidden: int, each: list[tuple[str, int, range]]) -> list[Stored]:
        """Load the projections of which names, numbers of rows and this rank's rows are given."""
        counts, fused = [n for _, n, _ in each], each[0][0].replace("q_proj", "qkv_proj")
        return [weights.matrix(fused, len(rows), hidden, take=rows) for rows in torch.arange(sum(counts)).split(counts)]

    def project(self, inputs: LayerInput) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """Return the residual stream with its delta added, the queries, keys and values, and None for output gates."""
        total, rows, gate = super().project(inputs)
        limit = self.limit
        return total, rows if limit is None else tuple(clip(each, limit) for each in rows), gate


def rename(name: str) -> str | None:
    found = name
    for published, ours in NAMES.items():
        found = found.replace(published, ours)
    found = re.sub(r"\.ffn\.experts\.(\d+)\.(w1|v1|w2)\.", lambda m: f".mlp.experts.{m[1]}.{PARTS[m[2]]}.", found)
    return qwen3_moe.rename(found)
