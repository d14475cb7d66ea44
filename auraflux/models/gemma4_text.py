"""Gemma 4: layers with a sliding window among wider ones that see everything, dense or with a mixture beside every MLP.

Values are normalised, and in some models made of keys. The small models' last layers read keys and values of earlier ones,
and every layer is fed by an embedding of its own. What a layer gives is normalised before it joins the residual stream, and
the stream is multiplied by a number at its end.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import AttentionShape, Batch, Beside, Cache
from auraflux.errors import FormatError
from auraflux.models import attention
from auraflux.models.attention import Heads
from auraflux.models.config import Keys
from auraflux.models.decoder import Decoder, FeedForward, Mixer, Residual, Stream, text_name
from auraflux.models.mixture import MixtureConfig
from auraflux.models.mlp import MLP as Gated
from auraflux.models.rotation import Rotation, rope_settings, rotation
from auraflux.ops import Gelu, Routing, add_norm_linears, combine, embed, geglu, linear, per_layer_inputs, rms_norm, route
from auraflux.weights.experts import load_experts
from auraflux.weights.loader import Weights
from auraflux.weights.streamed import Guess

SLIDING, FULL = "sliding_attention", "full_attention"
USUAL = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True, eq=False)
class Config:
    """hidden, vocab are widths; the tuples have one entry for each layer.

    inners         widths of the MLPs
    heads          of queries and keys
    sources        whose keys and values it reads: its own number, or that of an earlier layer
    keys_as_values whether layers that see everything make values of keys
    rotations      by the kind of layer
    fed            the width of what a layer is fed; 0 for nothing
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
        keys.refuse("hidden_activation", "gelu_pytorch_tanh")
        keys.refuse("use_bidirectional_attention", False, "vision")
        keys.refuse("attention_bias", False)
        kinds, vocab = _kinds(keys), keys.get("vocab_size", 262144)
        keys.refuse("vocab_size_per_layer_input", vocab)
        sources, heads = _sources(keys, kinds), _heads(keys, kinds)
        widths = {kind: each.width for kind, each in zip(kinds, heads, strict=True)}
        return cls(
            hidden=keys["hidden_size"],
            vocab=vocab,
            layers=len(kinds),
            kinds=kinds,
            inners=_inners(keys, sources),
            heads=heads,
            sources=sources,
            keys_as_values=keys.get("attention_k_eq_v", False),
            window=keys.get("sliding_window", 0) if SLIDING not in kinds else keys.window(),
            fed=keys.get("hidden_size_per_layer_input", 0),
            mixture=_mixture(keys),
            final_softcap=keys.get("final_logit_softcapping", None),
            eps=keys.get("rms_norm_eps", 1e-6),
            tied=config.get("tie_word_embeddings", keys.get("tie_word_embeddings", True)),
            context=keys.get("max_position_embeddings", 131072),
            rotations={kind: rotation(keys, width, _rope(keys, kind)) for kind, width in widths.items()},
        )

    @property
    def own(self) -> int:
        """How many layers, the first ones, have keys and values of their own."""
        return sum(index == source for index, source in enumerate(self.sources))


def _kinds(keys: Keys) -> tuple[str, ...]:
    if "layer_types" in keys:
        return keys.layer_types(SLIDING, FULL)
    count = keys["num_hidden_layers"]
    return tuple(SLIDING if (index + 1) % 6 and index + 1 < count else FULL for index in range(count))


def _sources(keys: Keys, kinds: tuple[str, ...]) -> tuple[int, ...]:
    own = len(kinds) - keys.get("num_kv_shared_layers", 0)
    last = {kind: index for index, kind in enumerate(kinds[: max(own, 0)])}
    if missing := set(kinds) - set(last):
        raise FormatError(
            f"config.json has num_kv_shared_layers {len(kinds) - own}, and no {missing.pop()} layer before those."
        )
    return tuple(index if index < own else last[kind] for index, kind in enumerate(kinds))


def _heads(keys: Keys, kinds: tuple[str, ...]) -> tuple[Heads, ...]:
    count, kv, width = keys.get("num_attention_heads", 8), keys.get("num_key_value_heads", 4), keys.get("head_dim", 256)
    # Google's files say what layers that see everything have, transformers' own list such layers
    wide = keys.get("num_global_key_value_heads", kv) if keys.get("attention_k_eq_v", False) else kv
    usual = {SLIDING: (kv, width), FULL: (wide, keys.get("global_head_dim", 512))}
    listed = keys.get("per_layer_config", None)
    made = []
    for index, kind in enumerate(kinds):
        own = usual[kind]
        if listed is not None:
            found = listed.get(str(index), {})
            own = found.get("num_key_value_heads") or kv, found.get("head_dim") or width
        if count % own[0]:
            raise FormatError(f"layer {index} has {own[0]} key heads in config.json, which {count} query heads cannot share.")
        made.append(Heads(count, *own))
    for kind in set(kinds):
        if len({each for each, other in zip(made, kinds, strict=True) if other == kind}) > 1:
            raise FormatError(f"config.json has {kind} layers of several widths in per_layer_config; one is supported.")
    return tuple(made)


