"""Gemma 3: layers with a sliding window among layers that see everything, each kind with its own rotation.

A norm multiplies by 1 + w, and what attention and MLP give is normalised once more before it joins the residual stream.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import AttentionShape, Batch, Beside
from auraflux.models import attention, mlp
from auraflux.models.attention import Heads
from auraflux.models.config import Keys
from auraflux.models.decoder import Decoder, FeedForward, Mixer, Residual, Stream, text_name
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
            window=keys.window(),
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


class Model(Decoder[Config]):
    """Attention, then an MLP, each between two norms."""

    norms = "input_layernorm", "pre_feedforward_layernorm"
    beside = True

    def __init__(self, config: Config, weights: Weights):
        super().__init__(config, weights)
        # rounded to the dtype of the activations, as transformers does
        self.scale = torch.tensor(config.hidden**0.5, dtype=weights.dtype).item()

    def make_norm(self, weights: Weights, name: str) -> Tensor:
        # added here and not by the loader: `convert` writes w, which is what mlx-lm keeps too
        return 1 + super().make_norm(weights, name)

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        return Attention(self.config, weights, name, index, self.make_norm(weights, f"{name}.post_attention_layernorm"))

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        return MLP(self.config, weights, name, self.make_norm(weights, f"{name}.post_feedforward_layernorm"))

    def embedded(self, ids: Tensor) -> Tensor:
        return super().embedded(ids) * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the next token: [N, H] -> [N, V] float32."""
        scores, cap = super().logits(hidden), self.config.final_softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)


class Attention(attention.Attention):
    """Attention whose result is normalised.

    norm  [H]  over the result
    """

    def __init__(self, config: Config, weights: Weights, name: str, index: int, norm: Tensor):
        heads = Heads(config.heads, config.kv_heads, config.head_width)
        rotation = config.rotations[config.kinds[index]].to(weights.device)
        scores = config.scale, config.softcap
        super().__init__(weights, f"{name}.self_attn", config.hidden, heads, rotation, config.eps, *scores)
        assert self.norms is not None
        self.norms, self.norm = (1 + self.norms[0], 1 + self.norms[1]), norm

    def __call__(self, stream: Stream, batch: Batch | Beside, store: Any) -> tuple[Tensor, Tensor]:
        total, attended = super().__call__(stream, batch, store)
        return total, rms_norm(attended, self.norm, self.eps)


class MLP(mlp.MLP):
    """down(gelu(gate x) * up x), normalised.

    norm  [H]  over the result
    """

    def __init__(self, config: Config, weights: Weights, name: str, norm: Tensor):
        super().__init__(weights, f"{name}.mlp", config.hidden, config.inner)
        self.norm, self.eps = norm, config.eps

    def __call__(self, stream: Stream) -> Residual:
        total, (gate, up) = add_norm_linears(*stream, (self.gate, self.up))
        return total, rms_norm(self.join(linear(geglu(gate, up), self.down)), self.norm, self.eps)


rename = text_name


def make_caches(config: Config) -> list[AttentionShape]:
    windows = {SLIDING: config.window, FULL: None}
    return [AttentionShape(config.kv_heads, config.head_width, window=windows[kind]) for kind in config.kinds]
