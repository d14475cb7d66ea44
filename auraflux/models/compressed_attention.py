"""Compressed attention (DeepSeek V4): a sliding window, and compressed entries for older positions.

Key and value of all heads are one vector, cached for a sliding window. For older positions, layers cache compressed entries:
one for many tokens, and all entries are attended to, or one for a few tokens, and an indexer with keys of its own selects some.
The vectors are rotated as keys, so the attention output is rotated back by the query's position.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import add_norm_linears, linear
from auraflux.cache import Batch
from auraflux.cache.layers.compressed import CompressionWeights
from auraflux.models.layer import LayerInput, PartMixer
from auraflux.models.rotation import Rotation
from auraflux.ops import TokenSelection, latent_output, norm_rope, rope
from auraflux.weights.loader import Weights

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


@dataclass(frozen=True)
class Widths:
    """The widths of attention.

    query   the queries' low rank
    head    a query, and the vector that is key and value
    groups  of heads with an output projection each, to `out`
    """

    query: int
    head: int
    groups: int
    out: int


@dataclass(frozen=True)
class Index:
    """The sizes of the indexer: heads, their width, and the entries that a token attends to (top k)."""

    heads: int
    width: int
    most: int


@dataclass(frozen=True, eq=False)
class AttentionConfig:
    """The sizes of attention; `hidden` is the model's width.

    kinds      the attention of each layer
    rates      tokens of a compressed entry, by kind
    rotations  of heads: in layers with a window alone, and in those with entries
    index_rotation  RoPE of the indexer's heads
    """

    hidden: int
    heads: int
    widths: Widths
    kinds: tuple[str, ...]
    rates: dict[str, int]
    index: Index
    eps: float
    rotations: tuple[Rotation, Rotation]
    index_rotation: Rotation


class Compressor:
    """The compressor of several tokens' vectors into one entry.

    projections  of values and of gates
    """

    def __init__(self, config: AttentionConfig, weights: Weights, name: str, kind: str, width: int, rotation: Rotation):
        wide = width * (1 + (kind == SPARSE))
        self.projections = [weights.matrix(f"{name}.{part}_proj", wide, config.hidden) for part in ("kv", "gate")]
        bias = weights.vector(f"{name}.position_bias", config.rates[kind], wide)
        norm = weights.vector(f"{name}.kv_norm.weight", width)
        self.learned = CompressionWeights(bias, norm, config.eps, rotation.frequencies.to(weights.device))


class Indexer:
    """The indexer of compressed entries: its keys are entries of its own."""

    def __init__(self, config: AttentionConfig, weights: Weights, name: str, kind: str):
        index = config.index
        self.heads, self.rotation = index.heads, config.index_rotation.to(weights.device)
        self.compressor = Compressor(config, weights, name, kind, index.width, config.index_rotation)
        self.query = weights.matrix(f"{name}.q_b_proj", index.heads * index.width, config.widths.query)
        self.share = weights.matrix(f"{name}.scorer.weights_proj", index.heads, config.hidden)

    def choose(self, batch: Batch, store: Any, q: Tensor, weights: Tensor) -> TokenSelection:
        """Select entries by queries [T, H * D] and head weights [T, H]; factors common to all scores are omitted."""
        return store.select_tokens(batch, self.rotation(q.unflatten(1, (self.heads, -1)), batch.positions), weights)


class Attention(PartMixer):
    """Attention to a sliding window and compressed entries; all heads share one vector for key and value."""

    def __init__(self, config: AttentionConfig, weights: Weights, name: str, index: int):
        widths, kind, hidden, heads = config.widths, config.kinds[index], config.hidden, config.heads
        self.heads, self.groups, self.scale, self.eps = heads, widths.groups, widths.head**-0.5, config.eps
        self.rotation = config.rotations[kind != WINDOW].to(weights.device)
        self.query_a = weights.matrix(f"{name}.q_a_proj", widths.query, hidden)
        self.query_norm = weights.vector(f"{name}.q_a_norm.weight", widths.query)
        self.query_b = weights.matrix(f"{name}.q_b_proj", heads * widths.head, widths.query)
        self.kv = weights.matrix(f"{name}.kv_proj", widths.head, hidden)
        # queries are normalised without a weight
        self.norms = torch.ones(widths.head, device=weights.device), weights.vector(f"{name}.kv_norm.weight", widths.head)
        self.out_a = weights.matrix(
            f"{name}.o_a_proj", widths.groups * widths.out, heads * widths.head // widths.groups, in_order=True
        )
        self.out_b = weights.matrix(f"{name}.o_b_proj", hidden, widths.groups * widths.out)
        self.sinks = weights.vector(f"{name}.sinks", heads)
        self.compressor = self.indexer = None
        if kind != WINDOW:
            self.compressor = Compressor(config, weights, f"{name}.compressor", kind, widths.head, config.rotations[1])
        if kind == SPARSE:
            self.indexer = Indexer(config, weights, f"{name}.compressor.indexer", kind)

    def mix(self, inputs: LayerInput, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        total, q, *index_inputs = self.append(inputs, batch, store)
        options = [self.indexer.choose(batch, store, *index_inputs)] if self.indexer is not None and index_inputs else []
        mixed = store.attend(batch, q, self.scale, self.sinks, *options)
        back = rope(mixed, -self.rotation.frequencies, batch.positions, self.rotation.mscale, True)
        parts = latent_output(back.view(len(q), self.groups, -1), self.out_a, 0)
        return total, linear(parts.flatten(1), self.out_b)

    def update_cache(self, inputs: LayerInput, batch: Batch, store: Any) -> None:
        """Append KV vectors and compressed entries of new tokens to the cache."""
        self.append(inputs, batch, store)

    def append(self, inputs: LayerInput, batch: Batch, store: Any) -> tuple[Tensor, ...]:
        """Append KV vectors and entries; return the residual stream with its delta added and the queries, then, where a
        selection is due, the indexer's queries and weights."""
        indexer = self.indexer
        selects = indexer is not None and not store.sees_all(batch)
        first, second = [self.query_a, self.kv], [self.query_b]
        inner = None if indexer is None else indexer.compressor
        makers = [each for each in (self.compressor, inner) if each is not None]
        first += [weight for maker in makers for weight in maker.projections]
        if indexer is not None and selects:
            first, second = [*first, indexer.share], [*second, indexer.query]
        total, (q, kv, *rest) = add_norm_linears(*inputs, first, [None] * len(first))
        _, (q, *index_inputs) = add_norm_linears(q, None, self.query_norm, self.eps, second, [None] * len(second))
        rotating = self.rotation.frequencies, batch.positions, self.norms, self.eps, self.rotation.mscale, True
        q, kv = norm_rope(q.unflatten(1, (self.heads, -1)), kv.unsqueeze(1), *rotating)
        store.append(batch, kv.squeeze(1))
        for number, (maker, entries) in enumerate(zip(makers, store.entry_layers if makers else (), strict=True)):
            entries.append(batch, torch.cat(rest[2 * number : 2 * number + 2], 1), maker.learned)
        return total, q, *index_inputs, *rest[2 * len(makers) :]
