"""A GPU that is only assumed, to ask what would be launched on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Capability = tuple[int, int]  # NVIDIA's compute capability
AMPERE: Capability = (8, 0)
HOPPER: Capability = (9, 0)

_assumed: ContextVar[Capability | None] = ContextVar("assumed", default=None)


@contextmanager
def assume_gpu(capability: Capability = HOPPER) -> Iterator[None]:
    """Let tensors of any device pass for a GPU's inside the block; nothing can be launched."""
    token = _assumed.set(capability)
    try:
        yield
    finally:
        _assumed.reset(token)


def assumed() -> Capability | None:
    """The GPU that is assumed; None where there need not be one."""
    return _assumed.get()
