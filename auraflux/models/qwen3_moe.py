"""Qwen3 with a mixture of experts in most layers."""

from dataclasses import dataclass
from typing import Any

from auraflux.models import llama
from auraflux.models.config import Keys
from auraflux.models.decoder import FeedForward
from auraflux.models.mixture import Mixture
from auraflux.models.mlp import MLP, AddedMLP
from auraflux.ops import Routing
from auraflux.weights.experts import load_experts
from auraflux.weights.loader import Weights


@dataclass(frozen=True)
class MixtureConfig:
    """count experts of width `inner`, and one of width `shared` that all tokens go to, or None."""

    count: int
    inner: int
    routing: Routing
    shared: int | None = None


@dataclass(frozen=True, eq=False)
class Config(llama.Config):
    """As Llama's; the layers in `sparse` have a mixture instead of an MLP."""

    mixture: MixtureConfig | None
    sparse: frozenset[int]

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys, plain = Keys(config), llama.Config.from_hf(config)
        # transformers writes the second name
        count = keys["num_experts" if "num_experts" in keys else "num_local_experts"]
        routing = Routing(keys["num_experts_per_tok"], "softmax", renormalize=keys.get("norm_topk_prob", False))
        mixture = MixtureConfig(count, keys["moe_intermediate_size"], routing)
        return cls(**{**vars(plain), "head_norms": True}, mixture=mixture, sparse=sparse_layers(keys))


def sparse_layers(keys: Keys) -> frozenset[int]:
    """Every `decoder_sparse_step`th layer, less those that are named."""
    step, dense = keys.get("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    return frozenset(range(step - 1, keys["num_hidden_layers"], step)) - frozenset(dense)


class Model(llama.Model):
    """Llama's, with mixtures."""

    config: Config

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        name, hidden, mixture = f"{name}.mlp", self.config.hidden, self.config.mixture
        if mixture is None or index not in self.config.sparse:
            return AddedMLP(weights, name, hidden, self.config.inner)
        shared = shared_gate = None
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


rename, make_caches = llama.rename, llama.make_caches
