"""Texts that are kept after they were written, so that one that begins like them is not computed again.

A kept text is a parked `Sequence`: it owns its pages, and its checkpoints, until memory is wanted. A text that begins like it
branches from it and shares its pages, copying those it writes to. Texts that are still being written can be branched from, too.
"""

from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

from auraflux.cache.cache import Cache
from auraflux.cache.prefix_disk import PrefixDisk
from auraflux.cache.radix import Node, RadixTree
from auraflux.cache.sequence import Part, Sequence, Snapshot
from auraflux.errors import CacheError

LOOKED_AT = 64  # texts that begin equally well, of which the one that needs the least computing again is taken
TRIMMED = 4  # a kept text loses this part of its length at a time


@dataclass(eq=False)
class Kept:
    """A text that can be branched from.

    ids   of its tokens
    live  it is being written: nothing is taken from it
    """

    ids: list[int]
    sequence: Sequence
    live: bool
    node: Node["Kept"] = field(init=False)


@dataclass(frozen=True)
class Start:
    """A sequence for a prompt.

    held    tokens of the prompt that it has
    shared  tokens that the prompt has in common with some text: where it parts from it, others may, too
    """

    sequence: Sequence
    held: int
    shared: int


class PrefixStore:
    """Finds and keeps texts of one cache.

    disk  where texts go when their pages are wanted; None for nowhere
    """

    def __init__(self, cache: Cache, disk: PrefixDisk | None = None):
        self.cache, self.disk = cache, disk
        self._tree: RadixTree[Kept] = RadixTree()
        # parked texts, the one used longest ago first
        self._parked: OrderedDict[Kept, None] = OrderedDict()
        cache.reclaim = self._reclaim

    def __len__(self) -> int:
        """Texts that are kept, without those still being written."""
        return len(self._parked)

    def look(self, prompt: list[int]) -> tuple[Kept | None, int, int]:
        """Find the text to branch from for a prompt, how many tokens that saves, and how many they share.

        The last token of a prompt is never among them: its scores are wanted.
        """
        wanted = prompt[:-1]
        best, saved, shared = None, 0, 0
        for kept, common in islice(self._tree.find(wanted), LOOKED_AT):
            shared = max(shared, common)
            if common <= saved:
                break
            reached = kept.sequence.reach(min(common, kept.sequence.length))
            if reached > saved:
                best, saved = kept, reached
        return best, saved, shared

    def open(self, prompt: list[int]) -> Start:
        """Make a sequence that holds as much of a prompt as is kept."""
        kept, saved, shared = self.look(prompt)
        if kept is None:
            return Start(self.cache.open(), 0, shared)
        if not kept.live:
            self._use(kept)
        sequence = kept.sequence.branch(min(saved, kept.sequence.length))
        return Start(sequence, sequence.length, shared)

    def note(self, ids: list[int], sequence: Sequence) -> Kept:
        """Let others branch from a text that is being written."""
        kept = Kept(list(ids), sequence, live=True)
        kept.node = self._tree.insert(kept.ids, kept)
        return kept

    def forget(self, kept: Kept) -> None:
        """Let nobody branch from a text any more; whoever writes it keeps it."""
        self._tree.remove(kept.node, kept)
        self._parked.pop(kept, None)

    def keep(self, ids: list[int], sequence: Sequence) -> Kept | None:
        """Take over a text that is no longer written; `ids` are the tokens the sequence holds."""
        if sequence.length == 0:
            sequence.close()
            return None
        sequence.park()
        kept = Kept(ids[: sequence.length], sequence, live=False)
        for other, common in list(islice(self._tree.find(kept.ids), LOOKED_AT)):
            if other.live or common < len(other.ids):
                continue
            # nothing is lost with a text that this one begins with
            if sequence.reach(common) >= other.sequence.reach(other.sequence.length):
                self._drop(other)
        kept.node = self._tree.insert(kept.ids, kept)
        self._parked[kept] = None
        return kept

    def _save(self, kept: Kept) -> None:
        if self.disk is not None and kept.sequence.reach(kept.sequence.length) > 0:
            self.disk.save(kept.ids, kept.sequence.snapshot())

    def save_all(self) -> None:
        """Write all kept texts to disk, those used last at the end, and wait until they are there."""
        for kept in list(self._parked):
            self._save(kept)
            if self.disk is not None:
                self.disk.wait()

    def fetch(self, prompt: list[int]) -> "Future[Snapshot | None] | None":
        """Begin to read what the disk has of a prompt, where that is more than is kept here."""
        if self.disk is None:
            return None
        saved, common = self.disk.find(prompt, not self.cache.forgets)
        if saved is None or common < self.look(prompt)[1] + self.cache.page:
            return None
        return self.disk.load(saved)

    def take_in(self, prompt: list[int], snapshot: Snapshot | None) -> None:
        """Keep what was read from disk for a prompt, if there is room for it."""
        if snapshot is None:
            return
        try:
            sequence = self.cache.restore(snapshot)
        except CacheError:
            return
        # what it has beyond the prompt is of no use for it
        sequence.truncate(min(sequence.length, len(prompt) - 1))
        self.keep(prompt, sequence)

    def clear(self) -> None:
        """Forget all kept texts."""
        for kept in list(self._parked):
            self._drop(kept)

    def _use(self, kept: Kept) -> None:
        self._parked.move_to_end(kept)

    def _drop(self, kept: Kept) -> None:
        self.forget(kept)
        kept.sequence.close()

    def _reclaim(self, part: Part) -> bool:
        """Give up the end of the text used longest ago; tell whether there was one.

        That frees a page, or lets whoever else has it write to it without a copy, or neither: then it must be asked again.
        """
        if not self._parked:
            return False
        kept = next(iter(self._parked))
        self._save(kept)
        self._trim(kept)
        return True

    def _trim(self, kept: Kept) -> None:
        """Cut a text short by part of its length, or give it up."""
        page, length = self.cache.page, kept.sequence.length
        rest = (length - max(length // TRIMMED, 1)) // page * page
        rest = kept.sequence.reach(rest)
        self.forget(kept)
        if rest == 0:
            kept.sequence.close()
            return
        kept.sequence.truncate(rest)
        shorter = Kept(kept.ids[:rest], kept.sequence, live=False)
        shorter.node = self._tree.insert(shorter.ids, shorter)
        # it stays the one used longest ago
        self._parked[shorter] = None
        self._parked.move_to_end(shorter, last=False)
