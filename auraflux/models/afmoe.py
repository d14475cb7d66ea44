"""AFMoE, Arcee's Trinity: gated attention and experts, each between two norms; only layers with a window have RoPE."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from auraflux.models import llama, output_norms, qwen3_moe
from auraflux.models.attention import Heads, OutputGate
from auraflux.models.config import Keys
from auraflux.models.layer import FeedForward, Mixer
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.mlp import MLP
from auraflux.models.output_norms import NormedMixture, NormedMLP
from auraflux.models.rotation import no_rotation
from auraflux.ops import Routing
from auraflux.weights.fields import FACTOR, HEAD, LAYER_INTERVAL, LAYERS, SHARED_EXPERTS
from auraflux.weights.formats.untrusted import FLAG
from auraflux.weights.loader import Weights


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """Qwen3's config; `scaled` embeddings are multiplied by the root of the hidden width."""

    scaled: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys = keys.changed({"head_dim": keys.get("head_dim", HEAD, 128)})
        plain = llama.Config.from_hf(keys.found)
        kinds = llama.listed_kinds(keys, keys.get("global_attn_every_n_layers", LAYER_INTERVAL, 4))
        still = no_rotation(plain.head_width)
        count, chosen = keys.experts("num_experts")
        routing = Routing(chosen, "sigmoid", renormalize=True, scale=keys.get("route_scale", FACTOR, 1.0))
        shared = keys.expert_inner * keys.get("num_shared_experts", SHARED_EXPERTS, 2) or None
        changes = {
            "windows": llama.windows_of(keys, kinds),
            "others": {index: still for index, kind in enumerate(kinds) if kind == llama.FULL},
        }
        return cls(
            **vars(plain) | changes,
            mixture=MixtureConfig(count, keys.expert_inner, routing, shared),
            sparse=frozenset(range(keys.get("num_dense_layers", LAYERS, 1), keys.layers)),
            home="mlp",
            scaled=keys.get("mup_enabled", FLAG, False),
        )


class Model(qwen3_moe.Model):
    """Attention, then an MLP or experts, each between two norms."""

    config: Config
    norms = "input_layernorm", "pre_mlp_layernorm"

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        heads = Heads(config.heads, config.kv_heads, config.head_width)
        rotation, gate = config.rotation_of(index).to(weights.device), OutputGate("gate_proj")
        made = output_norms.Attention(weights, f"{name}.self_attn", config.hidden, heads, rotation, config.eps, gate=gate)
        made.output_norm, made.output_eps = self.make_norm(weights, f"{name}.post_attention_layernorm"), config.eps
        return made

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        config, norm = self.config, self.make_norm(weights, f"{name}.post_mlp_layernorm")
        if index not in config.sparse:
            return NormedMLP(MLP(weights, f"{name}.mlp", config.hidden, config.inner), norm, config.eps)
        assert config.mixture is not None
        found = biased_mixture(weights, f"{name}.mlp", config.hidden, config.mixture, "expert_bias")
        return NormedMixture(**vars(found), norm=norm, eps=config.eps, join=weights.slices.all_reduce)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        found = super().embed_tokens(ids)
        return found * self.config.hidden**0.5 if self.config.scaled else found


def rename(name: str) -> str | None:
    ours = qwen3_moe.rename(name)
    return None if ours is None else ours.replace(".mlp.router.gate.", ".mlp.gate.")


make_caches = qwen3_moe.make_caches
