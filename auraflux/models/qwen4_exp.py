"""Qwen4: Qwen3.5's layers around a stream of several vectors for each token, with embeddings of n-grams that stay on disk.

Attention chooses blocks of positions by small heads of its own. Some delta layers first add what a large table says of the last
tokens: which rows they are is known before a step begins, so they are read from disk while it runs.

All norms but the delta layer's own have weights w of (1 + w), as in Qwen3.5.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch, Beside, Cache, IndexedShape, NGramShape, RecurrentShape
from auraflux.cache.compressed import Learned
from auraflux.errors import FormatError
from auraflux.models import qwen3_5_moe
from auraflux.models.attention import Attention, Heads
from auraflux.models.config import Keys
from auraflux.models.decoder import Given, Layer, Mixer, Residual
from auraflux.models.mtp import Place
from auraflux.models.ngram_rows import Grams, offsets, rows_of
from auraflux.models.qwen3_5_moe import ATTENTION, DELTA, Delta, rename
from auraflux.models.qwen3_moe import sparse_layers
from auraflux.ops import (
    gate_streams,
    gate_values,
    linear,
    linears,
    norm_streams,
    rms_norm,
    sigmoid_gate,
    split_q_gate,
    write_streams,
)
from auraflux.ops._recording import recorder
from auraflux.weights.boundary import shown
from auraflux.weights.loader import Weights
from auraflux.weights.row_table import Coming, Rows
from auraflux.weights.stored import is_blank

__all__ = ["Config", "Model", "make_caches", "rename"]

INDEXED = "indexed_attention"
MOST_HEADS = 1 << 14  # of n-grams, in all layers: their primes have to be found
READS = "rows of a table are read from disk as tokens come"


@dataclass(frozen=True)
class Index:
    """The sizes of the indexer: heads, their width, positions of a block, and how many blocks a token attends to."""

    heads: int
    width: int
    rate: int
    most: int


@dataclass(frozen=True)
class Recalling:
    """The sizes of the layers that read embeddings of n-grams.

    layers  their numbers, in the order of their tables
    width   of what a token reads, of all heads together
    taps    of the convolution over it, whose inputs lie as far apart as the longest n-gram is long
    """

    layers: tuple[int, ...]
    grams: Grams
    width: int
    taps: int

    @property
    def reach(self) -> int:
        return (self.taps - 1) * self.grams.size


@dataclass(frozen=True, eq=False)
class Config(qwen3_5_moe.Config):
    """Qwen3.5's; a token has `streams` vectors, mixed by way of `rank` numbers.

    gate      of delta layers' results
    index     None where no layer attends
    recalling None where no layer reads n-grams
    """

    streams: int
    rank: int
    gate: str
    index: Index | None
    recalling: Recalling | None

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        gate = keys.get("output_gate_type", keys.get("hidden_act", "silu"))
        if gate not in ("silu", "swish", "sigmoid"):
            raise FormatError(
                f"config.json of model_type {keys.kind!r} has output_gate_type {gate!r}; only silu or sigmoid is supported."
            )
        inner = config.get("text_config")
        known = {**config, **inner} if isinstance(inner, dict) else {**config}
        known |= {"text_config": None, "output_gate_type": None, "model_type": keys.kind}
        known["partial_rotary_factor"] = keys.get("partial_rotary_factor", 1.0)
        if "layer_types" in keys:
            known["layer_types"] = [ATTENTION if kind == INDEXED else kind for kind in keys["layer_types"]]
        _check_experts(keys)
        base = qwen3_5_moe.Config.from_hf(known)
        return cls(
            **vars(base),
            streams=keys["hc_count"],
            rank=keys["hc_lowrank"],
            gate="sigmoid" if gate == "sigmoid" else "silu",
            index=_index(keys, len(base.rotation.frequencies)) if ATTENTION in base.kinds else None,
            recalling=_recalling(keys, base),
        )


def _check_experts(keys: Keys) -> None:
    layers = keys["num_hidden_layers"] if keys.get("num_experts", 0) and keys["shared_expert_intermediate_size"] else 0
    if not layers or len(sparse_layers(keys)) < layers:
        raise FormatError(f"config.json of model_type {keys.kind!r} has layers without experts or without a shared one.")


def _index(keys: Keys, turned: int) -> Index:
    keys.refuse("indexer_kv_heads", 1)
    rate, budget = keys["indexer_compress_ratio"], keys["indexer_budget"]
    if budget % rate:
        raise FormatError(f"config.json has indexer_budget {budget}, which is no multiple of indexer_compress_ratio {rate}.")
    if 2 * turned > (width := keys["indexer_head_dim"]):
        raise FormatError(f"config.json has indexer_head_dim {width}, of which {2 * turned} channels are to be rotated.")
    return Index(keys["indexer_n_heads"], width, rate, budget // rate)


def _recalling(keys: Keys, base: qwen3_5_moe.Config) -> Recalling | None:
    layers = tuple(sorted({number - 1 for number in keys.get("ple_layer_ids", [])}))
    if not layers:
        return None
    strange = [number + 1 for number in layers if not 0 <= number < base.layers or base.kinds[number] != DELTA]
    if strange:
        raise FormatError(f"config.json has ple_layer_ids {strange}, which are no layers of kind {DELTA}.")
    ends = keys["eos_token_id"]
    if not (first := ends if isinstance(ends, list) else [ends]):
        raise FormatError("config.json has ple_layer_ids and an empty list of eos_token_id, which n-grams do not reach across.")
    if type(seed := keys.get("seed", 1234)) is not int:
        raise FormatError(f"config.json has seed {shown(seed)}; a whole number is needed.")
    grams = Grams(
        keys.get("ngram_size", 3),
        keys.get("heads_per_ngram", 8),
        keys.get("ngram_vocab_size_base", 20_000_000),
        seed,
        first[0],
    )
    width = keys.get("ple_embed_dim", base.hidden)
    if width % grams.count:
        raise FormatError(f"config.json has ple_embed_dim {width}, which does not divide among {grams.count} heads of n-grams.")
    if len(layers) * grams.count > MOST_HEADS:
        raise FormatError(f"config.json has {len(layers) * grams.count} heads of n-grams; {MOST_HEADS} are supported.")
    return Recalling(layers, grams, width, keys.get("ple_conv_kernel_size", 4))


class Model(qwen3_5_moe.Model):
    """Qwen3.5's layers, around a stream of several vectors."""

    config: Config
    whole = "a token has several vectors between its layers, and some of them go by the tokens before it."
    beside = False

    @classmethod
    def mtp_place(cls, config: Config) -> Place | None:  # type: ignore[override]
        return None

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        if config.kinds[index] == DELTA:
            return Delta(weights, f"{name}.linear_attn", config.hidden, config.delta, config.eps, config.gate)
        return IndexedAttention(config, weights, f"{name}.self_attn", self.shift)

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        config, recall = self.config, None
        around = tuple(Connection(config, weights, f"{name}.{part}_hyper_connection", self.shift) for part in ("attn", "mlp"))
        mixer, mlp = self.make_mixer(weights, name, index), self.make_mlp(weights, name, index)
        if config.recalling is not None and index in config.recalling.layers:
            recall = Recall(config, config.recalling, weights, f"{name}.ple", index, self.shift)
        nothing = torch.empty(0)
        return StreamLayer(nothing, mixer, nothing, mlp, config.eps, around=around, recall=recall)

    def make_end(self, weights: Weights) -> None:
        """Take what makes one vector of several."""
        self.mixer = Connection(self.config, weights, "model.hyper_connection_mixer", self.shift, writes=False)

    def embedded(self, ids: Tensor) -> Tensor:
        """Begin the stream, all of its vectors alike: [T] -> [T, N, H]."""
        return super().embedded(ids).unsqueeze(1).repeat(1, self.config.streams, 1)

    def carried(self, ids: Tensor, batch: Batch | Beside, cache: Cache, count: int) -> Residual:
        """Run tokens through the first layers; what any layer needs of n-grams is asked for before."""
        for layer, number in zip(self.layers, self.span, strict=True):
            layer.begin(ids, batch, cache.layers[number])  # type: ignore[attr-defined]
        return super().carried(ids, batch, cache, count)

    def normed(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """What comes out of the last layer, [T, N, H], as one vector: [T, H]."""
        return self.mixer(x)[0]


class Connection:
    """What leads from the stream into a part of a layer, and back."""

    def __init__(self, config: Config, weights: Weights, name: str, shift: float, writes: bool = True):
        self.eps, count, wide = config.eps, config.streams, config.streams * config.hidden
        self.norm = weights.vector(f"{name}.hc_norm.weight", wide, shift=shift).view(count, config.hidden)
        self.down = weights.matrix(f"{name}.input_mix_weight_down", config.rank, wide)
        self.up = weights.matrix(f"{name}.input_mix_weight_up", wide, config.rank)
        # few rows that weigh whole results, as a router's
        self.back = weights.vector(f"{name}.block_inject_weight.weight", count, wide, dtype=weights.dtype) if writes else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the part reads, [T, H], and what weighs its result on the way back, [T, N]: see `write_streams`."""
        normed = norm_streams(x, self.norm, self.eps)
        flat, count = normed.flatten(1), x.shape[1]
        low = linear(flat, self.down) / count
        gates = linear(sigmoid_gate(low, low), self.up)
        return gate_streams(normed, gates.view(x.shape)), None if self.back is None else linear(flat, self.back)


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamLayer(Layer):
    """A layer around a stream of several vectors, [T, N, H]; nothing waits to be added to it, and norms are in its connections.

    recall  adds what n-grams say first; None where nothing does
    """

    around: tuple["Connection", ...]
    recall: "Recall | None"

    def begin(self, ids: Tensor, batch: Batch, store: Any) -> None:
        """Ask for what the next call needs."""
        if self.recall is not None:
            self.recall.begin(ids, batch, store)

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> Residual:  # type: ignore[override]
        x, one, mixes = self._read(x, batch, store)
        x = write_streams(x, self.mixer(Given(one), batch, store)[1], mixes)  # type: ignore[arg-type]
        one, back = self.around[1](x)
        assert back is not None
        return write_streams(x, self.mlp(Given(one))[0], back), None  # type: ignore[arg-type]

    def remember(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> None:
        """Run only the part that stores something."""
        self.mixer.remember(Given(self._read(x, batch, store)[1]), batch, store)  # type: ignore[arg-type]

    def _read(self, x: Tensor, batch: Batch, store: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The stream with what n-grams say, what the mixer reads of it, and what weighs its result."""
        if self.recall is not None:
            x = x + self.recall(x, batch, store)
        one, mixes = self.around[0](x)
        assert mixes is not None
        return x, one, mixes


class Recall:
    """Embeddings of n-grams, gated by the stream and convolved with those of earlier tokens.

    table  None where weights are only written or outlined
    """

    def __init__(self, config: Config, recalling: Recalling, weights: Weights, name: str, index: int, shift: float):
        self.grams, self.eps, self.shape = recalling.grams, config.eps, (config.streams, config.hidden)
        number, wide, width = recalling.layers.index(index), config.streams * config.hidden, recalling.width
        inner = f"{name}.ple_embedding"
        grams, count = self.grams, self.grams.count
        multipliers = _told(weights, f"{inner}.layer_multipliers", grams.size, lambda: grams.multipliers(number, config.vocab))
        sizes = _told(weights, f"{inner}.ngram_heads_vocab_sizes", count, lambda: grams.head_rows(number))
        firsts = _told(weights, f"{inner}.ngram_heads_offsets", count, lambda: offsets(sizes))
        highest = max(first + size for first, size in zip(firsts.tolist(), sizes.tolist(), strict=True))
        if int(sizes.min()) < 1 or int(firsts.min()) < 0:
            raise FormatError(f"{inner} in {weights.checkpoint.path} has heads without rows, or before the first row.")
        self.numbers = tuple(each.to(weights.device) for each in (multipliers, sizes, firsts))
        self.table: Rows | None = weights.table(f"{inner}.ngram_embedding", highest, width // self.grams.count)
        self.projections = [
            weights.matrix(f"{name}.{part}_proj", rows, width) for part, rows in (("key", wide), ("value", config.hidden))
        ]
        self.key_norm, self.query_norm, self.conv_norm = (
            weights.vector(f"{name}.norm_{part}.weight", wide, shift=shift).view(self.shape)
            for part in ("key", "query", "conv")
        )
        taps = weights.vector(f"{name}.conv1d.weight", wide, 1, recalling.taps)
        self.taps = taps.view(wide, recalling.taps).T.contiguous()
        self.device = weights.device
        self._coming: Coming | None = None

    def begin(self, ids: Tensor, batch: Batch, store: Any) -> None:
        """Remember tokens [T], and begin to read their rows."""
        if (recording := recorder.recording) is not None:
            recording.spoil(READS)
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(READS)
        histories = store.histories(batch, ids, self.grams.blank)
        assert self.table is not None
        self._coming = self.table.fetch(rows_of(histories, self.grams, *self.numbers).view(-1))

    def __call__(self, x: Tensor, batch: Batch, store: Any) -> Tensor:
        """What is to be added to the stream, [T, N, H]."""
        assert self._coming is not None
        coming, self._coming = self._coming, None
        rows = coming.result().view(len(x), -1).to(self.device, x.dtype)
        keys, values = linears(rows, self.projections)
        keys = norm_streams(keys.view(x.shape), self.key_norm, self.eps)
        gated = gate_values(keys, norm_streams(x, self.query_norm, self.eps), values)
        normed = norm_streams(gated, self.conv_norm, self.eps)
        return gated + store.convolve_far(batch, normed.flatten(1), self.taps, self.grams.size).view(x.shape)


def _told(weights: Weights, name: str, count: int, usual: Callable[[], Tensor]) -> Tensor:
    """What a checkpoint says of n-grams, int64 [count], or what the config makes of them."""
    found = weights.integers(name, count) if weights.has(name) else None
    return usual() if found is None or is_blank(found) else found


class IndexedAttention(Attention):
    """Gated attention to blocks of positions that small heads choose."""

    tells_apart = False

    def __init__(self, config: Config, weights: Weights, name: str, shift: float):
        heads, rotation = Heads(config.heads, config.kv_heads, config.head_width), config.rotation.to(weights.device)
        super().__init__(weights, name, config.hidden, heads, rotation, config.eps, gated=True, shift=shift)
        assert config.index is not None
        self.index, width, name = config.index, config.index.width, f"{name}.indexer"
        self.index_qk = weights.matrix(f"{name}.index_qk_proj", (config.index.heads + 1) * width, config.hidden)
        self.index_norm = weights.vector(f"{name}.q_layernorm.weight", width, shift=shift)
        norm = weights.vector(f"{name}.k_layernorm.weight", width, shift=shift)
        means = torch.zeros(config.index.rate, width, device=weights.device)
        self.learned = Learned(means, norm, config.eps, rotation.frequencies, False)

    def __call__(self, stream: Any, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Give the stream with all that was to be added to it, and what comes next, both [T, H]."""
        total, q, gate, asked = self._remembered(stream, batch, store)
        chosen = None
        if not store.sees_all(batch):
            asked = rms_norm(asked.view(len(q), self.index.heads, -1), self.index_norm, self.eps)
            chosen = store.choose(batch, self.rotation(asked, batch.positions))
        out = sigmoid_gate(store.attend(batch, q, self.scale, chosen), gate)
        return total, self.projected(out)

    def remember(self, stream: Any, batch: Batch, store: Any) -> Any:
        """Store keys and values, and what blocks are chosen by."""
        self._remembered(stream, batch, store)

    def _remembered(self, stream: Any, batch: Batch, store: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The stream with all that was to be added to it, queries and their gates, and the indexer's queries [T, H * D]."""
        heads, tokens, index = self.heads, len(stream.x), self.index
        total, (q, k, v, both) = stream.linears([*self.qkv, self.index_qk], [*self.qkv_bias, None])
        q, gate = split_q_gate(q, heads.count)
        k, v = (each.view(tokens, -1, heads.width) for each in (k, v))
        q = store.rope_append(batch, q, k, v, self.rotation, self.norms, self.eps)
        asked, key = (each.contiguous() for each in both.split([index.heads * index.width, index.width], 1))
        store.append_keys(batch, key, self.learned)
        return total, q, gate, asked


def make_caches(config: Config) -> list[IndexedShape | RecurrentShape]:
    delta, recalling, index = config.delta, config.recalling, config.index
    sizes = sum(delta.parts), delta.value_heads, delta.key_width, delta.value_width
    shapes: list[IndexedShape | RecurrentShape] = []
    for number, kind in enumerate(config.kinds):
        if kind == ATTENTION:
            assert index is not None
            shapes.append(IndexedShape(config.kv_heads, config.head_width, index.rate, index.width, index.most))
        elif recalling is not None and number in recalling.layers:
            before, wide = recalling.grams.size - 1, config.streams * config.hidden
            shapes.append(NGramShape(*sizes, before=before, reach=recalling.reach, wide=wide))
        else:
            shapes.append(RecurrentShape(*sizes))
    return shapes
