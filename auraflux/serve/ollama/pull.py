"""Downloads that clients ask for, one at a time, with their progress as lines."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from auraflux.errors import AurafluxError
from auraflux.serve.failures import Failure, sentence
from auraflux.serve.ollama.lines import line
from auraflux.weights.download.pull import fetch

# between lines of one step; the first and the last are always sent
LINE_S = 0.2
# a line tells clients that a silent download runs
ALIVE_S = 5.0
PREFIXES = ("hf.co/", "huggingface.co/")


class Downloads:
    """The downloads of a server. One that its client left goes on to the end."""

    def __init__(self) -> None:
        self._running: asyncio.Future[Path] | None = None

    async def present(self) -> AsyncIterator[bytes]:
        """Yield the progress of a model that is here."""
        yield line({"status": "pulling manifest"})
        yield line({"status": "success"})

    async def fetch(self, name: str) -> AsyncIterator[bytes]:
        """Download a built-in model or one of the Hugging Face hub, and yield the progress."""
        if self._running is not None and not self._running.done():
            raise Failure(429, "Another model is being downloaded; try again when it is complete.", code="busy")
        progress = _Progress(asyncio.get_running_loop())
        self._running = asyncio.ensure_future(asyncio.to_thread(fetch, _hub_name(name), progress.report))
        self._running.add_done_callback(progress.end)
        yield line({"status": "pulling manifest"})
        async for status in progress.lines():
            yield status
        try:
            # a client that leaves must not cancel what another waits for
            await asyncio.shield(self._running)
        except AurafluxError as err:
            raise Failure(502, f"{name[:200]} cannot be downloaded: {sentence(err)}", code="download_failed") from err
        yield line({"status": "success"})


class _Progress:
    """Progress of one download, reported by its thread and read by the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._what, self._sent_at = "", 0.0

    def report(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what == self._what and now - self._sent_at < LINE_S and done < total:
            return
        self._what, self._sent_at = what, now
        status = {"status": what, "digest": what, "total": total, "completed": done}
        self._loop.call_soon_threadsafe(self._queue.put_nowait, status)

    def end(self, _: Any) -> None:
        self._queue.put_nowait(None)

    async def lines(self) -> AsyncIterator[bytes]:
        while True:
            try:
                status = await asyncio.wait_for(self._queue.get(), ALIVE_S)
            except TimeoutError:
                status = {"status": self._what or "downloading"}
            if status is None:
                return
            yield line(status)


def _hub_name(name: str) -> str:
    """Return a name in Ollama's form as one on the hub."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name.removesuffix(":latest")
