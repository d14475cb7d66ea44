"""Gemma 4: sliding-window layers among wider full-attention layers, dense or with a mixture parallel to every MLP.

Values are normalised, and in some models made of keys. The small models' last layers share the KV cache of earlier layers, and
every layer has a per-layer input embedding. Outputs of attention and MLP are normalised before they join the residual stream,
which each layer scales at its end.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import add_norm_linears, linear, run_experts
from auraflux.cache import AttentionShape, Batch, Cache, MixedBatch
from auraflux.errors import FormatError
from auraflux.models import attention
from auraflux.models.attention import Heads
from auraflux.models.config import Keys
from auraflux.models.decoder import Decoder, text_name
from auraflux.models.layer import FeedForward, LayerInput, Mixer, Residual
from auraflux.models.mixture import MixtureConfig
from auraflux.models.mlp import MLP as Gated
from auraflux.models.rotation import RopeSettings, Rotation, rope_settings, rotation
from auraflux.ops import Gelu, Routing, combine, embed, geglu, per_layer_inputs, rms_norm, route
from auraflux.weights.experts.load_layer import load_experts
from auraflux.weights.experts.resident import ExpertPredictor
from auraflux.weights.fields import COUNT, FACTOR, HEAD, LAYERS, WIDTH_OR_NONE
from auraflux.weights.formats.untrusted import FLAG
from auraflux.weights.loader import Weights

SLIDING, FULL = "sliding_attention", "full_attention"
USUAL = {
    SLIDING: RopeSettings(),
    FULL: RopeSettings("proportional", 1000000.0, partial_rotary_factor=0.25),
}


@dataclass(frozen=True, eq=False)
class Config:
    """hidden, vocab are widths; the tuples have one entry for each layer.

    inners         widths of the MLPs
    heads          of queries and keys
    sources        the layer whose KV cache it reads: itself or an earlier layer
    keys_as_values full-attention layers make values of keys
    rotations      by the kind of layer
    fed            the width of a layer's per-layer input; 0 for none
    final_softcap  of logits; None for none
    """

    hidden: int
    vocab: int
    layers: int
    kinds: tuple[str, ...]
    inners: tuple[int, ...]
    heads: tuple[Heads, ...]
    sources: tuple[int, ...]
    keys_as_values: bool
    window: int
    fed: int
    mixture: MixtureConfig | None
    final_softcap: float | None
    eps: float
    tied: bool
    context: int
    rotations: dict[str, Rotation]

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.only("hidden_activation", "gelu_pytorch_tanh")
        keys.only("use_bidirectional_attention", False, "vision")
        keys.only("attention_bias", False)
        kinds, vocab = _kinds(keys), keys.vocab(262144)
        keys.only("vocab_size_per_layer_input", vocab)
        sources, heads = _sources(keys, kinds), _heads(keys, kinds)
        widths = {kind: each.width for kind, each in zip(kinds, heads, strict=True)}
        return cls(
            hidden=keys.hidden,
            vocab=vocab,
            layers=len(kinds),
            kinds=kinds,
            inners=_inners(keys, sources),
            heads=heads,
            sources=sources,
            keys_as_values=keys.get("attention_k_eq_v", FLAG, False),
            window=keys.window() if SLIDING in kinds else keys.sliding_window() or 0,
            fed=keys.get("hidden_size_per_layer_input", WIDTH_OR_NONE, 0),
            mixture=_mixture(keys),
            final_softcap=keys.get("final_logit_softcapping", FACTOR, None),
            eps=keys.eps(1e-6),
            tied=keys.tied_outside(True),
            context=keys.context(131072),
            rotations={kind: rotation(keys, width, _rope(keys, kind)) for kind, width in widths.items()},
        )

    @property
    def own(self) -> int:
        """Return how many layers, the first ones, have a KV cache of their own."""
        return sum(index == source for index, source in enumerate(self.sources))


def _kinds(keys: Keys) -> tuple[str, ...]:
    if "layer_types" in keys:
        return keys.layer_types(SLIDING, FULL)
    count = keys.layers
    return tuple(SLIDING if (index + 1) % 6 and index + 1 < count else FULL for index in range(count))


def _sources(keys: Keys, kinds: tuple[str, ...]) -> tuple[int, ...]:
    own = len(kinds) - keys.get("num_kv_shared_layers", LAYERS, 0)
    last = {kind: index for index, kind in enumerate(kinds[: max(own, 0)])}
    if missing := set(kinds) - set(last):
        raise FormatError(
            f"config.json has num_kv_shared_layers {len(kinds) - own}, and no {missing.pop()} layer before those."
        )
    return tuple(index if index < own else last[kind] for index, kind in enumerate(kinds))


def _heads(keys: Keys, kinds: tuple[str, ...]) -> tuple[Heads, ...]:
    count, width = keys.get("num_attention_heads", COUNT, 8), keys.get("head_dim", HEAD, 256)
    kv = keys.get("num_key_value_heads", COUNT, 4)
    # Google's files say what layers that see everything have, transformers' own list such layers
    wide = keys.get("num_global_key_value_heads", COUNT, kv) if keys.get("attention_k_eq_v", FLAG, False) else kv
    usual = {SLIDING: (kv, width), FULL: (wide, keys.get("global_head_dim", HEAD, 512))}
    listed = keys.section("per_layer_config") if "per_layer_config" in keys else None
    made = []
    for index, kind in enumerate(kinds):
        own = usual[kind]
        if listed is not None:
            found = listed.section(str(index))
            own = found.get("num_key_value_heads", COUNT, kv), found.get("head_dim", HEAD, width)
        if count % own[0]:
            raise FormatError(f"layer {index} has {own[0]} key heads in config.json, which {count} query heads cannot share.")
        made.append(Heads(count, *own))
    for kind in set(kinds):
        if len({each for each, other in zip(made, kinds, strict=True) if other == kind}) > 1:
            raise FormatError(f"config.json has {kind} layers of several widths in per_layer_config; one is supported.")
    return tuple(made)


def _inners(keys: Keys, sources: tuple[int, ...]) -> tuple[int, ...]:
    double, inner = keys.get("use_double_wide_mlp", FLAG, False), keys.inner
    return tuple(inner * 2 if double and index != source else inner for index, source in enumerate(sources))


def _mixture(keys: Keys) -> MixtureConfig | None:
    if not keys.get("enable_moe_block", FLAG, False):
        return None
    count, chosen = keys.experts("num_experts", "top_k_experts")
    return MixtureConfig(count, keys.expert_inner, Routing(chosen, "softmax", renormalize=True))


def _rope(keys: Keys, kind: str) -> RopeSettings:
    return rope_settings(keys, kind) if "rope_parameters" in keys else USUAL[kind]


class Model(Decoder[Config]):
    """Attention, then an MLP or an MLP and a mixture, each between norms; then the per-layer input."""

    norms = "input_layernorm", "pre_feedforward_layernorm"

    def __init__(self, config: Config, weights: Weights):
        super().__init__(config, weights)
        # rounded to the activations' dtype, like transformers
        self.scale = torch.tensor(config.hidden**0.5, dtype=weights.dtype).item()
        names = [f"model.layers.{index}" for index in range(config.layers)]
        self.per_layer = PerLayerInputs(config, weights) if config.fed else None
        self.ends = [LayerEnd(config, weights, name) for name in names]
        for index in range(config.own, config.layers):
            unused = "k_proj", "v_proj", "k_norm"
            weights.skip(*(f"{names[index]}.self_attn.{kind}.weight" for kind in unused))

    @classmethod
    def no_pipeline_parallel(cls, config: Config) -> str | None:
        return "its layers may read per-layer embeddings of tokens, and keys and values of earlier layers."

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        return Attention(self.config, weights, name, index)

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        if self.config.mixture is not None:
            return MLPWithMixture(self.config, weights, name, index, self.config.mixture)
        return MLP(self.config, weights, name, index)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return super().embed_tokens(ids) * self.scale

    def run_layers(self, x: Tensor, batch: Batch | MixedBatch, cache: Cache, count: int) -> Residual:
        """Run the first `count` layers: ids [T] -> the residual stream, nothing pending, [T, H]."""
        ids, x = x, batch.put_embeddings(self.embed_tokens(x))
        fed: Any = [None] * count if self.per_layer is None else self.per_layer(ids, x)
        for index in range(count):
            store = cache.layers[self.config.sources[index]]
            x = self.ends[index](*self.layers[index](x, None, batch, store), fed[index])
        return x, None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token: [N, H] -> [N, V] float32."""
        scores, cap = super().logits(hidden), self.config.final_softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)


