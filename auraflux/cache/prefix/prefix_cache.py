"""The prefix cache: sequences stay in memory after they finish, so that later prompts reuse shared prefixes.

An entry is a suspended `KVSequence`: it owns its pages and checkpoints until memory is needed. A prompt with the same prefix
branches from it and shares its pages, with copy on write. Sequences that are still decoding can be branched from, too.
"""

from collections import OrderedDict, defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

from auraflux.cache.cache import Cache
from auraflux.cache.kv_sequence import CacheGroup, KVSequence, Snapshot
from auraflux.cache.prefix.disk import PrefixDisk
from auraflux.cache.prefix.radix import Node, RadixTree
from auraflux.errors import CacheError

MAX_CANDIDATES = 64  # entries with equally long shared prefixes, of which the one with the most reusable tokens is used
TRIM_DIVISOR = 4  # eviction trims an entry by this part of its length


@dataclass(eq=False)
class PrefixEntry:
    """A sequence that prompts can branch from.

    ids   of its tokens
    live  it is still running: it is not evicted
    """

    ids: list[int]
    sequence: KVSequence
    live: bool
    node: Node["PrefixEntry"] = field(init=False)


@dataclass(frozen=True)
class PrefixHit:
    """A sequence for a prompt.

    hit_tokens     prompt tokens that the sequence already holds
    shared_tokens  longest prefix that the prompt shares with any entry: later prompts may diverge at the same position
    """

    sequence: KVSequence
    hit_tokens: int
    shared_tokens: int


class PrefixCache:
    """The prefix entries of one cache, in LRU order.

    disk  receives evicted entries; None for nowhere
    """

    def __init__(self, cache: Cache, disk: PrefixDisk | None = None):
        self.cache, self.disk = cache, disk
        # keys and values depend on the adapter that computed them
        self._trees: dict[int | None, RadixTree[PrefixEntry]] = defaultdict(RadixTree)
        # entries that are not live, the least recently used first
        self._entries: OrderedDict[PrefixEntry, None] = OrderedDict()
        cache.evict_prefix = self._evict

    def __len__(self) -> int:
        """Return the number of entries that are not live."""
        return len(self._entries)

    def match(self, prompt: list[int], adapter: int | None = None) -> tuple[PrefixEntry | None, int, int]:
        """Find the entry with the most reusable tokens of a prompt; return it, these tokens, and the longest shared prefix.

        Only entries of the same adapter are found.

        The last token of a prompt is never reused: its logits are needed.
        """
        wanted = prompt[:-1]
        best, reused, shared = None, 0, 0
        for entry, common in islice(self._trees[adapter].find(wanted), MAX_CANDIDATES):
            shared = max(shared, common)
            if common <= reused:
                break
            reusable = entry.sequence.truncatable_length(min(common, entry.sequence.length))
            if reusable > reused:
                best, reused = entry, reusable
        return best, reused, shared

    def open(self, prompt: list[int], adapter: int | None = None) -> PrefixHit:
        """Open a sequence that holds as much of a prompt as is cached."""
        entry, reused, shared = self.match(prompt, adapter)
        if entry is None:
            opened = self.cache.open()
            opened.adapter = adapter
            return PrefixHit(opened, 0, shared)
        if not entry.live:
            self._entries.move_to_end(entry)
        sequence = entry.sequence.branch(min(reused, entry.sequence.length))
        return PrefixHit(sequence, sequence.length, shared)

    def insert_live(self, ids: list[int], sequence: KVSequence) -> PrefixEntry:
        """Add a running sequence, so that prompts can branch from it."""
        entry = PrefixEntry(list(ids), sequence, live=True)
        return self._add(entry)

    def _add(self, entry: PrefixEntry) -> PrefixEntry:
        entry.node = self._trees[entry.sequence.adapter].insert(entry.ids, entry)
        return entry

    def remove(self, entry: PrefixEntry) -> None:
        """Remove an entry without closing its sequence."""
        self._trees[entry.sequence.adapter].remove(entry.node, entry)
        self._entries.pop(entry, None)

    def insert(self, ids: list[int], sequence: KVSequence) -> PrefixEntry | None:
        """Take ownership of a finished sequence; `ids` are the tokens that it holds."""
        if sequence.length == 0:
            sequence.close()
            return None
        sequence.suspend()
        entry = PrefixEntry(ids[: sequence.length], sequence, live=False)
        for other, common in list(islice(self._trees[sequence.adapter].find(entry.ids), MAX_CANDIDATES)):
            if other.live or common < len(other.ids):
                continue
            # an entry that is a prefix of this one is redundant
            if sequence.truncatable_length(common) >= other.sequence.truncatable_length(other.sequence.length):
                self._drop(other)
        self._entries[self._add(entry)] = None
        return entry

    def _save(self, entry: PrefixEntry) -> None:
        # the disk does not know adapters
        if (
            self.disk is not None
            and entry.sequence.adapter is None
            and entry.sequence.truncatable_length(entry.sequence.length) > 0
        ):
            self.disk.save(entry.ids, entry.sequence.snapshot())

    def save_all(self) -> None:
        """Write all entries to disk, the most recently used last, and wait until they are written."""
        for entry in list(self._entries):
            self._save(entry)
            if self.disk is not None:
                self.disk.wait()

    def fetch(self, prompt: list[int], adapter: int | None = None) -> "Future[Snapshot | None] | None":
        """Start to read a prompt's prefix from disk; None where the disk has no longer prefix than memory."""
        if self.disk is None or adapter is not None:
            return None
        found, common = self.disk.find(prompt, not self.cache.needs_checkpoints)
        if found is None or common < self.match(prompt)[1] + self.cache.page:
            return None
        return self.disk.load(found)

    def insert_loaded(self, prompt: list[int], snapshot: Snapshot | None) -> None:
        """Add a prefix that was read from disk for a prompt, if the cache has room for it."""
        if snapshot is None:
            return
        try:
            sequence = self.cache.restore(snapshot)
        except CacheError:
            return
        # tokens past the prompt are of no use
        sequence.truncate(min(sequence.length, len(prompt) - 1))
        self.insert(prompt, sequence)

    def clear(self) -> None:
        """Drop all entries that are not live."""
        for entry in list(self._entries):
            self._drop(entry)

    def entries(self) -> set[PrefixEntry]:
        """Return all entries that are not live."""
        return set(self._entries)

    def keep_only(self, entries: set[PrefixEntry]) -> None:
        """Drop all other entries that are not live."""
        for entry in [each for each in self._entries if each not in entries]:
            self._drop(entry)

    def _drop(self, entry: PrefixEntry) -> None:
        self.remove(entry)
        entry.sequence.close()

    def _evict(self, group: CacheGroup) -> bool:
        """Trim the least recently used entry; return whether there was one.

        That frees a page, or lets its other owner write to it without a copy, or neither: the caller then tries again.
        """
        if not self._entries:
            return False
        entry = next(iter(self._entries))
        self._save(entry)
        self._trim(entry)
        return True

    def _trim(self, entry: PrefixEntry) -> None:
        """Truncate an entry by a part of its length, or drop it."""
        page, length = self.cache.page, entry.sequence.length
        remaining = (length - max(length // TRIM_DIVISOR, 1)) // page * page
        remaining = entry.sequence.truncatable_length(remaining)
        self.remove(entry)
        if remaining == 0:
            entry.sequence.close()
            return
        entry.sequence.truncate(remaining)
        shorter = PrefixEntry(entry.ids[:remaining], entry.sequence, live=False)
        # it stays the least recently used one
        self._entries[self._add(shorter)] = None
        self._entries.move_to_end(shorter, last=False)
