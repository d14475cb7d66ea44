"""Gemma 3: sliding-window layers among full-attention layers, each kind with its own RoPE.

A norm multiplies by 1 + w, and the outputs of attention and MLP are normalised before they join the residual stream.
EmbeddingGemma is the same with bidirectional attention.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import add_norm_linears, linear
from auraflux.cache import AttentionShape, Batch, BidirectionalShape, MixedBatch
from auraflux.models import attention, mlp
from auraflux.models.attention import Heads
from auraflux.models.config import Keys
from auraflux.models.decoder import Decoder, text_name
from auraflux.models.layer import FeedForward, LayerInput, Mixer, Residual
from auraflux.models.rotation import RopeSettings, Rotation, rope_settings, rotation
from auraflux.ops import geglu, rms_norm
from auraflux.weights.fields import COUNT, FACTOR, HEAD, LAYER_INTERVAL, THETA
from auraflux.weights.formats.untrusted import FLAG
from auraflux.weights.loader import Weights

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, eq=False)
class Config:
    """hidden, inner, vocab are widths; kinds names the attention of each layer.

    window                   positions that a sliding layer attends to; if bidirectional, to each side, both with the token
    bidirectional            tokens attend to later ones too: the model embeds prompts
    scale                    of the attention scores
    softcap, final_softcap   of attention scores and of logits; None for none
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
    bidirectional: bool
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
        keys.only("hidden_activation", "gelu_pytorch_tanh")
        bidirectional, window = keys.get("use_bidirectional_attention", FLAG, False), keys.window()
        if bidirectional:
            keys.only("attn_logit_softcapping")
        # Google's own files leave out whatever is transformers' default
        width, heads = keys.get("head_dim", HEAD, 256), keys.get("num_attention_heads", COUNT, 8)
        return cls(
            hidden=keys.hidden,
            inner=keys.inner,
            vocab=keys.vocab(262208),
            layers=keys.layers,
            heads=heads,
            kv_heads=keys.kv_heads(heads, 4),
            head_width=width,
            # half of a bidirectional window lies on each side
            window=window // 2 + 1 if bidirectional else window,
            bidirectional=bidirectional,
            kinds=_kinds(keys),
            scale=keys.get("query_pre_attn_scalar", FACTOR, 256) ** -0.5,
            softcap=keys.get("attn_logit_softcapping", FACTOR, None),
            final_softcap=keys.get("final_logit_softcapping", FACTOR, None),
            eps=keys.eps(1e-6),
            tied=keys.tied_outside(True),
            context=keys.context(131072),
            rotations={kind: rotation(keys, width, _rope(keys, kind)) for kind in (SLIDING, FULL)},
        )


def _kinds(keys: Keys) -> tuple[str, ...]:
    if "layer_types" in keys:
        return keys.layer_types(SLIDING, FULL)
    every = keys.get("sliding_window_pattern", LAYER_INTERVAL, 6)
    return tuple(SLIDING if (i + 1) % every else FULL for i in range(keys.layers))


def _rope(keys: Keys, kind: str) -> RopeSettings:
    if "rope_parameters" in keys:
        return rope_settings(keys, kind)
    if kind == SLIDING:
        return RopeSettings(rope_theta=keys.get("rope_local_base_freq", THETA, 10000.0))
    return replace(rope_settings(keys), rope_theta=keys.theta(1000000.0))


class Model(Decoder[Config]):
    """Attention, then an MLP, each between two norms."""

    norms = "input_layernorm", "pre_feedforward_layernorm"

    def __init__(self, config: Config, weights: Weights):
        super().__init__(config, weights)
        # rounded to the activations' dtype, like transformers
        self.scale = torch.tensor(config.hidden**0.5, dtype=weights.dtype).item()

    def make_norm(self, weights: Weights, name: str) -> Tensor:
        # added here and not by the loader: `convert` writes w, like mlx-lm
        return 1 + super().make_norm(weights, name)

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        return Attention(self.config, weights, name, index, self.make_norm(weights, f"{name}.post_attention_layernorm"))

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        return MLP(self.config, weights, name, self.make_norm(weights, f"{name}.post_feedforward_layernorm"))

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return super().embed_tokens(ids) * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token: [N, H] -> [N, V] float32."""
        scores, cap = super().logits(hidden), self.config.final_softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)


class Attention(attention.Attention):
    """Attention with a normalised output.

    norm  [H]  over the output
    """

    def __init__(self, config: Config, weights: Weights, name: str, index: int, norm: Tensor):
        heads = Heads(config.heads, config.kv_heads, config.head_width)
        rotation = config.rotations[config.kinds[index]].to(weights.device)
        scores = config.scale, config.softcap
        super().__init__(weights, f"{name}.self_attn", config.hidden, heads, rotation, config.eps, *scores)
        assert self.norms is not None
        self.norms, self.norm = (1 + self.norms[0], 1 + self.norms[1]), norm

    def __call__(self, inputs: LayerInput, batch: Batch | MixedBatch, store: Any) -> tuple[Tensor, Tensor]:
        total, attended = super().__call__(inputs, batch, store)
        return total, rms_norm(attended, self.norm, self.eps)


class MLP(mlp.MLP):
    """down(gelu(gate x) * up x), normalised.

    norm  [H]  over the output
    """

    def __init__(self, config: Config, weights: Weights, name: str, norm: Tensor):
        super().__init__(weights, f"{name}.mlp", config.hidden, config.inner)
        self.norm, self.eps = norm, config.eps

    def __call__(self, inputs: LayerInput) -> Residual:
        total, (gate, up) = add_norm_linears(*inputs, (self.gate, self.up))
        return total, rms_norm(self.join(linear(geglu(gate, up), self.down)), self.norm, self.eps)


rename = text_name


def make_caches(config: Config) -> list[AttentionShape] | list[BidirectionalShape]:
    windows = [config.window if kind == SLIDING else None for kind in config.kinds]
    if config.bidirectional:
        return [BidirectionalShape(window) for window in windows]
    return [AttentionShape(config.kv_heads, config.head_width, window=window) for window in windows]
