"""Layers whose pages are dealt out to ranks: each stores and attends to its own, and `merge_partials` joins what they find.

To a rank, a sequence is as long as the positions it holds of it, and every token that asks is a sequence of its own, which ends
with the last of them that the token sees. Positions that are kept as they are beside codes are few: all ranks could hold them,
and rank 0 alone reads them.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from auraflux.cache.batch import AttentionLayer, Batch, Rotation
from auraflux.cache.deal import Deal
from auraflux.cache.dense import DenseLayer
from auraflux.cache.latent import CodedLatentLayer, LatentLayer
from auraflux.cache.pages import LayerGroup
from auraflux.cache.turboquant import CodedLayer
from auraflux.errors import SettingsError
from auraflux.ops.attention.pages import KVPages, LatentPages
from auraflux.ops.attention.reference import (
    append_kv,
    append_latent,
    attention_partials,
    latent_partials,
    merge_partials,
    split_latent,
)
from auraflux.ops.norm.reference import rms_norm
from auraflux.ops.rope.reference import rope
from auraflux.ops.turboquant.calibration import BLOCK
from auraflux.ops.turboquant.pages import CodePages, LatentCodes
from auraflux.ops.turboquant.plain import PlainPages
from auraflux.ops.turboquant.reference import (
    append_codes,
    append_latent_codes,
    rotate,
    turboquant_latent_partials,
    turboquant_partials,
)

Partial = tuple[Tensor, Tensor, Tensor]  # o [N, blocks, D], m [N, blocks], l [N, blocks]


class Asking:
    """Tokens of a step that have to do with what is held here, each as a sequence of its own.

    tokens   [N]     their numbers in the step
    lines    [N]     of the sequences that they belong to
    table    [N, M]  int32, of the pages that are here
    lengths  [N]     int32, how many positions here each sees
    starts   [N + 1] int32
    """

    def __init__(self, batch: Batch, group: LayerGroup, ends: Tensor, wanted: Tensor):
        deal = group.deal
        lines = torch.repeat_interleave(torch.arange(len(batch.counts)), torch.tensor(batch.counts))
        lengths = deal.counted(ends, group.size)
        self.tokens = (wanted & (lengths > 0)).nonzero().squeeze(1)
        self.lines, self.lengths = lines[self.tokens], lengths[self.tokens]
        here = batch.table(group)[:, deal.rank :: deal.size] // deal.size
        self.table = here[self.lines].contiguous()
        self.starts = torch.arange(len(self.tokens) + 1, dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def storing(cls, batch: Batch, group: LayerGroup) -> "Asking":
        """The tokens whose positions are held here."""
        return cls(batch, group, batch.positions + 1, group.deal.owned(batch.positions, group.size))

    @classmethod
    def seeing(cls, batch: Batch, group: LayerGroup, but: int = 0) -> "Asking":
        """The tokens that see positions here, the newest `but` left out."""
        ends = (batch.positions + 1 - but).clamp(min=0)
        return cls(batch, group, ends, torch.ones_like(ends, dtype=torch.bool))

    def spread(self, found: Partial, tokens: int) -> Partial:
        """Make blocks of all tokens of those of some: the others saw nothing."""
        o, m, l = found  # noqa: E741
        heads = len(o) // len(self)
        rows = (self.tokens[:, None] * heads + torch.arange(heads)).flatten()
        wide = o.new_zeros(tokens * heads, *o.shape[1:]), m.new_full((tokens * heads, *m.shape[1:]), -torch.inf)
        total = l.new_zeros(tokens * heads, *l.shape[1:])
        for whole, part in zip((*wide, total), (o, m, l), strict=True):
            whole[rows] = part
        return *wide, total


def joined(deal: Deal, found: list[Partial], rows: int, width: int) -> Tensor:
    """Join the blocks that all ranks have found for the same queries: [rows, width]."""
    mine = torch.zeros(rows, width + 2)
    if found:
        o, m, l = (torch.cat(parts, 1) for parts in zip(*found, strict=True))  # noqa: E741
        live = l != 0
        peak = m.masked_fill(~live, -torch.inf).amax(1, keepdim=True)
        weight = torch.exp(m - peak).masked_fill(~live, 0)
        mine[:, :width] = (weight[..., None] * o).masked_fill(~live[..., None], 0).sum(1)
        mine[:, width], mine[:, width + 1] = peak.squeeze(1), (weight * l).sum(1)
    all_ranks = torch.stack(deal.share(mine), 1)
    o, m, l = all_ranks.split([width, 1, 1], 2)  # noqa: E741
    return merge_partials(o.contiguous(), m.squeeze(2).contiguous(), l.squeeze(2).contiguous())


class DealtDenseLayer(DenseLayer):
    """Uncompressed keys and values of the pages that are here."""

    def _pages(self, asking: Asking) -> KVPages:
        return KVPages(self.k, self.v, asking.table, asking.lengths)

    def append(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        asking = Asking.storing(batch, self.group)
        if len(asking):
            append_kv(k[asking.tokens], v[asking.tokens], self._pages(asking), asking.starts)

    def attend(
        self, batch: Batch, q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        tokens, heads, _ = q.shape
        deal, asking, found = self.group.deal, Asking.seeing(batch, self.group), []
        if len(asking):
            # the first position is rank 0's, so it has a part in all results
            options = None, sinks if deal.rank == 0 else None, softcap
            part = attention_partials(q[asking.tokens], self._pages(asking), asking.starts, scale, *options)
            found.append(asking.spread(part, tokens))
        out = joined(deal, found, tokens * heads, self.v.shape[3])
        return out.view(tokens, heads, -1).to(q.dtype)


class DealtCodedLayer(CodedLayer):
    """Codes of the pages that are here."""

    def __init__(self, group: LayerGroup, *options: Any):
        super().__init__(group, *options)
        if self.threshold:
            raise SettingsError("ranks that share a context know no share of all weights: leave --sparse-v out.")
        if group.size % BLOCK:
            raise SettingsError(f"ranks share a context in pages of a multiple of {BLOCK} tokens, not of {group.size}.")
        if self.head is not None and (self.head.group.limit or 0) > group.size:
            raise SettingsError(f"ranks that share a context keep at most {group.size} first positions as they are.")
        self._here = self.calibration
        if self._here is not None:
            mine = _in_pages(self._here.table, group.size)[group.deal.rank :: group.deal.size]
            self._here = replace(self._here, table=mine.flatten(0, 1).contiguous())

    def _codes(self, table: Tensor, lengths: Tensor, calibration: Any, plain: PlainPages | None) -> CodePages:
        stores = self.key_codes, self.key_norms, self.value_codes, self.value_norms
        sizes = self.key_bits, self.value_bits, self.width, self.seed
        return CodePages(*stores, table, lengths, *sizes, self.arrangement, calibration, plain)

    def _beside(self, batch: Batch) -> CodePages:
        """What is kept as it is, with codes that nobody reads: those of the page that belongs to no sequence."""
        nowhere = torch.full_like(batch.table(self.group), len(self.key_codes) - 1)
        return self._codes(nowhere, batch.lengths, self.calibration, self._plain(batch))

    def _first(self, batch: Batch, asking: Asking) -> PlainPages | None:
        """The first positions as they are, which rank 0 reads."""
        if self.head is None or self.group.deal.rank:
            return None
        view = self.head.view(batch)
        return PlainPages(KVPages(view.k, view.v, view.table[asking.lines].contiguous(), asking.lengths), None, 0)

    def append(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        asking = Asking.storing(batch, self.group)
        if len(asking):
            pages = self._codes(asking.table, asking.lengths, self._here, None)
            append_codes(k[asking.tokens], v[asking.tokens], pages, asking.starts)
        if self.group.deal.rank == 0 and (self.head is not None or self.recent is not None):
            append_codes(k, v, self._beside(batch), batch.starts)

    def rope_append(
        self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        return AttentionLayer.rope_append(self, batch, q, k, v, rotation, norms, eps)

    def attend(
        self, batch: Batch, q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        tokens, heads, width = q.shape
        deal, found = self.group.deal, []
        newest = 0 if self.recent is None else self.recent.group.span or 0
        if deal.rank:
            sinks = None
        elif newest:
            beside = self._beside(batch)
            found.append(turboquant_partials(q, beside, batch.starts, scale, beside.capacity, newest, sinks, softcap))
            sinks = None
        asking = Asking.seeing(batch, self.group, newest)
        if len(asking):
            pages = self._codes(asking.table, asking.lengths, self._here, self._first(batch, asking))
            options = pages.capacity, None, sinks, softcap
            part = turboquant_partials(q[asking.tokens], pages, asking.starts, scale, *options)
            found.append(asking.spread(part, tokens))
        out = joined(deal, found, tokens * heads, width).view(q.shape)
        return rotate(out, self.seed, inverse=True).to(q.dtype)


class DealtLatentLayer(LatentLayer):
    """Uncompressed latents and rotated keys of the pages that are here."""

    def _pages(self, asking: Asking) -> LatentPages:
        return LatentPages(self.latent, self.rope, asking.table, asking.lengths)

    def append(self, batch: Batch, latent: Tensor, k_rope: Tensor) -> None:
        asking = Asking.storing(batch, self.group)
        if len(asking):
            append_latent(latent[asking.tokens], k_rope[asking.tokens], self._pages(asking), asking.starts)

    def rope_append(
        self, batch: Batch, q: Tensor, kv: Tensor, heads: int, nope: int, rotation: Rotation, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return _rope_append(self, batch, q, kv, heads, nope, rotation, norm, eps)

    def attend(self, batch: Batch, q_latent: Tensor, q_rope: Tensor, scale: float) -> Tensor:
        found = _latents_found(latent_partials, self, batch, q_latent, q_rope, scale)
        return found.to(q_latent.dtype)


class DealtCodedLatentLayer(CodedLatentLayer):
    """Codes of latents, and rotated keys, of the pages here. No position is kept as it is: its key may be elsewhere."""

    def _pages(self, asking: Asking) -> LatentCodes:
        stores = self.codes, self.norms, self.rope
        return LatentCodes(*stores, asking.table, asking.lengths, self.bits, self.width, self.seed, None)

    def append(self, batch: Batch, latent: Tensor, k_rope: Tensor) -> None:
        asking = Asking.storing(batch, self.group)
        if len(asking):
            append_latent_codes(latent[asking.tokens], k_rope[asking.tokens], self._pages(asking), asking.starts)

    def rope_append(
        self, batch: Batch, q: Tensor, kv: Tensor, heads: int, nope: int, rotation: Rotation, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return _rope_append(self, batch, q, kv, heads, nope, rotation, norm, eps)

    def attend(self, batch: Batch, q_latent: Tensor, q_rope: Tensor, scale: float) -> Tensor:
        found = _latents_found(turboquant_latent_partials, self, batch, q_latent, q_rope, scale)
        return rotate(found, self.seed, inverse=True).to(q_latent.dtype)


DealtLatents = DealtLatentLayer | DealtCodedLatentLayer


def _rope_append(
    layer: DealtLatents,
    batch: Batch,
    q: Tensor,
    kv: Tensor,
    heads: int,
    nope: int,
    rotation: Rotation,
    norm: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Take projections apart, normalise latents, rotate queries and keys, and store: gives both parts of the queries."""
    q_nope, q_rope, latent, k_rope = split_latent(q, kv, heads, nope)
    rotating = rotation.frequencies, batch.positions, rotation.mscale, rotation.interleaved
    layer.append(batch, rms_norm(latent, norm, eps), rope(k_rope[:, None], *rotating)[:, 0].contiguous())
    return q_nope, rope(q_rope, *rotating)


def _latents_found(partials: Any, layer: DealtLatents, batch: Batch, q_latent: Tensor, q_rope: Tensor, scale: float) -> Tensor:
    """Attend to what is here, and join it with what others have: [T, H, C]."""
    tokens, heads, width = q_latent.shape
    asking, found = Asking.seeing(batch, layer.group), []
    if len(asking):
        mine = q_latent[asking.tokens], q_rope[asking.tokens]
        found.append(asking.spread(partials(*mine, layer._pages(asking), asking.starts, scale), tokens))
    return joined(layer.group.deal, found, tokens * heads, width).view(q_latent.shape)


def _in_pages(table: Tensor, size: int) -> Tensor:
    """Angles of blocks by pages, the last one filled up."""
    each = size // BLOCK
    missing = -len(table) % each
    return torch.cat([table, table[-1:].expand(missing, -1, -1)]).unflatten(0, (-1, each))
