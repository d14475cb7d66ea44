"""Step 3.5 and 3.7 Flash: gated attention with head counts and rotations by the kind of layer, and limited experts at the end.

All norms have weights w of (1 + w).
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from auraflux.errors import FormatError
from auraflux.models import llama, qwen3_moe
from auraflux.models.attention import Attention, Heads, OutputGate
from auraflux.models.config import Keys
from auraflux.models.deepseek_v3 import DENSE, SPARSE
from auraflux.models.laguna import check_heads
from auraflux.models.layer import FeedForward, Mixer
from auraflux.models.mixture import MixtureConfig, activated_mixture, biased_mixture
from auraflux.models.mlp import ActivatedMLP, AddedMLP
from auraflux.models.rotation import RopeSettings, rotations
from auraflux.ops import Limit, Routing
from auraflux.weights.fields import COUNT, EXPERTS, FACTOR, FRACTION, LAYERS, MOST_LAYERS, NAMES, THETA, WIDTH
from auraflux.weights.formats.untrusted import OBJECT, Kind, either, list_of, number, shown, string
from auraflux.weights.loader import Weights

# our keys -> those of published files, and their kinds
PUBLISHED: dict[str, tuple[str, Kind[int]]] = {
    "num_key_value_heads": ("num_attention_groups", COUNT),
    "n_routed_experts": ("moe_num_experts", EXPERTS),
    "num_experts_per_tok": ("moe_top_k", EXPERTS),
    "share_expert_dim": ("share_expert_dims", WIDTH),
}
BIAS = "gate.e_score_correction_bias"
GATE = OutputGate("g_proj", per_head=True)
FIRST_SPARSE = 3
LIMIT: Kind[float | None] = Kind("a number or null", lambda value: value is None or number(0, 1e6).accepts(value))
LIMITS = list_of(LIMIT, MOST_LAYERS)
# of each layer, and in published files of the MTP layers after the last one
BY_LAYER: dict[str, Kind[Any]] = {
    "layer_types": NAMES,
    "mlp_layer_types": NAMES,
    "swiglu_limits": LIMITS,
    "swiglu_limits_shared": LIMITS,
    "partial_rotary_factors": list_of(FRACTION, MOST_LAYERS),
}
THETAS: Kind[Any] = either(THETA, list_of(THETA, MOST_LAYERS))


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """Qwen3's config.

    head_counts    query heads of each layer
    scale          of the attention scores
    limits         of each layer's experts, see `activation`; None for no limit
    shared_limits  of each layer's MLP or shared expert
    extra          MTP layers after the last one, which are not used
    """

    head_counts: tuple[int, ...]
    scale: float
    limits: tuple[float | None, ...]
    shared_limits: tuple[float | None, ...]
    extra: int

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        found = Keys(config)
        found.only("gating", True, "per-head")
        found.only("use_bidirectional_attention", False)
        extra = found.get("num_nextn_predict_layers", LAYERS, 0)
        keys = _without_mtp(_renamed(found), extra)
        if not _has_rope_by_kind(keys):
            keys = keys.changed({"rope_parameters": _rope(keys), "rope_theta": None, "rope_scaling": None})
        plain, kinds = llama.Config.from_hf(keys.found), _kinds(keys)
        counts = _head_counts(keys, kinds, plain.heads)
        check_heads(keys, counts, plain.kv_heads)
        by_kind = rotations(keys, plain.head_width, dict.fromkeys(kinds, RopeSettings()))
        changes = {
            "windows": llama.windows_of(keys, kinds),
            "others": {index: by_kind[kind] for index, kind in enumerate(kinds)},
        }
        count, chosen = keys.experts("n_routed_experts")
        routing = Routing(chosen, "sigmoid", True, scale=keys.get("moe_router_scaling_factor", FACTOR, 1.0))
        return cls(
            **vars(plain) | changes,
            mixture=MixtureConfig(count, keys.expert_inner, routing, keys.get("share_expert_dim", WIDTH, 1280)),
            sparse=_sparse(keys),
            home="mlp",
            head_counts=tuple(counts),
            scale=keys.get("query_pre_attn_scalar", FACTOR, plain.head_width) ** -0.5,
            limits=_limits(keys, "swiglu_limits"),
            shared_limits=_limits(keys, "swiglu_limits_shared"),
            extra=extra,
        )


def _renamed(keys: Keys) -> Keys:
    """Return the keys by our names."""
    found = {ours: keys.get(theirs, kind, None) for ours, (theirs, kind) in PUBLISHED.items()}
    return keys.changed({ours: value for ours, value in found.items() if value is not None})


def _without_mtp(keys: Keys, extra: int) -> Keys:
    """Return the keys with lists by layer cut to the layers before the MTP layers."""
    found = {name: keys.get(name, kind, None) for name, kind in BY_LAYER.items()}
    lists = {name: each for name, each in found.items() if isinstance(each, list)}
    for name, each in lists.items():
        if len(each) not in (keys.layers, keys.layers + extra):
            raise FormatError(f"{keys.title} lists {len(each)} {name} for num_hidden_layers {keys.layers}.")
    return keys.changed({name: each[: keys.layers] for name, each in lists.items()})


def _has_rope_by_kind(keys: Keys) -> bool:
    return any(kind in keys.section("rope_parameters") for kind in (llama.SLIDING, llama.FULL))


def _rope(keys: Keys) -> dict[str, Any]:
    """Return the rotation of each kind of layer of a published file, which has a base and a share by layer."""
    kinds = _kinds(keys)
    theta = keys.get("rope_theta", THETAS, 10000.0)
    if isinstance(theta, list) and len(theta) < keys.layers:
        raise FormatError(f"{keys.title} lists {len(theta)} rope_theta for num_hidden_layers {keys.layers}.")
    shares = keys.get("partial_rotary_factors", BY_LAYER["partial_rotary_factors"], None)
    made: dict[str, Any] = {}
    for index, kind in enumerate(kinds):
        its: dict[str, Any] = {"rope_theta": theta[index] if isinstance(theta, list) else theta}
        if shares is not None:
            its["partial_rotary_factor"] = shares[index]
        if kind == llama.FULL:
            its |= keys.get("rope_scaling", OBJECT, {})
        made.setdefault(kind, its)
    return made


def _kinds(keys: Keys) -> tuple[str, ...]:
    return keys.layer_types(llama.SLIDING, llama.FULL) if "layer_types" in keys else (llama.FULL,) * keys.layers


def _head_counts(keys: Keys, kinds: tuple[str, ...], usual: int) -> list[int]:
    """Return the query heads of each layer: those listed by layer, or those of its kind."""
    listed, other = keys.section("per_layer_config"), keys.section("attention_other_setting")
    sliding = keys.get("num_sliding_attention_heads", COUNT, other.get("num_attention_heads", COUNT, usual))
    of_kind = {llama.SLIDING: sliding, llama.FULL: usual}
    return [listed.section(str(index)).get("num_attention_heads", COUNT, of_kind[kind]) for index, kind in enumerate(kinds)]


def _sparse(keys: Keys) -> frozenset[int]:
    """Return the layers with experts: those listed by kind or, in published files, by number; or all but the first three."""
    if "mlp_layer_types" in keys:
        kinds = keys.layer_types(DENSE, SPARSE, key="mlp_layer_types")
        return frozenset(index for index, kind in enumerate(kinds) if kind == SPARSE)
    listed = keys.get("moe_layers_enum", either(string(8 * MOST_LAYERS), list_of(LAYERS, MOST_LAYERS)), None)
    if listed is None:
        return frozenset(range(FIRST_SPARSE, keys.layers))
    numbers = [each.strip() for each in listed.split(",")] if isinstance(listed, str) else [str(each) for each in listed]
    if not all(each.isdecimal() and len(each) < 6 for each in numbers if each):
        raise FormatError(f"{keys.title} has moe_layers_enum {shown(listed)}; numbers of layers are needed.")
    return frozenset(int(each) for each in numbers if each) & frozenset(range(keys.layers))


def _limits(keys: Keys, name: str) -> tuple[float | None, ...]:
    found = keys.get(name, LIMITS, None) or [None] * keys.layers
    return tuple(each or None for each in found)


def activation(limit: float) -> Limit:
    """Return the activation whose silu(gate) is at most `limit`: the gate is limited where silu reaches it."""
    gate = limit + 1
    for _ in range(50):
        share = 1 / (1 + math.exp(-gate))
        gate -= (gate * share - limit) / (share + gate * share * (1 - share))
    return Limit(limit, gate)


class Model(qwen3_moe.Model):
    """Qwen3's model with gated attention and biased routing."""

    config: Config
    shift = 1.0

    def __init__(self, config: Config, weights: Weights):
        for index in range(config.layers, config.layers + config.extra):
            weights.skip_prefix(f"model.layers.{index}.")
        super().__init__(config, weights)

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        heads = Heads(config.head_counts[index], config.kv_heads, config.head_width)
        rotation, options = config.rotation_of(index).to(weights.device), dict[str, Any](scale=config.scale, shift=self.shift)
        return Attention(weights, f"{name}.self_attn", config.hidden, heads, rotation, config.eps, gate=GATE, **options)

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        config, limit = self.config, self.config.shared_limits[index]
        mixture, name = config.mixture, f"{name}.mlp"
        if mixture is None or index not in config.sparse:
            if limit is None:
                return AddedMLP(weights, name, config.hidden, config.inner)
            return ActivatedMLP(weights, name, config.hidden, config.inner, activation(limit))
        most = config.limits[index]
        kind = None if most is None else activation(most)
        if limit is None or mixture.shared is None:
            return biased_mixture(weights, name, config.hidden, mixture, BIAS, kind)
        return activated_mixture(weights, name, config.hidden, mixture, BIAS, kind, activation(limit))


def rename(name: str) -> str | None:
    if name.startswith("vit_large_projector."):
        return None
    ours = qwen3_moe.rename(name)
    if ours is None:
        return None
    ours = ours.replace(".moe.gate.weight", ".mlp.gate.weight").replace(".moe.router_bias", f".mlp.{BIAS}")
    ours = re.sub(r"\.moe\.(gate|up|down)_proj\.", r".mlp.switch_mlp.\1_proj.", ours)
    return ours.replace(".share_expert.", ".mlp.shared_experts.")


make_caches = qwen3_moe.make_caches
