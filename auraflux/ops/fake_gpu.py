"""A fake GPU, to find out without one which kernels would be launched on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

Capability = tuple[int, int]  # NVIDIA's compute capability
AMPERE: Capability = (8, 0)
HOPPER: Capability = (9, 0)
# shared memory of one program at most, in KB; from NVIDIA's table of compute capabilities
SHARED_KB = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99, (12, 1): 99}
# names the capability of a GPU that another passes for, see `gpu/as_gpu.py`
VARIABLE = "AURAFLUX_AS_GPU"

_fake: ContextVar[Capability | None] = ContextVar("fake_gpu", default=None)


@contextmanager
def use_fake_gpu(capability: Capability = HOPPER) -> Iterator[None]:
    """Treat tensors of any device as a GPU's inside the block; nothing can be launched."""
    token = _fake.set(capability)
    try:
        yield
    finally:
        _fake.reset(token)


def fake_capability() -> Capability | None:
    """Return the compute capability of the fake GPU, or None if there is none."""
    return _fake.get()


def is_gpu(device: torch.device) -> bool:
    """Return whether ops on a device run CUDA kernels, or would on the fake GPU."""
    return device.type == "cuda" or fake_capability() is not None
