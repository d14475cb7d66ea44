"""Descriptions of models that are not loaded, read from their files by a process that ends with them."""

import asyncio
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from multiprocessing import get_context

from auraflux.serve.listing import Listing
from auraflux.serve.several.catalog import Entry


class Descriptions:
    """Facts in the files of models. Reading them imports torch and may take long, so another process does it, once."""

    def __init__(self, entries: tuple[Entry, ...]):
        self._entries = entries
        self._executor: ProcessPoolExecutor | None = None
        self._found: dict[str, Future[Listing]] = {}

    async def of(self, entry: Entry) -> Listing:
        """Return the description of a model."""
        if self._executor is None:
            self._executor = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
            self._found = {each.name: self._executor.submit(_describe, each) for each in self._entries}
            # its process ends when all are described
            self._executor.shutdown(wait=False)
        try:
            return await asyncio.wrap_future(self._found[entry.name])
        except BrokenExecutor:
            return Listing(entry.name, "unknown", None, aliases=entry.aliases)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)


def _describe(entry: Entry) -> Listing:
    """Describe a model in the other process."""
    import os
    import signal

    from auraflux.serve.several.files import describe_files

    # the terminal signals all processes; this one ends with its work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return describe_files(entry)
