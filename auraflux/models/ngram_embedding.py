"""N-gram embeddings (Qwen4): rows of a table on disk, by hashes of the last tokens.

The rows are known before a step starts, so they are read from disk while it runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import linears
from auraflux.cache import Batch
from auraflux.errors import FormatError
from auraflux.models.ngram_rows import Grams, offsets, rows_of
from auraflux.ops import gate_values, norm_streams
from auraflux.ops._recording import recorder
from auraflux.weights.experts.row_table import PendingRows, RowSource
from auraflux.weights.formats.stored import is_placeholder
from auraflux.weights.loader import Weights

READS = "rows of a table are read from disk as tokens come"


@dataclass(frozen=True)
class NGramConfig:
    """The sizes of the layers with n-gram embeddings.

    layers  their numbers, in the order of their tables
    width   of a token's embedding, all heads together
    taps    of the convolution over it, dilated by the longest n-gram's length
    """

    layers: tuple[int, ...]
    grams: Grams
    width: int
    taps: int

    @property
    def reach(self) -> int:
        return (self.taps - 1) * self.grams.size


class NGramEmbedding:
    """N-gram embeddings, gated by the residual streams and convolved with those of earlier tokens.

    shape  residual streams of a token, and their width
    table  None where weights are converted or only listed
    """

    def __init__(
        self,
        ngrams: NGramConfig,
        weights: Weights,
        name: str,
        index: int,
        shape: tuple[int, int],
        vocab: int,
        eps: float,
        shift: float,
    ):
        self.grams, self.eps, self.shape, (streams, hidden) = ngrams.grams, eps, shape, shape
        number, wide, width = ngrams.layers.index(index), streams * hidden, ngrams.width
        inner = f"{name}.ple_embedding"
        grams, count = self.grams, self.grams.count
        multipliers = _hash_numbers(weights, f"{inner}.layer_multipliers", grams.size, lambda: grams.multipliers(number, vocab))
        sizes = _hash_numbers(weights, f"{inner}.ngram_heads_vocab_sizes", count, lambda: grams.head_rows(number))
        firsts = _hash_numbers(weights, f"{inner}.ngram_heads_offsets", count, lambda: offsets(sizes))
        highest = max(first + size for first, size in zip(firsts.tolist(), sizes.tolist(), strict=True))
        if int(sizes.min()) < 1 or int(firsts.min()) < 0:
            raise FormatError(f"{inner} in {weights.checkpoint.path} has heads without rows, or before the first row.")
        self.numbers = tuple(each.to(weights.device) for each in (multipliers, sizes, firsts))
        self.table: RowSource | None = weights.table(f"{inner}.ngram_embedding", highest, width // self.grams.count)
        self.projections = [
            weights.matrix(f"{name}.{part}_proj", rows, width) for part, rows in (("key", wide), ("value", hidden))
        ]
        self.key_norm, self.query_norm, self.conv_norm = (
            weights.vector(f"{name}.norm_{part}.weight", wide, shift=shift).view(self.shape)
            for part in ("key", "query", "conv")
        )
        taps = weights.vector(f"{name}.conv1d.weight", wide, 1, ngrams.taps)
        self.taps = taps.view(wide, ngrams.taps).T.contiguous()
        self.device = weights.device
        self._coming: PendingRows | None = None

    def begin(self, ids: Tensor, batch: Batch, store: Any) -> None:
        """Append token ids [T] to the cache, and start reading their rows."""
        if (recording := recorder.recording) is not None:
            recording.reject(READS)
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(READS)
        histories = store.histories(batch, ids, self.grams.blank)
        assert self.table is not None
        self._coming = self.table.fetch(rows_of(histories, self.grams, *self.numbers).view(-1))

    def __call__(self, x: Tensor, batch: Batch, store: Any) -> Tensor:
        """Return the embeddings to add to the residual streams, [T, N, H]."""
        assert self._coming is not None
        coming, self._coming = self._coming, None
        rows = coming.result().view(len(x), -1).to(self.device, x.dtype)
        keys, values = linears(rows, self.projections)
        keys = norm_streams(keys.view(x.shape), self.key_norm, self.eps)
        gated = gate_values(keys, norm_streams(x, self.query_norm, self.eps), values)
        normed = norm_streams(gated, self.conv_norm, self.eps)
        return gated + store.convolve_dilated(batch, normed.flatten(1), self.taps, self.grams.size).view(x.shape)


def _hash_numbers(weights: Weights, name: str, count: int, usual: Callable[[], Tensor]) -> Tensor:
    """Load the checkpoint's numbers of the n-gram hash, int64 [count], or derive them from the config."""
    found = weights.integers(name, count) if weights.has(name) else None
    return usual() if found is None or is_placeholder(found) else found
