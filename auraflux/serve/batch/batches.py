"""`Batches`: batches on disk, run one after another, also after a restart."""

import asyncio
import contextlib
import logging
import shutil
import time
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from auraflux.errors import AurafluxError, InputError
from auraflux.serve.batch.file_store import ID, KEPT_S, FileStore, new_id, read_json, write_json
from auraflux.serve.batch.journal import Journal
from auraflux.serve.batch.lines import BatchLine, read_lines
from auraflux.serve.batch.work import run_lines
from auraflux.serve.failures import Failure, sentence

log = logging.getLogger("auraflux.serve")
STATE = "batch.json"
ENDED = ("completed", "failed", "cancelled", "expired")
AT_ONCE = 8  # requests of a batch
CLEAN_UP_S = 3600.0
SAVE_S = 1.0  # between counts of finished requests on disk
WINDOW_S = 24 * 3600


class Batches:
    """The batches below a folder.

    files  inputs and results
    """

    def __init__(self, folder: Path):
        self.files = FileStore(folder)
        self._folder = folder / "batches"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._wake = asyncio.Event()
        self._running: tuple[str, asyncio.Task[None]] | None = None
        self._task: asyncio.Task[None] | None = None
        self._saved_at = 0.0

    def start(self, app: ASGIApp) -> None:
        """Run the batches that are not finished, and later ones, through an application."""
        self.files.drop_unfinished()
        self._task = asyncio.ensure_future(self._run(app))

    async def stop(self) -> None:
        """Interrupt the running batch; it goes on at the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def create(self, owner: str, file_id: str, endpoint: str, window: str, metadata: dict[str, str]) -> dict[str, Any]:
        """Queue a batch."""
        self.files.about(owner, file_id)
        now, id = int(time.time()), new_id("batch")
        state = {
            "id": id,
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": file_id,
            "completion_window": window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": None,
            "expires_at": now + WINDOW_S,
            "finalizing_at": None,
            "completed_at": None,
            "failed_at": None,
            "expired_at": None,
            "cancelling_at": None,
            "cancelled_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        (self._folder / id).mkdir(mode=0o700)
        # the input belongs to the batch: its client may delete the file
        shutil.copyfile(self.files.content(owner, file_id), self._folder / id / "input.jsonl")
        self._save({**state, "owner": owner})
        self._wake.set()
        return state

    def get(self, owner: str, id: str) -> dict[str, Any]:
        """Return a batch; Failure 404 for one that is not there, or is another client's."""
        found = read_json(self._folder / id / STATE) if ID.fullmatch(id) else None
        if found is None or found.pop("owner", None) != owner:
            raise Failure(404, f"There is no batch {id[:80]!r}.", code="batch_not_found", param="batch_id")
        return found

    def listed(self, owner: str) -> list[dict[str, Any]]:
        """Return a client's batches, newest first."""
        found = [state for state in self._all() if state.pop("owner", None) == owner]
        return sorted(found, key=lambda state: (-state["created_at"], state["id"]))

    def cancel(self, owner: str, id: str) -> dict[str, Any]:
        """Stop a batch; the responses so far become its files."""
        state = self.get(owner, id)
        if state["status"] in ENDED:
            raise Failure(400, f"The batch {id} is {state['status']} and cannot be cancelled.", code="invalid_value")
        state |= {"status": "cancelling", "cancelling_at": int(time.time())}
        self._save({**state, "owner": owner})
        if self._running is not None and self._running[0] == id:
            self._running[1].cancel()
        self._wake.set()
        return state

    async def _run(self, app: ASGIApp) -> None:
        while True:
            self._wake.clear()
            self._clean_up()
            for state in sorted(self._all(), key=lambda each: (each["created_at"], each["id"])):
                if state["status"] not in ENDED:
                    await self._process(app, state)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), CLEAN_UP_S)

    async def _process(self, app: ASGIApp, state: dict[str, Any]) -> None:
        """Run one batch to its end."""
        id, owner = state["id"], state["owner"]
        try:
            with Journal(self._folder / id / "output.jsonl") as outputs, Journal(self._folder / id / "error.jsonl") as errors:
                if state["status"] != "cancelling":
                    lines = await asyncio.to_thread(self._lines, state)
                    state["request_counts"] = _counts(lines, outputs, errors)
                    self._save(state | {"status": "in_progress", "in_progress_at": state["in_progress_at"] or int(time.time())})
                    work = run_lines(
                        app,
                        lines,
                        outputs=outputs,
                        errors=errors,
                        caller=f"batch/{owner}",
                        at_once=AT_ONCE,
                        on_done=lambda: self._progress(id, lines, outputs, errors),
                    )
                    self._running = id, asyncio.ensure_future(work)
                    await self._until_done(self._running[1])
                state = self._finished(id, len(outputs.done), len(errors.done))
        except (AurafluxError, OSError) as err:
            log.warning("the batch %s failed: %s", id, err)
            problem = {"code": "invalid_request", "message": sentence(err), "line": None, "param": None}
            errors_list = {"object": "list", "data": [problem]}
            state |= {"status": "failed", "failed_at": int(time.time()), "errors": errors_list}
        finally:
            self._running = None
        self._save(state)

    @staticmethod
    async def _until_done(work: asyncio.Task[None]) -> None:
        """Wait for the requests of a batch; a client may cancel them, and a stopping server cancels this task."""
        try:
            await asyncio.wait((work,))
        finally:
            work.cancel()
        if not work.cancelled() and (err := work.exception()) is not None:
            raise err

    def _lines(self, state: dict[str, Any]) -> list[BatchLine]:
        with (self._folder / state["id"] / "input.jsonl").open("rb") as file:
            return list(read_lines(file, state["endpoint"]))

    def _progress(self, id: str, lines: list[BatchLine], outputs: Journal, errors: Journal) -> None:
        now = time.monotonic()
        if now - self._saved_at < SAVE_S:
            return
        self._saved_at, state = now, read_json(self._folder / id / STATE)
        if state is not None:
            self._save(state | {"request_counts": _counts(lines, outputs, errors)})

    def _finished(self, id: str, completed: int, failed: int) -> dict[str, Any]:
        """Return the state of a batch whose requests have ended, with its files."""
        state = read_json(self._folder / id / STATE)
        if state is None:
            raise InputError("its description is damaged.")
        now, folder = int(time.time()), self._folder / id
        state["request_counts"] |= {"completed": completed, "failed": failed}
        for count, name, key in ((completed, "output", "output_file_id"), (failed, "error", "error_file_id")):
            if count:
                # chosen once, so that a restart at this point makes no second file
                state[key] = state[key] or f"file_{id.removeprefix('batch_')[:31]}{'0' if name == 'output' else '1'}"
                self.files.adopt(state[key], state["owner"], f"{id}_{name}.jsonl", folder / f"{name}.jsonl")
        if state["status"] == "cancelling":
            return state | {"status": "cancelled", "cancelled_at": now}
        return state | {"status": "completed", "finalizing_at": now, "completed_at": now}

    def _save(self, state: dict[str, Any]) -> None:
        write_json(self._folder / state["id"] / STATE, state)

    def _all(self) -> list[dict[str, Any]]:
        return [state for path in self._folder.glob(f"batch_*/{STATE}") if (state := read_json(path)) is not None]

    def _clean_up(self) -> None:
        """Delete files and batches that have expired."""
        self.files.clean_up()
        for state in self._all():
            if state["status"] in ENDED and state["created_at"] + KEPT_S <= time.time():
                shutil.rmtree(self._folder / state["id"], ignore_errors=True)


def _counts(lines: list[BatchLine], outputs: Journal, errors: Journal) -> dict[str, int]:
    return {"total": len(lines), "completed": len(outputs.done), "failed": len(errors.done)}
