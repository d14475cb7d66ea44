"""Where a folder is written: beside its place, which it takes when it is whole, by one process at a time.

What is written for `DST` lies in `.DST.unfinished`, which has a locked file in it. A run that was killed leaves that folder
behind, unlocked; the next run for `DST` puts back what had been moved out of the way, and removes the rest.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from auraflux.errors import FormatError

MARK, OLD = "auraflux-unfinished", "old"


@contextmanager
def working_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that no other process uses, empty but for its mark, and gone at the end."""
    target = target.absolute()
    folder = target.with_name(f".{target.name}.unfinished")
    with _claimed(folder):
        _tidy(folder, target)
        try:
            yield folder
        finally:
            _tidy(folder, target)
            # the mark goes last, so that what is left of a folder is known by it
            (folder / MARK).unlink()
            folder.rmdir()


def put_in_place(made: Path, target: Path, aside: Path, check: Callable[[], None]) -> None:
    """Rename a folder to what it shall be called; what has that name by then is moved aside if `check` lets it be replaced."""
    check()
    old = aside / OLD
    if os.path.lexists(target):
        os.rename(target, old)
    try:
        os.rename(made, target)
    except BaseException:
        if os.path.lexists(old):
            os.rename(old, target)
        raise


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
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
        with file:
            _lock(file, folder)
            # it may have been removed between being opened and locked
            if mark.exists() and os.path.samestat(os.fstat(file.fileno()), mark.stat()):
                yield
                return


def _lock(file: IO[bytes], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
