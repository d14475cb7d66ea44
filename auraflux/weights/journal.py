"""`Journal`: what of a long piece of writing is done, so that it can go on after it was stopped.

Its first line says what is written from what, with which settings; each further line is a thing that is whole on disk. A line
is added after the thing itself has reached the disk, and ends with a checksum of all up to here. One that was cut off, changed,
moved or repeated counts as not there, and so do those after it.
"""

import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from auraflux.errors import FormatError

NAME = "journal.jsonl"
SAMPLES, SAMPLE_NBYTES = 64, 1 << 16


class Journal:
    """The journal of a folder that is being written.

    head     what every later run must say too
    entries  what is done
    """

    def __init__(self, folder: Path, head: dict[str, Any]):
        self.path, self.head = folder / NAME, head
        folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists() and any(folder.iterdir()):
            raise FormatError(f"{folder} is there, and was not left by an interrupted run. Move it out of the way.")
        self._file, self._sum = _locked(self.path), 0
        found = self._read()
        self.entries = found[1:]
        if not found:
            self._file.truncate(0)
            self.add(head, entry=False)
        elif found[0] != head:
            self.close()
            raise self._other(found[0])

    def _read(self) -> list[dict[str, Any]]:
        """All whole lines; what follows them is cut off."""
        self._file.seek(0)
        found, end = [], 0
        for line in self._file:
            content, _, rest = line.rpartition(b" ")
            total = zlib.crc32(content, self._sum)
            # nothing at all leaves a checksum as it was
            if not content or rest != _written(total):
                break
            found.append(json.loads(content))
            self._sum, end = total, end + len(line)
        self._file.truncate(end)
        return found

    def _other(self, found: dict[str, Any]) -> FormatError:
        folder = self.path.parent
        if any(found.get(key) != self.head.get(key) for key in ("source", "stamps")):
            return FormatError(f"the model has changed since {folder} was begun. Use --force to begin again.")
        options = ", ".join(f"{key} {found.get(key)}" for key in self.head if found.get(key) != self.head[key])
        return FormatError(f"{folder} was begun with other settings ({options}). Use the same, or --force to begin again.")

    def add(self, found: dict[str, Any], entry: bool = True) -> None:
        """Note that something is whole on disk."""
        content = json.dumps(found).encode()
        self._sum = zlib.crc32(content, self._sum)
        self._file.write(content + b" " + _written(self._sum))
        self._file.flush()
        os.fsync(self._file.fileno())
        if entry:
            self.entries.append(found)

    def close(self) -> None:
        """Let others write."""
        self._file.close()


def _written(total: int) -> bytes:
    """A checksum as it ends a line."""
    return f"{total:08x}\n".encode()


def discard(folder: Path) -> None:
    """Remove what an interrupted run has left."""
    if (folder / NAME).exists():
        with _locked(folder / NAME):
            shutil.rmtree(folder)


def _locked(path: Path) -> IO[bytes]:
    """A file that no other process has open this way."""
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        file.close()
        raise FormatError(f"{path.parent} is being written by another process.") from err
    return file


def digest(files: Iterable[Path]) -> str:
    """Tell a model from others: a hash of its files' names and sizes, and of samples of their contents."""
    found = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name}\n{size}\n".encode())
        with path.open("rb", buffering=0) as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_NBYTES) * sample // (SAMPLES - 1))
                found.update(file.read(SAMPLE_NBYTES))
                if size <= SAMPLE_NBYTES:
                    break
    return f"sha256:{found.hexdigest()}"


def stamps(files: Iterable[Path]) -> list[int]:
    """When each file was last written, in nanoseconds: finds changes that samples do not."""
    return [path.stat().st_mtime_ns for path in files]
