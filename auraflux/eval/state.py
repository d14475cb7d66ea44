"""What a run has measured so far, on disk, so that one that was interrupted goes on."""

import fcntl
import hashlib
import json
from pathlib import Path
from typing import Any

from auraflux.errors import InputError

Key = tuple[str, str]  # setting and task


class State:
    """Records by setting and task, one line of a file each; a line that was cut off is written again."""

    def __init__(self, path: Path):
        self.path = path
        self._found: dict[Key, Any] = {}
        try:
            self._open(path)
        except OSError as err:
            raise InputError(f"what was measured cannot be kept in {path}: {err.strerror or err}.") from err

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            self._file.close()
            raise InputError(f"another run measures the same and keeps it in {path}. Wait until it has ended.") from err
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True):
            record = _parse(line)
            if record is None:
                break
            self._found[record["setting"], record["task"]] = record["result"]
            whole += len(line)
        self._file.truncate(whole)

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def __getitem__(self, key: Key) -> Any:
        return self._found[key]

    def __len__(self) -> int:
        return len(self._found)

    def add(self, setting: str, task: str, result: Any) -> None:
        """Keep a result, on disk before this returns."""
        record = {"setting": setting, "task": task, "result": result}
        # as it will be read again, so that a run that goes on has the same numbers as one that was never interrupted
        line = json.dumps(record)
        try:
            self._append(line.encode() + b"\n")
        except OSError as err:
            raise InputError(f"what was measured cannot be kept in {self.path}: {err.strerror or err}.") from err
        self._found[setting, task] = json.loads(line)["result"]

    def _append(self, line: bytes) -> None:
        """Write a line; one that did not fit is cut off when the file is opened again."""
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """Forget a run that is done: another measures again."""
        # removed before it is unlocked, so that nobody is left with a file that has no name
        self.path.unlink(missing_ok=True)
        self.close()


def _parse(line: bytes) -> dict[str, Any] | None:
    """What `add` wrote as a line; None if it is something else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_whole = line.endswith(b"\n") and isinstance(found, dict) and "result" in found
    return found if is_whole and all(isinstance(found.get(key), str) for key in ("setting", "task")) else None


def digest(*facts: object) -> str:
    """A name for all that a result depends on."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
