"""Checksums of files that were fetched, and a note beside each that was found right, so that it is not read again every time.

A note holds size and time of the file. It finds accidents, not intent: who can write to the file can write to its note.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

BLOCK = 1 << 20
NOTE = ".verified"


def digest(path: Path, kind: str, advance: Callable[[int, int], None] = lambda done, total: None) -> str:
    """The hash of a file: "sha256", or "git" as git names its contents."""
    total, done = path.stat().st_size, 0
    found = hashlib.sha256() if kind == "sha256" else hashlib.sha1(f"blob {total}\0".encode())
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found.update(block)
            done += len(block)
            advance(done, total)
    return found.hexdigest()


def _facts(path: Path, hash: str) -> dict[str, object]:
    found = path.stat()
    return {"hash": hash, "nbytes": found.st_size, "mtime_ns": found.st_mtime_ns}


def _note(path: Path) -> Path:
    return path.with_name(f".{path.name}{NOTE}")


def remember(path: Path, hash: str) -> None:
    """Note that a file has a hash; where that cannot be written, it is read again the next time."""
    with contextlib.suppress(OSError):
        _note(path).write_text(json.dumps(_facts(path, hash)))


def is_remembered(path: Path, hash: str) -> bool:
    """Whether a file is as it was when it was found to have a hash."""
    try:
        return json.loads(_note(path).read_text()) == _facts(path, hash)
    except (OSError, ValueError):
        return False
