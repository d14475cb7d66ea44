"""Qwen4: Qwen3.5's layers with hyper-connections, sparse attention, and n-gram embeddings that stay on disk.

An indexer selects blocks of positions for attention. Some delta layers first add n-gram embeddings of the last tokens.

All norms but the delta layer's own have weights w of (1 + w), as in Qwen3.5.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import linear
from auraflux.cache import Batch, BlockSparseShape, Cache, MixedBatch, NGramShape, RecurrentShape
from auraflux.cache.layers.compressed import CompressionWeights
from auraflux.errors import FormatError
from auraflux.models import qwen3_5_moe
from auraflux.models.attention import Attention, Heads
from auraflux.models.config import Keys
from auraflux.models.layer import Layer, Mixer, PreparedInput, Residual
from auraflux.models.mtp import MTPNames
from auraflux.models.ngram_embedding import NGramConfig, NGramEmbedding
from auraflux.models.ngram_rows import Grams
from auraflux.models.qwen3_5_moe import ATTENTION, DELTA, Delta, rename
from auraflux.models.qwen3_moe import sparse_layers
from auraflux.ops import gate_streams, norm_streams, rms_norm, sigmoid_gate, split_q_gate, write_streams
from auraflux.weights.fields import (
    COUNT,
    EXPERTS,
    FRACTION,
    HEAD,
    LAYERS,
    MOST_LAYERS,
    NAME,
    NAMES,
    STREAMS,
    TAPS,
    TOKEN_COUNT,
    TOKENS,
    WIDTH,
    WIDTH_OR_NONE,
    end_tokens,
)
from auraflux.weights.formats.untrusted import Kind, integer, list_of, shown
from auraflux.weights.loader import Weights

__all__ = ["Config", "Model", "make_caches", "rename"]

INDEXED = "indexed_attention"
SEED: Kind[int] = Kind("an integer", lambda value: type(value) is int)
MOST_HEADS = 1 << 14  # of n-grams, in all layers: their primes have to be found


@dataclass(frozen=True)
class Index:
    """The sizes of the indexer: heads, their width, positions of a block, and the blocks that a token attends to (top k)."""

    heads: int
    width: int
    rate: int
    most: int


@dataclass(frozen=True, eq=False)
class Config(qwen3_5_moe.Config):
    """Qwen3.5's config; a token has `streams` residual streams, mixed through a low `rank`.

    gate      of delta layers' outputs
    index     None where no layer has attention
    ngrams    None where no layer has n-gram embeddings
    """

    streams: int
    rank: int
    gate: str
    index: Index | None
    ngrams: NGramConfig | None

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        gate = keys.get("output_gate_type", NAME, keys.get("hidden_act", NAME, "silu"))
        if gate not in ("silu", "swish", "sigmoid"):
            raise FormatError(f"{keys.title} has output_gate_type {shown(gate)}; only silu or sigmoid is supported.")
        known: dict[str, Any] = {
            "output_gate_type": None,
            "partial_rotary_factor": keys.get("partial_rotary_factor", FRACTION, 1.0),
        }
        if "layer_types" in keys:
            known["layer_types"] = [ATTENTION if kind == INDEXED else kind for kind in keys.read("layer_types", NAMES)]
        _check_experts(keys)
        base = qwen3_5_moe.read_config(keys.changed(known))
        return cls(
            **vars(base),
            streams=keys.read("hc_count", STREAMS),
            rank=keys.read("hc_lowrank", WIDTH),
            gate="sigmoid" if gate == "sigmoid" else "silu",
            index=_index(keys, len(base.rotation.frequencies)) if ATTENTION in base.kinds else None,
            ngrams=_ngrams(keys, base),
        )


def _check_experts(keys: Keys) -> None:
    experts = keys.get("num_experts", EXPERTS, 0) and keys.read("shared_expert_intermediate_size", WIDTH_OR_NONE)
    if not experts or len(sparse_layers(keys)) < keys.layers:
        raise FormatError(f"{keys.title} has layers without experts or without a shared one.")


def _index(keys: Keys, turned: int) -> Index:
    keys.only("indexer_kv_heads", 1)
    rate, budget = keys.read("indexer_compress_ratio", TOKEN_COUNT), keys.read("indexer_budget", TOKEN_COUNT)
    if budget % rate:
        raise FormatError(f"config.json has indexer_budget {budget}, which is no multiple of indexer_compress_ratio {rate}.")
    if 2 * turned > (width := keys.read("indexer_head_dim", HEAD)):
        raise FormatError(f"config.json has indexer_head_dim {width}, of which {2 * turned} channels are to be rotated.")
    return Index(keys.read("indexer_n_heads", COUNT), width, rate, budget // rate)


def _ngrams(keys: Keys, base: qwen3_5_moe.Config) -> NGramConfig | None:
    layers = tuple(sorted({number - 1 for number in keys.get("ple_layer_ids", list_of(LAYERS, MOST_LAYERS), [])}))
    if not layers:
        return None
    strange = [number + 1 for number in layers if not 0 <= number < base.layers or base.kinds[number] != DELTA]
    if strange:
        raise FormatError(f"config.json has ple_layer_ids {strange}, which are no layers of kind {DELTA}.")
    grams = _grams(keys)
    width = keys.get("ple_embed_dim", WIDTH, base.hidden)
    if width % grams.count:
        raise FormatError(f"config.json has ple_embed_dim {width}, which does not divide among {grams.count} heads of n-grams.")
    if len(layers) * grams.count > MOST_HEADS:
        raise FormatError(f"config.json has {len(layers) * grams.count} heads of n-grams; {MOST_HEADS} are supported.")
    return NGramConfig(layers, grams, width, keys.get("ple_conv_kernel_size", TAPS, 4))


def _grams(keys: Keys) -> Grams:
    if (ends := end_tokens(keys)) is None:
        raise keys.missing("eos_token_id", TOKENS)
    if not ends:
        raise FormatError("config.json has ple_layer_ids and an empty list of eos_token_id, which n-grams do not reach across.")
    return Grams(
        size=keys.get("ngram_size", integer(2, 16), 3),
        heads=keys.get("heads_per_ngram", HEAD, 8),
        base=keys.get("ngram_vocab_size_base", integer(1, 1 << 40), 20_000_000),
        seed=keys.get("seed", SEED, 1234),
        blank=ends[0],
    )


class Model(qwen3_5_moe.Model):
    """Qwen3.5's layers with hyper-connections."""

    config: Config

    @classmethod
    def no_pipeline_parallel(cls, config: Config) -> str | None:  # type: ignore[override]
        return "a token has several residual streams between layers, and some layers read the tokens before it."

    @classmethod
    def mtp_names(cls, config: Config) -> MTPNames | None:  # type: ignore[override]
        return None

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        if config.kinds[index] == DELTA:
            return Delta(weights, f"{name}.linear_attn", config.hidden, config.delta, config.eps, config.gate)
        return IndexedAttention(config, weights, f"{name}.self_attn", self.shift)

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        config, ngrams = self.config, None
        around = tuple(Connection(config, weights, f"{name}.{part}_hyper_connection", self.shift) for part in ("attn", "mlp"))
        mixer, mlp = self.make_mixer(weights, name, index), self.make_mlp(weights, name, index)
        if config.ngrams is not None and index in config.ngrams.layers:
            shape = config.streams, config.hidden
            ngrams = NGramEmbedding(config.ngrams, weights, f"{name}.ple", index, shape, config.vocab, config.eps, self.shift)
        nothing = torch.empty(0)
        return StreamLayer(nothing, mixer, nothing, mlp, config.eps, around=around, ngrams=ngrams)

    def make_final_norm(self, weights: Weights) -> None:
        """Load the connection that collapses the residual streams."""
        self.mixer = Connection(self.config, weights, "model.hyper_connection_mixer", self.shift, writes=False)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Start the residual streams, all with the same embedding: [T] -> [T, N, H]."""
        return super().embed_tokens(ids).unsqueeze(1).repeat(1, self.config.streams, 1)

    def run_layers(self, x: Tensor, batch: Batch | MixedBatch, cache: Cache, count: int) -> Residual:
        """Start reading the n-gram rows of all layers, then run the first `count` layers: ids [T] -> [T, N, H]."""
        for layer, number in zip(self.layers, self.span, strict=True):
            layer.begin(x, batch, cache.layers[number])  # type: ignore[attr-defined]
        return super().run_layers(x, batch, cache, count)

    def final_norm(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Collapse and normalise the output of the last layer: [T, N, H] -> [T, H]."""
        return self.mixer(x)[0]


