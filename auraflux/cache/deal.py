"""Which pages of a sequence a rank holds, where several share them: they are dealt out one after the other."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Deal:
    """Page i of every sequence is held by rank i modulo `size`.

    A page's number in the pool says whose it is in the same way, and divided by `size` where it lies there.

    share  gives what all ranks have found, in their order
    """

    rank: int
    size: int
    share: Callable[[Tensor], list[Tensor]]

    @property
    def among_others(self) -> bool:
        return self.size > 1

    def has(self, page: int) -> bool:
        return page % self.size == self.rank

    def place(self, page: int) -> int:
        """Where a page of the pool lies here."""
        return page // self.size

    def owned(self, positions: Tensor, page: int) -> Tensor:
        """Tell which positions are held here."""
        return positions // page % self.size == self.rank

    def counted(self, ends: Tensor, page: int) -> Tensor:
        """How many positions before each of `ends` are held here: int32."""
        full, rest = ends // page, ends % page
        before = (full + self.size - 1 - self.rank) // self.size * page
        return (before + torch.where(full % self.size == self.rank, rest, 0)).int()


ALONE = Deal(0, 1, lambda found: [found])
