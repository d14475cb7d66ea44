"""Slots of a GPU's memory, filled from a bank in main memory by copies that overlap with kernels.

Copies run on a stream of their own. A kernel waits for the copies of the slots it reads, a copy for the kernels that read its
slot before, and a slot of main memory is not written to while a copy reads it.
"""

import weakref
from collections import deque
from collections.abc import Sequence

import torch

from auraflux.errors import AurafluxError
from auraflux.weights.bank import Bank, Held, Load, MainSlots


class Copy:
    """An expert on its way from disk, if it is not in main memory yet, to a slot of the GPU."""

    def __init__(self, slots: "DeviceSlots", expert: int, slot: int, held: Held):
        self._slots, self.expert, self.slot, self.held = slots, expert, slot, held
        self.error: AurafluxError | None = None
        self.event: torch.cuda.Event | None = None

    def poll(self) -> bool:
        """Whether the copy was put on its stream, or cannot be: kernels then wait for it on the GPU."""
        if self.event is not None or self.error is not None:
            return True
        if self.held.load is not None and not self.held.load.poll():
            return False
        self._slots.land(self)
        return True


class DeviceSlots:
    """A GPU's memory, filled from the bank `below`."""

    def __init__(self, below: Bank, slots: int, stream: torch.cuda.Stream):
        self.below, self.stream = below, stream
        source = below.slots.memory
        self.memory = torch.empty(slots, source.shape[1], dtype=torch.uint8, device=stream.device)
        self._copying: deque[Copy] = deque()
        self._landed: dict[int, torch.cuda.Event] = {}
        self._read: dict[int, torch.cuda.Event] = {}

    def fill(self, expert: int, slot: int, ahead: bool) -> Copy | None:
        self._settle()
        held = self.below.request(expert, (), ahead)
        while held is None and self._copying and self._copying[0].event is not None:
            self._copying[0].event.synchronize()
            self._settle()
            held = self.below.request(expert, (), ahead)
        if held is None:
            return None
        held.pins += 1
        self.below.note({expert: 1})
        copy = Copy(self, expert, slot, held)
        copy.poll()
        return copy

    def land(self, copy: Copy) -> None:
        """Put a copy on the stream; its expert is in main memory, or failed to get there."""
        try:
            self.below.arrived([copy.expert])
        except AurafluxError as err:
            copy.error = err
            return
        held, read = copy.held, self._read.pop(copy.slot, None)
        with torch.cuda.stream(self.stream):
            if read is not None:
                self.stream.wait_event(read)
            self.memory[copy.slot].copy_(self.below.slots.memory[held.slot], non_blocking=True)
            copy.event = torch.cuda.Event()
            copy.event.record(self.stream)
        self._landed[copy.slot] = copy.event
        self._copying.append(copy)

    def _settle(self) -> None:
        """Let go of slots in main memory whose copies are done."""
        while self._copying and self._copying[0].event is not None and self._copying[0].event.query():
            self._copying.popleft().held.pins -= 1

    def hurry(self, expert: int, load: Load) -> None:
        held = self.below.get(expert)
        if held is not None and held.load is not None:
            self.below.slots.hurry(expert, held.load)

    def before(self, slots: Sequence[int]) -> None:
        """Have kernels wait for the copies to slots they are about to read."""
        kernels = torch.cuda.current_stream(self.memory.device)
        for slot in slots:
            if (event := self._landed.pop(slot, None)) is not None:
                kernels.wait_event(event)

    def after(self, slots: Sequence[int]) -> None:
        """Have copies to slots wait for the kernels that read them."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.memory.device))
        self._read.update(dict.fromkeys(slots, event))


def pin(slots: MainSlots) -> bool:
    """Lock main memory in place, so that copies to a GPU go straight from it; say whether the system let us."""
    runtime, address = torch.cuda.cudart(), slots.memory.data_ptr()
    if int(runtime.cudaHostRegister(address, slots.memory.nbytes, 0)) != 0:
        return False
    weakref.finalize(slots, runtime.cudaHostUnregister, address)
    return True