def _inners(keys: Keys, sources: tuple[int, ...]) -> tuple[int, ...]:
    double, inner = keys.get("use_double_wide_mlp", False), keys["intermediate_size"]
    return tuple(inner * 2 if double and index != source else inner for index, source in enumerate(sources))


def _mixture(keys: Keys) -> MixtureConfig | None:
    if not keys.get("enable_moe_block", False):
        return None
    routing = Routing(keys["top_k_experts"], "softmax", renormalize=True)
    return MixtureConfig(keys["num_experts"], keys["moe_intermediate_size"], routing)


def _rope(keys: Keys, kind: str) -> dict[str, Any]:
    return rope_settings(keys, kind) if "rope_parameters" in keys else USUAL[kind]


class Model(Decoder[Config]):
    """Attention, then an MLP or both an MLP and a mixture, each between norms; then what the layer is fed."""

    norms = "input_layernorm", "pre_feedforward_layernorm"
    whole = "its layers may be fed from tokens and read keys of earlier ones."

    def __init__(self, config: Config, weights: Weights):
        super().__init__(config, weights)
        # rounded to the dtype of the activations, as transformers does
        self.scale = torch.tensor(config.hidden**0.5, dtype=weights.dtype).item()
        names = [f"model.layers.{index}" for index in range(config.layers)]
        self.feed = Feed(config, weights) if config.fed else None
        self.ends = [End(config, weights, name) for name in names]
        for index in range(config.own, config.layers):
            kept = "k_proj", "v_proj", "k_norm"
            weights.skip(*(f"{names[index]}.self_attn.{kind}.weight" for kind in kept))

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        return Attention(self.config, weights, name, index)

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        if self.config.mixture is not None:
            return Both(self.config, weights, name, index, self.config.mixture)
        return MLP(self.config, weights, name, index)

    def embedded(self, ids: Tensor) -> Tensor:
        return super().embedded(ids) * self.scale

    def carried(self, ids: Tensor, batch: Batch | Beside, cache: Cache, count: int) -> Residual:
        """Run tokens through the first layers: the stream, with all that was to be added to it, [T, H]."""
        x = self.embedded(ids)
        fed: Any = [None] * count if self.feed is None else self.feed(ids, x)
        for index in range(count):
            store = cache.layers[self.config.sources[index]]
            x = self.ends[index](*self.layers[index](x, None, batch, store), fed[index])
        return x, None

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the next token: [N, H] -> [N, V] float32."""
        scores, cap = super().logits(hidden), self.config.final_softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)


class Attention(attention.Attention):
    """Attention whose values are normalised, and its result too."""

    def __init__(self, config: Config, weights: Weights, name: str, index: int):
        heads, kind, own = config.heads[index], config.kinds[index], config.sources[index] == index
        parts = "q" if not own else "qk" if config.keys_as_values and kind == FULL else "qkv"
        rotation = config.rotations[kind].to(weights.device)
        super().__init__(weights, f"{name}.self_attn", config.hidden, heads, rotation, config.eps, 1.0, parts=parts)
        self.own, self.read_again = own, index in config.sources[config.own :]
        self.unit = torch.ones(heads.width, device=weights.device)
        self.norm = weights.vector(f"{name}.post_attention_layernorm.weight", config.hidden)

    def __call__(self, stream: Stream, batch: Batch | Beside, store: Any) -> tuple[Tensor, Tensor]:
        total, attended = super().__call__(stream, batch, store)
        return total, rms_norm(attended, self.norm, self.eps)

    def products(self, stream: Stream) -> tuple[Tensor, tuple[Tensor, ...], None]:
        """Give the stream with all that was to be added to it, and queries, with keys and values if there are any."""
        total, found = add_norm_linears(*stream, self.qkv, self.qkv_bias)
        q, *rest = (part.view(len(total), -1, self.heads.width) for part in found)
        return total, (q, rest[0], rms_norm(rest[-1], self.unit, self.eps)) if self.own else (q,), None

    def stored(self, batch: Batch, store: Any, q: Tensor, *rest: Tensor) -> Tensor:
        """Store keys and values, if there are any: gives the queries as they attend."""
        assert self.norms is not None
        if not self.own:
            return self.rotation(rms_norm(q, self.norms[0], self.eps), batch.positions)
        return super().stored(batch, store, q, *rest)


class MLP(Gated):
    """down(gelu(gate x) * up x), normalised."""

    def __init__(self, config: Config, weights: Weights, name: str, index: int):
        super().__init__(weights, f"{name}.mlp", config.hidden, config.inners[index])
        self.norm = weights.vector(f"{name}.post_feedforward_layernorm.weight", config.hidden)
        self.eps = config.eps

    def plain(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """The stream with all that was to be added to it, and the result before its norm."""
        total, (gate, up) = add_norm_linears(*stream, (self.gate, self.up))
        return total, self.join(linear(geglu(gate, up), self.down))

    def __call__(self, stream: Stream) -> Residual:
        total, found = self.plain(stream)
        return total, rms_norm(found, self.norm, self.eps)


class Both(MLP):
    """An MLP and a mixture side by side, each between norms of its own; their sum is normalised.

    router_norm  [H]  over what the router reads
    gain         [E]  of what each expert gives
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

    def __call__(self, stream: Stream) -> Residual:
        total, found = self.plain(stream)
        ids, weights = self.choose(total)
        mixed = self.experts(rms_norm(total, self.before, self.eps), ids, weights)
        both = combine(rms_norm(found, self.mlp_norm, self.eps), rms_norm(mixed, self.mixed_norm, self.eps))
        return total, rms_norm(both, self.norm, self.eps)

    def announce(self, following: Guess | None, norm: Tensor, eps: float) -> Guess:
        """Hear how to guess the experts of the next mixture; give how to guess those of this one."""
        self.experts.announce(following)
        return lambda residual: self.choose(residual)[0]

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts that x [T, H] goes to and their weights, both [T, k]."""
        return route(linear(rms_norm(x, self.router_norm, self.eps), self.router), self.routing, None, self.gain)


class Feed:
    """What layers are fed: an embedding for each of them, and a part of the stream's beginning."""

    def __init__(self, config: Config, weights: Weights):
        width = config.layers * config.fed
        self.table = weights.matrix("model.embed_tokens_per_layer", config.vocab, width)
        self.projection = weights.matrix("model.per_layer_model_projection", width, config.hidden)
        # both halves are divided by the root of two; what is projected, by the root of its width, which only eps can tell
        self.norm = weights.vector("model.per_layer_projection_norm.weight", config.fed) * 0.5**0.5
        self.eps, self.share = config.eps * config.hidden, (config.fed / 2) ** 0.5

    def __call__(self, ids: Tensor, x: Tensor) -> Tensor:
        """Make what all layers are fed: ids [T], x [T, H] -> [L, T, P]."""
        embedded = embed(ids, self.table).to(x.dtype)
        return per_layer_inputs(linear(x, self.projection), embedded, self.norm, self.eps, self.share)


class End:
    """The end of a layer: what it is fed, if anything, and the number that the stream is multiplied by."""

    def __init__(self, config: Config, weights: Weights, name: str):
        self.scale, self.eps, self.fed = weights.number(f"{name}.layer_scalar"), config.eps, config.fed > 0
        if self.fed:
            self.gate = weights.matrix(f"{name}.per_layer_input_gate", config.fed, config.hidden)
            self.up = weights.matrix(f"{name}.per_layer_projection", config.hidden, config.fed)
            self.norm = weights.vector(f"{name}.post_per_layer_input_norm.weight", config.hidden)

    def __call__(self, x: Tensor, delta: Tensor | None, fed: Tensor | None) -> Tensor:
        """Give the stream as the next layer reads it: [T, H]."""
        total = x if delta is None else combine(x, delta)
        if self.fed and fed is not None:
            made = linear(geglu(linear(total, self.gate), fed), self.up)
            total = combine(total, rms_norm(made, self.norm, self.eps))
        return total if self.scale == 1.0 else total * self.scale


def rename(name: str) -> str | None:
    found = text_name(name)
    # beside mlx-lm's stacks, which lie one level deeper
    return None if found is None else re.sub(r"(layers\.\d+\.experts)\.(gate_up_proj|down_proj)$", r"\1.experts.\2", found)


def make_caches(config: Config) -> list[AttentionShape]:
    windows = {SLIDING: config.window, FULL: None}
    kept = zip(config.heads[: config.own], config.kinds, strict=False)
    return [AttentionShape(heads.kv, heads.width, window=windows[kind]) for heads, kind in kept]
