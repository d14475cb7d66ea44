"""`Journal`: progress log of a conversion, so that an interrupted run can resume.

The first line has the source and the settings; each further line is an item that is complete on disk. A line is added after the
item is synced to disk, and ends with a running checksum of all lines. A truncated, modified, moved or repeated line invalidates
itself and all lines after it.
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
    """Progress log of an output folder.

    head     source and settings, which a resuming run must match
    entries  completed items
    """

    def __init__(self, folder: Path, head: dict[str, Any]):
        self.path, self.head = folder / NAME, head
        folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists() and any(folder.iterdir()):
            raise FormatError(f"{folder} exists, and was not left by an interrupted run. Move it out of the way.")
        self._file, self._sum = _locked(self.path), 0
        found = self._read()
        self.entries = found[1:]
        if not found:
            self._file.truncate(0)
            self.add(head, entry=False)
        elif found[0] != head:
            self.close()
            raise self._mismatch(found[0])

    def _read(self) -> list[dict[str, Any]]:
        """Return all valid lines and truncate the rest."""
        self._file.seek(0)
        found, end = [], 0
        for line in self._file:
            content, _, rest = line.rpartition(b" ")
            total = zlib.crc32(content, self._sum)
            # an empty line would leave the checksum unchanged
            if not content or rest != _line_end(total):
                break
            found.append(json.loads(content))
            self._sum, end = total, end + len(line)
        self._file.truncate(end)
        return found

    def _mismatch(self, found: dict[str, Any]) -> FormatError:
        folder = self.path.parent
        if any(found.get(key) != self.head.get(key) for key in ("source", "stamps")):
            return FormatError(f"the model has changed since {folder} was started. Use --force to start again.")
        options = ", ".join(f"{key} {found.get(key)}" for key in self.head if found.get(key) != self.head[key])
        return FormatError(f"{folder} was started with other settings ({options}). Use the same, or --force to start again.")

    def add(self, found: dict[str, Any], entry: bool = True) -> None:
        """Record that an item is complete on disk."""
        content = json.dumps(found).encode()
        self._sum = zlib.crc32(content, self._sum)
        self._file.write(content + b" " + _line_end(self._sum))
        self._file.flush()
        os.fsync(self._file.fileno())
        if entry:
            self.entries.append(found)

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()


def _line_end(total: int) -> bytes:
    """Return the checksum at the end of a line."""
    return f"{total:08x}\n".encode()


def discard(folder: Path) -> None:
    """Remove the output of an interrupted run."""
    if (folder / NAME).exists():
        with _locked(folder / NAME):
            shutil.rmtree(folder)


def _locked(path: Path) -> IO[bytes]:
    """Open a file and lock it exclusively."""
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        file.close()
        raise FormatError(f"{path.parent} is being written by another process.") from err
    return file


def digest(files: Iterable[Path]) -> str:
    """Return a hash that identifies a model: names, sizes and samples of its files."""
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
    """Return each file's mtime in ns, which detects changes that samples miss."""
    return [path.stat().st_mtime_ns for path in files]