class Connection:
    """The connection from the residual streams into a mixer or an MLP, and back."""

    def __init__(self, config: Config, weights: Weights, name: str, shift: float, writes: bool = True):
        self.eps, count, wide = config.eps, config.streams, config.streams * config.hidden
        self.norm = weights.vector(f"{name}.hc_norm.weight", wide, shift=shift).view(count, config.hidden)
        self.down = weights.matrix(f"{name}.input_mix_weight_down", config.rank, wide)
        self.up = weights.matrix(f"{name}.input_mix_weight_up", wide, config.rank)
        # few rows with a large effect, like a router's: not quantized
        self.back = weights.vector(f"{name}.block_inject_weight.weight", count, wide, dtype=weights.dtype) if writes else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input of the mixer or MLP, [T, H], and the weights of its output, [T, N]: see `write_streams`."""
        normed = norm_streams(x, self.norm, self.eps)
        flat, count = normed.flatten(1), x.shape[1]
        low = linear(flat, self.down) / count
        gates = linear(sigmoid_gate(low, low), self.up)
        return gate_streams(normed, gates.view(x.shape)), None if self.back is None else linear(flat, self.back)


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamLayer(Layer):
    """A layer with several residual streams, [T, N, H], and no pending delta; its connections have the norms.

    ngrams  adds n-gram embeddings before the mixer; None for none
    """

    around: tuple["Connection", ...]
    ngrams: "NGramEmbedding | None"

    @property
    def supports_mixed_batch(self) -> bool:
        """Refuse mixed batches: n-gram rows are read for all tokens of a step, before the first layer."""
        return False

    def begin(self, ids: Tensor, batch: Batch, store: Any) -> None:
        """Start reading the rows that the next call needs."""
        if self.ngrams is not None:
            self.ngrams.begin(ids, batch, store)

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> Residual:  # type: ignore[override]
        x, one, mixes = self._read(x, batch, store)
        x = write_streams(x, self.mixer(PreparedInput(one), batch, store)[1], mixes)
        one, back = self.around[1](x)
        assert back is not None
        return write_streams(x, self.mlp(PreparedInput(one))[0], back), None

    def update_cache(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> None:
        """Append new tokens to the cache; the output is not needed."""
        self.mixer.update_cache(PreparedInput(self._read(x, batch, store)[1]), batch, store)

    def _read(self, x: Tensor, batch: Batch, store: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the streams with n-gram embeddings added, the mixer's input, and the weights of its output."""
        if self.ngrams is not None:
            x = x + self.ngrams(x, batch, store)
        one, mixes = self.around[0](x)
        assert mixes is not None
        return x, one, mixes


