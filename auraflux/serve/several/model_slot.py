"""`ModelSlot`: one model of the server, in a process of its own while it is loaded."""

import asyncio
import contextlib
import logging
import math
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from time import time
from typing import Any

from auraflux.serve.failures import LATER, Failure, sentence
from auraflux.serve.limits import Limits
from auraflux.serve.listing import Listing
from auraflux.serve.metrics import Tally
from auraflux.serve.service import Service
from auraflux.serve.several.catalog import Entry
from auraflux.serve.transport.link import ModelPlan
from auraflux.serve.transport.pipe import LOADING, PipeLink

log = logging.getLogger("auraflux.serve")
# for a model process to end
END_S = 10.0
ENDED = "its process ended; the server's log says why."
# what a model process loads: the entry, the bytes of memory for all models, and its end of the pipe
Start = Callable[[Entry, int, Connection], None]


class LoadError(Exception):
    """A model could not be loaded; the message says why."""


@dataclass
class Use:
    """Counts of the users of a model.

    waiting       requests that wait until it is loaded
    running       requests that it serves
    last          when the last one began or ended, on the event loop's clock
    expires       when it is unloaded without further requests
    keep_alive_s  as the last request asked
    """

    waiting: int = 0
    running: int = 0
    last: float = 0.0
    expires: float = math.inf
    keep_alive_s: float | None = None


class ModelSlot:
    """A model of the catalog and its process.

    plan     memory that it takes or will take; None before it is known
    granted  whether it has its memory: it is being loaded, or is loaded
    leaving  whether it must make room: running requests finish, others wait until it is loaded again
    has_ended  whether the process ended by itself
    """

    def __init__(self, entry: Entry, start: Start, limits: Limits, max_queue: int, changed: Callable[[], None]):
        self.entry, self.tally, self.use = entry, Tally(), Use()
        self.plan: ModelPlan | None = None
        self.granted = self.leaving = self.has_ended = False
        self.task: asyncio.Task[None] | None = None
        self._start, self._limits, self._max_queue, self._changed = start, limits, max_queue, changed
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._link: PipeLink | None = None
        self._service: Service | None = None

    @property
    def is_open(self) -> bool:
        """Return whether it takes requests."""
        return self.is_loaded and not self.leaving and not self.has_ended

    @property
    def is_loaded(self) -> bool:
        return self._service is not None and self._link is not None and self._link.facts is not None

    @property
    def is_idle(self) -> bool:
        """Return whether it can be unloaded without anybody noticing."""
        return self.is_loaded and not self.use.running and (self.leaving or not self.use.waiting)

    @property
    def service(self) -> Service:
        assert self._service is not None, f"{self.entry.name} is not loaded"
        return self._service

    @property
    def names(self) -> tuple[str, ...]:
        return self.entry.name, *self.entry.aliases

    async def open(self, memory_nbytes: int) -> ModelPlan:
        """Start its process and return the memory that the model will take; nothing is loaded yet."""
        ours, theirs = multiprocessing.Pipe()
        target = partial(self._start, self.entry, memory_nbytes)
        process = multiprocessing.get_context("spawn").Process(target=target, args=(theirs,), name="auraflux-model")
        self._process, self._connection = process, ours
        await asyncio.to_thread(process.start)
        # the model process ends when this end closes, however this process ends
        theirs.close()
        try:
            found: Any = await asyncio.to_thread(ours.recv)
        except (EOFError, OSError) as err:
            raise LoadError(ENDED) from err
        if not isinstance(found, ModelPlan):
            raise LoadError(sentence(Exception(found[1])))
        self.plan = found
        return found

    async def load(self) -> None:
        """Let the process load the model, and wait until it has."""
        assert self._connection is not None, "open comes first"
        ready = asyncio.Event()
        self._link = PipeLink(self._connection, self._max_queue, on_stop=partial(self._ended, ready), on_ready=ready.set)
        self._link.listen()
        self._link.send(("load",))
        await ready.wait()
        if self._link.facts is None:
            reason = self._link.unavailable_reason
            raise LoadError(ENDED if reason == LOADING else sentence(Exception(reason)))
        self._service = Service(self._link, self._limits, aliases=self.entry.aliases, tally=self.tally)

    def _ended(self, ready: asyncio.Event) -> None:
        """Notice that the process has ended by itself; its requests have failed."""
        self.has_ended = True
        ready.set()
        self._changed()

    async def close(self) -> None:
        """Unload the model: end its process and free its memory."""
        link, process, connection = self._link, self._process, self._connection
        self._link = self._process = self._connection = self._service = None
        if link is not None:
            link.on_stop = lambda: None
            with contextlib.suppress(OSError, ValueError):
                link.close()
        if connection is not None:
            connection.close()
        if process is not None and process.pid is not None:
            await asyncio.to_thread(process.join, END_S)
            process.kill()
            await asyncio.to_thread(process.join)
        self.granted = self.leaving = self.has_ended = False
        self.use.keep_alive_s = None

    def listing(self, loop_time: float, described: Listing) -> Listing:
        """Return what clients may know: of the loaded model, or what its files tell."""
        if not self.is_loaded:
            return described
        listing = self.service.describe()
        expires = None if math.isinf(self.use.expires) else time() + self.use.expires - loop_time
        assert listing.loaded is not None, "it is loaded"
        assert self.plan is not None, "a loaded model has a plan"
        return replace(listing, loaded=replace(listing.loaded, nbytes=self.plan.nbytes, expires_at=expires))


def still_loading(name: str, seconds: float) -> Failure:
    """Return the failure of a request whose model was not loaded in time."""
    message = f"The model {name} was not loaded within {seconds:g} s; try again soon."
    return Failure(503, message, code="model_loading", headers={**LATER, "retry-after": "5"})
