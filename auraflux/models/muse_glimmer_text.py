"""Muse Glimmer: dense, with gated attention and MLPs between two norms each, and no RoPE in every fourth layer.

Norms multiply by 1 + w, those of queries and keys have no weights, and embeddings are normalised.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.models import llama, output_norms
from auraflux.models.attention import Heads, OutputGate
from auraflux.models.config import Keys
from auraflux.models.decoder import Decoder, text_name
from auraflux.models.layer import FeedForward, Mixer
from auraflux.models.mlp import MLP
from auraflux.models.output_norms import NormedMLP
from auraflux.models.rotation import no_rotation
from auraflux.ops import rms_norm
from auraflux.weights.fields import EPS, FACTOR, MOST_LAYERS
from auraflux.weights.formats.untrusted import list_of, number
from auraflux.weights.loader import Weights

THETAS = list_of(number(0, 1e12), MOST_LAYERS)  # 0 for no RoPE


@dataclass(frozen=True, eq=False)
class Config(llama.Config):
    """Llama's config.

    scale          of the attention scores
    post_eps       of the norms over the outputs of attention and MLP
    multiplier     of the logits, before `final_softcap` limits them
    """

    scale: float
    post_eps: float
    multiplier: float
    final_softcap: float

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.only("hidden_activation", "silu")
        plain, layers = llama.Config.from_hf(keys.found), keys.layers
        usual = tuple(llama.SLIDING if (layers - 1 - i) % 4 else llama.FULL for i in range(layers))
        kinds = keys.layer_types(llama.SLIDING, llama.FULL) if "layer_types" in keys else usual
        thetas = keys.get("layer_rope_theta", THETAS, [(layers - 1 - i) % 4 for i in range(layers)])
        still = no_rotation(plain.head_width)
        changes = {
            "windows": llama.windows_of(keys, kinds),
            "others": {index: still for index, theta in enumerate(thetas) if not theta},
            "head_norms": llama.EACH,
        }
        return cls(
            **vars(plain) | changes,
            scale=plain.head_width**-0.5 * keys.get("qk_scale_factor", FACTOR, 3.87),
            post_eps=keys.get("post_norm_eps", EPS, 1e-8),
            multiplier=keys.get("output_multiplier", FACTOR, 0.19611613513818404),
            final_softcap=keys.get("final_logit_softcapping", FACTOR, 20.0),
        )


class Model(Decoder[Config]):
    """Attention, then an MLP, each between two norms."""

    norms = "input_layernorm", "pre_feedforward_layernorm"

    def __init__(self, config: Config, weights: Weights):
        self.unit = torch.ones(config.hidden, device=weights.device)
        super().__init__(config, weights)

    def make_norm(self, weights: Weights, name: str) -> Tensor:
        # added here and not by the loader, so that `convert` writes w
        return 1 + super().make_norm(weights, name)

    def make_final_norm(self, weights: Weights) -> None:
        self.norm = weights.vector("model.norm.weight", self.config.hidden)

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        norm = self.make_norm(weights, f"{name}.post_attention_layernorm")
        return Attention(self.config, weights, f"{name}.self_attn", index, norm)

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        config, norm = self.config, self.make_norm(weights, f"{name}.post_feedforward_layernorm")
        return NormedMLP(MLP(weights, f"{name}.mlp", config.hidden, config.inner), norm, config.post_eps)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return rms_norm(super().embed_tokens(ids), self.unit, self.config.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token: [N, H] -> [N, V] float32."""
        cap = self.config.final_softcap
        return cap * torch.tanh(super().logits(hidden) * (self.config.multiplier / cap))


class Attention(output_norms.Attention):
    """Gated attention; the norms over queries and keys have no weights."""

    def __init__(self, config: Config, weights: Weights, name: str, index: int, norm: Tensor):
        heads, rotation = Heads(config.heads, config.kv_heads, config.head_width), config.rotation_of(index)
        gate = OutputGate("gate_proj")
        super().__init__(weights, name, config.hidden, heads, rotation.to(weights.device), None, config.scale, gate=gate)
        unit = torch.ones(heads.width, device=weights.device)
        self.norms, self.eps = (unit, unit), config.eps
        self.output_norm, self.output_eps = norm, config.post_eps


rename = text_name
make_caches = llama.make_caches
