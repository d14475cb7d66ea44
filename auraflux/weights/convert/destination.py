"""Atomic creation of an output folder by one process at a time.

Output for `DST` is written to `.DST.unfinished`, which contains a lock file, and renamed when complete. A killed run leaves
that folder behind, unlocked; the next run for `DST` restores a target that had been moved away, and removes the rest.
"""

import ctypes
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from auraflux.errors import FormatError

log = logging.getLogger("auraflux")

LOCK_FILE, NEW, OLD = "auraflux-unfinished", "new", "old"
HERE, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


@contextmanager
def working_folder(target: Path, wait: bool = False) -> Iterator[Path]:
    """Yield a locked temporary folder next to `target`, empty except for its lock file, and remove it at the end.

    wait  wait for another process that holds it; otherwise raise
    """
    target = target.absolute()
    folder = working_name(target)
    with _locked(folder, wait):
        _clean_up(folder, target)
        try:
            yield folder
        finally:
            _remove(folder, target)


def clear(target: Path) -> None:
    """Remove the temporary folder of a killed run, unless another process holds it."""
    if working_name(target).exists():
        with suppress(OSError, FormatError), working_folder(target):
            pass


def working_name(target: Path) -> Path:
    if not target.name:
        raise FormatError(f"{target} is no name of a new folder. Give one, such as {target / 'model'}.")
    return target.with_name(f".{target.name}.unfinished")


def _remove(folder: Path, target: Path) -> None:
    """Remove a working folder; leave what cannot be removed to the next run, which recognizes the lock file."""
    try:
        _clean_up(folder, target)
        if os.listdir(folder) == [LOCK_FILE]:
            # if interrupted between the two, an empty folder is left, which the next run accepts
            (folder / LOCK_FILE).unlink()
            folder.rmdir()
            return
        reason = "Directory not empty"
    except OSError as err:
        reason = err.strerror or str(err)
    log.warning("%s could not be removed (%s); the next run for %s removes it.", folder, reason, target)


def put_in_place(made: Path, target: Path, aside: Path, check: Callable[[], None]) -> None:
    """Rename a finished folder to `target`; move an existing target to `aside` if `check` allows replacing it."""
    check()
    new, old = aside / NEW, aside / OLD
    if made != new:
        os.rename(made, new)
    try:
        if os.path.lexists(target):
            if _exchange(new, target):
                return
            os.rename(target, old)
        os.rename(new, target)
    except BaseException:
        if os.path.lexists(old):
            os.rename(old, target)
        if made != new:
            os.rename(new, made)
        raise


def _exchange(made: Path, target: Path) -> bool:
    """Swap two folders atomically with renameat2; return False where the system does not support it."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return function is not None and function(HERE, os.fsencode(made), HERE, os.fsencode(target), EXCHANGE) == 0


@contextmanager
def _locked(folder: Path, wait: bool) -> Iterator[None]:
    """Create a folder if needed and hold its lock."""
    lock_file = folder / LOCK_FILE
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        if not lock_file.exists() and any(folder.iterdir()):
            raise FormatError(f"{folder} exists, and was not left by an interrupted run. Move it out of the way.")
        try:
            file = lock_file.open("ab")
        except FileNotFoundError:
            # another process has just removed it
            continue
        except OSError:
            with suppress(OSError):
                folder.rmdir()
            raise
        with file:
            _lock(file, folder, wait)
            # it may have been removed between open and lock
            if lock_file.exists() and os.path.samestat(os.fstat(file.fileno()), lock_file.stat()):
                yield
                return


def _lock(file: IO[bytes], folder: Path, wait: bool) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as err:
        raise FormatError(f"{folder} is being written by another process.") from err


def _clean_up(folder: Path, target: Path) -> None:
    """Restore a target that was moved aside and not replaced, and remove everything except the lock file."""
    old = folder / OLD
    if os.path.lexists(old) and not os.path.lexists(target):
        os.rename(old, target)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK_FILE:
            path.unlink()
