"""A model with its KV cache: tokens in, logits out."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import Tensor

from auraflux.adapters.loaded import LoadedAdapters
from auraflux.cache import Batch, Cache, CacheSettings, KVSequence, Logits, MixedBatch
from auraflux.cache.key_calibration import ModelCalibration
from auraflux.cache.page_shards import UNSHARDED
from auraflux.engine.device import device_memory, to_device
from auraflux.engine.graph_runner import GraphRunner
from auraflux.engine.model_runner import HiddenRunner, Model, ModelRunner, Ranks
from auraflux.errors import CacheFull
from auraflux.quant import QTensor
from auraflux.vision.families import Vision
from auraflux.weights.dense_modules import DenseModule
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool

# tokens that a GPU's prefill steps are padded to: few sizes, so that CUDA graphs are reused; coarse below 256, where a step is
# bound by reading the weights
PREFILL_SIZES = (32, 64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
# sequences that a GPU's decode steps are padded to
DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LENGTH_BUCKETS = (1024, 4096, 16384)  # tokens that a step index covers; powers of two beyond
GROWTH = 0.25  # of the KV cache, when it runs out of pages and experts can give up memory
# tokens of a mixed batch: few sizes, since each is captured for every number of decoding sequences, and full matmul tiles
MIXED_SIZES = (128, 256, 512, 1024)
MIXED_BUCKETS = LENGTH_BUCKETS[1:]
MIN_MIXED_CHUNK = 32  # prompt tokens in a mixed batch


class CacheOptions(TypedDict, total=False):
    """Options of an engine's KV cache.

    context           maximum tokens of a sequence
    sequences         maximum open sequences; 1 by default
    tokens            capacity; by default every sequence can fill its context
    cached_sequences  prefix-cache entries that sliding windows reserve pages for, in addition to `sequences`
    chunk             tokens of a prefill step, over all sequences
    key_calibration   per-channel mean and scale of keys; None to quantize keys without
    """

    context: Required[int]
    sequences: int
    tokens: int | None
    cached_sequences: int
    chunk: int
    key_calibration: ModelCalibration | None
    dtype: torch.dtype
    device: torch.device | str


class Engine:
    """Runs the tokens of sequences through a model, with chunked prefill.

    exact      multiply float32 activations, see `ModelRunner`
    invariant  batch-invariant results on a GPU, see `ModelRunner`
    fp8        round the operands of long prefill chunks to FP8, see `ModelRunner`
    graphs     replay decode steps, on a GPU also prefill steps, instead of running their Python every time
    ranks      that run the model with this process; None for a single process
    hidden     return the hidden states of all tokens, which MTP drafts from

    `vision` encodes images; None where the model takes none.
    `dense_modules` make embeddings of pooled hidden states, one after another.
    `chunks_by_layer` chunks of prompts may be computed in a step that needs no logits, see `prefill`.
    `take_memory` takes so many bytes of GPU memory from the expert cache and returns how many it got; None without one.
    """

    chunks_by_layer = 1
    take_memory: Callable[[int], int] | None = None
    vision: Vision | None = None
    dense_modules: Sequence[DenseModule] = ()

    def __init__(
        self,
        model: Model,
        shapes: list[Any],
        settings: CacheSettings,
        *,
        exact: bool = False,
        invariant: bool = False,
        fp8: bool = False,
        graphs: bool = True,
        ranks: Ranks | None = None,
        hidden: bool = False,
        **options: Unpack[CacheOptions],
    ):
        local_layers, page_shard = (None, UNSHARDED) if ranks is None else (ranks.local_layers, ranks.page_shard)
        with device_memory():
            self.cache = Cache(shapes, settings, local_layers=local_layers, page_shard=page_shard, **options)
        self.model, self.chunk, self.ranks = model, self.cache.chunk, ranks
        self.device, self.returns_hidden = self.cache.device, hidden
        single_rank = HiddenRunner if hidden else ModelRunner
        self.runner = (single_rank if ranks is None else ranks.runner)(model, self.cache, exact)
        self.runner.invariant, self.runner.fp8_prefill = invariant, fp8
        self.graphs = GraphRunner(self.runner, graphs)

    @property
    def batch_invariant(self) -> bool:
        """Return whether batch-invariant GPU kernels are used; CPU kernels always are."""
        return self.runner.invariant and self.device.type == "cuda"

    @property
    def adapters(self) -> LoadedAdapters | None:
        """Adapters of the model; None for none."""
        return self.graphs.adapters

    def set_adapters(self, loaded: LoadedAdapters) -> None:
        """Use adapters from now on; refuse those of weights that a step does not compute as linear layers."""
        self.graphs.adapters = loaded
        for tokens in (1, 2):
            sequence = self.cache.open()
            sequence.adapter = 0
            try:
                self.step(self.cache.batch([sequence]), [[0] * tokens])
            finally:
                sequence.close()
            loaded.check_touched()

    def use_pool(self, pool: GpuExpertPool) -> None:
        """Prepare steps of a model whose experts are in a pool."""
        self.graphs.max_tokens, self.graphs.before_step = pool.max_captured_tokens, pool.before_step
        self.take_memory, self.chunks_by_layer = pool.give_up, pool.chunks_by_layer(self.chunk)
        if pool.on_disk:
            self.graphs.after_step = pool.check

    def try_token(self) -> None:
        """Run a token and discard it, so that an unsupported model fails at load time."""
        sequence = self.cache.open()
        try:
            self.compute_logits(self.step(self.cache.batch([sequence]), [[0]]))
        finally:
            sequence.close()

    def grow_cache(self) -> bool:
        """Enlarge the KV cache at the expense of the expert cache; return whether it has more pages.

        The next step must begin with a new batch.
        """
        if self.take_memory is None:
            return False
        with device_memory():
            # graphs refer to the memory of both
            self.graphs.reset()
            extra = self.cache.growth_nbytes
            taken = self.take_memory(self.cache.page_nbytes + int(GROWTH * self.cache.reserved_nbytes) + extra)
            return self.cache.grow(taken - extra)

    def check(self) -> None:
        """Raise if a rank is lost."""
        if self.ranks is not None:
            self.ranks.check()

    def restart(self, unless: Callable[[], bool]) -> None:
        """Restart the ranks, unless `unless` becomes true; all sequences must be closed, since their KV is lost."""
        assert self.ranks is not None
        self.cache.clear_indexes()
        self.graphs.reset()
        self.ranks.restart(unless)

    def step(self, batch: Batch, ids: list[list[int]]) -> Tensor:
        """Append tokens to each sequence of a batch and return the final hidden states [T, H].

        An error or interrupt leaves the sequences at their former length or shorter.
        """
        before = [sequence.length for sequence in batch.sequences]
        try:
            with device_memory():
                padded = self._reserve(batch, [len(each) for each in ids])
                tokens = [token for each in ids for token in each]
                flat = to_device(tokens + tokens[-1:] * (batch.padding or 0), self.device)
                hidden = self.graphs.prefill(batch, flat) if padded else self.graphs.run_uncaptured(batch, flat)
                self.graphs.check_step()
                batch.drop_padding()
                return hidden[: len(tokens)]
        except BaseException:
            batch.roll_back(before)
            raise

    def _reserve(self, batch: Batch, counts: list[int]) -> bool:
        """Reserve cache slots for a step's tokens and its padding; return whether it is padded to a size that has a graph."""
        size = self._padded_size(batch, counts)
        if size is not None:
            try:
                batch.extend([size], padding=size - counts[0])
            except CacheFull:
                # the tokens may fit without padding
                pass
            else:
                return True
        batch.extend(counts)
        return False

    def _padded_size(self, batch: Batch, counts: list[int]) -> int | None:
        """Return the size that a prefill step is padded to for its CUDA graph; None for steps that run without."""
        # above the largest size a GPU takes longer than the step's Python, so a graph gains nothing
        if (
            batch.logits is Logits.LAST
            or len(counts) > 1
            or not 1 < counts[0] <= min(self.chunk, PREFILL_SIZES[-1])
            or not self.graphs.supports_prefill
            or batch.sequences[0].attends_ahead(counts[0])
        ):
            return None
        size = self._prefill_size(counts[0])
        return size if self.graphs.captures(size) and batch.sequences[0].length + size <= batch.context else None

    def _prefill_size(self, tokens: int) -> int:
        return next((size for size in PREFILL_SIZES if tokens <= size < self.chunk), min(self.chunk, PREFILL_SIZES[-1]))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits of hidden states: [N, H] -> [N, V]."""
        return self.runner.compute_logits(hidden)

    def decode(self, batch: Batch, ids: list[int] | Tensor) -> Tensor:
        """Append one token to each sequence and return the next-token logits [B, V]."""
        return self.graphs.decode(batch, ids)

    def mixed_chunk_sizes(self, sequences: int) -> list[int]:
        """Return the prefill chunk sizes of a mixed batch with this many decoding sequences; empty if unsupported."""
        # a single decoding sequence would share its step index with the prompt
        if not self.model.supports_mixed_batch or not self.graphs.supports_prefill or self.returns_hidden or sequences < 2:
            return []
        width = padded_batch_size(sequences) if self.cache.supports_padding else sequences
        totals = [total for total in MIXED_SIZES if total <= self.chunk and self.graphs.captures(total)]
        return [total - width for total in totals if total - width >= MIN_MIXED_CHUNK]

    def fit_mixed_chunk(self, sequences: int, tokens: int, more: bool) -> int:
        """Return how many prompt tokens to prefill with this many decoding sequences; 0 if they fit no mixed batch.

        more  the prompt has further tokens, so the chunk is rounded down to a full batch
        """
        sizes = self.mixed_chunk_sizes(sequences)
        if more:
            tokens = max((size for size in sizes if size <= tokens), default=tokens)
        return tokens if any(size >= tokens for size in sizes) else 0

    def decode_mixed(self, batch: Batch, ids: list[int] | Tensor, sequence: KVSequence, chunk: list[int]) -> Tensor | None:
        """Run one token of each sequence and a prefill chunk of another in a mixed batch; return the decode logits [B, V].

        Return None, with nothing changed, if the cache has no room for the chunk or no size fits it.
        """
        size = next((size for size in self.mixed_chunk_sizes(len(batch.sequences)) if size >= len(chunk)), None)
        if size is None or sequence.length + size > self.cache.context or sequence.attends_ahead(len(chunk)):
            return None
        if self.adapters is not None and any(each.adapter is not None for each in (*batch.sequences, sequence)):
            # its token-wise layers would need the adapters of both parts
            return None
        longest = max(each.length for each in batch.sequences) + 1
        decode = self.cache.batch(batch.sequences, _bucket(longest, MIXED_BUCKETS), padding_sequences=batch.padding_sequences)
        prefill = self.cache.batch([sequence], _bucket(sequence.length + size, MIXED_BUCKETS), logits=Logits.NONE)
        mixed = MixedBatch(decode, prefill)
        before = mixed.lengths
        try:
            mixed.extend(size, padding=size - len(chunk))
        except CacheFull:
            return None
        try:
            with device_memory():
                flat = to_device(chunk + chunk[-1:] * (size - len(chunk)), self.device)
                logits = self.graphs.decode_mixed(mixed, ids, flat)
                self.graphs.check_step()
                prefill.drop_padding()
                return logits
        except BaseException:
            mixed.roll_back(before)
            raise

    def mixed_batch_counts(self, parallel: int) -> list[int]:
        """Return the numbers of decoding sequences whose mixed batches have distinct graphs."""
        # one sequence prefills
        counts = {min(count, parallel - 1) for count in DECODE_SIZES if count <= padded_batch_size(parallel - 1)}
        return sorted(count for count in counts if self.mixed_chunk_sizes(count))

    def warm_up_mixed(self, count: int, size: int | None = None, times: int = 2) -> None:
        """Run mixed batches of this many decoding sequences; the first run compiles kernels, the second captures graphs.

        size  of the prefill chunk; None for all sizes
        """
        *decoding, prefilling = sequences = [self.cache.open() for _ in range(count + 1)]
        try:
            batch = self.decode_batch(decoding)
            sizes = self.mixed_chunk_sizes(count) if size is None else [size]
            for chunk in (chunk for chunk in sizes for _ in range(times)):
                self.decode_mixed(batch, [0] * count, prefilling, [0] * chunk)
        finally:
            for sequence in sequences:
                sequence.close()

    def verify(self, batch: Batch, ids: list[list[int]]) -> Tensor:
        """Append several tokens to each sequence and return the logits after every one, [T, V]."""
        if self._has_verify_graph(batch, list(map(len, ids))):
            return self.graphs.verify(batch, ids)
        # never captured, so its time is representative
        self.graphs.warming_up = False
        return self.compute_logits(self.step(batch, ids))

    def _has_verify_graph(self, batch: Batch, counts: list[int]) -> bool:
        """Return whether a verify step is replayed; on a GPU sequences are padded to the longest draft, which costs little."""
        if len(set(counts)) == 1:
            return len(counts) == 1 or self.device.type == "cuda"
        longest = max(sequence.length for sequence in batch.sequences) + max(counts)
        return self.device.type == "cuda" and self.ranks is None and not self.cache.has_states and longest <= batch.context

    @property
    def hidden(self) -> Tensor | None:
        """Hidden states behind the last logits, [N, H]; None unless `returns_hidden`."""
        return self.runner.hidden

    def prefill(self, sequences: list[KVSequence], chunks: list[list[int]], hidden: bool = False) -> Tensor:
        """Compute prefill chunks, at most `chunk` tokens together; return the final hidden states if asked for.

        More tokens, up to `max_prefill_tokens`, are divided into parts, all of which go through a layer before the next one.

        hidden  return them even without `returns_hidden`
        """
        logits = Logits.ALL if hidden or self.returns_hidden else Logits.NONE
        if logits is Logits.NONE and self.chunk < sum(map(len, chunks)) <= self.max_prefill_tokens(sequences):
            return self._prefill_by_layers(sequences, chunks)
        return self.step(self._prefill_batch(sequences, chunks, logits), chunks)

    def max_prefill_tokens(self, sequences: list[KVSequence]) -> int:
        """Return the most tokens of a prefill step of these sequences, if no hidden states are needed."""
        by_layers = (
            self.model.supports_mixed_batch
            and self.ranks is None
            and not self.returns_hidden
            # a checkpoint between two parts would have the states of neither
            and self.cache.checkpoints.stride is None
            and all(sequence.adapter is None and sequence.inputs is None for sequence in sequences)
        )
        return self.chunk * (self.chunks_by_layer if by_layers else 1)

    def _prefill_by_layers(self, sequences: list[KVSequence], chunks: list[list[int]]) -> Tensor:
        """Compute more than `chunk` tokens, all through a layer before the next one; return no hidden states."""
        before, counts = [sequence.length for sequence in sequences], [len(each) for each in chunks]
        try:
            with device_memory():
                # the last part may have no room: nothing is computed then
                self.cache.batch(sequences).reserve(counts)
                parts = []
                for number, pieces in enumerate(split_parts(counts, self.chunk)):
                    ids = [chunks[which][span.start : span.stop] for which, span in pieces]
                    batch = self._prefill_batch([sequences[which] for which, _ in pieces], ids, Logits.NONE, number)
                    batch.extend([len(each) for each in ids])
                    parts.append((to_device([token for each in ids for token in each], self.device), batch))
                self.graphs.prefill_by_layers(parts)
                self.graphs.check_step()
                if self.device.type == "cuda":
                    # the next step waits anyway, since it reads the tables of the experts
                    torch.cuda.synchronize(self.device)
                return torch.empty(0, device=self.device)
        except BaseException:
            for sequence, length in zip(sequences, before, strict=True):
                sequence.truncate(min(length, sequence.length))
            raise

    def supports_last_logits(self, count: int) -> bool:
        """Return whether `prefill_last_logits` serves this many prompts: GPU kernels exist for the decode batch sizes."""
        # recurrent states cannot be rewound to before a prompt's last token
        serves = (
            self.graphs.runs_ahead and self.model.idempotent_append and not self.cache.has_states and not self.returns_hidden
        )
        return serves and padded_batch_size(count) == count

    def prefill_last_logits(self, sequences: list[KVSequence], chunks: list[list[int]]) -> Tensor:
        """Compute the last chunks of prompts, at most `chunk` tokens together, and return the last-token logits [B, V]."""
        return self.compute_logits(self.step(self.cache.batch(sequences, logits=Logits.LAST), chunks))

    def prefers_separate_steps(self, tokens: int) -> bool:
        """Return whether prompts of this many tokens are faster one by one: only steps of a single prompt have graphs."""
        return self.graphs.supports_prefill and tokens <= PREFILL_SIZES[-1] and self.graphs.captures(tokens)

    def decode_batch(self, sequences: list[KVSequence]) -> Batch:
        """Return a batch for decode steps; a GPU's is padded to one of few sizes, so that graphs are reused."""
        padding_sequences = 0
        if self.cache.has_states:
            rows: list[Any] = [sequence.group_states[self.cache.states] for sequence in sequences]
            self.cache.states.compact(rows)
        elif self.device.type == "cuda" and self.cache.supports_padding:
            padding_sequences = padded_batch_size(len(sequences)) - len(sequences)
        return self.cache.batch(sequences, padding_sequences=padding_sequences)

    def _prefill_batch(
        self, sequences: list[KVSequence], chunks: list[list[int]], logits: Logits = Logits.ALL, part: int = 0
    ) -> Batch:
        """Return a batch for prompts; with prefill graphs one prompt's length is rounded up to a bucket, which reuses them."""
        if len(sequences) > 1 or not self.graphs.supports_prefill:
            return self.cache.batch(sequences, logits=logits, part=part)
        rest = len(chunks[0]) % self.chunk
        longest = sequences[0].length + len(chunks[0]) - rest + (self._prefill_size(rest) if rest else 0)
        return self.cache.batch(sequences, _bucket(longest, LENGTH_BUCKETS), logits=logits, part=part)

    def logits(self, sequence: KVSequence, ids: list[int]) -> Iterator[Tensor]:
        """Yield the logits after every token, [T, V] per chunk, computed through the KV cache as in generation."""
        batch = self._prefill_batch([sequence], [ids])
        for start in range(0, len(ids), self.chunk):
            yield self.compute_logits(self.step(batch, [ids[start : start + self.chunk]]))

    def all_logits(self, sequence: KVSequence, ids: list[int]) -> Tensor:
        """Return the logits after every token, [T, V]."""
        return torch.cat(list(self.logits(sequence, ids)))


