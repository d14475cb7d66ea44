"""`FileWatch`: detection of changes to memory-mapped model files.

Mapped weights are never copied, so modifying or truncating a file while the model runs gives wrong results or SIGBUS. Sizes and
modification times are therefore checked before every step. Replacing a file by rename is harmless: the mapping refers to
the old inode.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from auraflux.errors import FormatError

MAPS = Path("/proc/self/maps")
Stamp = tuple[int, int]  # size in bytes, mtime in ns


class FileWatch:
    """Open descriptors of model files; a changed file that is no longer mapped is dropped."""

    def __init__(self, paths: Iterable[Path]):
        self._files: dict[int, tuple[Path, Stamp]] = {}
        for path in paths:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as err:
                raise FormatError(f"{path} cannot be read: {err.strerror}.") from err
            self._files[descriptor] = (path, _stamp(descriptor))

    def check(self) -> None:
        """Raise if a mapped file has changed."""
        for descriptor, (path, stamp) in self._files.items():
            if _stamp(descriptor) != stamp:
                if self._is_mapped(descriptor):
                    raise FormatError(f"{path} was changed while the model was in use; load it again.")
                os.close(descriptor)
                del self._files[descriptor]
                return

    def _is_mapped(self, descriptor: int) -> bool:
        """Return whether this process maps the file; True if /proc is not available."""
        found = os.fstat(descriptor)
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
        try:
            lines = MAPS.read_text().splitlines()
        except OSError:
            return True
        return any(line.split()[3:5] == [device, str(found.st_ino)] for line in lines)

    # bound as a default: at interpreter exit the module's globals may be gone
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for descriptor in self._files:
            close(descriptor)


def _stamp(descriptor: int) -> Stamp:
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns
