"""What one cache tells others of the same layers, so that their memory follows it.

Whoever decides which pages a sequence has does so for all layers, also for those that others hold. What comes of it is a few
writes to memory: a page is copied, a state is kept or moved, a line of a page table changes. A `Journal` notes these, in plain
numbers; a `Mirror` makes the same writes on the other side, and batches whose sequences only the first cache knows.
"""

from itertools import chain
from typing import Any

import torch

from auraflux.cache.batch import Batch
from auraflux.cache.cache import Cache
from auraflux.cache.index import StepIndex
from auraflux.cache.recurrent import StateMark
from auraflux.errors import FormatError

Entry = list[Any]  # where, what, numbers
KEPT = 64  # batches of a mirror; the one that was used longest ago goes first


class Journal:
    """Notes what is written to the memory of a cache."""

    def __init__(self, cache: Cache):
        self._parts = {part: number for number, part in enumerate(cache.parts)}
        self._entries: list[Entry] = []
        cache.tell(self._hear)

    def _hear(self, where: Any, what: str, *numbers: Any) -> None:
        if what == "line":
            group, line, first, pages = numbers
            # a row changes its list
            numbers = self._parts[group], line, first, list(pages)
        self._entries.append([where, what, *numbers])

    def take(self) -> list[Entry]:
        """Give what was noted since the last time."""
        taken, self._entries = self._entries, []
        return taken


def facts_of(batch: Batch) -> dict[str, Any]:
    """What a mirror must be told of a batch that has made room for a step."""
    index, counts = batch.index, batch.counts + [1] * batch.fillers
    return {"index": [index.count, index.reach], "counts": counts, "silent": batch.silent, "places": batch.places}


class FollowedBatch(Batch):
    """A batch of another cache's sequences: layers read it as any other, and nobody makes room with it."""

    ends = False  # ranks read prompts' last tokens in steps of their own

    def __init__(self, index: StepIndex, places: tuple[int, ...], silent: bool):
        self.index, self.silent, self.sequences, self.fillers, self.extra = index, silent, [], 0, None
        self._places, self._views, self._beyond = places, {}, None

    @property
    def places(self) -> tuple[int, ...]:
        return self._places

    def turn(self, counts: list[int], lengths: list[int]) -> None:
        """Take the next step: so many new tokens of each sequence, which is then so long."""
        self.counts, self.single = counts, all(new == 1 for new in counts)
        if self.single:
            self.positions = self.index.positions
        else:
            spans = (range(length - new, length) for length, new in zip(lengths, counts, strict=True))
            self.positions = torch.tensor([*chain.from_iterable(spans)], dtype=torch.int32).to(self.index.device)


class Mirror:
    """Repeats on a cache what another's journal tells."""

    def __init__(self, cache: Cache):
        self.cache, self._parts = cache, cache.parts
        self._marks: dict[int, StateMark] = {}
        self._lengths: dict[StepIndex, list[int]] = {}
        self._batches: dict[Any, FollowedBatch] = {}

    def repeat(self, entries: list[Entry]) -> None:
        """Make the same writes, in the same order."""
        for where, what, *numbers in entries:
            if isinstance(where, list):
                self._index(self.cache.index(*where), what, *numbers)
            elif what == "page":
                self._part(where).copy_to(*numbers)
            else:
                self._state(self._part(where), what, *numbers)

    def batch(self, facts: dict[str, Any]) -> FollowedBatch:
        """The batch of a step whose numbers were told."""
        index, places, silent = self.cache.index(*facts["index"]), tuple(facts["places"]), facts["silent"]
        key = index, places, silent
        found = self._batches.pop(key, None) or FollowedBatch(index, places, silent)
        if len(self._batches) >= KEPT:
            del self._batches[next(iter(self._batches))]
        self._batches[key] = found
        found.turn(facts["counts"], self._lengths[index])
        return found

    def _part(self, number: int) -> Any:
        return self._parts[number]

    def _index(self, index: StepIndex, what: str, *numbers: Any) -> None:
        match what:
            case "numbers":
                self._lengths[index] = numbers[0]
                index.write(*numbers)
            case "line":
                index.write_line(self._part(numbers[0]), *numbers[1:])
            case "slot":
                index.move_to(*numbers)
            case _:
                raise FormatError(f"a journal tells of {what!r}, which is nothing that happens to a step.")

    def _state(self, states: Any, what: str, *numbers: int) -> None:
        match what:
            case "clear" | "move" | "swap":
                getattr(states, what)(*numbers)
            case "keep":
                self._marks[numbers[1]] = states.keep(numbers[0])
            case "put":
                states.put(numbers[0], self._marks[numbers[1]])
            case "drop":
                del self._marks[numbers[0]]
            case _:
                raise FormatError(f"a journal tells of {what!r}, which is nothing that happens to a state.")
