"""Where a folder is written: beside its place, which it takes when it is whole, by one process at a time.

What is written for `DST` lies in `.DST.unfinished`, which has a locked file in it. A run that was killed leaves that folder
behind, unlocked; the next run for `DST` puts back what had been moved out of the way, and removes the rest.
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

MARK, NEW, OLD = "auraflux-unfinished", "new", "old"
HERE, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


@contextmanager
def working_folder(target: Path, wait: bool = False) -> Iterator[Path]:
    """A folder beside `target` that no other process uses, empty but for its mark, and gone at the end.

    wait  until another process that has it is done; otherwise that is an error
    """
    target = target.absolute()
    folder = working_name(target)
    with _claimed(folder, wait):
        _tidy(folder, target)
        try:
            yield folder
        finally:
            _remove(folder, target)


def clear(target: Path) -> None:
    """Remove what a killed run has left beside a target that is there, unless another process has it."""
    if working_name(target).exists():
        with suppress(OSError, FormatError), working_folder(target):
            pass


def working_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.unfinished")


def _remove(folder: Path, target: Path) -> None:
    """Remove a working folder; what cannot be removed is left to the next run, which knows it by its mark."""
    try:
        _tidy(folder, target)
        if os.listdir(folder) == [MARK]:
            # without the mark it is empty, which is no hindrance either
            (folder / MARK).unlink()
            folder.rmdir()
            return
        reason = "Directory not empty"
    except OSError as err:
        reason = err.strerror or str(err)
    log.warning("%s could not be removed (%s); the next run for %s removes it.", folder, reason, target)


def put_in_place(made: Path, target: Path, aside: Path, check: Callable[[], None]) -> None:
    """Rename a folder to what it shall be called; what has that name by then is moved aside if `check` lets it be replaced."""
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
    """Let two folders change names at once, where the system can: then there is no moment without a target."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return function is not None and function(HERE, os.fsencode(made), HERE, os.fsencode(target), EXCHANGE) == 0


@contextmanager
def _claimed(folder: Path, wait: bool) -> Iterator[None]:
    """Hold a folder's lock, making it if need be."""
    mark = folder / MARK
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and any(folder.iterdir()):
            raise FormatError(f"{folder} is there, and was not left by an interrupted run. Move it out of the way.")
        try:
            file = mark.open("ab")
        except FileNotFoundError:
            # another process has just finished with it
            continue
        except OSError:
            with suppress(OSError):
                folder.rmdir()
            raise
        with file:
            _lock(file, folder, wait)
            # it may have been removed between being opened and locked
            if mark.exists() and os.path.samestat(os.fstat(file.fileno()), mark.stat()):
                yield
                return


def _lock(file: IO[bytes], folder: Path, wait: bool) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as err:
        raise FormatError(f"{folder} is being written by another process.") from err


def _tidy(folder: Path, target: Path) -> None:
    """Put back what was moved aside and not replaced, and remove all else but the mark."""
    old = folder / OLD
    if os.path.lexists(old) and not os.path.lexists(target):
        os.rename(old, target)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != MARK:
            path.unlink()
