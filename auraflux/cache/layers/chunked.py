"""Attention within chunks: a token attends to the tokens of its own chunk, the positions from a multiple of the chunk size on.

A chunk holds whole pages, so the part of a sequence that lies in one is a sequence of its own, with fewer pages. While no
sequence is longer than a chunk, this is full attention.
"""

from typing import Any

import torch
from torch import Tensor

from auraflux.cache.batch import AttentionLayer, Batch, Rotation
from auraflux.cache.layers.dense import DenseLayer
from auraflux.cache.layers.quantized import QuantizedLayer
from auraflux.cache.pages import LayerGroup


class ChunkedLayer(AttentionLayer):
    """Keys and values of one layer whose tokens attend within chunks of `size` positions."""

    def __init__(self, kv: DenseLayer | QuantizedLayer, size: int):
        self.kv, self.size, self.group = kv, size, kv.group
        self.token_nbytes, self.full_precision_nbytes = kv.token_nbytes, kv.full_precision_nbytes

    def nbytes_at(self, length: int) -> int:
        """Return the bytes of a sequence of `length` tokens."""
        return self.kv.nbytes_at(length)

    def view(self, batch: Batch) -> None:
        """Do nothing: `kv` has its own view."""

    def append(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of the batch's new tokens: [T, Hkv, D] and [T, Hkv, Dv]."""
        self.kv.append(batch, k, v)

    def rope_append(
        self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        """Normalise and rotate queries and keys, then store keys and values; return the queries [T, Hq, D]."""
        return self.kv.rope_append(batch, q, k, v, rotation, norms, eps)

    def attend(
        self, batch: Batch, q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        """Attend from the batch's new tokens: [T, Hq, D] -> [T, Hq, Dv]."""
        if batch.index.length_bucket <= self.size:
            return self.kv.attend(batch, q, scale, sinks, softcap)
        if self.size not in batch.pieces:
            batch.pieces[self.size] = Pieces(batch, self.size)
        return self.kv.attend(batch.pieces[self.size], q, scale, sinks, softcap)


class Pieces:
    """The new tokens of a batch as sequences that lie in one chunk each; layers attend to it as to a batch.

    lengths  [P]      int32, positions of the chunk, new tokens included
    starts   [P + 1]  int32, first row of each piece's new tokens
    """

    def __init__(self, batch: Batch, size: int):
        self._index, self._size = batch.index, size
        self._tables: dict[LayerGroup, Tensor] = {}
        if batch.single:
            # on the device: a recorded step has other lengths
            last = batch.lengths - 1
            self._rows = torch.arange(len(last), device=last.device)
            self._chunks, self.lengths, self.starts = last // size, last % size + 1, batch.starts
            return
        rows, chunks, lengths, counts = zip(*_divided(batch, size), strict=True)
        numbers = torch.tensor([rows, chunks, lengths, counts], dtype=torch.int32).to(batch.index.device, non_blocking=True)
        self._rows, self._chunks, self.lengths = numbers[0].long(), numbers[1], numbers[2].contiguous()
        self.starts = torch.nn.functional.pad(numbers[3].cumsum(0, dtype=torch.int32), (1, 0))

    def view(self, layer: Any) -> Any:
        """Return the pages of a layer."""
        return layer.view(self)

    def table(self, group: LayerGroup) -> Tensor:
        """Return the page table of the pieces, int32 [P, M]."""
        if group not in self._tables:
            pages, of_all = self._size // group.size, self._index.table(group)
            columns = self._chunks[:, None] * pages + torch.arange(pages, device=of_all.device)
            # the bucket may end before the chunk
            self._tables[group] = of_all[self._rows].gather(1, columns.long().clamp(max=of_all.shape[1] - 1))
        return self._tables[group]

    def ends(self, group: LayerGroup) -> None:
        """Return None: tokens attend to earlier ones."""


def _divided(batch: Batch, size: int) -> list[tuple[int, int, int, int]]:
    """Return the sequence, the chunk, the length within it and the new tokens of every piece."""
    found = []
    for row, (sequence, new) in enumerate(zip(batch.sequences, batch.counts, strict=True)):
        at = sequence.length - new
        while at < sequence.length:
            end = min(sequence.length, (at // size + 1) * size)
            found.append((row, at // size, end - at // size * size, end - at))
            at = end
    return found
