"""`Watch`: whether a model's files are what they were when they were mapped.

Weights that are used as they lie on disk are never copied: a file that is written to or cut short while a model runs would give
wrong numbers, or end the process with SIGBUS. So sizes and times are asked for before every step. A file that was replaced by
another of its name is no matter, since the one that is mapped stays as it was.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from auraflux.errors import FormatError

MAPS = Path("/proc/self/maps")
Stamp = tuple[int, int]  # bytes, and nanoseconds of the last change


class Watch:
    """Files that stay open to be asked about; what a model no longer maps is let go of when it changes."""

    def __init__(self, paths: Iterable[Path]):
        self._files: dict[int, tuple[Path, Stamp]] = {}
        for path in paths:
            try:
                number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as err:
                raise FormatError(f"{path} cannot be read: {err.strerror}.") from err
            self._files[number] = (path, _stamp(number))

    def check(self) -> None:
        """Refuse to go on where a mapped file has changed."""
        for number, (path, stamp) in self._files.items():
            if _stamp(number) != stamp:
                if self._is_mapped(number):
                    raise FormatError(f"{path} was changed while the model was in use; load it again.")
                os.close(number)
                del self._files[number]
                return

    def _is_mapped(self, number: int) -> bool:
        """Whether the file is in this process's memory, as far as the system tells."""
        found = os.fstat(number)
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
        try:
            lines = MAPS.read_text().splitlines()
        except OSError:
            return True
        return any(line.split()[3:5] == [device, str(found.st_ino)] for line in lines)

    # at the end of a program the module may be emptied before this is called
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for number in self._files:
            close(number)


def _stamp(number: int) -> Stamp:
    found = os.fstat(number)
    return found.st_size, found.st_mtime_ns
