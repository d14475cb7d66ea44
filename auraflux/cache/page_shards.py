"""Context parallelism: the pages of a sequence are distributed round-robin over ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PageShard:
    """The pages that one rank stores: page i of every sequence belongs to rank i modulo `size`.

    Page numbers of the pool follow the same rule: number modulo `size` is the rank, number divided by `size` the local page.

    all_gather  returns the tensors of all ranks, in rank order
    """

    rank: int
    size: int
    all_gather: Callable[[Tensor], list[Tensor]]

    @property
    def is_sharded(self) -> bool:
        return self.size > 1

    def owns_page(self, page: int) -> bool:
        return page % self.size == self.rank

    def local_page(self, page: int) -> int:
        """Return the index of a pool page in this rank's stores."""
        return page // self.size

    def owns(self, positions: Tensor, page: int) -> Tensor:
        """Return which positions this rank stores, in pages of `page` tokens."""
        return positions // page % self.size == self.rank

    def local_lengths(self, ends: Tensor, page: int) -> Tensor:
        """Return the number of positions before each of `ends` that this rank stores: int32."""
        full, rest = ends // page, ends % page
        before = (full + self.size - 1 - self.rank) // self.size * page
        return (before + torch.where(full % self.size == self.rank, rest, 0)).int()


UNSHARDED = PageShard(0, 1, lambda tensor: [tensor])
