"""Compressed attention: a sliding window of tokens, and one compressed entry for every `ratio` tokens.

Key and value are one vector. The inputs of an entry are stored in pages until all of its tokens are there, so sequences are
forked and truncated as in other layers: an entry depends on its own tokens and, with overlap, on those of the entry before, and
is rewritten whenever its last token is appended. An entry lies in the page of its last token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from auraflux.cache.batch import Batch, Layer
from auraflux.cache.layers.sparse_latent import token_starts
from auraflux.cache.pages import LayerGroup
from auraflux.ops.attention.pages import KVPages, RowPages
from auraflux.ops.attention.reference import append_keys, attention, attention_partials, choose_positions, merge_partials
from auraflux.ops.attention.reference_token_selection import TokenSelection
from auraflux.ops.compress.reference import compress_windows


class CompressionWeights(NamedTuple):
    """The weights that compress tokens into an entry, see `compress_windows`."""

    bias: Tensor
    norm: Tensor
    eps: float
    inv_freq: Tensor
    interleaved: bool = True


class WindowLayer(Layer):
    """The sliding window of one layer, one vector per token."""

    def __init__(self, group: LayerGroup, width: int, dtype: torch.dtype):
        self.group, self.rows = group, group.zeros(group.size, width, dtype=dtype)
        self.token_nbytes = width * dtype.itemsize

    def view(self, batch: Batch) -> tuple[RowPages, KVPages]:
        index, heads = (batch.table(self.group), batch.lengths), self.rows.unsqueeze(1)
        return RowPages(self.rows, *index), KVPages(heads, heads, *index)

    def append(self, batch: Batch, kv: Tensor) -> None:
        """Store the vectors of the batch's new tokens, [T, D]."""
        append_keys(kv, batch.view(self)[0], batch.starts)

    def attend(self, batch: Batch, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Attend from the batch's new tokens: [T, H, D] -> [T, H, D]."""
        return attention(q, batch.view(self)[1], batch.starts, scale, self.group.span, sinks)


class CompressedEntries(Layer):
    """The compressed entries of one layer, of `width`, and the inputs of entries that are not complete.

    pending  group whose pages hold these inputs
    ratio    tokens per entry
    overlap  an entry also reads the tokens of the one before
    """

    def __init__(self, group: LayerGroup, pending: LayerGroup, width: int, ratio: int, overlap: bool, dtype: torch.dtype):
        self.group, self.pending, self.ratio = group, pending, ratio
        self.entries = group.zeros(max(1, group.size // ratio), width, dtype=dtype)
        wide = 2 * width * (1 + overlap)
        # float32: gates go into an exponential
        self.rows = pending.zeros(pending.size, wide, dtype=torch.float32)
        self.token_nbytes = self.entries[0].nbytes // group.size
        self.full_precision_nbytes = 4 * wide * (pending.span or 0)

    def view(self, batch: Batch) -> RowPages:
        return RowPages(self.rows, batch.table(self.pending), batch.lengths)

    def nbytes_at(self, length: int) -> int:
        return self.token_nbytes * length + 4 * self.rows.shape[2] * self.pending.resident_tokens(length)

    def entry_table(self, batch: Batch) -> Tensor:
        """Return the page table of the batch's entries, int32 [B, M]."""
        every = max(1, self.ratio // self.group.size)
        return batch.table(self.group)[:, every - 1 :: every].contiguous()

    def append(self, batch: Batch, rows: Tensor, weights: CompressionWeights) -> None:
        """Store the inputs of entries, [T, W] of the batch's new tokens, and write the entries they complete."""
        entries = RowPages(self.entries, self.entry_table(batch), batch.lengths)
        compress_windows(rows, batch.view(self), batch.starts, entries, *weights)


class CompressedLayer(Layer):
    """A sliding window, and compressed entries of the whole sequence.

    keys   entries' index keys, which select entries; None where tokens attend to all of them
    top_k  entries that a token attends to
    """

    def __init__(self, window: WindowLayer, entries: CompressedEntries, keys: CompressedEntries | None, top_k: int):
        self.window, self.entries, self.keys, self.top_k, self.group = window, entries, keys, top_k, window.group
        parts = [window, entries, *([] if keys is None else [keys])]
        self.token_nbytes = sum(part.token_nbytes for part in parts)
        self.full_precision_nbytes = sum(part.full_precision_nbytes for part in parts)
        self._parts = parts
        self.entry_layers = parts[1:]

    def nbytes_at(self, length: int) -> int:
        """Return the bytes of a sequence of `length` tokens."""
        return sum(part.nbytes_at(length) for part in self._parts)

    def view(self, batch: Batch) -> tuple[RowPages, KVPages]:
        return self.window.view(batch)

    def append(self, batch: Batch, kv: Tensor) -> None:
        """Store the vectors of the batch's new tokens, [T, D]."""
        self.window.append(batch, kv)

    def sees_all(self, batch: Batch) -> bool:
        """Return whether no token of a step can have more than `top_k` entries before it."""
        return self.keys is None or batch.index.length_bucket // self.entries.ratio <= self.top_k

    def select_tokens(self, batch: Batch, q: Tensor, weights: Tensor) -> TokenSelection:
        """Select entries for the batch's new tokens by queries [T, H, D] and head weights [T, H]."""
        assert self.keys is not None
        visible, table = self._visible_entries(batch)
        pages = RowPages(self.keys.entries, table, visible.clamp(min=1))
        return choose_positions(q, weights, pages, token_starts(len(q), q.device), self.top_k)

    def attend(self, batch: Batch, q: Tensor, scale: float, sinks: Tensor, selection: TokenSelection | None = None) -> Tensor:
        """Attend from the batch's new tokens to the window and the selected entries, None for all: [T, H, D] -> [T, H, D]."""
        if batch.index.length_bucket < self.entries.ratio:
            return self.window.attend(batch, q, scale, sinks)
        near = attention_partials(q, batch.view(self)[1], batch.starts, scale, self.group.span, sinks)
        visible, table = self._visible_entries(batch)
        entries = self.entries.entries.unsqueeze(1)
        if selection is None:
            pages = KVPages(entries, entries, table, visible.clamp(min=1))
        else:
            entries = self.entries.entries.view(-1, 1, 1, q.shape[2])
            pages = KVPages(entries, entries, *selection)
        far, highest, total = attention_partials(q, pages, token_starts(len(q), q.device), scale)
        # a token before the first complete entry was given one that it must not attend to
        total = total.view(q.shape[:2]).masked_fill(visible[:, None] == 0, 0).view(-1, 1)
        both = (torch.cat(parts, 1) for parts in zip(near, (far, highest, total), strict=True))
        return merge_partials(*both).view(q.shape).to(q.dtype)

    def _visible_entries(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the number of complete entries before each new token, int32 [T], and their page table, int32 [T, M]."""
        table, visible = self.entries.entry_table(batch), (batch.positions + 1) // self.entries.ratio
        if batch.single:
            return visible, table
        owners = torch.repeat_interleave(torch.tensor(batch.counts, device=table.device), output_size=len(visible))
        return visible, table[owners]
