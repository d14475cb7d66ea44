"""Llama's layers with mixtures of experts, routed by softmax: Qwen2 and Qwen3, OLMoE, Mixtral, Mellum."""

import re
from dataclasses import dataclass
from typing import Any

from auraflux.models import llama
from auraflux.models.config import Keys
from auraflux.models.decoder import text_name
from auraflux.models.layer import FeedForward
from auraflux.models.mixture import Mixture, MixtureConfig
from auraflux.models.mlp import MLP, AddedMLP
from auraflux.models.rotation import RopeSettings
from auraflux.ops import Routing
from auraflux.weights.experts.load_layer import load_experts
from auraflux.weights.fields import LAYER_INTERVAL, LAYERS, MOST_LAYERS, WIDTH, WIDTH_OR_NONE
from auraflux.weights.formats.untrusted import FLAG, list_of
from auraflux.weights.loader import Weights

MELLUM_ROPE = {llama.SLIDING: RopeSettings(), llama.FULL: RopeSettings(rope_theta=500000.0)}
# Mixtral's names of an expert's projections
PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True, eq=False)
class Config(llama.Config):
    """Llama's config; the layers in `sparse` have a mixture instead of an MLP, named `home` within them."""

    mixture: MixtureConfig | None
    sparse: frozenset[int]
    home: str

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys, plain = Keys(config), llama.Config.from_hf(config)
        keys.only("clip_qkv")
        mixtral = keys.kind == "mixtral"
        # transformers writes the second name
        count, chosen = keys.experts("num_experts" if "num_experts" in keys else "num_local_experts")
        routing = Routing(chosen, "softmax", renormalize=keys.get("norm_topk_prob", FLAG, False) or mixtral)
        # OLMoE, FlexOlmo and Mixtral have no other MLPs
        alone = keys.kind in ("olmoe", "flex_olmo", "mixtral")
        inner = keys.get("moe_intermediate_size", WIDTH, plain.inner) if alone else keys.expert_inner
        shared = keys.get("shared_expert_intermediate_size", WIDTH_OR_NONE, 0) or None
        mixture = MixtureConfig(count, inner, routing, shared if keys.kind == "qwen2_moe" else None)
        home = "block_sparse_moe" if mixtral else "mlp"
        if keys.kind == "mellum":
            return cls(**vars(plain) | _mellum(keys, plain.head_width), mixture=mixture, home=home)
        return cls(**vars(plain), mixture=mixture, sparse=sparse_layers(keys), home=home)


def _mellum(keys: Keys, width: int) -> dict[str, Any]:
    """Return the windows, rotations and experts of the layers, each by its kind."""
    listed = keys.layer_types("dense", "sparse", key="mlp_layer_types") if "mlp_layer_types" in keys else None
    sparse = frozenset(index for index in range(keys.layers) if listed is None or listed[index] == "sparse")
    return {**llama.by_kind(keys, width, MELLUM_ROPE), "sparse": sparse}


def sparse_layers(keys: Keys) -> frozenset[int]:
    """Every `decoder_sparse_step`th layer, less those that are named."""
    step, dense = (
        keys.get("decoder_sparse_step", LAYER_INTERVAL, 1),
        keys.get("mlp_only_layers", list_of(LAYERS, MOST_LAYERS), []),
    )
    return frozenset(range(step - 1, keys.layers, step)) - frozenset(dense)


class Model(llama.Model):
    """Llama's model with mixtures."""

    config: Config

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        hidden, mixture = self.config.hidden, self.config.mixture
        if mixture is None or index not in self.config.sparse:
            return AddedMLP(weights, f"{name}.mlp", hidden, self.config.inner)
        return self.make_mixture(weights, f"{name}.{self.config.home}", mixture)

    def make_mixture(self, weights: Weights, name: str, mixture: MixtureConfig) -> FeedForward:
        """Make the mixture under a name such as model.layers.3.mlp."""
        hidden, shared, shared_gate = self.config.hidden, None, None
        if mixture.shared is not None:
            shared = MLP(weights, f"{name}.shared_expert", hidden, mixture.shared).as_expert()
            shared_gate = weights.matrix(f"{name}.shared_expert_gate", 1, hidden)
        return Mixture(
            mixture.routing,
            weights.matrix(f"{name}.gate", mixture.count, hidden),
            load_experts(weights, name, mixture.count, hidden, mixture.inner),
            shared=shared,
            shared_gate=shared_gate,
        )


def rename(name: str) -> str | None:
    ours = text_name(name)
    if ours is None or ours.startswith("mtp."):
        return None
    if ".block_sparse_moe." not in ours:
        return ours
    return re.sub(r"\.experts\.(\d+)\.(w[123])\.", lambda match: f".experts.{match[1]}.{PARTS[match[2]]}.", ours)


make_caches = llama.make_caches
