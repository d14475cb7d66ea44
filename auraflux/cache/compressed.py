"""Compressed attention: the newest positions as they are, and one entry for every window of tokens before.

Key and value are one vector. What entries are made of is kept for as long as a window is open, in pages like all else, so
sequences are forked and cut as everywhere: an entry depends on the tokens of its window and of the one before, and is written
again whenever its window closes. An entry lies in the page of its window's tokens, or of the last of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from auraflux.cache.batch import Batch, Layer
from auraflux.cache.pages import LayerGroup
from auraflux.cache.sparse import counting
from auraflux.ops.attention.pages import KVPages, RowPages
from auraflux.ops.attention.reference import append_keys, attention, attention_partials, choose_positions, merge_partials
from auraflux.ops.attention.reference_choice import Chosen
from auraflux.ops.compress.reference import compress_windows


class Learned(NamedTuple):
    """What a model has learned of how windows become entries, see `compress_windows`."""

    bias: Tensor
    norm: Tensor
    eps: float
    inv_freq: Tensor
    interleaved: bool = True


class WindowLayer(Layer):
    """The newest positions of one layer, one vector each."""

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


class Entries(Layer):
    """The entries of one layer, of `width`, and what those of open windows will be made of.

    rate   tokens of a window
    twice  whether the window before is read too
    """

    def __init__(self, group: LayerGroup, opened: LayerGroup, width: int, rate: int, twice: bool, dtype: torch.dtype):
        self.group, self.opened, self.rate = group, opened, rate
        self.entries = group.zeros(max(1, group.size // rate), width, dtype=dtype)
        wide = 2 * width * (1 + twice)
        # gates go into an exponential: they keep their precision
        self.rows = opened.zeros(opened.size, wide, dtype=torch.float32)
        self.token_nbytes = self.entries[0].nbytes // group.size
        self.plain_nbytes = 4 * wide * (opened.span or 0)

    def view(self, batch: Batch) -> RowPages:
        return RowPages(self.rows, batch.table(self.opened), batch.lengths)

    def nbytes_at(self, length: int) -> int:
        return self.token_nbytes * length + 4 * self.rows.shape[2] * self.opened.held(length)

    def places(self, batch: Batch) -> Tensor:
        """The pages of the batch's entries, int32 [B, M]."""
        every = max(1, self.rate // self.group.size)
        return batch.table(self.group)[:, every - 1 :: every].contiguous()

    def append(self, batch: Batch, rows: Tensor, learned: Learned) -> None:
        """Store what entries are made of, [T, W] of the batch's new tokens, and write entries whose windows they close."""
        entries = RowPages(self.entries, self.places(batch), batch.lengths)
        compress_windows(rows, batch.view(self), batch.starts, entries, *learned)


class CompressedLayer(Layer):
    """A window, and entries of all that came before and in it.

    keys  those by which tokens choose entries; None where they attend to all
    most  entries that a token attends to
    """

    def __init__(self, window: WindowLayer, entries: Entries, keys: Entries | None, most: int):
        self.window, self.entries, self.keys, self.most, self.group = window, entries, keys, most, window.group
        parts = [window, entries, *([] if keys is None else [keys])]
        self.token_nbytes = sum(part.token_nbytes for part in parts)
        self.plain_nbytes = sum(part.plain_nbytes for part in parts)
        self._parts = parts
        self.made = parts[1:]

    def nbytes_at(self, length: int) -> int:
        """Bytes of a sequence of so many tokens."""
        return sum(part.nbytes_at(length) for part in self._parts)

    def view(self, batch: Batch) -> tuple[RowPages, KVPages]:
        return self.window.view(batch)

    def append(self, batch: Batch, kv: Tensor) -> None:
        """Store the vectors of the batch's new tokens, [T, D]."""
        self.window.append(batch, kv)

    def sees_all(self, batch: Batch) -> bool:
        """Whether no token of a step can have more entries before it than it may choose."""
        return self.keys is None or batch.index.reach // self.entries.rate <= self.most

    def choose(self, batch: Batch, q: Tensor, weights: Tensor) -> Chosen:
        """Choose entries for the batch's new tokens, by queries [T, H, D] and heads' weights [T, H]."""
        assert self.keys is not None
        seen, places = self._seen(batch)
        pages = RowPages(self.keys.entries, places, seen.clamp(min=1))
        return choose_positions(q, weights, pages, counting(len(q), q.device), self.most)

    def attend(self, batch: Batch, q: Tensor, scale: float, sinks: Tensor, chosen: Chosen | None = None) -> Tensor:
        """Attend from the batch's new tokens to the window, and to entries that were chosen or all: [T, H, D] -> [T, H, D]."""
        if batch.index.reach < self.entries.rate:
            return self.window.attend(batch, q, scale, sinks)
        near = attention_partials(q, batch.view(self)[1], batch.starts, scale, self.group.span, sinks)
        seen, places = self._seen(batch)
        entries = self.entries.entries.unsqueeze(1)
        if chosen is None:
            pages = KVPages(entries, entries, places, seen.clamp(min=1))
        else:
            entries = self.entries.entries.view(-1, 1, 1, q.shape[2])
            pages = KVPages(entries, entries, *chosen)
        far, highest, total = attention_partials(q, pages, counting(len(q), q.device), scale)
        # a token before the end of the first window has been given an entry that it does not see
        total = total.view(q.shape[:2]).masked_fill(seen[:, None] == 0, 0).view(-1, 1)
        both = (torch.cat(parts, 1) for parts in zip(near, (far, highest, total), strict=True))
        return merge_partials(*both).view(q.shape).to(q.dtype)

    def _seen(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """How many entries each new token sees, int32 [T], and the pages of its sequence's, int32 [T, M]."""
        places, seen = self.entries.places(batch), (batch.positions + 1) // self.entries.rate
        if batch.single:
            return seen, places
        owners = torch.repeat_interleave(torch.tensor(batch.counts, device=places.device), output_size=len(seen))
        return seen, places[owners]
