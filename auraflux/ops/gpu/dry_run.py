"""Dry runs: steps that launch no kernels, which find out what would be launched.

What the host does for kernels, such as copying experts for them, is pointless then. This module needs no Triton.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_running = 0


@contextmanager
def dry_run() -> Iterator[None]:
    """Make `is_dry_run` true inside the block."""
    global _running
    _running += 1
    try:
        yield
    finally:
        _running -= 1


def is_dry_run() -> bool:
    """Return whether kernels are not launched at present."""
    return _running > 0
