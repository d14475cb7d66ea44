"""Dense transformers with grouped-query attention: Llama and its close relatives Mistral, Qwen2 and Qwen3.

`Attention` and `MLP` also serve the families that change something else.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from auraflux.cache import AttentionShape, Batch, Cache
from auraflux.models.config import Keys
from auraflux.models.rotation import Rotation, rope_settings, rotation
from auraflux.ops import (
    SharedExpert,
    add_norm_gate_up,
    add_norm_linears,
    add_rms_norm,
    embed,
    linear,
    rms_norm,
    sigmoid_gate,
    split_q_gate,
)
from auraflux.weights.loader import Weights


@dataclass(frozen=True, eq=False)
class Config:
    """hidden, inner, vocab are widths; heads of queries, kv_heads of keys; context is what the model was trained on."""

    hidden: int
    inner: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    window: int | None
    eps: float
    tied: bool
    head_norms: bool
    context: int
    rotation: Rotation

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.refuse("hidden_act", "silu")
        heads, hidden = keys["num_attention_heads"], keys["hidden_size"]
        width = keys.get("head_dim", hidden // heads)
        sliding = keys.kind == "mistral" or keys.get("use_sliding_window", False)
        return cls(
            hidden=hidden,
            inner=keys["intermediate_size"],
            vocab=keys["vocab_size"],
            layers=keys["num_hidden_layers"],
            heads=heads,
            kv_heads=keys.get("num_key_value_heads", heads),
            head_width=width,
            window=keys.get("sliding_window", None) if sliding else None,
            eps=keys["rms_norm_eps"],
            tied=keys.get("tie_word_embeddings", False),
            head_norms=keys.kind == "qwen3",
            context=keys.get("max_position_embeddings", 2048),
            rotation=rotation(keys, width, rope_settings(keys)),
        )


class Model:
    """Embedding, layers, norm and head. Families whose layers are their own override `make_layer`.

    shift  of the norms' weights, see `Weights.vector`
    """

    shift = 0.0

    def __init__(self, config: Any, weights: Weights):
        self.config, self.dtype = config, weights.dtype
        self.table = weights.matrix("model.embed_tokens", config.vocab, config.hidden)
        self.layers = [self.make_layer(weights, index) for index in range(config.layers)]
        self.norm = weights.vector("model.norm.weight", config.hidden, shift=self.shift)
        self.head = head(weights, self.table, config.vocab, config.hidden, config.tied)

    def make_layer(self, weights: Weights, index: int) -> Any:
        return Layer(self.config, weights, f"model.layers.{index}", self.config.rotation.to(weights.device))

    def __call__(self, ids: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Run the new tokens of a batch: ids [T] -> [T, H], after the last norm."""
        x, delta = self.through(ids, batch, cache, len(self.layers))
        return Stream(x, delta, self.norm, self.config.eps).normed()[1]

    def remember(self, ids: Tensor, batch: Batch, cache: Cache) -> None:
        """Run tokens after which nobody asks what follows: of the last layer only what it keeps is wanted."""
        carried = self.through(ids, batch, cache, len(self.layers) - 1)
        self.layers[-1].remember(*carried, batch, cache.layers[-1])

    def through(self, ids: Tensor, batch: Batch, cache: Cache, count: int) -> tuple[Tensor, Tensor | None]:
        """Run tokens through the first layers: the stream and what is still to be added to it, both [T, H]."""
        x, delta = self.embedded(ids), None
        for layer, store in zip(self.layers[:count], cache.layers, strict=False):
            x, delta = layer(x, delta, batch, store)
        return x, delta

    def embedded(self, ids: Tensor) -> Tensor:
        return embed(ids, self.table).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the next token: [N, H] -> [N, V] float32."""
        return linear(hidden, self.head).float()


class Stream(NamedTuple):
    """What a part of a layer reads: the residual stream, what is still to be added to it, and the norm over their sum.

    x      [T, H]
    delta  [T, H] or None
    norm   [H]
    """

    x: Tensor
    delta: Tensor | None
    norm: Tensor
    eps: float

    def normed(self) -> tuple[Tensor, Tensor]:
        """The sum, and its norm."""
        if self.delta is None:
            return self.x, rms_norm(self.x, self.norm, self.eps)
        h, total = add_rms_norm(self.delta, self.x, self.norm, self.eps)
        return total, h


class Layer:
    """Attention, then an MLP, each added to the residual stream when the next norm reads it."""

    def __init__(self, config: Config, weights: Weights, name: str, turn: Rotation):
        self.eps = config.eps
        self.attention_norm = weights.vector(f"{name}.input_layernorm.weight", config.hidden)
        self.mlp_norm = weights.vector(f"{name}.post_attention_layernorm.weight", config.hidden)
        heads = Heads(config.heads, config.kv_heads, config.head_width)
        self.attention: Any = Attention(
            weights, f"{name}.self_attn", config.hidden, heads, turn, config.eps if config.head_norms else None
        )
        self.mlp: Any = MLP(weights, f"{name}.mlp", config.hidden, config.inner)

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        x, delta = self.attention(Stream(x, delta, self.attention_norm, self.eps), batch, store)
        return self.mlp.of_stream(Stream(x, delta, self.mlp_norm, self.eps))

    def remember(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> None:
        self.attention.remember(Stream(x, delta, self.attention_norm, self.eps), batch, store)


@dataclass(frozen=True)
class Heads:
    """count of queries, kv of keys and values, all `width` wide."""

    count: int
    kv: int
    width: int


class Attention:
    """Grouped-query attention over the cache.

    eps    of norms over each head's query and key; None where there are none
    scale  of the scores; by default 1/sqrt(width)
    sinks  whether each head has one
    gated  whether q_proj holds, beside each head's query, a gate for its output
    shift  what is missing in the checkpoint's weights of the norms: 1 where they are those of a (1 + w) norm
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        hidden: int,
        heads: Heads,
        turn: Rotation,
        eps: float | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        gated: bool = False,
        shift: float = 0.0,
    ):
        self.heads, self.turn, self.eps, self.softcap, self.gated = heads, turn, eps or 0.0, softcap, gated
        self.scale = heads.width**-0.5 if scale is None else scale
        rows = {"q": heads.count * (2 if gated else 1), "k": heads.kv, "v": heads.kv}
        names = {kind: f"{name}.{kind}_proj" for kind in rows}
        self.qkv = [weights.matrix(names[kind], n * heads.width, hidden) for kind, n in rows.items()]
        self.qkv_bias = [weights.bias(names[kind], n * heads.width) for kind, n in rows.items()]
        self.out = weights.matrix(f"{name}.o_proj", hidden, heads.count * heads.width)
        self.out_bias = weights.bias(f"{name}.o_proj", hidden)
        self.norms: tuple[Tensor, Tensor] | None = None
        if eps is not None:
            q_norm, k_norm = (weights.vector(f"{name}.{kind}_norm.weight", heads.width, shift=shift) for kind in "qk")
            self.norms = q_norm, k_norm
        self.sinks = weights.vector(f"{name}.sinks", heads.count) if sinks else None

    def __call__(self, stream: Stream, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Give the stream with all that was to be added to it, and what comes next, both [T, H]."""
        total, q, gate = self.remember(stream, batch, store)
        out = store.attend(batch, q, self.scale, self.sinks, self.softcap)
        if gate is not None:
            out = sigmoid_gate(out, gate)
        return total, linear(out.view(len(q), -1), self.out, self.out_bias)

    def remember(self, stream: Stream, batch: Batch, store: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store keys and values: gives the stream with all that was to be added to it, queries, and gates if there are any."""
        heads, tokens = self.heads, len(stream.x)
        total, (q, k, v) = add_norm_linears(*stream, self.qkv, self.qkv_bias)
        gate = None
        if self.gated:
            q, gate = split_q_gate(q, heads.count)
        else:
            q = q.view(tokens, -1, heads.width)
        k, v = (t.view(tokens, -1, heads.width) for t in (k, v))
        return total, store.append_turned(batch, q, k, v, self.turn, self.norms, self.eps), gate


class MLP:
    """down(silu(gate x) * up x)."""

    def __init__(self, weights: Weights, name: str, hidden: int, inner: int):
        self.gate = weights.matrix(f"{name}.gate_proj", inner, hidden)
        self.up = weights.matrix(f"{name}.up_proj", inner, hidden)
        self.down = weights.matrix(f"{name}.down_proj", hidden, inner)

    def as_expert(self) -> SharedExpert:
        """The weights, for a mixture to add it to its experts."""
        return SharedExpert(self.gate, self.up, self.down)

    def of_stream(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Give the stream with all that was to be added to it, and what comes next, both [T, H]."""
        total, inner = add_norm_gate_up(*stream, self.gate, self.up)
        return total, linear(inner, self.down)


def head(weights: Weights, table: Any, vocab: int, hidden: int, tied: bool) -> Any:
    """The matrix that scores the next token: the embedding's own where the two are tied."""
    if not tied:
        return weights.matrix("lm_head", vocab, hidden)
    weights.skip("lm_head.weight")
    return table


def rename(name: str) -> str | None:
    return None if re.search(r"rotary_emb\.inv_freq$", name) else name


def make_caches(config: Config) -> list[AttentionShape]:
    return [AttentionShape(config.kv_heads, config.head_width, window=config.window)] * config.layers
