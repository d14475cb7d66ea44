"""Keys and values as a peer would keep them, except that a query reads its nearest keys as they are.

A key is read uncompressed where query position - key position < newest. That depends on no more than the two positions, so a
result does not depend on how the tokens were cut into steps. What the peer keeps of all tokens is kept, and the uncompressed
ones of the last `newest`, as a window layer keeps them.
"""

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from auraflux.cache.batch import AttentionLayer, Batch
from auraflux.cache.dense import DenseLayer
from auraflux.cache.pages import LayerGroup
from auraflux.ops.attention.pages import KVPages
from auraflux.ops.attention.reference import attention_partials, merge_partials

Partials = tuple[Tensor, Tensor, Tensor]


class PartialLayer(AttentionLayer, Protocol):
    """A layer whose attention can be stopped before the division, so that it is merged with another's."""

    group: LayerGroup

    def partials(
        self, pages: Any, q: Tensor, starts: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Partials:
        """Attend to what `view` gave, or to the beginning of it: as `merge_partials` takes it, one block."""


class RecentLayer(AttentionLayer):
    """All tokens as a peer keeps them, and the newest of them uncompressed."""

    def __init__(self, coded: PartialLayer, recent: DenseLayer):
        self.coded, self.recent = coded, recent
        assert recent.group.span is not None
        self.newest: int = recent.group.span
        self.group, self.token_nbytes = coded.group, coded.token_nbytes

    def nbytes_at(self, length: int) -> int:
        """What the peer keeps, and the newest twice."""
        return self.coded.nbytes_at(length) + self.recent.nbytes_at(length)

    def view(self, batch: Batch) -> tuple[Any, KVPages]:
        return self.coded.view(batch), self.recent.view(batch)

    def append(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of the batch's new tokens: [T, Hkv, D] both."""
        self.coded.append(batch, k, v)
        self.recent.append(batch, k, v)

    def attend(
        self, batch: Batch, q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        """Attend from the batch's new tokens: [T, Hq, D] -> [T, Hq, D]."""
        codes, recent = batch.view(self)
        parts = [attention_partials(q, recent, batch.starts, scale, self.newest, sinks, softcap)]
        older = self._older(batch, codes, q, scale, softcap)
        if older is not None:
            parts.append(older)
        o, m, l = (torch.cat(part, 1) for part in zip(*parts, strict=True))  # noqa: E741
        return merge_partials(o, m, l).view(*q.shape[:2], -1).to(q.dtype)

    def _older(self, batch: Batch, codes: Any, q: Tensor, scale: float, softcap: float | None) -> Partials | None:
        """Attend to the codes at least `newest` back: a query at p does as if it stood at p - newest in a shorter sequence."""
        rows: list[int] = []
        old_starts = [0]
        end = 0
        for sequence, new in zip(batch.sequences, batch.counts, strict=True):
            end += new
            rows += range(end - max(0, min(new, sequence.length - self.newest)), end)
            old_starts.append(len(rows))
        if not rows:
            return None
        shorter = replace(codes, lengths=(codes.lengths - self.newest).clamp(min=0))
        span = self.coded.group.span
        window = None if span is None else span - self.newest
        if len(rows) == len(q):
            return self.coded.partials(shorter, q, batch.starts, scale, window, softcap)
        tokens = torch.tensor(rows, device=q.device)
        begins = torch.tensor(old_starts, dtype=torch.int32, device=q.device)
        return self._spread(self.coded.partials(shorter, q[tokens], begins, scale, window, softcap), tokens, q)

    def _spread(self, found: Partials, tokens: Tensor, q: Tensor) -> Partials:
        """Give what some tokens found to all; the others saw nothing."""
        width = found[0].shape[-1]
        o = q.new_zeros(*q.shape[:2], width, dtype=torch.float32)
        m, l = o.new_full(q.shape[:2], -torch.inf), o.new_zeros(q.shape[:2])  # noqa: E741
        o[tokens] = found[0].view(len(tokens), -1, width)
        m[tokens], l[tokens] = (part.view(len(tokens), -1) for part in found[1:])
        return o.flatten(0, 1).unsqueeze(1), m.view(-1, 1), l.view(-1, 1)