class Attention(attention.Attention):
    """Attention with normalised values and a normalised output."""

    # per-layer inputs have rows of all tokens of a step
    supports_mixed_batch = False

    def __init__(self, config: Config, weights: Weights, name: str, index: int):
        heads, kind, own = config.heads[index], config.kinds[index], config.sources[index] == index
        parts = "q" if not own else "qk" if config.keys_as_values and kind == FULL else "qkv"
        rotation = config.rotations[kind].to(weights.device)
        super().__init__(weights, f"{name}.self_attn", config.hidden, heads, rotation, config.eps, 1.0, parts=parts)
        self.own, self.shares_kv = own, index in config.sources[config.own :]
        self.unit = torch.ones(heads.width, device=weights.device)
        self.norm = weights.vector(f"{name}.post_attention_layernorm.weight", config.hidden)

    def __call__(self, inputs: LayerInput, batch: Batch | MixedBatch, store: Any) -> tuple[Tensor, Tensor]:
        total, attended = super().__call__(inputs, batch, store)
        return total, rms_norm(attended, self.norm, self.eps)

    def project(self, inputs: LayerInput) -> tuple[Tensor, tuple[Tensor, ...], None]:
        """Return the residual stream with its delta added, and queries with the layer's own keys and values."""
        total, found = add_norm_linears(*inputs, self.qkv, self.qkv_bias)
        q, *rest = (part.view(len(total), -1, self.heads.width) for part in found)
        return total, (q, rest[0], rms_norm(rest[-1], self.unit, self.eps)) if self.own else (q,), None

    def append(self, batch: Batch, store: Any, q: Tensor, *rest: Tensor) -> Tensor:
        """Append the layer's own keys and values to the cache; return the rotated queries."""
        assert self.norms is not None
        if not self.own:
            return self.rotation(rms_norm(q, self.norms[0], self.eps), batch.positions)
        return super().append(batch, store, q, *rest)


