"""Dense transformers whose MLPs became mixtures of experts chosen by softmax: Qwen2 and Qwen3, OLMoE, Mixtral."""

import re
from dataclasses import dataclass
from typing import Any

from auraflux.models import llama
from auraflux.models.config import Keys
from auraflux.models.decoder import FeedForward, text_name
from auraflux.models.mixture import Mixture, MixtureConfig
from auraflux.models.mlp import MLP, AddedMLP
from auraflux.ops import Routing
from auraflux.weights.experts import load_experts
from auraflux.weights.loader import Weights

# what Mixtral calls an expert's projections
PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True, eq=False)
class Config(llama.Config):
    """The same as Llama's; the layers in `sparse` have a mixture instead of an MLP, `home` is its name within them."""

    mixture: MixtureConfig | None
    sparse: frozenset[int]
    home: str

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys, plain = Keys(config), llama.Config.from_hf(config)
        keys.refuse("clip_qkv", None)
        mixtral = keys.kind == "mixtral"
        # transformers writes the second name
        count = keys["num_experts" if "num_experts" in keys else "num_local_experts"]
        routing = Routing(keys["num_experts_per_tok"], "softmax", renormalize=mixtral or keys.get("norm_topk_prob", False))
        # OLMoE and Mixtral have no other MLPs
        inner = (
            keys.get("moe_intermediate_size", plain.inner)
            if keys.kind in ("olmoe", "mixtral")
            else keys["moe_intermediate_size"]
        )
        shared = keys.get("shared_expert_intermediate_size", 0) or None
        mixture = MixtureConfig(count, inner, routing, shared if keys.kind == "qwen2_moe" else None)
        home = "block_sparse_moe" if mixtral else "mlp"
        return cls(**vars(plain), mixture=mixture, sparse=sparse_layers(keys), home=home)


def sparse_layers(keys: Keys) -> frozenset[int]:
    """Every `decoder_sparse_step`th layer, less those that are named."""
    step, dense = keys.get("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    return frozenset(range(step - 1, keys["num_hidden_layers"], step)) - frozenset(dense)


class Model(llama.Model):
    """Llama's, with mixtures."""

    config: Config

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        hidden, mixture = self.config.hidden, self.config.mixture
        if mixture is None or index not in self.config.sparse:
            return AddedMLP(weights, f"{name}.mlp", hidden, self.config.inner)
        return self.make_mixture(weights, f"{name}.{self.config.home}", mixture)

    def make_mixture(self, weights: Weights, name: str, mixture: MixtureConfig) -> FeedForward:
        """The mixture under a name such as model.layers.3.mlp."""
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
    kept = text_name(name)
    if kept is None or ".block_sparse_moe." not in kept:
        return kept
    return re.sub(r"\.experts\.(\d+)\.(w[123])\.", lambda found: f".experts.{found[1]}.{PARTS[found[2]]}.", kept)


make_caches = llama.make_caches
