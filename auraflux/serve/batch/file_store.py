"""`FileStore`: clients' files on disk, each in a folder of its own with a description."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from auraflux.errors import InputError
from auraflux.serve.failures import Failure

ID = re.compile(r"(?:file|batch)_[0-9a-f]{32}")
CONTENT, ABOUT = "content", "about.json"
KEPT_S = 30 * 24 * 3600
MAX_FILES = 10_000


class FileStore:
    """Files below a folder that only its owner can read. A file belongs to the API key of the client that uploaded it."""

    def __init__(self, folder: Path):
        self._folder = folder / "files"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as err:
            raise InputError(f"the folder for files {folder} cannot be made: {err.strerror or err}.") from err

    def add(self, owner: str, name: str, purpose: str, content: bytes) -> dict[str, Any]:
        """Store a file; it appears whole or not at all."""
        if sum(1 for _ in self._folder.iterdir()) >= MAX_FILES:
            raise Failure(429, f"There are {MAX_FILES:,} files; delete some.", code="too_many_files")
        id = new_id("file")
        working = self._folder / f".{id}"
        working.mkdir(mode=0o700)
        (working / CONTENT).write_bytes(content)
        about = describe(id, name, purpose, len(content))
        write_json(working / ABOUT, {**about, "owner": owner})
        os.replace(working, self._folder / id)
        return about

    def adopt(self, id: str, owner: str, name: str, source: Path) -> None:
        """Make a finished file one of the store's, under an id that was chosen before; do nothing if it is."""
        target, working = self._folder / id, self._folder / f".{id}"
        if target.exists():
            return
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir(mode=0o700)
        shutil.copyfile(source, working / CONTENT)
        about = describe(id, name, "batch_output", source.stat().st_size)
        write_json(working / ABOUT, {**about, "owner": owner})
        os.replace(working, target)

    def about(self, owner: str, id: str) -> dict[str, Any]:
        """Return the description of a file; Failure 404 for one that is not there, or is another client's."""
        found = read_json(self._folder / id / ABOUT) if ID.fullmatch(id) else None
        if found is None or found.pop("owner", None) != owner:
            raise Failure(404, f"There is no file {id[:80]!r}.", code="file_not_found", param="file_id")
        return found

    def content(self, owner: str, id: str) -> Path:
        """Return the path of a file's content."""
        self.about(owner, id)
        return self._folder / id / CONTENT

    def delete(self, owner: str, id: str) -> None:
        self.about(owner, id)
        shutil.rmtree(self._folder / id, ignore_errors=True)

    def listed(self, owner: str) -> list[dict[str, Any]]:
        """Return the descriptions of a client's files, newest first."""
        found = [
            about for about in map(read_json, self._descriptions()) if about is not None and about.pop("owner", None) == owner
        ]
        return sorted(found, key=lambda about: (-about["created_at"], about["id"]))

    def drop_unfinished(self) -> None:
        """Delete what an interruption left behind; only while no client uploads."""
        for unfinished in self._folder.glob(".file_*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def clean_up(self) -> None:
        """Delete files that have expired."""
        for path in list(self._descriptions()):
            about = read_json(path)
            if about is not None and about["expires_at"] <= time.time():
                shutil.rmtree(path.parent, ignore_errors=True)

    def _descriptions(self) -> Iterator[Path]:
        return self._folder.glob(f"file_*/{ABOUT}")


def describe(id: str, name: str, purpose: str, nbytes: int) -> dict[str, Any]:
    """Return a file in OpenAI's form."""
    created = int(time.time())
    return {
        "id": id,
        "object": "file",
        "bytes": nbytes,
        "created_at": created,
        "expires_at": created + KEPT_S,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
    }


def new_id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole or not at all."""
    working = path.with_name(f".{path.name}")
    with working.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(working, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file; None if there is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
