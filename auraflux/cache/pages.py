"""The page pool, and the layers that share one page table because they see equally far back.

Positions of a sequence lie in pages of `size` tokens. A page may have several owners: sequences forked from each other, and
checkpoints. Only a page with one owner is written to; an append to a shared one writes to a copy.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from auraflux.cache.deal import ALONE, Deal
from auraflux.cache.index import Note, StepIndex, unheard

ALIGNMENT = 64


def reserve(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor of zeros whose memory, on CPU, is taken only as it is written to."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    octets = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -octets.ctypes.data % ALIGNMENT
    return torch.from_numpy(octets)[start : start + nbytes].view(dtype).view(shape)


class PagePool:
    """Pages, each free or with a number of owners.

    kinds  of pages, as many of each: that of a page is its number modulo `kinds`
    """

    def __init__(self, count: int, kinds: int = 1):
        self.count, self.kinds = -(-count // kinds) * kinds, kinds
        self._free = [list(range(self.count - kinds + kind, -1, -kinds)) for kind in range(kinds)]
        self._owners = [0] * self.count

    @property
    def free(self) -> int:
        return sum(map(len, self._free))

    def lack(self, places: Iterable[int]) -> int:
        """How many pages are missing, of the kind of which most are, for these places; negative where some are left over."""
        wanted = Counter(place % self.kinds for place in places)
        return max((count - len(self._free[kind]) for kind, count in wanted.items()), default=-self.free)

    @property
    def used(self) -> int:
        return self.count - sum(map(len, self._free))

    def owners(self, page: int) -> int:
        return self._owners[page]

    def take(self, place: int = 0) -> int:
        """Take a page of the kind that has this place in its sequence."""
        page = self._free[place % self.kinds].pop()
        self._owners[page] = 1
        return page

    def share(self, pages: list[int]) -> list[int]:
        """Count one more owner of each page, and give the owner's own list of them."""
        for page in pages:
            self._owners[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free[page % self.kinds].append(page)


class LayerGroup:
    """Layers that see equally far back: their stores have the same pages, and a sequence has one table for all of them.

    span   how many positions a query sees, its own among them; None for all
    size   tokens in a page
    spare  positions kept beyond the span: truncating by as many is exact at once
    limit  only so many of the first positions are kept; None for all
    deal   which pages have memory here
    plain_nbytes  of a token in all layers of the group, uncompressed in bf16
    stores        of all layers; those that others hold are on the device meta
    page_nbytes   of a page in all of them
    note          hears what is done to pages
    """

    def __init__(
        self,
        span: int | None,
        pages: int,
        size: int,
        spare: int,
        device: torch.device,
        limit: int | None = None,
        deal: Deal = ALONE,
    ):
        self.span, self.size, self.spare, self.device, self.limit, self.deal = span, size, spare, device, limit, deal
        self.pool, self.plain_nbytes, self.page_nbytes = PagePool(pages, deal.size), 0, 0
        self.stores: list[Tensor] = []
        self.own: list[Tensor] = []
        self.holds = True
        self.note: Note = unheard
        # rows that may hold more than their sequences need: a step's tokens are not given up before the next step
        self.windows: WeakSet[PageRow] = WeakSet()

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Make a store of all pages that have memory here and one more, [P + 1, *shape]."""
        where = self.device if self.holds else torch.device("meta")
        self.stores.append(reserve(self.deal.place(self.pool.count) + 1, *shape, dtype=dtype, device=where))
        if self.holds:
            self.own.append(self.stores[-1])
        self.page_nbytes += self.stores[-1][0].nbytes
        return self.stores[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages that have an owner."""
        return self.pool.used * self.page_nbytes

    @property
    def own_page_nbytes(self) -> int:
        """Bytes of a page here; where others have some of the pages, of a page on average."""
        return -(-sum(store[0].nbytes for store in self.own) // self.deal.size)

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of all pages here."""
        return self.deal.place(self.pool.count) * sum(store[0].nbytes for store in self.own)

    @property
    def free(self) -> int:
        return self.pool.free

    @property
    def grows(self) -> bool:
        """Whether a sequence has more pages the longer it is."""
        return self.span is None and self.limit is None

    def describe(self) -> str:
        if self.limit is not None:
            return f"pages of {self.size} tokens for the first {self.limit} positions"
        layers = "layers that see everything" if self.span is None else f"layers that see {self.span} positions"
        return f"pages of {self.size} tokens for {layers}"

    def held(self, length: int) -> int:
        """How many positions of a sequence of so many tokens are needed for the next."""
        return min(length, self.span or length, self.limit or length)

    def end(self, length: int) -> int:
        """How many pages hold the first `length` positions, as far as they are kept."""
        return -(-min(length, self.limit or length) // self.size)

    def open(self) -> "PageRow":
        return PageRow(self)

    def needs(self, steps: list[tuple["PageRow", int, int]]) -> int:
        """Count the pages that rows will take when each is extended in turn: [(row, length, new)]."""
        if self.pool.kinds > 1:
            # more than are free where there are too few of one kind
            return self.free + self.pool.lack(place for row, length, new in steps for place in row.places(length, new))
        shared = Counter(row.pages[-1] for row, length, new in steps if new and row.must_copy(length))
        # of a page's owners the last to write has it for itself
        kept = sum(count == self.pool.owners(page) for page, count in shared.items())
        return sum(row.needs(length, new) for row, length, new in steps) - kept

    @cached_property
    def filler(self) -> "PageRow":
        """The page after the pool's, which belongs to no sequence: steps are filled up with tokens that go there."""
        return PageRow(self, 0, [self.pool.count])

    def refresh(self, index: StepIndex, rows: list["PageRow"]) -> None:
        """Tell the index of a step where its sequences' pages are."""
        index.refresh(self, rows)

    def settle(self) -> bool:
        """Return the pages that no sequence will see again; tell whether there were any."""
        before = self.free
        for row in list(self.windows):
            row.settle(row.reached)
        return self.free > before

    def oldest(self, length: int) -> int:
        """The first position that a query at `length` sees."""
        return 0 if self.span is None else max(0, length - self.span + 1)

    def copy(self, page: int) -> int:
        """Give up one ownership of a page for a new page with the same content."""
        fresh = self.pool.take(page)
        self.copy_to(page, fresh)
        self.note("page", page, fresh)
        self.pool.release([page])
        return fresh

    def copy_to(self, page: int, other: int) -> None:
        """Write a page's content to another."""
        if self.deal.has(page) and self.own:
            to, source = self.deal.place(other), self.deal.place(page)
            # in one launch: a page of every layer is little to copy
            torch._foreach_copy_([store[to] for store in self.own], [store[source] for store in self.own])


@dataclass(frozen=True)
class PageMark:
    """The pages that a checkpoint of a window owns; page numbers count from the start of the sequence."""

    group: LayerGroup
    first: int
    pages: list[int]

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self.group.page_nbytes

    def release(self) -> None:
        self.group.pool.release(self.pages)


@dataclass(frozen=True)
class PageImage:
    """A copy of what a sequence's pages hold: `first`, and one tensor [n, ...] for each store of the group."""

    first: int
    tensors: list[Tensor]

    @property
    def pages(self) -> int:
        return len(self.tensors[0])


class PageRow:
    """The pages of one sequence in one group.

    pages    in order; the i-th holds the positions from (first + i) * size on
    stamp    changes whenever first or pages do
    reached  positions that it has been extended by, no more than its sequence has
    place    None: pages are found through a step's index
    """

    place, parked = None, False

    def __init__(self, group: LayerGroup, first: int = 0, pages: list[int] | None = None, reached: int = 0):
        self.group, self.first, self.pages, self.stamp, self.reached = group, first, pages or [], 0, reached
        if group.span is not None:
            group.windows.add(self)

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self.group.page_nbytes

    @property
    def plain_nbytes(self) -> int:
        return len(self.pages) * self.group.size * self.group.plain_nbytes

    def settle(self, length: int) -> None:
        """Return the pages that no query from `length` - spare on sees."""
        gone = self.group.oldest(max(0, length - self.group.spare)) // self.group.size - self.first
        if gone > 0:
            self._hold(self.first + gone, self.pages[gone:], self.pages[:gone])

    def must_copy(self, length: int) -> bool:
        """Tell whether the next token would be written to a page that others own too."""
        group = self.group
        if length % group.size == 0 or length >= (group.limit or length + 1):
            return False
        return group.pool.owners(self.pages[-1]) > 1

    def needs(self, length: int, new: int) -> int:
        """Count the pages that `extend` will take."""
        if new == 0:
            return 0
        return self.group.end(length + new) - self.first - len(self.pages) + self.must_copy(length)

    def places(self, length: int, new: int) -> list[int]:
        """The places in the sequence of the pages that `extend` will take."""
        if new == 0:
            return []
        after = self.first + len(self.pages)
        return [*([after - 1] if self.must_copy(length) else []), *range(after, self.group.end(length + new))]

    def extend(self, length: int, new: int) -> None:
        """Make room for tokens after the first `length`."""
        if new == 0:
            return
        if self.must_copy(length):
            self.pages[-1] = self.group.copy(self.pages[-1])
            self.stamp += 1
        lacking = range(self.first + len(self.pages), self.group.end(length + new))
        self.pages += map(self.group.pool.take, lacking)
        self.stamp += len(lacking)
        self.reached = length + new

    def reaches(self, length: int) -> bool:
        """Tell whether all that a query at `length` sees is still here."""
        return self.first * self.group.size <= self.group.oldest(length)

    def truncate(self, length: int) -> None:
        self.reached = min(self.reached, length)
        keep = self.group.end(length) - self.first
        if length == 0:
            self._hold(0, [], self.pages)
        elif keep < len(self.pages):
            self._hold(self.first, self.pages[:keep], self.pages[keep:])

    def shorten(self, length: int) -> None:
        """Return the pages of extra tokens: what a query at `length` sees has not been given up since."""
        self.truncate(length)

    def mark(self, length: int) -> PageMark | None:
        """Own what a query at `length` sees; None where nothing is ever lost."""
        if self.group.span is None:
            return None
        first = self.group.oldest(length) // self.group.size
        pages = self.pages[first - self.first : self.group.end(length) - self.first]
        return PageMark(self.group, first, self.group.pool.share(pages))

    def rewind(self, length: int, mark: PageMark | None) -> None:
        if mark is None:
            self.truncate(length)
        else:
            self.reached = length
            self._hold(mark.first, self.group.pool.share(mark.pages), self.pages)

    def fork(self) -> "PageRow":
        return PageRow(self.group, self.first, self.group.pool.share(self.pages), self.reached)

    def park(self) -> None:
        """Pages are found again as they are."""

    def snapshot(self) -> PageImage:
        return PageImage(self.first, [store[self.pages].cpu() for store in self.group.stores])

    def image_of(self, length: int, mark: PageMark | None) -> PageImage:
        """Copy what the row held at a checkpoint."""
        first, pages = (self.first, self.pages[: self.group.end(length)]) if mark is None else (mark.first, mark.pages)
        return PageImage(first, [store[pages].cpu() for store in self.group.stores])

    def restore(self, image: PageImage) -> None:
        """Take pages with what an image holds; the row must be empty."""
        self.first, self.pages = image.first, [self.group.pool.take(image.first + i) for i in range(image.pages)]
        for store, tensor in zip(self.group.stores, image.tensors, strict=True):
            store[self.pages] = tensor.to(store.device)
        self.stamp += 1

    def close(self) -> None:
        self.reached = 0
        self._hold(0, [], self.pages)

    def _hold(self, first: int, pages: list[int], gone: list[int]) -> None:
        self.group.pool.release(gone)
        self.first, self.pages = first, pages
        self.stamp += 1
