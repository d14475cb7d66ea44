"""A fake GPU, to find out without one which kernels would be launched on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Capability = tuple[int, int]  # NVIDIA's compute capability
AMPERE: Capability = (8, 0)
HOPPER: Capability = (9, 0)

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
