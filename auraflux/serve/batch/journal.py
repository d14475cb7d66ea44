"""`Journal`: responses on disk, one JSON object per line, appended whole; a restart finds which requests are done."""

import json
import os
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from auraflux.errors import InputError

BLOCK = 1 << 20


class Journal:
    """An append-only file of responses. A line that an interruption cut short is dropped when the file is opened again.

    done  custom_ids of its lines
    """

    def __init__(self, path: Path):
        self.path = path
        self.done: set[str] = set()
        self._recover()
        self._file: FileIO = path.open("ab", buffering=0)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def append(self, id: str, response: dict[str, Any]) -> None:
        """Store a response; it is on disk when this returns."""
        if id in self.done:
            return
        text = (json.dumps(response, ensure_ascii=False, separators=(",", ":")) + "\n").encode(errors="replace")
        view = memoryview(text)
        while view:
            view = view[self._file.write(view) :]
        os.fsync(self._file.fileno())
        self.done.add(id)

    def close(self) -> None:
        self._file.close()

    def _recover(self) -> None:
        """Read what is there, and cut off a line without an end."""
        if not self.path.exists():
            return
        end = 0
        with self.path.open("rb+") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self.done.add(str(json.loads(line)["custom_id"]))
                except (ValueError, KeyError, TypeError, RecursionError) as err:
                    raise InputError(
                        f"{self.path.name} has a line {number} that is no response of a batch. Give another file, or remove it."
                    ) from err
                end += len(line)
            file.truncate(end)
