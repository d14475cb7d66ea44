"""A simulated peer cache with a recent window in full precision.

A key is read in full precision where query position - key position < recent_window. That depends only on the two positions, so
a result does not depend on the prefill chunks. The layer stores all tokens quantized, and the most recent ones uncompressed in
a sliding-window layer.
"""

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from auraflux.cache.batch import AttentionLayer, Batch
from auraflux.cache.layers.dense import DenseLayer
from auraflux.cache.pages import LayerGroup
from auraflux.ops.attention.pages import KVPages
from auraflux.ops.attention.reference import attention_partials, merge_partials

Partials = tuple[Tensor, Tensor, Tensor]


class PartialLayer(AttentionLayer, Protocol):
    """A layer that can return partial attention before normalization, for a merge with another layer's."""

    group: LayerGroup

    def partials(
        self, pages: Any, q: Tensor, starts: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Partials:
        """Attend to the pages of `view` or a prefix of them; return one block for `merge_partials`."""


class RecentLayer(AttentionLayer):
    """All tokens as a peer stores them, and the most recent ones uncompressed."""

    def __init__(self, quantized: PartialLayer, recent: DenseLayer):
        self.quantized, self.recent = quantized, recent
        assert recent.group.span is not None
        self.recent_window: int = recent.group.span
        self.group, self.token_nbytes = quantized.group, quantized.token_nbytes

    def nbytes_at(self, length: int) -> int:
        """Return the bytes of both layers: recent tokens are stored twice."""
        return self.quantized.nbytes_at(length) + self.recent.nbytes_at(length)

    def view(self, batch: Batch) -> tuple[Any, KVPages]:
        return self.quantized.view(batch), self.recent.view(batch)

    def append(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of the batch's new tokens: [T, Hkv, D] both."""
        self.quantized.append(batch, k, v)
        self.recent.append(batch, k, v)

    def attend(
        self, batch: Batch, q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        """Attend from the batch's new tokens: [T, Hq, D] -> [T, Hq, D]."""
        codes, recent = batch.view(self)
        parts = [attention_partials(q, recent, batch.starts, scale, self.recent_window, sinks, softcap)]
        older = self._older(batch, codes, q, scale, softcap)
        if older is not None:
            parts.append(older)
        o, m, l = (torch.cat(part, 1) for part in zip(*parts, strict=True))  # noqa: E741
        return merge_partials(o, m, l).view(*q.shape[:2], -1).to(q.dtype)

    def _older(self, batch: Batch, codes: Any, q: Tensor, scale: float, softcap: float | None) -> Partials | None:
        """Attend to quantized keys outside the window: a query at p acts as at p - recent_window in a shorter sequence."""
        rows: list[int] = []
        old_starts = [0]
        end = 0
        for sequence, new in zip(batch.sequences, batch.counts, strict=True):
            end += new
            rows += range(end - max(0, min(new, sequence.length - self.recent_window)), end)
            old_starts.append(len(rows))
        if not rows:
            return None
        shorter = replace(codes, lengths=(codes.lengths - self.recent_window).clamp(min=0))
        span = self.quantized.group.span
        window = None if span is None else span - self.recent_window
        if len(rows) == len(q):
            return self.quantized.partials(shorter, q, batch.starts, scale, window, softcap)
        tokens = torch.tensor(rows, device=q.device)
        begins = torch.tensor(old_starts, dtype=torch.int32, device=q.device)
        return self._scatter(self.quantized.partials(shorter, q[tokens], begins, scale, window, softcap), tokens, q)

    def _scatter(self, found: Partials, tokens: Tensor, q: Tensor) -> Partials:
        """Scatter the partials of some tokens to all tokens; the others attended to nothing."""
        width = found[0].shape[-1]
        o = q.new_zeros(*q.shape[:2], width, dtype=torch.float32)
        m, l = o.new_full(q.shape[:2], -torch.inf), o.new_zeros(q.shape[:2])  # noqa: E741
        o[tokens] = found[0].view(len(tokens), -1, width)
        m[tokens], l[tokens] = (part.view(len(tokens), -1) for part in found[1:])
        return o.flatten(0, 1).unsqueeze(1), m.view(-1, 1), l.view(-1, 1)
