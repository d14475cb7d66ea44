"""Recordings in progress, by thread; ops and CPU kernels check `recorder` at every call.

Usually nothing is recorded. `recorder` is a dict, so that checking an empty one costs only a truth test.
"""

from array import array
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, Protocol

from torch import Tensor


class Recording(Protocol):
    """A decode step being recorded for replay without Python, see `simd/replay/record.py`."""

    def add(self, code: int, args: array, jobs: int) -> None:
        """Record a kernel launch."""

    def retain(self, memory: Any) -> None:
        """Retain memory that a launch points to."""

    def add_query(self, code: int, args: array) -> None:
        """Record a query that Python made of a kernel; the last argument is its answer."""

    def checks_error_flag(self, address: int) -> bool:
        """Return whether to check the error flag that a kernel sets."""

    def read(self, how: str, tensor: Tensor) -> None:
        """Record that Python reads a tensor's values."""

    def reject(self, reason: str) -> None:
        """Declare the recording not replayable, with a reason."""

    def workspace(self, nbytes: int) -> int:
        """Return the address of scratch memory with a fixed location."""

    def paused(self) -> AbstractContextManager[None]:
        """Suspend recording inside the block."""


class Recorder(dict[int, Recording]):
    """Recordings in progress, by thread id."""

    @property
    def recording(self) -> Recording | None:
        """Recording of this thread; usually None."""
        return self.get(get_ident()) if self else None


recorder = Recorder()
