"""The page pool: reference-counted page numbers, and the memory they index."""

import math
import mmap
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

HUGE_PAGES_FROM = 4 << 20  # bytes
PRIVATE = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}


def reserve(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros whose CPU memory is committed only when it is written to."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not nbytes:
        return torch.zeros(*shape, dtype=dtype, device=device)
    # malloc would clear, and so commit, what it hands out again
    try:
        memory = mmap.mmap(-1, nbytes, **PRIVATE)
    except OSError as err:
        raise MemoryError from err
    if nbytes >= HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


class PagePool:
    """Pages with reference counts.

    ranks  that share the pool: page `n` belongs to rank n modulo `ranks`, and each has the same number of pages
    """

    def __init__(self, count: int, ranks: int = 1):
        self.count, self.ranks = -(-count // ranks) * ranks, ranks
        self._free = [list(range(self.count - ranks + rank, -1, -ranks)) for rank in range(ranks)]
        self._owners = [0] * self.count

    def grow(self, count: int) -> None:
        """Add pages of a single rank, which are allocated after the others."""
        assert self.ranks == 1, "pages of several ranks are not added"
        self._free[0][:0] = range(self.count + count - 1, self.count - 1, -1)
        self._owners += [0] * count
        self.count += count

    @property
    def free(self) -> int:
        return sum(map(len, self._free))

    def shortfall(self, indexes: Iterable[int]) -> int:
        """Return how many pages the rank with the fewest lacks for these page indexes; negative if none lacks any."""
        wanted = Counter(index % self.ranks for index in indexes)
        return max((count - len(self._free[rank]) for rank, count in wanted.items()), default=-self.free)

    @property
    def used(self) -> int:
        return self.count - sum(map(len, self._free))

    def owners(self, page: int) -> int:
        return self._owners[page]

    def allocate(self, index: int = 0) -> int:
        """Allocate a page of the rank that stores page `index` of a sequence."""
        page = self._free[index % self.ranks].pop()
        self._owners[page] = 1
        return page

    def share(self, pages: list[int]) -> list[int]:
        """Add an owner to each page; return a copy of the list for that owner."""
        for page in pages:
            self._owners[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        """Remove an owner from each page; free the pages without one."""
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free[page % self.ranks].append(page)
