"""One replica: the HTTP application in this process, its model in another, as in `auraflux serve`."""

import asyncio
import logging
import multiprocessing
import os
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from typing import Any
from uuid import uuid4

from starlette.types import Message, Scope

from auraflux.errors import BackendError
from auraflux.serve.app import make_app
from auraflux.serve.service import Service
from auraflux.serve.transport.http_process import HttpSettings, set_up_log
from auraflux.serve.transport.pipe import PipeLink
from auraflux.tokenizer.template_process import process as template_process

log = logging.getLogger("auraflux")
POLL_S = 0.05  # between checks whether the model is loaded
END_S = 10.0  # for the model process to end

# ASGI scope fields that can be sent to another process
FIELDS = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
    "server",
)
ReplicaRequest = tuple[dict[str, Any], bytes]


class Replica:
    """Serves requests, each a scope and a body, with the ASGI messages of the application.

    load      target of the model process: loads the model and serves the given connection
    settings  of the application
    steady    whether an unavailable model recovers by itself
    """

    def __init__(self, load: Callable[[Connection], None], settings: HttpSettings, steady: bool = False):
        set_up_log(settings.log_json)
        self._settings, self._steady, self._listening = settings, steady, False
        self._name = uuid4().hex[:8]
        ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=load, args=(theirs,), name="auraflux-model", daemon=False
        )
        self._process.start()
        # the model process ends when this end closes, however this process ends
        theirs.close()
        self._connection, self._link = ours, PipeLink(ours, settings.waiting, self._on_model_end)
        self._service = Service(self._link, settings.limits)
        self._app = make_app(self._service, settings.access)
        template_process.warm_up()

    async def start(self) -> "Replica":
        """Wait until the model is loaded."""
        self._link.listen()
        self._listening = True
        while self._link.facts is None:
            if not self._process.is_alive():
                raise BackendError("the model process ended while it loaded the model; see the log above.")
            await asyncio.sleep(POLL_S)
        return self

    def _on_model_end(self) -> None:
        """Exit before any client sees an error, so that the router retries on another replica."""
        if self._listening and self._link.facts is not None:
            log.error("the model process ended; this replica exits")
            os._exit(1)

    def check_health(self) -> None:
        """Raise if this replica cannot serve requests any more."""
        if not self._process.is_alive():
            raise BackendError("the model process has ended.")
        if self._link.facts is None and not self._steady:
            raise BackendError(self._link.unavailable_reason)

    async def respond(self, request: ReplicaRequest) -> AsyncIterator[list[Message]]:
        """Yield the messages of a response; those that arrive together form one list."""
        queue: asyncio.Queue[Message | None] = asyncio.Queue()
        task = asyncio.ensure_future(self._app(*_asgi_arguments(request), queue.put))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            more = True
            while more:
                batch = [await queue.get()]
                while not queue.empty():
                    batch.append(queue.get_nowait())
                more = batch[-1] is not None
                yield [message for message in batch if message is not None]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def full_response(self, request: ReplicaRequest) -> tuple[str, int, bytes]:
        """Return this replica's name, and the status and body of a response."""
        messages = [message async for batch in self.respond(request) for message in batch]
        return self._name, messages[0]["status"], b"".join(message.get("body", b"") for message in messages[1:])

    async def close(self) -> None:
        """Drain running requests, and end the model process."""
        await self._service.drain(self._settings.grace_s)
        self._listening = False
        self._link.close()
        self._connection.close()
        await asyncio.to_thread(self._process.join, END_S)
        self._process.kill()


def _asgi_arguments(request: ReplicaRequest) -> tuple[Scope, Callable[[], Any]]:
    """Return the scope and receive function for an ASGI application."""
    scope, body = request
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if parts:
            return parts.pop()
        # the next message would be the disconnect, which cancels the task instead
        return await asyncio.get_running_loop().create_future()

    return {**scope, "asgi": {"version": "3.0"}, "state": {}}, receive
