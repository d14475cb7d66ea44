"""`HostMemory`: experts of all layers in host memory, pinned layer by layer while they are loaded.

One range of addresses is reserved for all layers, so that GPU kernels find an expert by its offset. Pages are allocated when a
layer is loaded and pinned right after, so that loading never stalls on one large allocation.
"""

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 1 << 21  # of layers: huge pages, which are pinned faster
MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
NOT_PINNED = (
    "host memory could not be pinned (see 'ulimit -l'; containers and WSL limit it), so experts are copied to the GPU through "
    "pageable memory and steps are not replayed as CUDA graphs: decode is several times slower."
)


class HostMemory:
    """Host memory for experts.

    memory  [capacity]  uint8
    pinned  whether GPU kernels can read all experts
    """

    def __init__(self, capacity: int, device: torch.device):
        capacity = -(-capacity // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        mapped = mmap.mmap(-1, capacity, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self.pinned, self._device = device.type == "cuda", device
        self.used = -self.memory.data_ptr() % ALIGNMENT

    def allocate(self, nbytes: int) -> tuple[int, Tensor]:
        """Reserve bytes for a layer and return their offset and view."""
        first = self.used
        if first + nbytes > len(self.memory):
            raise MemoryError(f"{nbytes} bytes for experts exceed the {len(self.memory)} bytes that were planned")
        self.used = -(-(first + nbytes) // ALIGNMENT) * ALIGNMENT
        return first, self.memory[first : first + nbytes]

    def pin(self, part: Tensor) -> None:
        """Pin a layer that has been loaded, so that the GPU reads it directly."""
        if not self.pinned:
            return
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(part.data_ptr(), part.nbytes, MAPPED)) != 0:
            # the error is sticky until it is read
            runtime.cudaGetLastError()
            self.pinned = False
            return
        weakref.finalize(self.memory, runtime.cudaHostUnregister, part.data_ptr())
