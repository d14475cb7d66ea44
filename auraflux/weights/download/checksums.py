"""Checksums of downloaded files, and a record next to each verified file so that it is not hashed again every time.

A record has the file's size and mtime. It detects accidents, not tampering:
anyone who can modify the file can modify the record.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

BLOCK = 1 << 20
SUFFIX = ".verified"


def digest(path: Path, kind: str, advance: Callable[[int, int], None] = lambda done, total: None) -> str:
    """Return the hash of a file: "sha256", or "git" for its git blob id."""
    total, done = path.stat().st_size, 0
    found = hashlib.sha256() if kind == "sha256" else hashlib.sha1(f"blob {total}\0".encode())
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found.update(block)
            done += len(block)
            advance(done, total)
    return found.hexdigest()


def _stat_record(path: Path, hash: str) -> dict[str, object]:
    found = path.stat()
    return {"hash": hash, "nbytes": found.st_size, "mtime_ns": found.st_mtime_ns}


def _record_path(path: Path) -> Path:
    return path.with_name(f".{path.name}{SUFFIX}")


def record_verified(path: Path, hash: str) -> None:
    """Record that a file has a hash; if the record cannot be written, the file is hashed again next time."""
    with contextlib.suppress(OSError):
        _record_path(path).write_text(json.dumps(_stat_record(path, hash)))


def is_verified(path: Path, hash: str) -> bool:
    """Return whether a file is unchanged since it was verified to have a hash."""
    try:
        return json.loads(_record_path(path).read_text()) == _stat_record(path, hash)
    except (OSError, ValueError):
        return False
