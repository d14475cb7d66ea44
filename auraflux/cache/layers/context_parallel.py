"""Context-parallel layers: each rank stores and attends to its own pages, and `merge_partials` merges the partial results.

On a rank, every query token is its own sequence, whose length is the number of local positions that the token attends to. The
full-precision window is small: rank 0 alone stores and reads it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from auraflux.cache.batch import AttentionLayer, Batch, Rotation
from auraflux.cache.layers.dense import DenseLayer
from auraflux.cache.layers.latent import LatentLayer, QuantizedLatentLayer
from auraflux.cache.layers.quantized import QuantizedLayer
from auraflux.cache.page_shards import PageShard
from auraflux.cache.pages import LayerGroup
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
from auraflux.ops.turboquant.full_precision import FullPrecisionKV
from auraflux.ops.turboquant.pages import CodePages, LatentCodes
from auraflux.ops.turboquant.reference import (
    append_codes,
    append_latent_codes,
    rotate,
    turboquant_latent_partials,
    turboquant_partials,
)

Partial = tuple[Tensor, Tensor, Tensor]  # o [N, blocks, D], m [N, blocks], l [N, blocks]


class LocalTokens:
    """Tokens of a step that store or attend to local positions, each as its own sequence.

    tokens     [N]     rows of the step
    sequences  [N]     the sequence of each
    table      [N, M]  int32, local pages
    lengths    [N]     int32, local positions of each
    starts     [N + 1] int32
    """

    def __init__(self, batch: Batch, group: LayerGroup, ends: Tensor, included: Tensor):
        page_shard, owners = group.page_shard, _owners(batch)
        lengths = page_shard.local_lengths(ends, group.size)
        self.tokens = (included & (lengths > 0)).nonzero().squeeze(1)
        self.sequences, self.lengths = owners[self.tokens], lengths[self.tokens]
        pages = batch.table(group)[:, page_shard.rank :: page_shard.size] // page_shard.size
        self.table = pages[self.sequences].contiguous()
        self.starts = torch.arange(len(self.tokens) + 1, dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def appended(cls, batch: Batch, group: LayerGroup) -> "LocalTokens":
        """Return the tokens whose positions are local."""
        numbers = _numbers(batch)
        return cls(batch, group, numbers + 1, group.page_shard.owns(numbers, group.size))

    @classmethod
    def attending(cls, batch: Batch, group: LayerGroup, recent_window: int = 0) -> "LocalTokens":
        """Return the tokens that attend to local positions outside the recent window."""
        ends = batch.ends(group) if recent_window == 0 else None
        ends = (_numbers(batch) + 1 - recent_window).clamp(min=0) if ends is None else ends
        return cls(batch, group, ends, torch.ones_like(ends, dtype=torch.bool))

    def scatter(self, partial: Partial, tokens: int) -> Partial:
        """Scatter partial results to all tokens of the step; the others get weight 0."""
        o, m, l = partial  # noqa: E741
        heads = len(o) // len(self)
        rows = (self.tokens[:, None] * heads + torch.arange(heads)).flatten()
        wide = o.new_zeros(tokens * heads, *o.shape[1:]), m.new_full((tokens * heads, *m.shape[1:]), -torch.inf)
        total = l.new_zeros(tokens * heads, *l.shape[1:])
        for target, part in zip((*wide, total), (o, m, l), strict=True):
            target[rows] = part
        return *wide, total


def _owners(batch: Batch) -> Tensor:
    """Return the sequence of each token of a step, [T]."""
    return torch.repeat_interleave(torch.arange(len(batch.counts)), torch.tensor(batch.counts))


def _numbers(batch: Batch) -> Tensor:
    """Return the number of each token of a step in its sequence, int32 [T]: with images it is not the RoPE position."""
    owners = _owners(batch)
    return torch.arange(len(owners), dtype=torch.int32) + (batch.lengths - batch.starts[1:])[owners]


def merge_ranks(page_shard: PageShard, partials: list[Partial], rows: int, width: int) -> Tensor:
    """Merge the partial results of all ranks for the same queries: [rows, width]."""
    mine = torch.zeros(rows, width + 2)
    if partials:
        o, m, l = (torch.cat(parts, 1) for parts in zip(*partials, strict=True))  # noqa: E741
        live = l != 0
        peak = m.masked_fill(~live, -torch.inf).amax(1, keepdim=True)
        weight = torch.exp(m - peak).masked_fill(~live, 0)
        mine[:, :width] = (weight[..., None] * o).masked_fill(~live[..., None], 0).sum(1)
        mine[:, width], mine[:, width + 1] = peak.squeeze(1), (weight * l).sum(1)
    all_ranks = torch.stack(page_shard.all_gather(mine), 1)
    o, m, l = all_ranks.split([width, 1, 1], 2)  # noqa: E741
    return merge_partials(o.contiguous(), m.squeeze(2).contiguous(), l.squeeze(2).contiguous())


class ContextParallelDenseLayer(DenseLayer):
    """Full-precision keys and values of the local pages."""

    def _pages(self, local: LocalTokens) -> KVPages:
        return KVPages(self.k, self.v, local.table, local.lengths)

    def append(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        local = LocalTokens.appended(batch, self.group)
        if len(local):
            append_kv(k[local.tokens], v[local.tokens], self._pages(local), local.starts)

    def attend(
        self, batch: Batch, q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        tokens, heads, _ = q.shape
        page_shard, local, partials = self.group.page_shard, LocalTokens.attending(batch, self.group), []
        if len(local):
            # rank 0 stores the first position, so it contributes to all results: it alone adds the attention sinks
            options = None, sinks if page_shard.rank == 0 else None, softcap
            part = attention_partials(q[local.tokens], self._pages(local), local.starts, scale, *options)
            partials.append(local.scatter(part, tokens))
        out = merge_ranks(page_shard, partials, tokens * heads, self.v.shape[3])
        return out.view(tokens, heads, -1).to(q.dtype)


class ContextParallelQuantizedLayer(QuantizedLayer):
    """Quantized keys and values of the local pages."""

    def __init__(self, group: LayerGroup, *options: Any):
        super().__init__(group, *options)
        if self.threshold:
            raise SettingsError(
                "--sparse-v is not supported with context parallelism: a rank does not know the total attention weight."
            )
        if group.size % BLOCK:
            raise SettingsError(f"context parallelism needs pages of a multiple of {BLOCK} tokens, not of {group.size}.")
        if self.sinks is not None and (self.sinks.group.limit or 0) > group.size:
            raise SettingsError(f"context parallelism supports at most {group.size} sink tokens.")
        self._local_calibration = self.calibration
        if self._local_calibration is not None:
            mine = _in_pages(self._local_calibration.table, group.size)[group.page_shard.rank :: group.page_shard.size]
            self._local_calibration = replace(self._local_calibration, table=mine.flatten(0, 1).contiguous())

    def _codes(self, table: Tensor, lengths: Tensor, calibration: Any, full_precision: FullPrecisionKV | None) -> CodePages:
        stores = self.key_codes, self.key_norms, self.value_codes, self.value_norms
        sizes = self.key_bits, self.value_bits, self.width, self.seed
        return CodePages(*stores, table, lengths, *sizes, self.arrangement, calibration, full_precision)

    def _window_pages(self, batch: Batch) -> CodePages:
        """Return the full-precision window, with the padding page in place of codes."""
        padding = torch.full_like(batch.table(self.group), len(self.key_codes) - 1)
        return self._codes(padding, batch.lengths, self.calibration, self._full_precision(batch))

    def _sink_pages(self, batch: Batch, local: LocalTokens) -> FullPrecisionKV | None:
        """Return the sink tokens in full precision on rank 0; None on others."""
        if self.sinks is None or self.group.page_shard.rank:
            return None
        view = self.sinks.view(batch)
        return FullPrecisionKV(KVPages(view.k, view.v, view.table[local.sequences].contiguous(), local.lengths), None, 0)

    def append(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        local = LocalTokens.appended(batch, self.group)
        if len(local):
            pages = self._codes(local.table, local.lengths, self._local_calibration, None)
            append_codes(k[local.tokens], v[local.tokens], pages, local.starts)
        if self.group.page_shard.rank == 0 and (self.sinks is not None or self.recent is not None):
            append_codes(k, v, self._window_pages(batch), batch.starts)

    def rope_append(
        self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        return AttentionLayer.rope_append(self, batch, q, k, v, rotation, norms, eps)

    def rope_append_attend(self, batch: Batch, *options: Any) -> Tensor:
        return AttentionLayer.rope_append_attend(self, batch, *options)

    def attend(
        self, batch: Batch, q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        tokens, heads, width = q.shape
        page_shard, partials = self.group.page_shard, []
        recent_window = 0 if self.recent is None else self.recent.group.span or 0
        if page_shard.rank:
            sinks = None
        elif recent_window:
            window = self._window_pages(batch)
            window_options = window.capacity, recent_window, sinks, softcap, 0.0, batch.ends(self.group)
            partials.append(turboquant_partials(q, window, batch.starts, scale, *window_options))
            sinks = None
        local = LocalTokens.attending(batch, self.group, recent_window)
        if len(local):
            pages = self._codes(local.table, local.lengths, self._local_calibration, self._sink_pages(batch, local))
            options = pages.capacity, None, sinks, softcap
            part = turboquant_partials(q[local.tokens], pages, local.starts, scale, *options)
            partials.append(local.scatter(part, tokens))
        out = merge_ranks(page_shard, partials, tokens * heads, width).view(q.shape)
        return rotate(out, self.seed, inverse=True).to(q.dtype)


class ContextParallelLatentLayer(LatentLayer):
    """Full-precision latents and RoPE keys of the local pages."""

    def _pages(self, local: LocalTokens) -> LatentPages:
        return LatentPages(self.latent, self.rope, local.table, local.lengths)

    def append(self, batch: Batch, latent: Tensor, k_rope: Tensor) -> None:
        local = LocalTokens.appended(batch, self.group)
        if len(local):
            append_latent(latent[local.tokens], k_rope[local.tokens], self._pages(local), local.starts)

    def rope_append(
        self, batch: Batch, q: Tensor, kv: Tensor, heads: int, nope: int, rotation: Rotation, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return _rope_append(self, batch, q, kv, heads, nope, rotation, norm, eps)

    def attend(self, batch: Batch, q_latent: Tensor, q_rope: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None, "models whose latents have sinks have sparse attention, which is refused"
        out = _attend_latents(latent_partials, self, batch, q_latent, q_rope, scale)
        return out.to(q_latent.dtype)


class ContextParallelQuantizedLatentLayer(QuantizedLatentLayer):
    """Quantized latents and full-precision RoPE keys of the local pages; no window, since its RoPE keys may be elsewhere."""

    def _pages(self, local: LocalTokens) -> LatentCodes:
        stores = self.codes, self.norms, self.rope
        return LatentCodes(*stores, local.table, local.lengths, self.bits, self.width, self.seed, None)

    def append(self, batch: Batch, latent: Tensor, k_rope: Tensor) -> None:
        local = LocalTokens.appended(batch, self.group)
        if len(local):
            append_latent_codes(latent[local.tokens], k_rope[local.tokens], self._pages(local), local.starts)

    def rope_append(
        self, batch: Batch, q: Tensor, kv: Tensor, heads: int, nope: int, rotation: Rotation, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return _rope_append(self, batch, q, kv, heads, nope, rotation, norm, eps)

    def attend(self, batch: Batch, q_latent: Tensor, q_rope: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None, "models whose latents have sinks have sparse attention, which is refused"
        out = _attend_latents(turboquant_latent_partials, self, batch, q_latent, q_rope, scale)
        return rotate(out, self.seed, inverse=True).to(q_latent.dtype)


ContextParallelLatents = ContextParallelLatentLayer | ContextParallelQuantizedLatentLayer


def _rope_append(
    layer: ContextParallelLatents,
    batch: Batch,
    q: Tensor,
    kv: Tensor,
    heads: int,
    nope: int,
    rotation: Rotation,
    norm: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Split projections, normalise latents, rotate queries and keys, and store; return both parts of the queries."""
    q_nope, q_rope, latent, k_rope = split_latent(q, kv, heads, nope)
    rotating = rotation.frequencies, batch.positions, rotation.mscale, rotation.interleaved
    layer.append(batch, rms_norm(latent, norm, eps), rope(k_rope[:, None], *rotating)[:, 0].contiguous())
    return q_nope, rope(q_rope, *rotating)


def _attend_latents(
    attend: Any, layer: ContextParallelLatents, batch: Batch, q_latent: Tensor, q_rope: Tensor, scale: float
) -> Tensor:
    """Attend to local positions and merge the results of all ranks: [T, H, C]."""
    tokens, heads, width = q_latent.shape
    local, partials = LocalTokens.attending(batch, layer.group), []
    if len(local):
        mine = q_latent[local.tokens], q_rope[local.tokens]
        partials.append(local.scatter(attend(*mine, layer._pages(local), local.starts, scale), tokens))
    return merge_ranks(layer.group.page_shard, partials, tokens * heads, width).view(q_latent.shape)


def _in_pages(table: Tensor, size: int) -> Tensor:
    """Group the angles of blocks by pages, and pad the last page."""
    each = size // BLOCK
    missing = -len(table) % each
    return torch.cat([table, table[-1:].expand(missing, -1, -1)]).unflatten(0, (-1, each))
