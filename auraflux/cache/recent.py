"""Keys and values as codes, except that a query reads its nearest keys as they are.

A key is read uncompressed where query position - key position < newest. That depends on no more than the two positions, so a
result does not depend on how the tokens were cut into steps. The codes of all tokens are kept, and the uncompressed ones of the
last `newest`, as a window layer keeps them.
"""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from auraflux.cache.batch import Batch
from auraflux.cache.dense import DenseLayer
from auraflux.cache.turboquant import CodedLayer
from auraflux.ops.attention.pages import KVPages, rows_of, spans
from auraflux.ops.attention.reference import merge_partials
from auraflux.ops.turboquant.pages import CodePages
from auraflux.ops.turboquant.reference import rotate, turboquant_partials

Partials = tuple[Tensor, Tensor, Tensor]


class RecentLayer:
    """Codes of all tokens, and the newest of them uncompressed."""

    def __init__(self, coded: CodedLayer, recent: DenseLayer):
        self.coded, self.recent = coded, recent
        assert recent.group.span is not None
        self.newest: int = recent.group.span
        self.token_nbytes = coded.token_nbytes

    def view(self, batch: Batch) -> tuple[CodePages, KVPages]:
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
        parts = [
            self._older(codes, q, batch.starts, scale, softcap),
            newest_partials(q, recent, batch.starts, scale, self.newest, softcap),
        ]
        if sinks is not None:
            sink = sinks.expand(len(q), -1)
            parts.append((q.new_zeros(q.shape, dtype=torch.float32), sink, torch.ones_like(sink)))
        o, m, l = (torch.stack(part, 2).flatten(0, 1) for part in zip(*parts, strict=True))  # noqa: E741
        return merge_partials(o, m, l).view(q.shape).to(q.dtype)

    def _older(self, codes: CodePages, q: Tensor, starts: Tensor, scale: float, softcap: float | None) -> Partials:
        """Attend to the codes at least `newest` back: a query at p does as if it stood at p - newest in a shorter sequence."""
        o = q.new_zeros(q.shape, dtype=torch.float32)
        m, l = o.new_full(q.shape[:2], -torch.inf), o.new_zeros(q.shape[:2])  # noqa: E741
        rows: list[int] = []
        old_starts = [0]
        for length, (start, end) in zip(codes.lengths.tolist(), pairwise(starts.tolist()), strict=True):
            rows += range(end - max(0, min(end - start, length - self.newest)), end)
            old_starts.append(len(rows))
        if not rows:
            return o, m, l
        shorter = replace(codes, lengths=(codes.lengths - self.newest).clamp(min=0))
        span = self.coded.group.span
        window = None if span is None else span - self.newest
        tokens = torch.tensor(rows, device=q.device)
        begins = torch.tensor(old_starts, dtype=torch.int32, device=q.device)
        options = window, None, softcap, self.coded.threshold
        found = turboquant_partials(q[tokens], shorter, begins, scale, shorter.capacity, *options)
        o[tokens], m[tokens], l[tokens] = (part.squeeze(1).unflatten(0, (len(rows), -1)) for part in found)
        return rotate(o, codes.seed, inverse=True), m, l


def newest_partials(
    q: Tensor, pages: KVPages, starts: Tensor, scale: float, newest: int, softcap: float | None = None
) -> Partials:
    """Attend to the uncompressed keys less than `newest` back, in torch: (o [T, Hq, Dv], m [T, Hq], l [T, Hq]), float32."""
    heads = pages.k.shape[1]
    o = q.new_zeros(*q.shape[:2], pages.v.shape[3], dtype=torch.float32)
    m, l = o.new_full(q.shape[:2], -torch.inf), o.new_zeros(q.shape[:2])  # noqa: E741
    for b, start, new, first, length in spans(pages, starts, q.shape[0], newest - 1):
        page, slot = rows_of(pages, b, first, length)
        k, v = pages.k[page, :, slot].float(), pages.v[page, :, slot].float()
        mine = slice(start, start + new)
        scores = torch.einsum("nhgd,thd->nhgt", q[mine].float().unflatten(1, (heads, -1)), k).flatten(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        back = torch.arange(length - new, length, device=q.device)[:, None] - torch.arange(first, length, device=q.device)
        scores = scores.masked_fill(((back < 0) | (back >= newest))[:, None], -torch.inf)
        m[mine] = scores.amax(-1)
        weights = torch.exp(scores - m[mine, :, None])
        l[mine] = weights.sum(-1)
        o[mine] = torch.einsum("nhgt,thd->nhgd", weights.unflatten(1, (heads, -1)), v).flatten(1, 2)
    return o, m, l
