"""File system calls on the page cache: flush files to disk, and drop them from memory."""

import os
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Flush a file or a directory to disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def drop_page_cache(file: int, start: int = 0, nbytes: int = 0) -> None:
    """Drop clean pages of an open file from the page cache, where the system supports it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, nbytes, os.POSIX_FADV_DONTNEED)
