"""What kernels read about the sequences of a step, as tensors that stay where they are from step to step."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Note = Callable[..., None]  # what was done, and the numbers it was done with

ALIGNED = 4  # int32 numbers; kernels read from multiples of 16 bytes faster


def unheard(*what: Any) -> None:
    """Ignore what is told: nobody else needs to know."""


class Paged(Protocol):
    """Layers that share a page table, as far as an index cares."""

    def end(self, length: int) -> int:
        """How many pages hold the first `length` positions, as far as they are kept."""


class StepIndex:
    """Lengths, starts, positions and page tables of so many sequences, none longer than `reach`.

    Batches of as many sequences take turns with one index, so that a step recorded for one of them serves all.

    lengths    [B]      int32, the new tokens among them
    starts     [B + 1]  int32, where each sequence's new tokens begin in the stack
    positions  [B]      int32, of the new tokens in their sequences where each has one
    parts      [3]      int32, where a single sequence's tokens and its extra ones begin in the stack, and its end, see `Batch`
    end        [1]      int32, its length without the extra ones
    slots      [2]      int64, twice where its recurrent states are
    note       hears what is written to them
    """

    def __init__(self, count: int, reach: int, device: torch.device):
        self.count, self.reach, self.device = count, reach, device
        self._width = -(-(count + 1) // ALIGNED) * ALIGNED
        self._numbers = torch.zeros(4, self._width, dtype=torch.int32, device=device)
        lengths, starts, positions, extra = self._numbers
        self.lengths, self.starts, self.positions = lengths[:count], starts[: count + 1], positions[:count]
        self.parts, self.end = extra[:3], extra[3:4]
        self.slots, self._slot = torch.zeros(2, dtype=torch.int64, device=device), 0
        self._tables: dict[Paged, tuple[Tensor, list[tuple[Any, int] | None]]] = {}
        self.note: Note = unheard

    def write(self, lengths: list[int], starts: list[int], positions: list[int], extra: int = 0) -> None:
        """Set the numbers of a step; positions only where each sequence has one new token."""
        ends = [0, starts[1] - extra, starts[1], lengths[0] - extra]
        rows = [row + [0] * (self._width - len(row)) for row in (lengths, starts, positions, ends)]
        # from memory that is not pinned: it is read before the call returns, so the next step may follow at once
        self._numbers.copy_(torch.tensor(rows, dtype=torch.int32), non_blocking=True)
        self.note("numbers", lengths, starts, positions, extra)

    def move_to(self, slot: int) -> None:
        """Say where the recurrent states of a single sequence are."""
        if slot != self._slot:
            self.slots.fill_(slot)
            self._slot = slot
            self.note("slot", slot)

    def table(self, group: Paged) -> Tensor:
        """The page table of a group, int32 [B, M]."""
        if group not in self._tables:
            pages = torch.zeros(self.count, group.end(self.reach), dtype=torch.int32, device=self.device)
            self._tables[group] = pages, [None] * self.count
        return self._tables[group][0]

    def refresh(self, group: Paged, rows: list[Any]) -> None:
        """Bring the table of a group up to date with what sequences hold; what has not changed is not sent again."""
        self.table(group)
        known = self._tables[group][1]
        for b, row in enumerate(rows):
            seen = known[b]
            if seen is None or seen[0] is not row or seen[1] != row.stamp:
                self.write_line(group, b, row.first, row.pages)
                known[b] = row, row.stamp

    def write_line(self, group: Paged, line: int, first: int, pages: list[int]) -> None:
        """Write a sequence's pages, from the `first` of its page numbers on."""
        table = self.table(group)
        table[line, first : first + len(pages)].copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)
        self.note("line", group, line, first, pages)
