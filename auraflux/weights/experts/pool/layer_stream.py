"""`LayerStream`: experts of long prefill steps, copied to the GPU one layer ahead of the layer that computes.

A long prefill chunk uses nearly all experts of every layer. Cached ones are used in their slots. The others pass through a ring
of slots that is borrowed from the pool, the least used ones: while a layer computes, the copy engine fills the slots of the
next. Events order copies and kernels; the host only issues them. The ring's slots are in a row, so that experts in a row need
one copy.

The last layer is copied only when it runs: a prompt needs it for its last token at most, whose experts are fetched singly.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from auraflux.ops import ExpertPool, Experts
from auraflux.ops.moe.pool import CLOCK, NEVER_USED

RING_SHARE = 2  # slots of the ring at most, as a multiple of a layer's experts
# slots of the ring beyond the missing experts of a layer: those of the next are copied into them while the layer computes
SPARE_SLOTS, TOKENS_PER_SPARE_SLOT = 12, 128


@dataclass(eq=False)
class _Layer:
    """Copies of a layer: number of cached experts, those that need a slot, slots of issued ones, and the last copy's event."""

    cached: int
    missing: deque[int]
    slots: list[int] = field(default_factory=list)
    copied: torch.cuda.Event | None = None


class LayerStream:
    """Streams experts through a pool.

    hits, misses  experts that were cached, and those that were copied, in all steps so far
    """

    def __init__(self, pool: ExpertPool):
        self.pool, (layers, self._count) = pool, pool.slots.shape
        device, slots = pool.memory.device, len(pool.memory)
        self.ring = min(slots, RING_SHARE * self._count)
        self.hits = self.misses = 0
        self._stream = torch.cuda.Stream(device)
        self._slots = torch.empty(layers, self._count, dtype=torch.int32, pin_memory=True)
        self._owners = torch.empty(slots, dtype=torch.int32, pin_memory=True)
        self._uses = torch.empty(slots, dtype=torch.float32, pin_memory=True)
        # slots of this step's experts, a row per layer: those of the ring are in it too
        self._map = torch.empty_like(self._slots, pin_memory=True)
        self._device_map = torch.empty_like(pool.slots)
        self._experts = [pool.experts_in(row, layer) for layer, row in enumerate(self._device_map)]
        self._offsets = pool.offsets.cpu().numpy()
        self._layers: list[_Layer] = []
        # slots of the ring, each with the event after which it may be overwritten
        self._free: deque[tuple[int, torch.cuda.Event]] = deque()
        self._ring_owners: dict[int, int] = {}
        self._layer: int | None = None
        # parts of a step that each layer runs, and those that the present layer has yet to run
        self._parts, self._parts_left = 1, 0
        self._clock = 0.0
        self._begun = torch.cuda.Event()

    @property
    def single_pass(self) -> bool:
        """True if the ring holds all experts of a layer at once."""
        return self.ring >= self._count

    def run(self, layer: int, tokens: int, work: Callable[[Experts], None]) -> None:
        """Run a layer's experts: call `work` with all of them, or, unless `single_pass`, with some after the other."""
        if self._layer is None or layer < self._layer or (layer == self._layer and not self._parts_left):
            self.begin(tokens)
        mine = self._layers[layer]
        if layer != self._layer:
            self._layer, self._parts_left = layer, self._parts
            self.hits += mine.cached
        self._parts_left -= 1
        following = layer + 1 if layer + 2 < len(self._layers) else None
        while True:
            self._issue(layer)
            complete = not mine.missing
            if complete and following is not None:
                # into slots that are free already: these copies overlap with this layer's kernels
                self._issue(following)
            done = self._compute(layer, mine, work)
            if self._parts_left:
                # the other parts use the same experts
                return
            self._free.extend((slot, done) for slot in mine.slots)
            if complete:
                break
            # the row of the map changes between passes
            done.synchronize()
            self._map[layer].fill_(-1)
            mine.slots = []
        if following is not None:
            self._issue(following)

    def _compute(self, layer: int, mine: _Layer, work: Callable[[Experts], None]) -> torch.cuda.Event:
        """Run `work` after the copies that were issued, and return the event of its end."""
        stream = torch.cuda.current_stream(self.pool.memory.device)
        if mine.copied is not None:
            stream.wait_event(mine.copied)
        work(self._experts[layer])
        done = torch.cuda.Event()
        done.record(stream)
        return done

    def begin(self, tokens: int, parts: int = 1) -> None:
        """Start a step: borrow the least used slots for the ring, and copy the first layer's missing experts.

        parts  how often each layer runs, with other tokens, before the next one; more than one only if `single_pass`
        """
        self.finish()
        pool, count = self.pool, self._count
        for host, table in ((self._slots, pool.slots), (self._owners, pool.owners), (self._uses, pool.uses)):
            host.copy_(table)
        self._clock = int(pool.state[CLOCK]) / pool.half_life
        slots, owners, uses = self._slots.view(-1).numpy(), self._owners.numpy(), self._uses.numpy()
        ring = self._choose_ring(slots, owners, uses, SPARE_SLOTS + tokens // TOKENS_PER_SPARE_SLOT)
        evicted = owners[ring]
        slots[evicted[evicted >= 0]] = -1
        owners[ring], uses[ring] = -1, NEVER_USED
        self._push()
        self._map.copy_(self._slots)
        self._device_map.copy_(self._map, non_blocking=True)
        self._begun = torch.cuda.Event()
        self._begun.record(torch.cuda.current_stream(pool.memory.device))
        self._free = deque((slot, self._begun) for slot in ring.tolist())
        absent = [np.flatnonzero(row < 0).tolist() for row in self._slots.numpy()]
        self._layers = [_Layer(count - len(each), deque(each)) for each in absent]
        self._ring_owners = {}
        self._layer, self._parts, self._parts_left = -1, parts, 0
        self._issue(0)

    def finish(self) -> None:
        """Leave the experts that the ring holds in the pool, which the next kernels may change; nothing if no step runs."""
        if self._layer is None:
            return
        torch.cuda.current_stream(self.pool.memory.device).wait_stream(self._stream)
        # the tables that `begin` pushed have been read
        self._begun.synchronize()
        slots, owners, uses = self._slots.view(-1).numpy(), self._owners.numpy(), self._uses.numpy()
        for slot, owner in self._ring_owners.items():
            slots[owner], owners[slot], uses[slot] = slot, owner, self._clock
        self._push()
        self._layer = None

    def _choose_ring(self, slots: np.ndarray, owners: np.ndarray, uses: np.ndarray, spare: int) -> np.ndarray:
        """Return slots in a row whose experts were used least: room for any layer's missing experts and some of the next's."""
        missing = (slots.reshape(-1, self._count) < 0).sum(1)
        size = min(self.ring, int(missing.max()) + spare)
        ring = _least_used(uses, size)
        evicted = owners[ring]
        missing = missing + np.bincount(evicted[evicted >= 0] // self._count, minlength=len(missing))
        return ring if missing.max() <= size else _least_used(uses, self.ring)

    def _issue(self, layer: int) -> None:
        """Start to copy a layer's missing experts into the free slots of the ring."""
        mine, awaited = self._layers[layer], None
        if not mine.missing or not self._free:
            return
        with torch.cuda.stream(self._stream):
            while mine.missing and self._free:
                expert, slot, free = mine.missing[0], *self._free[0]
                if free is not awaited:
                    self._stream.wait_event(free)
                    awaited = free
                count = self._run_length(mine.missing, free)
                self._copy(layer, expert, slot, count)
                for number in range(count):
                    mine.missing.popleft()
                    self._free.popleft()
                    self._map[layer, expert + number] = slot + number
                    mine.slots.append(slot + number)
                    self._ring_owners[slot + number] = layer * self._count + expert + number
                self.misses += count
            self._finish_copies(layer)
            # behind the experts: on the stream of the kernels it would wait for copies of the next layer
            self._device_map[layer].copy_(self._map[layer], non_blocking=True)
            mine.copied = torch.cuda.Event()
            mine.copied.record(self._stream)

    def _run_length(self, missing: deque[int], free: torch.cuda.Event) -> int:
        """Return how many experts in a row go into slots in a row, so that one copy serves them."""
        count = 1
        for expert, (slot, event) in zip(islice(missing, 1, None), islice(self._free, 1, None), strict=False):
            if expert != missing[0] + count or slot != self._free[0][0] + count or event is not free:
                break
            count += 1
        return count

    def _copy(self, layer: int, expert: int, slot: int, count: int) -> None:
        """Copy experts that follow each other in host memory into slots that do."""
        pool, nbytes, first = self.pool, self.pool.nbytes[layer], int(self._offsets[layer, expert])
        source = pool.host[first : first + count * nbytes].view(count, nbytes)
        pool.memory[slot : slot + count, :nbytes].copy_(source, non_blocking=True)

    def _finish_copies(self, layer: int) -> None:
        """Do nothing: all copies of the layer are on the stream."""

    def _push(self) -> None:
        """Copy the tables to the device."""
        for host, table in ((self._slots, self.pool.slots), (self._owners, self.pool.owners), (self._uses, self.pool.uses)):
            table.copy_(host, non_blocking=True)


class DryStream:
    """Stands for a `LayerStream` in a dry run: layers launch the same kernels, and nothing is copied."""

    def __init__(self, pool: ExpertPool):
        self._pool = pool

    @property
    def single_pass(self) -> bool:
        return len(self._pool.memory) >= self._pool.slots.shape[1]

    def begin(self, tokens: int, parts: int = 1) -> None:
        pass

    def run(self, layer: int, tokens: int, work: Callable[[Experts], None]) -> None:
        work(self._pool.layers[layer])


def _least_used(uses: np.ndarray, size: int) -> np.ndarray:
    """Return so many slots in a row whose experts were used least."""
    sums = np.concatenate([[0.0], np.exp2(uses.astype(np.float64) - uses.max()).cumsum()])
    first = int((sums[size:] - sums[: len(sums) - size]).argmin())
    return np.arange(first, first + size)