class IndexedAttention(Attention):
    """Gated attention to blocks of positions that an indexer selects."""

    def __init__(self, config: Config, weights: Weights, name: str, shift: float):
        heads, rotation = Heads(config.heads, config.kv_heads, config.head_width), config.rotation.to(weights.device)
        super().__init__(weights, name, config.hidden, heads, rotation, config.eps, gated=True, shift=shift)
        assert config.index is not None
        self.index, width, name = config.index, config.index.width, f"{name}.indexer"
        self.index_qk = weights.matrix(f"{name}.index_qk_proj", (config.index.heads + 1) * width, config.hidden)
        self.index_norm = weights.vector(f"{name}.q_layernorm.weight", width, shift=shift)
        norm = weights.vector(f"{name}.k_layernorm.weight", width, shift=shift)
        means = torch.zeros(config.index.rate, width, device=weights.device)
        self.learned = CompressionWeights(means, norm, config.eps, rotation.frequencies, False)

    def __call__(self, inputs: Any, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        total, q, gate, index_query = self._append(inputs, batch, store)
        chosen = None
        if not store.sees_all(batch):
            index_query = rms_norm(index_query.view(len(q), self.index.heads, -1), self.index_norm, self.eps)
            chosen = store.select_blocks(batch, self.rotation(index_query, batch.positions))
        out = sigmoid_gate(store.attend(batch, q, self.scale, chosen), gate)
        return total, self.projected(out)

    def update_cache(self, inputs: Any, batch: Batch, store: Any) -> None:
        """Append keys, values and index keys of new tokens to the cache."""
        self._append(inputs, batch, store)

    def _append(self, inputs: Any, batch: Batch, store: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Append keys, values and index keys; return residual stream, queries, gates and index queries [T, H * D]."""
        heads, tokens, index = self.heads, len(inputs.x), self.index
        total, (q, k, v, both) = inputs.linears([*self.qkv, self.index_qk], [*self.qkv_bias, None])
        q, gate = split_q_gate(q, heads.count)
        k, v = (each.view(tokens, -1, heads.width) for each in (k, v))
        q = store.rope_append(batch, q, k, v, self.rotation, self.norms, self.eps)
        index_query, key = (each.contiguous() for each in both.split([index.heads * index.width, index.width], 1))
        store.append_keys(batch, key, self.learned)
        return total, q, gate, index_query


def make_caches(config: Config) -> list[BlockSparseShape | RecurrentShape]:
    delta, ngrams, index = config.delta, config.ngrams, config.index
    sizes = sum(delta.parts), delta.value_heads, delta.key_width, delta.value_width
    shapes: list[BlockSparseShape | RecurrentShape] = []
    for number, kind in enumerate(config.kinds):
        if kind == ATTENTION:
            assert index is not None
            shapes.append(BlockSparseShape(config.kv_heads, config.head_width, index.rate, index.width, index.most))
        elif ngrams is not None and number in ngrams.layers:
            before, wide = ngrams.grams.size - 1, config.streams * config.hidden
            shapes.append(NGramShape(*sizes, history_tokens=before, conv_inputs=ngrams.reach, conv_width=wide))
        else:
            shapes.append(RecurrentShape(*sizes))
    return shapes
