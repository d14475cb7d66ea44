"""Results of an evaluation on disk, so that an interrupted run can resume."""

import fcntl
import hashlib
import json
from pathlib import Path
from typing import Any

from auraflux.errors import InputError

Key = tuple[str, str]  # setting and task


class State:
    """Results by setting and task, one JSON line each; a truncated last line is discarded."""

    def __init__(self, path: Path):
        self.path = path
        self._found: dict[Key, Any] = {}
        try:
            self._open(path)
        except OSError as err:
            raise InputError(f"results cannot be saved to {path}: {err.strerror or err}.") from err

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            self._file.close()
            raise InputError(f"another run of the same evaluation writes to {path}. Wait until it ends.") from err
        valid_nbytes = 0
        for line in path.read_bytes().splitlines(keepends=True):
            record = _parse(line)
            if record is None:
                break
            self._found[record["setting"], record["task"]] = record["result"]
            valid_nbytes += len(line)
        self._file.truncate(valid_nbytes)

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def __getitem__(self, key: Key) -> Any:
        return self._found[key]

    def __len__(self) -> int:
        return len(self._found)

    def add(self, setting: str, task: str, result: Any) -> None:
        """Save a result to disk."""
        record = {"setting": setting, "task": task, "result": result}
        # parsed from JSON, so that a resumed run has the same numbers as an uninterrupted one
        line = json.dumps(record)
        try:
            self._append(line.encode() + b"\n")
        except OSError as err:
            raise InputError(f"results cannot be saved to {self.path}: {err.strerror or err}.") from err
        self._found[setting, task] = json.loads(line)["result"]

    def _append(self, line: bytes) -> None:
        """Write a line; a partial line is discarded when the file is opened again."""
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """Delete the results of a finished run."""
        # deleted before it is unlocked, so that no other process locks a deleted file
        self.path.unlink(missing_ok=True)
        self.close()


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parse a line of `add`; return None if it is invalid."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_valid = line.endswith(b"\n") and isinstance(found, dict) and "result" in found
    return found if is_valid and all(isinstance(found.get(key), str) for key in ("setting", "task")) else None


def digest(*facts: object) -> str:
    """Return a digest of everything that a result depends on."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
