"""`no_garbage_collection`, for blocks that create many objects or that no collection may interrupt."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection inside the block; also a decorator."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
