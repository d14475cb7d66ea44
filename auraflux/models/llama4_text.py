"""Llama 4: attention within chunks in layers with RoPE, to all tokens in the others; experts read tokens times their scores."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import run_experts, shared_output
from auraflux.cache import AttentionShape
from auraflux.errors import FormatError
from auraflux.models import attention, llama, qwen3_moe
from auraflux.models.attention import Heads
from auraflux.models.config import Keys
from auraflux.models.layer import FeedForward, LayerInput, Mixer, PreparedInput, Residual
from auraflux.models.mixture import Mixture, MixtureConfig
from auraflux.models.mlp import MLP
from auraflux.models.rotation import Growth, no_rotation, rope_settings, rotation
from auraflux.ops import Routing, combine, gate_heads, route
from auraflux.weights.experts.load_layer import load_experts
from auraflux.weights.fields import FACTOR, HEAD, LAYER_INTERVAL, LAYERS, MOST_LAYERS, TOKEN_COUNT, WIDTH
from auraflux.weights.formats.untrusted import FLAG, either, integer, list_of
from auraflux.weights.loader import Weights

CHUNKED = "chunked_attention"
THETA = 500000.0
FLAGS = list_of(integer(0, 1), MOST_LAYERS)  # one per layer


@dataclass(frozen=True, eq=False)
class Config(qwen3_moe.Config):
    """Qwen3's config; layers with a window attend within chunks of its size.

    unit_norms  queries and keys with RoPE are normalised, without weights
    """

    unit_norms: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        dense = keys.get("intermediate_size_mlp", WIDTH, 16384)
        head = keys.get("head_dim", HEAD, None) or keys.hidden // keys.heads
        usual = {"intermediate_size": dense, "head_dim": head, "rope_theta": keys.theta(THETA)}
        plain = llama.Config.from_hf(keys.changed(usual).found)
        turned = rotation(keys, head, rope_settings(keys.changed(usual)), interleaved=True, by_context=True)
        rotated, unit_norms = _rotated(keys), keys.get("use_qk_norm", FLAG, True)
        if unit_norms and turned.mscale != 1:
            raise FormatError(f"{keys.title} has use_qk_norm and RoPE that scales queries by {turned.mscale:g}, not by 1.")
        count, chosen = keys.experts("num_local_experts")
        own = {
            "tied": keys.tied_outside(False),
            "windows": _windows(keys, rotated),
            "rotation": turned,
            "others": {index: no_rotation(head) for index in range(keys.layers) if not rotated[index]},
            "growth": _growth(keys),
        }
        return cls(
            **vars(plain) | own,
            # experts are chosen by logits, and their weights are not used
            mixture=MixtureConfig(count, keys.inner, Routing(chosen, "softmax", renormalize=False), keys.inner),
            sparse=_sparse(keys),
            home="mlp",
            unit_norms=unit_norms,
        )


def _rotated(keys: Keys) -> tuple[bool, ...]:
    """Return the layers with RoPE: those the checkpoint lists, or all but every n-th."""
    every = keys.get("no_rope_layer_interval", LAYER_INTERVAL, 4)
    listed = keys.get("no_rope_layers", FLAGS, None) or [int((index + 1) % every != 0) for index in range(keys.layers)]
    if len(listed) < keys.layers:
        raise FormatError(f"{keys.title} lists {len(listed)} no_rope_layers for num_hidden_layers {keys.layers}.")
    return tuple(map(bool, listed[: keys.layers]))


def _windows(keys: Keys, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return the chunk size of each layer; None for full attention."""
    kinds = keys.layer_types(CHUNKED, llama.FULL) if "layer_types" in keys else None
    chunked = rotated if kinds is None else tuple(kind == CHUNKED for kind in kinds)
    size = keys.get("attention_chunk_size", TOKEN_COUNT, None)
    if any(chunked) and size is None:
        raise FormatError(f"{keys.title} has layers with {CHUNKED} and no attention_chunk_size.")
    return tuple(size if each else None for each in chunked)


def _growth(keys: Keys) -> Growth | None:
    # some files have a number in place of a flag
    if not keys.get("attn_temperature_tuning", either(FLAG, integer(0, 1 << 16)), True):
        return None
    return Growth(keys.get("attn_scale", FACTOR, 0.1), keys.get("floor_scale", TOKEN_COUNT, 8192), ahead=1)


def _sparse(keys: Keys) -> frozenset[int]:
    every = keys.get("interleave_moe_layer_step", LAYER_INTERVAL, 1)
    listed = keys.get("moe_layers", list_of(LAYERS, MOST_LAYERS), None)
    return frozenset(range(every - 1, keys.layers, every) if listed is None else listed)


class Model(qwen3_moe.Model):
    """Attention in chunks or to all tokens, then an MLP or experts."""

    config: Config

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        heads, turned = Heads(config.heads, config.kv_heads, config.head_width), config.rotation_of(index).to(weights.device)
        rotates = index not in config.others
        options = weights, f"{name}.self_attn", config.hidden, heads, turned
        made = attention.Attention(*options, growth=None if rotates else config.growth)
        if rotates and config.unit_norms:
            # a norm without weights commutes with a rotation
            ones = torch.ones(config.head_width, device=weights.device)
            made.norms, made.eps = (ones, ones), config.eps
        return made

    def make_mixture(self, weights: Weights, name: str, mixture: MixtureConfig) -> FeedForward:
        assert mixture.shared is not None
        hidden = self.config.hidden
        return ScaledMixture(
            mixture.routing,
            weights.matrix(f"{name}.gate", mixture.count, hidden),
            load_experts(weights, name, mixture.count, hidden, mixture.inner, transposed=True),
            shared=MLP(weights, f"{name}.shared_expert", hidden, mixture.shared).as_expert(),
            join=weights.slices.all_reduce,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class ScaledMixture(Mixture):
    """A mixture whose experts read tokens times the sigmoids of their logits; outputs are added without weights.

    join  sums the shared expert over ranks
    """

    join: Callable[[Tensor], Tensor]

    def __call__(self, inputs: LayerInput | PreparedInput) -> Residual:
        """Return the residual stream with the output added, [T, H], and no delta."""
        h, residual, (logits,) = inputs.scores((self.router,))
        ids, _ = route(logits, self.routing)
        # each choice is a token of its own, with one expert
        rows = h.repeat_interleave(ids.shape[1], 0)
        rows = gate_heads(rows[:, None], logits.gather(1, ids.long()).view(-1, 1))[:, 0]
        alone = torch.ones(len(rows), 1, device=h.device)
        found = run_experts(self.experts, rows, ids.view(-1, 1), alone).view(*ids.shape, -1)
        shared = shared_output(h, self.shared)
        assert shared is not None
        return combine(residual, found[:, 0] if ids.shape[1] == 1 else found.sum(1), self.join(shared)), None


def rename(name: str) -> str | None:
    ours = qwen3_moe.rename(name)
    return None if ours is None else ours.replace(".feed_forward.", ".mlp.").replace(".mlp.router.", ".mlp.gate.")


def make_caches(config: Config) -> list[AttentionShape]:
    sizes = config.kv_heads, config.head_width
    return [AttentionShape(*sizes, window=window, chunked=window is not None) for window in config.windows]
