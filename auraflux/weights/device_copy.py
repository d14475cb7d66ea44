"""Copies of weights to a GPU: threads read chunks into pinned memory, and the GPU copies those while they read the next.

`Tensor.to` reads a mapped file on one thread, and waits for the GPU after each tensor.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from auraflux.machine import usable_cores

CHUNK_NBYTES = 2 << 20
STAGED_FROM = 2 * CHUNK_NBYTES  # bytes; below this, waking the threads costs more than the copy
MAX_THREADS = 8  # more do not read memory faster


def copy_to_device(source: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on a device, as `Tensor.to`; `source` may be overwritten or unmapped when this returns."""
    if device.type != "cuda" or not source.is_cpu or source.nbytes < STAGED_FROM or not source.is_contiguous():
        return source.to(device, dtype)
    # the device converts: it is faster, and a 16-bit file is half as much to copy as float32
    return _staging(device).copy(source).to(dtype)


@cache
def _staging(device: torch.device) -> "Staging":
    return Staging(device, CHUNK_NBYTES, min(MAX_THREADS, usable_cores()))


class Staging:
    """Threads and the buffers that they fill.

    device  that gets the tensors
    nbytes  of a chunk
    """

    def __init__(self, device: torch.device, nbytes: int, threads: int):
        self._device, self._nbytes = device, nbytes
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="auraflux-copy")
        # two for each thread: one is filled while the GPU copies the other
        self._buffers: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(2 * threads):
            self._buffers.put(_Buffer(nbytes, device))

    def copy(self, source: Tensor) -> Tensor:
        """Return a contiguous tensor on the device. Later work on the caller's stream waits for it, the host does not."""
        out = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        octets, target = (each.view(-1).view(torch.uint8) for each in (source, out))
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def chunk(first: int) -> None:
            part, buffer = slice(first, first + self._nbytes), self._buffers.get()
            try:
                buffer.send(octets[part], target[part], stream)
            finally:
                self._buffers.put(buffer)

        # `list` raises what a thread has raised
        list(self._threads.map(chunk, range(0, len(octets), self._nbytes)))
        return out


def staging_memory(nbytes: int, device: torch.device) -> Tensor:
    """Return memory from which the device copies: pinned for a GPU, unless the system refuses (`ulimit -l`, containers)."""
    if device.type == "cuda":
        with suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8)


class _Buffer:
    """Memory for one chunk."""

    def __init__(self, nbytes: int, device: torch.device):
        self._memory = staging_memory(nbytes, device)
        self._sent: torch.cuda.Event | None = None

    def send(self, source: Tensor, target: Tensor, stream: torch.cuda.Stream | None) -> None:
        """Copy `source` to the device once the last chunk has left; return when `source` has been read."""
        if self._sent is not None:
            self._sent.synchronize()
        filled = self._memory[: len(source)]
        # numpy copies on this thread alone; torch would start threads for each of these
        np.copyto(filled.numpy(), source.numpy())
        with torch.cuda.stream(stream):
            target.copy_(filled, non_blocking=True)
            self._sent = None if stream is None else stream.record_event()
