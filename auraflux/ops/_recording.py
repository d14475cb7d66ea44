"""The steps that are being recorded, by thread: one object, which ops and CPU kernels ask at every call.

Most of the time nobody records. So that asking then costs a truth value, `recorder` is a dict, and an empty one.
"""

from array import array
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, Protocol

from torch import Tensor


class Recording(Protocol):
    """A step on its way to being repeated without its Python, see `simd/record.py`."""

    def add(self, code: int, args: array, jobs: int) -> None:
        """Note a launch."""

    def keep(self, memory: Any) -> None:
        """Hold on to memory that a launch points to."""

    def ask(self, code: int, args: array) -> None:
        """Note a question that Python has asked a kernel; the answer is the last of its numbers."""

    def looks(self, address: int) -> bool:
        """Whether to look for what a kernel found wrong."""

    def read(self, how: str, tensor: Tensor) -> None:
        """Hear that Python reads a tensor's values."""

    def spoil(self, reason: str) -> None:
        """Say why the step cannot be repeated."""

    def workspace(self, nbytes: int) -> int:
        """Address of scratch memory that stays where it is."""

    def paused(self) -> AbstractContextManager[None]:
        """Look away: what is done inside leaves nothing behind."""


class Recorder(dict[int, Recording]):
    """What each thread records, by its number."""

    @property
    def recording(self) -> Recording | None:
        """What this thread records; None most of the time."""
        return self.get(get_ident()) if self else None


recorder = Recorder()
