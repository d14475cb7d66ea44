"""The tensors that kernels read about a step: lengths, positions, page tables and embeddings, at fixed addresses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

WriteObserver = Callable[..., None]  # called with the kind of a write and its arguments

ALIGNED = 4  # int32 numbers; kernels load faster from multiples of 16 bytes


def no_observer(*event: Any) -> None:
    """Ignore a write: no other cache replicates it."""


class Paged(Protocol):
    """Layers that share a page table."""

    def page_count(self, length: int) -> int:
        """Return the number of pages that hold the first `length` stored positions."""


class StepIndex:
    """Lengths, starts, positions and page tables of `count` sequences, none longer than `length_bucket`.

    Batches of the same size and length bucket share one index, so that a CUDA graph captured for one of them serves all.

    lengths          [B]      int32, new tokens included
    starts           [B + 1]  int32, first row of each sequence's new tokens
    positions        [B]      int32, of the new tokens where each sequence has one
    padding_starts   [3]      int32, of a single sequence: first row of its tokens, first row of its padding, and its end
    unpadded_length  [1]      int32, length of a single sequence without padding
    slots            [2]      int64, recurrent-state slot of a single sequence, twice
    on_write         observer of writes to these tensors
    """

    def __init__(self, count: int, length_bucket: int, device: torch.device):
        self.count, self.length_bucket, self.device = count, length_bucket, device
        self._width = -(-(count + 1) // ALIGNED) * ALIGNED
        self._numbers = torch.zeros(4, self._width, dtype=torch.int32, device=device)
        lengths, starts, positions, padding = self._numbers
        self.lengths, self.starts, self.positions = lengths[:count], starts[: count + 1], positions[:count]
        self.padding_starts, self.unpadded_length = padding[:3], padding[3:4]
        self.slots, self._slot = torch.zeros(2, dtype=torch.int64, device=device), 0
        self._tables: dict[Paged, tuple[Tensor, list[tuple[Any, int] | None]]] = {}
        self.on_write: WriteObserver = no_observer

    def write(self, lengths: list[int], starts: list[int], positions: list[int], padding: int = 0) -> None:
        """Set the lengths, starts and positions of a step; positions only where each sequence has one new token."""
        ends = [0, starts[1] - padding, starts[1], lengths[0] - padding]
        rows = [row + [0] * (self._width - len(row)) for row in (lengths, starts, positions, ends)]
        # the source is pageable memory, which is read before the call returns: the next step may follow at once
        self._numbers.copy_(torch.tensor(rows, dtype=torch.int32), non_blocking=True)
        self.on_write("step", lengths, starts, positions, padding)

    def set_slot(self, slot: int) -> None:
        """Set the recurrent-state slot of a single sequence."""
        if slot != self._slot:
            self.slots.fill_(slot)
            self._slot = slot
            self.on_write("slot", slot)

    def table(self, group: Paged) -> Tensor:
        """Return the page table of a group, int32 [B, M]."""
        if group not in self._tables:
            pages = torch.zeros(self.count, group.page_count(self.length_bucket), dtype=torch.int32, device=self.device)
            self._tables[group] = pages, [None] * self.count
        return self._tables[group][0]

    def update_table(self, group: Paged, tables: list[Any]) -> None:
        """Write the rows of a group's page table whose sequence or version changed."""
        self.table(group)
        known = self._tables[group][1]
        for b, table in enumerate(tables):
            seen = known[b]
            if seen is None or seen[0] is not table or seen[1] != table.version:
                self.write_row(group, b, table.first, table.pages)
                known[b] = table, table.version

    def write_row(self, group: Paged, row: int, first: int, pages: list[int]) -> None:
        """Write a sequence's pages to a row of the page table, from column `first` on."""
        table = self.table(group)
        table[row, first : first + len(pages)].copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)
        self.on_write("row", group, row, first, pages)


@dataclass(frozen=True, eq=False)
class Embeddings:
    """The embeddings of images in a step, which take the place of those of their tokens.

    rows    [N]     int64, tokens of the step, in host memory
    values  [N, H]
    """

    rows: Tensor
    values: Tensor

    @classmethod
    def joined(cls, parts: Sequence["Embeddings"]) -> "Embeddings | None":
        """Return the embeddings of several images together; None for none."""
        if len(parts) < 2:
            return parts[0] if parts else None
        return cls(torch.cat([part.rows for part in parts]), torch.cat([part.values for part in parts]))

    def put(self, x: Tensor) -> Tensor:
        """Put them in place of the embeddings of their tokens: [T, H]."""
        return x.index_copy(0, self.rows.to(x.device), self.values.to(x.device, x.dtype))


class EmbeddingBuffers:
    """Embeddings at fixed addresses, which a recorded step of T tokens reads.

    present  [T, 1]  bool, tokens with an embedding
    values   [T, H]
    """

    def __init__(self, present: Tensor, values: Tensor):
        self.present, self.values = present, values

    @classmethod
    def empty(cls, tokens: int, like: Embeddings, device: torch.device) -> "EmbeddingBuffers":
        """Make buffers for steps of up to so many tokens."""
        values = like.values.new_zeros(tokens, like.values.shape[1], device=device)
        return cls(torch.zeros(tokens, 1, dtype=torch.bool, device=device), values)

    def first(self, tokens: int) -> "EmbeddingBuffers":
        """Return the same memory for a step of so many tokens."""
        return EmbeddingBuffers(self.present[:tokens], self.values[:tokens])

    def write(self, found: Embeddings) -> None:
        """Set the embeddings of the next step."""
        rows = found.rows.to(self.values.device)
        self.present.zero_().index_fill_(0, rows, True)
        self.values.index_copy_(0, rows, found.values.to(self.values))

    def put(self, x: Tensor) -> Tensor:
        """Put them in place of the embeddings of their tokens: [T, H]."""
        return torch.where(self.present, self.values.to(x.dtype), x)
