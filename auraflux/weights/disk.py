"""What the system is told about files: to write them out, and to drop them from its page cache."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file or a folder's names are on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def forget(file: int, start: int = 0, nbytes: int = 0) -> None:
    """Have an open file, or a part of it, dropped from the page cache where the system can; what is not on disk stays."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, nbytes, os.POSIX_FADV_DONTNEED)