class MLP(Gated):
    """down(gelu(gate x) * up x), normalised."""

    def __init__(self, config: Config, weights: Weights, name: str, index: int):
        super().__init__(weights, f"{name}.mlp", config.hidden, config.inners[index])
        self.norm = weights.vector(f"{name}.post_feedforward_layernorm.weight", config.hidden)
        self.eps = config.eps

    def plain(self, inputs: LayerInput) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its delta added, and the output before its norm."""
        total, (gate, up) = add_norm_linears(*inputs, (self.gate, self.up))
        return total, self.join(linear(geglu(gate, up), self.down))

    def __call__(self, inputs: LayerInput) -> Residual:
        total, found = self.plain(inputs)
        return total, rms_norm(found, self.norm, self.eps)


class MLPWithMixture(MLP):
    """An MLP and a parallel mixture, each between norms of its own; their sum is normalised.

    router_norm  [H]  over the router's input
    gain         [E]  scales each expert's output
    """

    def __init__(self, config: Config, weights: Weights, name: str, index: int, mixture: MixtureConfig):
        super().__init__(config, weights, name, index)
        hidden, self.routing = config.hidden, mixture.routing
        before = f"{name}.pre_feedforward_layernorm_2.weight"
        after = (f"{name}.post_feedforward_layernorm_{number}.weight" for number in (1, 2))
        self.before = weights.vector(before, hidden)
        self.mlp_norm, self.mixed_norm = (weights.vector(each, hidden) for each in after)
        self.router = weights.matrix(f"{name}.router.proj", mixture.count, hidden)
        self.router_norm = weights.vector(f"{name}.router.scale", hidden) * hidden**-0.5
        self.gain = weights.vector(f"{name}.router.per_expert_scale", mixture.count)
        self.experts = load_experts(weights, f"{name}.experts", mixture.count, hidden, mixture.inner, Gelu())

    def __call__(self, inputs: LayerInput) -> Residual:
        total, found = self.plain(inputs)
        ids, weights = self.choose(total)
        mixed = run_experts(self.experts, rms_norm(total, self.before, self.eps), ids, weights)
        both = combine(rms_norm(found, self.mlp_norm, self.eps), rms_norm(mixed, self.mixed_norm, self.eps))
        return total, rms_norm(both, self.norm, self.eps)

    def link_prefetch(self, following: ExpertPredictor | None, norm: Tensor, eps: float) -> ExpertPredictor:
        """Take the predictor of the next mixture's experts; return that of this mixture's."""
        self.experts.prefetch_with(following)
        return lambda residual: self.choose(residual)[0]

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route x [T, H]: expert ids and weights, both [T, k]."""
        return route(linear(rms_norm(x, self.router_norm, self.eps), self.router), self.routing, None, self.gain)


class PerLayerInputs:
    """Per-layer inputs: an embedding for each layer, and a projection of the token embedding."""

    def __init__(self, config: Config, weights: Weights):
        width = config.layers * config.fed
        self.table = weights.matrix("model.embed_tokens_per_layer", config.vocab, width)
        self.projection = weights.matrix("model.per_layer_model_projection", width, config.hidden)
        # both halves are divided by sqrt(2); the projection's 1/sqrt(width) cancels in the norm, except for eps
        self.norm = weights.vector("model.per_layer_projection_norm.weight", config.fed) * 0.5**0.5
        self.eps, self.share = config.eps * config.hidden, (config.fed / 2) ** 0.5

    def __call__(self, ids: Tensor, x: Tensor) -> Tensor:
        """Compute the inputs of all layers: ids [T], x [T, H] -> [L, T, P]."""
        embedded = embed(ids, self.table).to(x.dtype)
        return per_layer_inputs(linear(x, self.projection), embedded, self.norm, self.eps, self.share)


class LayerEnd:
    """The end of a layer: its per-layer input, if any, and the scale of the residual stream."""

    def __init__(self, config: Config, weights: Weights, name: str):
        self.scale, self.eps, self.fed = weights.scalar(f"{name}.layer_scalar"), config.eps, config.fed > 0
        if self.fed:
            self.gate = weights.matrix(f"{name}.per_layer_input_gate", config.fed, config.hidden)
            self.up = weights.matrix(f"{name}.per_layer_projection", config.hidden, config.fed)
            self.norm = weights.vector(f"{name}.post_per_layer_input_norm.weight", config.hidden)

    def __call__(self, x: Tensor, delta: Tensor | None, fed: Tensor | None) -> Tensor:
        """Return the residual stream for the next layer: [T, H]."""
        total = x if delta is None else combine(x, delta)
        if self.fed and fed is not None:
            made = linear(geglu(linear(total, self.gate), fed), self.up)
            total = combine(total, rms_norm(made, self.norm, self.eps))
        return total if self.scale == 1.0 else total * self.scale


def rename(name: str) -> str | None:
    found = text_name(name)
    # to the level of mlx-lm's stacks
    return None if found is None else re.sub(r"(layers\.\d+\.experts)\.(gate_up_proj|down_proj)$", r"\1.experts.\2", found)


def make_caches(config: Config) -> list[AttentionShape]:
    windows = {SLIDING: config.window, FULL: None}
    own = zip(config.heads[: config.own], config.kinds, strict=False)
    return [AttentionShape(heads.kv, heads.width, window=windows[kind]) for heads, kind in own]
