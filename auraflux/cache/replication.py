"""Replication of one cache's writes on other ranks.

One rank decides which pages each sequence has, also for the layers of other ranks. Its decisions amount to a few writes to
memory: a page is copied, a recurrent state is saved or moved, a row of a page table changes. A `ReplicationLog` records these
as plain numbers; a `CacheReplica` repeats the same writes on another rank, and makes batches whose sequences only the first
cache knows.
"""

from itertools import chain
from typing import Any

import torch

from auraflux.cache.batch import Batch, Logits
from auraflux.cache.cache import Cache
from auraflux.cache.layers.recurrent import StateCheckpoint
from auraflux.cache.step_index import StepIndex
from auraflux.errors import FormatError

Entry = list[Any]  # target, kind, arguments; the target is a group's number or an index's key
MAX_BATCHES = 64  # cached by a replica, in LRU order


class ReplicationLog:
    """Records the writes to the memory of a cache."""

    def __init__(self, cache: Cache):
        self._groups = {group: number for number, group in enumerate(cache.groups)}
        self._entries: list[Entry] = []
        cache.observe(self._record)

    def _record(self, target: Any, kind: str, *arguments: Any) -> None:
        if kind == "row":
            group, row, first, pages = arguments
            # a copy: the page table goes on to change its list
            arguments = self._groups[group], row, first, list(pages)
        self._entries.append([target, kind, *arguments])

    def take(self) -> list[Entry]:
        """Return the entries since the last call, and clear them."""
        taken, self._entries = self._entries, []
        return taken


def batch_facts(batch: Batch) -> dict[str, Any]:
    """Return the facts that a replica needs to make a batch that was extended for a step."""
    index, counts = batch.index, batch.counts + [1] * batch.padding_sequences
    facts = {
        "index": [index.count, index.length_bucket],
        "counts": counts,
        "logits": batch.logits.value,
        "slots": batch.slots,
    }
    return facts if batch.single or not batch.has_inputs else {**facts, **_image_facts(batch)}


def _image_facts(batch: Batch) -> dict[str, Any]:
    """Return the positions of a step with images, and where its tokens attend ahead."""
    ends = [each if each is None else each.tolist() for each in batch.all_ends]
    positions = batch.positions.cpu()
    if positions.dim() == 1:
        return {"positions": positions.tolist(), "ends": ends}
    # many frequencies share a position: of its time, its row or its column
    distinct, which = torch.unique(positions, dim=1, return_inverse=True)
    return {"positions": distinct.tolist(), "frequencies": which.tolist(), "ends": ends}


class ReplicaBatch(Batch):
    """A batch of another cache's sequences: layers read it like any other, and it allocates nothing."""

    def __init__(self, index: StepIndex, slots: tuple[int, ...], logits: Logits, context: int):
        self.context = context
        self.index, self.logits, self.sequences, self.padding_sequences, self.padding = index, logits, [], 0, None
        self._slots, self._views, self._padding_mask, self.embeddings, self.all_ends = slots, {}, None, None, [None, None]

    @property
    def slots(self) -> tuple[int, ...]:
        return self._slots

    def advance(self, facts: dict[str, Any], lengths: list[int]) -> None:
        """Set the next step from its `batch_facts`, and the length of each sequence with its new tokens."""
        self.counts, device = facts["counts"], self.index.device
        known = facts.get("positions")
        self.single = known is None and all(new == 1 for new in self.counts)
        if self.single:
            self.positions = self.index.positions
        elif known is None:
            spans = (range(length - new, length) for length, new in zip(lengths, self.counts, strict=True))
            self.positions = torch.tensor([*chain.from_iterable(spans)], dtype=torch.int32).to(device)
        else:
            positions = torch.tensor(known, dtype=torch.int32)
            self.positions = (positions[:, facts["frequencies"]] if "frequencies" in facts else positions).to(device)
        ends = facts.get("ends", [None, None])
        self.all_ends = [None if each is None else torch.tensor(each, dtype=torch.int32).to(device) for each in ends]
        self.embeddings = None


class CacheReplica:
    """Applies the replication log of another cache to a cache."""

    def __init__(self, cache: Cache):
        self.cache, self._groups = cache, cache.groups
        self._checkpoints: dict[int, StateCheckpoint] = {}
        self._lengths: dict[StepIndex, list[int]] = {}
        self._batches: dict[Any, ReplicaBatch] = {}

    def apply(self, entries: list[Entry]) -> None:
        """Repeat the writes of a log, in its order."""
        for target, kind, *arguments in entries:
            if isinstance(target, list):
                self._apply_index(self.cache.index(*target), kind, *arguments)
            elif kind == "page":
                self._group(target).copy_page(*arguments)
            else:
                self._apply_state(self._group(target), kind, *arguments)

    def batch(self, facts: dict[str, Any]) -> ReplicaBatch:
        """Return the batch of a step from its `batch_facts`."""
        index, slots, logits = self.cache.index(*facts["index"]), tuple(facts["slots"]), Logits(facts["logits"])
        key = index, slots, logits
        found = self._batches.pop(key, None) or ReplicaBatch(index, slots, logits, self.cache.context)
        if len(self._batches) >= MAX_BATCHES:
            del self._batches[next(iter(self._batches))]
        self._batches[key] = found
        found.advance(facts, self._lengths[index])
        return found

    def _group(self, number: int) -> Any:
        return self._groups[number]

    def _apply_index(self, index: StepIndex, kind: str, *arguments: Any) -> None:
        match kind:
            case "step":
                self._lengths[index] = arguments[0]
                index.write(*arguments)
            case "row":
                index.write_row(self._group(arguments[0]), *arguments[1:])
            case "slot":
                index.set_slot(*arguments)
            case _:
                raise FormatError(f"the replication log has an unknown entry {kind!r} for a step index.")

    def _apply_state(self, states: Any, kind: str, *arguments: int) -> None:
        match kind:
            case "clear" | "copy" | "swap":
                getattr(states, kind)(*arguments)
            case "save":
                self._checkpoints[arguments[1]] = states.save(arguments[0])
            case "load":
                states.load(arguments[0], self._checkpoints[arguments[1]])
            case "drop":
                del self._checkpoints[arguments[0]]
            case _:
                raise FormatError(f"the replication log has an unknown entry {kind!r} for a recurrent state.")
