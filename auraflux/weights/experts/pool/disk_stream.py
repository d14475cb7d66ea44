"""`DiskLayerStream`: experts of long prefill steps that are read from disk, through host memory, one layer ahead."""

import torch

from auraflux.ops import ExpertPool
from auraflux.weights.experts.pool.disk_tier import DiskTier
from auraflux.weights.experts.pool.layer_stream import LayerStream

MOST_READS = 64  # experts of a request: the next one waits for the copies of its last expert


class DiskLayerStream(LayerStream):
    """Streams experts through a pool; each is copied to the GPU as soon as it is in host memory."""

    def __init__(self, pool: ExpertPool, tier: DiskTier):
        super().__init__(pool)
        self._tier = tier
        self._wanted: dict[int, int] = {}
        self._last_copy: torch.cuda.Event | None = None

    def _copy(self, layer: int, expert: int, slot: int, count: int) -> None:
        """Note the slots of experts; `_finish_copies` reads them."""
        self._wanted |= {expert + number: slot + number for number in range(count)}

    def _finish_copies(self, layer: int) -> None:
        """Read the experts of a layer and copy them into their slots; the stream waits for these to be free."""
        wanted, self._wanted = self._wanted, {}
        left, size = list(wanted), min(MOST_READS, self._tier.slots)
        while left:
            some, left = left[:size], left[size:]
            arrived = self._read(layer, some, wanted)
            if len(arrived) == len(some):
                continue
            # nothing may be copied into the ring's slots after they are given back
            self._stream.synchronize()
            for expert in {*some, *left} - arrived:
                del self._ring_owners[wanted[expert]]
            self._tier.check()

    def _read(self, layer: int, experts: list[int], slots: dict[int, int]) -> set[int]:
        """Read some experts and start their copies; return those that could be read."""
        pool, nbytes, arrived = self.pool, self.pool.nbytes[layer], set[int]()
        if self._last_copy is not None:
            # a request gives the host memory of the last one back
            self._last_copy.synchronize()
        for expert, row in self._tier.read(layer, experts, streamed=True):
            pool.memory[slots[expert], :nbytes].copy_(row[:nbytes], non_blocking=True)
            arrived.add(expert)
        self._last_copy = torch.cuda.Event()
        self._last_copy.record(self._stream)
        return arrived
