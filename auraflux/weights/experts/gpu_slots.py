"""Slots of GPU memory, filled from an expert cache in pinned host memory by copies that overlap with kernels.

Copies run on their own CUDA stream. A kernel waits for the copies into the slots it reads, a copy for earlier kernels that read
its slot, and a host slot is pinned while a copy reads it.
"""

import weakref
from collections import deque
from collections.abc import Sequence

import torch

from auraflux.errors import AurafluxError
from auraflux.weights.experts.expert_cache import CachedExpert, ExpertCache, HostSlots, Load


class GpuCopy:
    """Copy of an expert into a GPU slot; it starts once the expert has been read from disk into host memory."""

    def __init__(self, slots: "GpuSlots", expert: int, slot: int, cached: CachedExpert):
        self._slots, self.expert, self.slot, self.cached = slots, expert, slot, cached
        self.error: AurafluxError | None = None
        self.event: torch.cuda.Event | None = None

    def poll(self) -> bool:
        """Return whether the copy is on its stream, where kernels wait for it, or has failed."""
        if self.event is not None or self.error is not None:
            return True
        if self.cached.load is not None and not self.cached.load.poll():
            return False
        self._slots.start_copy(self)
        return True


class GpuSlots:
    """Slots of GPU memory, filled from an expert cache in host memory."""

    def __init__(self, host_cache: ExpertCache, slots: int, stream: torch.cuda.Stream):
        self.host_cache, self.stream = host_cache, stream
        source = host_cache.slots.memory
        self.memory = torch.empty(slots, source.shape[1], dtype=torch.uint8, device=stream.device)
        self._copies: deque[GpuCopy] = deque()
        self._copy_events: dict[int, torch.cuda.Event] = {}
        self._kernel_events: dict[int, torch.cuda.Event] = {}

    def load(self, expert: int, slot: int, prefetch: bool) -> GpuCopy | None:
        self._unpin_finished()
        cached = self.host_cache.request(expert, (), prefetch)
        while cached is None and self._copies and self._copies[0].event is not None:
            self._copies[0].event.synchronize()
            self._unpin_finished()
            cached = self.host_cache.request(expert, (), prefetch)
        if cached is None:
            return None
        cached.pins += 1
        self.host_cache.count_uses({expert: 1})
        copy = GpuCopy(self, expert, slot, cached)
        copy.poll()
        return copy

    def start_copy(self, copy: GpuCopy) -> None:
        """Put a copy on the stream; the load of its expert into host memory has finished or failed."""
        try:
            self.host_cache.loaded([copy.expert])
        except AurafluxError as err:
            copy.error = err
            return
        cached, kernels = copy.cached, self._kernel_events.pop(copy.slot, None)
        with torch.cuda.stream(self.stream):
            if kernels is not None:
                self.stream.wait_event(kernels)
            self.memory[copy.slot].copy_(self.host_cache.slots.memory[cached.slot], non_blocking=True)
            copy.event = torch.cuda.Event()
            copy.event.record(self.stream)
        self._copy_events[copy.slot] = copy.event
        self._copies.append(copy)

    def _unpin_finished(self) -> None:
        """Unpin the host slots of finished copies."""
        while self._copies and self._copies[0].event is not None and self._copies[0].event.query():
            self._copies.popleft().cached.pins -= 1

    def prioritize(self, expert: int, load: Load) -> None:
        cached = self.host_cache.get(expert)
        if cached is not None and cached.load is not None:
            self.host_cache.slots.prioritize(expert, cached.load)

    def before_kernels(self, slots: Sequence[int]) -> None:
        """Make kernels wait for the copies into slots they are about to read."""
        kernels = torch.cuda.current_stream(self.memory.device)
        for slot in slots:
            if (event := self._copy_events.pop(slot, None)) is not None:
                kernels.wait_event(event)

    def after_kernels(self, slots: Sequence[int]) -> None:
        """Make later copies into slots wait for the kernels that read them."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.memory.device))
        self._kernel_events.update(dict.fromkeys(slots, event))


def pin_memory(slots: HostSlots) -> bool:
    """Pin host slots for direct copies to the GPU; return whether the system allowed it."""
    runtime, address = torch.cuda.cudart(), slots.memory.data_ptr()
    if int(runtime.cudaHostRegister(address, slots.memory.nbytes, 0)) != 0:
        return False
    weakref.finalize(slots, runtime.cudaHostUnregister, address)
    return True
