"""`Bank`: slots of memory that hold some of a layer's experts, those asked for most of late.

A bank decides which expert is in which slot; how it gets there is the business of the memory. Slots of main memory are filled
from disk, those of a GPU from the slots of another bank (`device_slots.py`).
"""

import mmap
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from auraflux.errors import AurafluxError
from auraflux.weights.expert_files import ExpertFile
from auraflux.weights.reader import Read, Reader
from auraflux.weights.traffic import Meter

HALF_LIFE = 64  # tokens
LARGEST = 2.0**500  # counts are made small again before they overflow


class Load(Protocol):
    """An expert on its way to a slot."""

    @property
    def error(self) -> AurafluxError | None: ...

    def poll(self) -> bool:
        """Whether it is there, or has failed."""


class Slots(Protocol):
    """Memory for experts: uint8 [slots, stride]."""

    memory: Tensor

    def fill(self, expert: int, slot: int, ahead: bool) -> Load | None:
        """Begin to bring an expert to a slot; None where there is no room for it on the way.

        ahead  nobody waits for it yet
        """

    def hurry(self, expert: int, load: Load) -> None:
        """Somebody waits for it by now."""

    def before(self, slots: Sequence[int]) -> None:
        """Called before slots are read by kernels."""

    def after(self, slots: Sequence[int]) -> None:
        """Called when kernels that read slots have been launched."""


class MainSlots:
    """Main memory, filled from disk. None of it is taken before it is written."""

    def __init__(self, file: ExpertFile, slots: int, reader: Reader, meter: Meter):
        self.file, self.reader, self.meter = file, reader, meter
        # direct reads want memory at a page's start
        memory = mmap.mmap(-1, slots * file.stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # a direct read pins every page that it writes to
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(memory, dtype=torch.uint8).view(slots, file.stride)
        whole = memoryview(memory)
        self._views = [whole[slot * file.stride : (slot + 1) * file.stride] for slot in range(slots)]

    def fill(self, expert: int, slot: int, ahead: bool) -> Read:
        return self.reader.read(self.file, expert, self._views[slot], self.meter, ahead)

    def hurry(self, expert: int, load: Load) -> None:
        self.reader.hurry(load)

    def before(self, slots: Sequence[int]) -> None:
        """Nothing: what a read has written is there."""

    def after(self, slots: Sequence[int]) -> None:
        """Nothing: kernels of the CPU are done when they return."""


@dataclass(eq=False)
class Held:
    """An expert in a slot.

    load   None once it was seen to be there
    ahead  nobody has asked for it yet
    pins   how many copies are being made of it
    """

    slot: int
    load: Load | None
    ahead: bool
    pins: int = 0

    @property
    def movable(self) -> bool:
        return self.pins == 0 and (self.load is None or self.load.poll())


class Bank:
    """Which experts are in which slots. Not for several threads at once.

    The expert that was asked for least makes room, where an ask counts half as much as one HALF_LIFE tokens later. That holds
    more of what is needed next than the last use alone: on traces of 8 of 256 experts a token, with 64 slots, 0.70 instead of
    0.62 where some are liked better than others (Zipf), 0.65 instead of 0.61 where the liking changes every 200 tokens, and as
    much where the routing is uniform or repeats itself.
    """

    def __init__(self, slots: Slots):
        self.slots = slots
        self._free = list(range(len(slots.memory) - 1, -1, -1))
        self._held: dict[int, Held] = {}
        self._asks: defaultdict[int, float] = defaultdict(float)
        self._ask = 1.0  # what one counts now

    def get(self, expert: int) -> Held | None:
        return self._held.get(expert)

    def __getitem__(self, expert: int) -> Held:
        return self._held[expert]

    def held(self) -> list[int]:
        """Experts that are here or on their way."""
        return list(self._held)

    def request(self, expert: int, keep: Container[int], ahead: bool = False) -> Held | None:
        """Have an expert brought here, unless it is or is on its way; None if every slot is taken by those to keep."""
        held = self._held.get(expert)
        if held is not None and not (held.ahead and held.load is not None and held.load.error is not None):
            if held.ahead and not ahead and held.load is not None:
                self.slots.hurry(expert, held.load)
            return held
        if held is not None:
            # what went wrong while nobody waited is tried again
            self.drop(expert)
        slot = self._slot(keep)
        if slot is None:
            return None
        load = self.slots.fill(expert, slot, ahead)
        if load is None:
            self._free.append(slot)
            return None
        self._held[expert] = made = Held(slot, load, ahead)
        return made

    def _slot(self, keep: Container[int]) -> int | None:
        if self._free:
            return self._free.pop()
        movable = [expert for expert, held in self._held.items() if expert not in keep and held.movable]
        return self._held.pop(min(movable, key=self._asks.__getitem__)).slot if movable else None

    def drop(self, expert: int) -> None:
        """Forget an expert that is not on its way."""
        self._free.append(self._held.pop(expert).slot)

    def arrived(self, experts: Iterable[int]) -> list[int]:
        """Those of some experts that can be used; raises where one could not be had, which may then be asked for again."""
        found = []
        for expert in experts:
            held = self._held.get(expert)
            if held is None:
                continue
            if held.load is not None and held.load.poll():
                if held.load.error is not None:
                    self.drop(expert)
                    raise held.load.error
                held.load = None
            if held.load is None:
                found.append(expert)
        return found

    def coming(self, experts: Iterable[int] | None = None) -> list[Load]:
        """What is on its way here, of some experts or of all."""
        found = self._held.values() if experts is None else [self._held[e] for e in experts if e in self._held]
        return [held.load for held in found if held.load is not None]

    def note(self, asks: Mapping[int, int], tokens: int = 1) -> None:
        """Count how many of some tokens ask for each expert."""
        self._ask *= 2 ** (tokens / HALF_LIFE)
        if self._ask > LARGEST:
            self._asks = defaultdict(float, {expert: count / self._ask for expert, count in self._asks.items()})
            self._ask = 1.0
        for expert, count in asks.items():
            self._asks[expert] += count * self._ask
