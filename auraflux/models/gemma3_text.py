"""Gemma 3: layers with a sliding window among layers that see everything, each kind with its own rotation.

A norm multiplies by 1 + w, and what attention and MLP give is normalised once more before it joins the residual stream.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import AttentionShape, Batch
from auraflux.models import llama
from auraflux.models.config import Keys
from auraflux.models.llama import Stream
from auraflux.models.rotation import Rotation, rope_settings, rotation
from auraflux.ops import add_norm_linears, geglu, linear, rms_norm
from auraflux.weights.loader import Weights

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, eq=False)
class Config:
    """hidden, inner, vocab are widths; kinds says which layers have the window.

    scale                    of the scores
    softcap, final_softcap   of scores and of logits; None for none
    rotations                by the kind of layer
    """

    hidden: int
    inner: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    window: int
    kinds: tuple[str, ...]
    scale: float
    softcap: float | None
    final_softcap: float | None
    eps: float
    tied: bool
    context: int
    rotations: dict[str, Rotation]

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.refuse("hidden_activation", "gelu_pytorch_tanh")
        keys.refuse("use_bidirectional_attention", False)
        # Google's own files leave out whatever is transformers' default
        width = keys.get("head_dim", 256)
        return cls(
            hidden=keys["hidden_size"],
            inner=keys["intermediate_size"],
            vocab=keys.get("vocab_size", 262208),
            layers=keys["num_hidden_layers"],
            heads=keys.get("num_attention_heads", 8),
            kv_heads=keys.get("num_key_value_heads", 4),
            head_width=width,
            window=keys["sliding_window"],
            kinds=_kinds(keys),
            scale=keys.get("query_pre_attn_scalar", 256) ** -0.5,
            softcap=keys.get("attn_logit_softcapping", None),
            final_softcap=keys.get("final_logit_softcapping", None),
            eps=keys.get("rms_norm_eps", 1e-6),
            tied=config.get("tie_word_embeddings", keys.get("tie_word_embeddings", True)),
            context=keys.get("max_position_embeddings", 131072),
            rotations={kind: rotation(keys, width, _rope(keys, kind)) for kind in (SLIDING, FULL)},
        )


def _kinds(keys: Keys) -> tuple[str, ...]:
    if "layer_types" in keys:
        return keys.layer_types(SLIDING, FULL)
    every = keys.get("sliding_window_pattern", 6)
    return tuple(SLIDING if (i + 1) % every else FULL for i in range(keys["num_hidden_layers"]))


def _rope(keys: Keys, kind: str) -> dict[str, Any]:
    if "rope_parameters" in keys:
        return rope_settings(keys, kind)
    if kind == SLIDING:
        return {"rope_type": "default", "rope_theta": keys.get("rope_local_base_freq", 10000.0)}
    return {**rope_settings(keys), "rope_theta": keys.get("rope_theta", 1000000.0)}


class Model(llama.Model):
    """Embedding, layers, norm and head."""

    def __init__(self, config: Config, weights: Weights):
        super().__init__(config, weights)
        self.norm = 1 + self.norm
        # rounded to the dtype of the activations, as transformers does
        self.scale = torch.tensor(config.hidden**0.5, dtype=weights.dtype).item()

    def make_layer(self, weights: Weights, index: int) -> "Layer":
        return Layer(self.config, weights, index)

    def embedded(self, ids: Tensor) -> Tensor:
        return super().embedded(ids) * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the next token: [N, H] -> [N, V] float32."""
        scores, cap = super().logits(hidden), self.config.final_softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)


class Layer:
    """Attention, then an MLP, each between two norms."""

    def __init__(self, config: Config, weights: Weights, index: int):
        name, self.eps = f"model.layers.{index}", config.eps
        self.attention_norm, self.attended_norm, self.mlp_norm, self.mixed_norm = (
            1 + weights.vector(f"{name}.{norm}_layernorm.weight", config.hidden)
            for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        self.attention = llama.Attention(
            weights,
            f"{name}.self_attn",
            config.hidden,
            llama.Heads(config.heads, config.kv_heads, config.head_width),
            config.rotations[config.kinds[index]].to(weights.device),
            config.eps,
            config.scale,
            config.softcap,
            shift=1.0,
        )
        self.mlp = MLP(weights, f"{name}.mlp", config.hidden, config.inner)

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        x, attended = self.attention(Stream(x, delta, self.attention_norm, self.eps), batch, store)
        attended = rms_norm(attended, self.attended_norm, self.eps)
        x, mixed = self.mlp.of_stream(Stream(x, attended, self.mlp_norm, self.eps))
        return x, rms_norm(mixed, self.mixed_norm, self.eps)

    def remember(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> None:
        self.attention.remember(Stream(x, delta, self.attention_norm, self.eps), batch, store)


class MLP(llama.MLP):
    """down(gelu(gate x) * up x)."""

    def of_stream(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Give the stream with all that was to be added to it, and what comes next, both [T, H]."""
        total, (gate, up) = add_norm_linears(*stream, (self.gate, self.up))
        return total, linear(geglu(gate, up), self.down)


def rename(name: str) -> str | None:
    if re.search(r"^(model\.)?(vision_tower|multi_modal_projector)\.|rotary_emb", name):
        return None
    # transformers 5 says model.language_model.layers, all others language_model.model.layers and language_model.lm_head
    return name.removeprefix("language_model.").replace("model.language_model.", "model.")


def make_caches(config: Config) -> list[AttentionShape]:
    windows = {SLIDING: config.window, FULL: None}
    return [AttentionShape(config.kv_heads, config.head_width, window=windows[kind]) for kind in config.kinds]
