"""Groups of layers that share one page table because they have the same attention span.

Positions of a sequence lie in pages of `size` tokens. A page may have several owners: sequences forked from each other, and
checkpoints. Only a page with one owner is written to; an append to a shared page writes to a copy.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakSet

import torch
from torch import Tensor

from auraflux.cache.page_pool import PagePool, reserve
from auraflux.cache.page_shards import UNSHARDED, PageShard
from auraflux.cache.step_index import StepIndex, WriteObserver, no_observer


class LayerGroup:
    """Layers with the same attention span: their stores have the same pages, and a sequence has one page table for all of them.

    span                 positions that a query attends to, itself included; None for all
    size                 tokens in a page
    rollback_tokens      positions retained past the span: truncating by up to as many needs no checkpoint
    limit                only the first `limit` positions are stored; None for all
    page_shard           pages that have memory on this rank
    uncompressed_nbytes  of a token in all layers of the group without quantization
    stores               of all layers; those of other ranks are on the meta device
    local_stores         of layers that have memory on this rank
    page_nbytes          of a page in all stores
    on_write             observer of page copies
    """

    def __init__(
        self,
        span: int | None,
        pages: int,
        size: int,
        rollback_tokens: int,
        device: torch.device,
        limit: int | None = None,
        page_shard: PageShard = UNSHARDED,
    ):
        self.span, self.size, self.rollback_tokens, self.device, self.limit = span, size, rollback_tokens, device, limit
        self.page_shard, self.pool = page_shard, PagePool(pages, page_shard.size)
        self.uncompressed_nbytes, self.page_nbytes = 0, 0
        self.stores: list[Tensor] = []
        self.local_stores: list[Tensor] = []
        self.is_local = True
        self.on_write: WriteObserver = no_observer
        # tables that may hold expired pages: these are released before the next step, not after each
        self.window_tables: WeakSet[PageTable] = WeakSet()

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate a store of this rank's pages and a padding page, [P + 1, *shape]."""
        where = self.device if self.is_local else torch.device("meta")
        self.stores.append(reserve(self.page_shard.local_page(self.pool.count) + 1, *shape, dtype=dtype, device=where))
        if self.is_local:
            self.local_stores.append(self.stores[-1])
        self.page_nbytes += self.stores[-1][0].nbytes
        return self.stores[-1]

    def grow(self, pages: int) -> None:
        """Add pages. The others keep their numbers; step indexes become invalid, since the padding page moves."""
        before = self.pool.count
        self.pool.grow(pages)
        for store in self.local_stores:
            larger = reserve(self.pool.count + 1, *store.shape[1:], dtype=store.dtype, device=store.device)
            larger[:before] = store[:before]
            # in place: layers refer to the store
            store.set_(larger)  # type: ignore[call-overload]
        vars(self).pop("padding_state", None)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages in use."""
        return self.pool.used * self.page_nbytes

    @property
    def local_page_nbytes(self) -> int:
        """Bytes of a page on this rank, averaged over the ranks that share the pool."""
        return -(-sum(store[0].nbytes for store in self.local_stores) // self.page_shard.size)

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of all pages on this rank."""
        return self.page_shard.local_page(self.pool.count) * sum(store[0].nbytes for store in self.local_stores)

    @property
    def free(self) -> int:
        return self.pool.free

    @property
    def grows(self) -> bool:
        """Return whether a longer sequence needs more pages."""
        return self.span is None and self.limit is None

    def describe(self) -> str:
        """Return a description of the group's pages for error messages."""
        if self.limit is not None:
            return f"pages of {self.size} tokens for the first {self.limit} positions"
        layers = "full-attention layers" if self.span is None else f"layers with a window of {self.span} tokens"
        return f"pages of {self.size} tokens for {layers}"

    def resident_tokens(self, length: int) -> int:
        """Return how many positions of a sequence of `length` tokens the next token attends to."""
        return min(length, self.span or length, self.limit or length)

    def page_count(self, length: int) -> int:
        """Return the number of pages that hold the first `length` stored positions."""
        return -(-min(length, self.limit or length) // self.size)

    def open(self) -> "PageTable":
        return PageTable(self)

    def pages_needed(self, extensions: list[tuple["PageTable", int, int]]) -> int:
        """Return the number of pages that extending each table in order will allocate: [(table, length, new)]."""
        if self.pool.ranks > 1:
            # more than are free if one rank lacks pages
            indexes = (index for table, length, new in extensions for index in table.new_page_indexes(length, new))
            return self.free + self.pool.shortfall(indexes)
        shared = Counter(table.pages[-1] for table, length, new in extensions if new and table.needs_copy(length))
        # the last of a page's owners to write needs no copy
        in_place = sum(count == self.pool.owners(page) for page, count in shared.items())
        return sum(table.pages_needed(length, new) for table, length, new in extensions) - in_place

    @cached_property
    def padding_state(self) -> "PageTable":
        """The table of padding sequences: the page after the pool's, which belongs to no sequence."""
        return PageTable(self, 0, [self.pool.count])

    def update_index(self, index: StepIndex, states: list["PageTable"]) -> None:
        """Write the sequences' page tables to the index of a step."""
        index.update_table(self, states)

    def release_expired(self) -> bool:
        """Release the pages outside all windows; return whether there were any."""
        before = self.free
        for table in list(self.window_tables):
            table.release_expired(table.extended_length)
        return self.free > before

    def first_visible(self, length: int) -> int:
        """Return the first position that a query at `length` attends to."""
        return 0 if self.span is None else max(0, length - self.span + 1)

    def copy_on_write(self, page: int) -> int:
        """Replace one ownership of a shared page by a new page with the same content."""
        fresh = self.pool.allocate(page)
        self.copy_page(page, fresh)
        self.on_write("page", page, fresh)
        self.pool.release([page])
        return fresh

    def copy_page(self, page: int, other: int) -> None:
        """Copy a page's content to another page in all local stores."""
        if self.page_shard.owns_page(page) and self.local_stores:
            to, source = self.page_shard.local_page(other), self.page_shard.local_page(page)
            # one launch for all layers: each copy is small
            torch._foreach_copy_([store[to] for store in self.local_stores], [store[source] for store in self.local_stores])


@dataclass(frozen=True)
class PageCheckpoint:
    """The pages of a sliding window that a checkpoint owns; `first` counts from the start of the sequence."""

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
    """A copy of the contents of a sequence's pages: `first`, and one tensor [n, ...] for each store of the group."""

    first: int
    tensors: list[Tensor]

    @property
    def pages(self) -> int:
        return len(self.tensors[0])


class PageTable:
    """The pages of one sequence in one group.

    pages            in order; the i-th holds the positions from (first + i) * size on
    version          changes with `first` and `pages`
    extended_length  length up to which pages were allocated, at most that of the sequence
    slot             None: pages are found through a step's index
    """

    slot, suspended = None, False

    def __init__(self, group: LayerGroup, first: int = 0, pages: list[int] | None = None, extended_length: int = 0):
        self.group, self.first, self.pages, self.version = group, first, pages or [], 0
        self.extended_length = extended_length
        if group.span is not None:
            group.window_tables.add(self)

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self.group.page_nbytes

    def used_nbytes(self, length: int) -> int:
        return self.group.resident_tokens(length) * self.group.page_nbytes // self.group.size

    def uncompressed_nbytes(self, length: int) -> int:
        return self.group.resident_tokens(length) * self.group.uncompressed_nbytes

    def release_expired(self, length: int) -> None:
        """Release the pages that no query from `length` - rollback_tokens on attends to."""
        oldest = self.group.first_visible(max(0, length - self.group.rollback_tokens))
        expired = oldest // self.group.size - self.first
        if expired > 0:
            self._replace(self.first + expired, self.pages[expired:], self.pages[:expired])

    def needs_copy(self, length: int) -> bool:
        """Return whether the next token would be written to a page with other owners."""
        group = self.group
        if length % group.size == 0 or length >= (group.limit or length + 1):
            return False
        return group.pool.owners(self.pages[-1]) > 1

    def pages_needed(self, length: int, new: int) -> int:
        """Return the number of pages that `extend` will allocate."""
        if new == 0:
            return 0
        return self.group.page_count(length + new) - self.first - len(self.pages) + self.needs_copy(length)

    def new_page_indexes(self, length: int, new: int) -> list[int]:
        """Return the indexes in the sequence of the pages that `extend` will allocate."""
        if new == 0:
            return []
        after = self.first + len(self.pages)
        return [*([after - 1] if self.needs_copy(length) else []), *range(after, self.group.page_count(length + new))]

    def extend(self, length: int, new: int) -> None:
        """Allocate pages for `new` tokens after the first `length`."""
        if new == 0:
            return
        if self.needs_copy(length):
            self.pages[-1] = self.group.copy_on_write(self.pages[-1])
            self.version += 1
        missing = range(self.first + len(self.pages), self.group.page_count(length + new))
        self.pages += map(self.group.pool.allocate, missing)
        self.version += len(missing)
        self.extended_length = length + new

    def can_truncate(self, length: int) -> bool:
        """Return whether all positions that a query at `length` attends to are still stored."""
        return self.first * self.group.size <= self.group.first_visible(length)

    def truncate(self, length: int) -> None:
        """Release the pages after the first `length` positions."""
        self.extended_length = min(self.extended_length, length)
        remaining = self.group.page_count(length) - self.first
        if length == 0:
            self._replace(0, [], self.pages)
        elif remaining < len(self.pages):
            self._replace(self.first, self.pages[:remaining], self.pages[remaining:])

    def drop_padding(self, length: int) -> None:
        """Release the pages of padding tokens; no page that a query at `length` attends to was released since."""
        self.truncate(length)

    def checkpoint(self, length: int) -> PageCheckpoint | None:
        """Share the pages that a query at `length` attends to; None in a group without a window."""
        if self.group.span is None:
            return None
        first = self.group.first_visible(length) // self.group.size
        pages = self.pages[first - self.first : self.group.page_count(length) - self.first]
        return PageCheckpoint(self.group, first, self.group.pool.share(pages))

    def rewind(self, length: int, saved: PageCheckpoint | None) -> None:
        """Return to a checkpoint at `length`."""
        if saved is None:
            self.truncate(length)
        else:
            self.extended_length = length
            self._replace(saved.first, self.group.pool.share(saved.pages), self.pages)

    def fork(self) -> "PageTable":
        return PageTable(self.group, self.first, self.group.pool.share(self.pages), self.extended_length)

    def suspend(self) -> None:
        """Do nothing: pages stay where they are."""

    def snapshot(self) -> PageImage:
        return PageImage(self.first, [store[self.pages].cpu() for store in self.group.stores])

    def snapshot_at(self, length: int, saved: PageCheckpoint | None) -> PageImage:
        """Copy the pages of a checkpoint at `length`."""
        if saved is None:
            first, pages = self.first, self.pages[: self.group.page_count(length)]
        else:
            first, pages = saved.first, saved.pages
        return PageImage(first, [store[pages].cpu() for store in self.group.stores])

    def restore(self, image: PageImage) -> None:
        """Allocate pages with the contents of an image; the table must be empty."""
        self.first, self.pages = image.first, [self.group.pool.allocate(image.first + i) for i in range(image.pages)]
        for store, tensor in zip(self.group.stores, image.tensors, strict=True):
            store[self.pages] = tensor.to(store.device)
        self.version += 1

    def close(self) -> None:
        self.extended_length = 0
        self._replace(0, [], self.pages)

    def _replace(self, first: int, pages: list[int], released: list[int]) -> None:
        self.group.pool.release(released)
        self.first, self.pages = first, pages
        self.version += 1
