"""Hunyuan 4: DeepSeek V3.2's sparse latent attention with sinks and output gates, hyper-connections, experts with limits."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from auraflux.adapters.linears import run_experts, shared_output
from auraflux.models import deepseek_v3, deepseek_v32
from auraflux.models.config import Keys
from auraflux.models.deepseek_v3 import Projection
from auraflux.models.deepseek_v32 import FULL, SHARED, Indexer, make_caches
from auraflux.models.hyper_connections import Hyper, HyperLayer, Readout
from auraflux.models.layer import FeedForward, Layer, LayerInput, Mixer, Residual
from auraflux.models.mlp import MLP
from auraflux.models.mtp import MTPNames
from auraflux.ops import Limit, combine, rms_norm, route, start_streams
from auraflux.weights.experts.load_layer import load_experts
from auraflux.weights.fields import EPS, FACTOR, LAYERS, NAMES, STREAMS
from auraflux.weights.loader import Weights

__all__ = ["Config", "Model", "make_caches", "rename"]

INDEXED = "indexed_attention"
BIAS = "gate.e_score_correction_bias"
# published names -> transformers' names
RENAMED = (
    (".hc_pre.hc_", ".hc_"),
    (".hc_attn_layer.hc_", ".attn_hc."),
    (".hc_mlp_layer.hc_", ".ffn_hc."),
    (".hc_head_", ".hc_"),
    (".learnable_sink_param", ".sinks"),
    (".linear_gate.", ".gate_proj."),
)


@dataclass(frozen=True, eq=False)
class Config(deepseek_v32.Config):
    """DeepSeek V3.2's config; `limit` clamps the routed experts' activations."""

    hyper: Hyper
    limit: float

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.only("rope_interleave", False)
        if "layer_types" in keys:
            keys.layer_types(INDEXED)
        usual = [FULL if index == 0 or index % 4 == 1 else SHARED for index in range(keys.layers)]
        changes = {
            "rope_interleave": False,
            "first_k_dense_replace": keys.get("first_k_dense_replace", LAYERS, 1),
            "indexer_types": keys.get("indexer_types", NAMES, usual),
        }
        base = deepseek_v32.Config.from_hf(keys.changed(changes).found)
        index = replace(base.index, eps=base.eps, rotates_last=True)
        streams, most = keys.get("hc_mult", STREAMS, 4), keys.get("hc_magnitude", FACTOR, 2.0)
        return cls(
            # the tensors of its MTP layers are not known
            **vars(replace(base, index=index, extra=0)),
            hyper=Hyper(streams, None, keys.get("hc_eps", EPS, 1e-6), most),
            limit=keys.get("swiglu_limit", FACTOR, 10.0),
        )


class Model(deepseek_v32.Model):
    """Gated sparse latent attention, then an MLP in the first layers and experts in the others, with hyper-connections."""

    config: Config

    def __init__(self, config: Config, weights: Weights):
        weights.skip_prefix("model.mtp_layers.")
        super().__init__(config, weights)
        self.read = Readout(config.hyper, config.hidden, config.eps, weights, "model.hc_head")

    @classmethod
    def no_tensor_parallel(cls, config: Config) -> str | None:  # type: ignore[override]
        return "its hyper-connections were not tried with it."

    @classmethod
    def no_pipeline_parallel(cls, config: Config) -> str | None:  # type: ignore[override]
        return "a token has several residual streams between layers."

    @classmethod
    def mtp_names(cls, config: Config) -> MTPNames | None:  # type: ignore[override]
        return None

    def make_attention(self, weights: Weights, name: str, indexer: Indexer, chooses: bool) -> Mixer:
        config, made = self.config, deepseek_v32.Attention(self.config, weights, name, indexer, chooses)
        made.gate = Projection(weights, f"{name}.gate_proj", config.heads * config.widths.value, config.hidden)
        made.sinks = weights.vector(f"{name}.sinks", config.heads)
        return made

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        config, name = self.config, f"{name}.mlp"
        dense = not config.sparse[index]
        return MLP(weights, name, config.hidden, config.inner) if dense else Mixture(config, weights, name)

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        made = super()._layer(weights, name, index)
        return HyperLayer.around_parts(made, self.config.hyper, self.config.hidden, weights, name)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Start the residual streams, all with the same embedding: [T] -> [T, N, H]."""
        return start_streams(super().embed_tokens(ids), self.config.hyper.count)

    def final_norm(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Collapse and normalise the output of the last layer: [T, N, H] -> [T, H]."""
        return rms_norm(self.read(x), self.norm, self.config.eps)


class Mixture(FeedForward):
    """Routed experts with limits, and a shared expert without; their sum is the next delta."""

    def __init__(self, config: Config, weights: Weights, name: str):
        mixture, hidden = config.mixture, config.hidden
        self.routing = mixture.routing
        self.router = weights.matrix(f"{name}.gate", mixture.count, hidden)
        self.bias = weights.vector(f"{name}.{BIAS}", mixture.count)
        self.experts = load_experts(weights, name, mixture.count, hidden, mixture.inner, Limit(config.limit))
        shared = f"{name}.shared_experts"
        self.shared = None if mixture.shared is None else MLP(weights, shared, hidden, mixture.shared).as_expert()

    def __call__(self, inputs: LayerInput) -> Residual:
        """Return the residual stream and the next delta, both [T, H]."""
        h, residual, (scores,) = inputs.scores((self.router,))
        found, shared = run_experts(self.experts, h, *route(scores, self.routing, self.bias)), shared_output(h, self.shared)
        return residual, found if shared is None else combine(found, shared)


def rename(name: str) -> str | None:
    found = deepseek_v3.rename(name)
    for published, ours in RENAMED:
        found = found and found.replace(published, ours)
    return found