def split_parts(counts: list[int], chunk: int) -> list[list[tuple[int, range]]]:
    """Divide the new tokens of sequences into the fewest parts of at most `chunk` tokens, evenly.

    A part has the number of each of its sequences, and which of its new tokens.
    """
    total, starts = sum(counts), [0, *accumulate(counts)]
    size = -(-total // -(-total // chunk))
    made = []
    for first in range(0, total, size):
        spans = (range(max(first - at, 0), min(first + size - at, count)) for at, count in zip(starts, counts, strict=False))
        made.append([(number, span) for number, span in enumerate(spans) if span])
    return made


def _bucket(length: int, buckets: tuple[int, ...]) -> int:
    """Return the largest length in the bucket of `length`, so that few step indexes are needed."""
    return next((bucket - 1 for bucket in buckets if length < bucket), length)


def padded_batch_size(count: int) -> int:
    """Return the number of sequences that a GPU's decode batch of `count` is padded to."""
    return next((size for size in DECODE_SIZES if size >= count), count)


def nbytes(model: Any) -> int:
    """Return the bytes of all tensors of a model, each counted once; of experts in a pool only the slots."""
    seen: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, GpuExpertPool):
            visit(value.pool.memory)
        elif isinstance(value, Tensor):
            seen[value.data_ptr()] = value.nbytes
        elif isinstance(value, QTensor):
            seen[value.packed.data_ptr()] = value.nbytes
        elif isinstance(value, dict):
            for each in value.values():
                visit(each)
        elif isinstance(value, list | tuple):
            for each in value:
                visit(each)
        elif type(value).__module__.startswith("auraflux."):
            visit(vars(value))

    visit(model)
    return sum(seen.values())
