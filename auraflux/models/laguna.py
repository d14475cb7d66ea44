"""Laguna: gated attention with a head count and a rotation by the kind of layer, and DeepSeek V3's routing."""

from dataclasses import dataclass
from typing import Any

from auraflux.errors import FormatError
from auraflux.models import llama, qwen3_moe
from auraflux.models.attention import Attention, Heads, OutputGate
from auraflux.models.config import Keys
from auraflux.models.deepseek_v3 import DENSE, SPARSE
from auraflux.models.layer import FeedForward, Mixer
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.rotation import RopeSettings
from auraflux.ops import Routing
from auraflux.weights.fields import COUNT, FACTOR, MOST_LAYERS, NAME, WIDTH_OR_NONE
from auraflux.weights.formats.untrusted import FLAG, either, list_of, number
from auraflux.weights.loader import Weights

ROPE = {
    llama.SLIDING: RopeSettings(partial_rotary_factor=1.0),
    llama.FULL: RopeSettings(rope_theta=500000.0, partial_rotary_factor=0.5),
}
BIAS = "gate.e_score_correction_bias"
GATES: dict[bool | str, OutputGate] = {
    True: OutputGate("g_proj", per_head=True, soft=True),
    "per-head": OutputGate("g_proj", per_head=True, soft=True),
    "per-element": OutputGate("g_proj", soft=True),
}


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """Qwen3's config.

    head_counts  query heads of each layer
    gate         over the outputs of attention
    """

    head_counts: tuple[int, ...]
    gate: OutputGate

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        if keys.get("moe_router_logit_softcapping", number(0, 1e6), 0):
            raise FormatError(f"{keys.title} has moe_router_logit_softcapping, which is not supported.")
        keys.only("moe_apply_router_weight_on_input", False)
        plain, layers = llama.Config.from_hf(keys.found), keys.layers
        counts = keys.get("num_attention_heads_per_layer", list_of(COUNT, MOST_LAYERS), [plain.heads] * layers)
        check_heads(keys, counts, plain.kv_heads)
        count, chosen = keys.experts("num_experts")
        routing = Routing(chosen, "sigmoid", renormalize=True, scale=keys.get("moe_routed_scaling_factor", FACTOR, 1.0))
        shared = keys.get("shared_expert_intermediate_size", WIDTH_OR_NONE, 0) or None
        return cls(
            **vars(plain) | llama.by_kind(keys, plain.head_width, ROPE),
            mixture=MixtureConfig(count, keys.expert_inner, routing, shared),
            sparse=sparse_layers(keys),
            home="mlp",
            head_counts=tuple(counts),
            gate=_gate(keys),
        )


def sparse_layers(keys: Keys) -> frozenset[int]:
    """Return the layers with experts: those listed, or all but the first."""
    usual = (DENSE,) + (SPARSE,) * (keys.layers - 1)
    kinds = keys.layer_types(DENSE, SPARSE, key="mlp_layer_types") if "mlp_layer_types" in keys else usual
    return frozenset(index for index, kind in enumerate(kinds) if kind == SPARSE)


def check_heads(keys: Keys, counts: list[int], kv_heads: int) -> None:
    """Refuse query heads of layers that do not share the key heads."""
    if len(counts) != keys.layers or any(count % kv_heads for count in counts):
        raise FormatError(f"{keys.title} has query heads {counts} for {keys.layers} layers of {kv_heads} key heads.")


def _gate(keys: Keys) -> OutputGate:
    keys.only("gating", *GATES)
    return GATES[keys.get("gating", either(FLAG, NAME), True)]


class Model(qwen3_moe.Model):
    """Qwen3's model with gated attention and biased routing."""

    config: Config

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        heads = Heads(config.head_counts[index], config.kv_heads, config.head_width)
        rotation = config.rotation_of(index).to(weights.device)
        return Attention(weights, f"{name}.self_attn", config.hidden, heads, rotation, config.eps, gate=config.gate)

    def make_mixture(self, weights: Weights, name: str, mixture: MixtureConfig) -> FeedForward:
        return biased_mixture(weights, name, self.config.hidden, mixture, BIAS)


def rename(name: str) -> str | None:
    ours = qwen3_moe.rename(name)
    if ours is None:
        return None
    # as published
    return ours.replace(".mlp.experts.e_score_correction_bias", f".mlp.{BIAS}").replace(".shared_expert.", ".shared_experts.")


make_caches = qwen3_moe.make_caches
