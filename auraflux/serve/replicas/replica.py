"""One replica: the HTTP application in this process, its model in another, as `auraflux serve` has them."""

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
from auraflux.run.template_process import process as template_process
from auraflux.serve.app import make_app
from auraflux.serve.front import FrontSettings, set_up_log
from auraflux.serve.pipe import PipeLink
from auraflux.serve.service import Service

log = logging.getLogger("auraflux")
LOOK_S = 0.05  # between two looks whether the model is loaded
END_S = 10.0  # in which the model's process must end

# what an application is told of a request, and can be sent to another process
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
Asked = tuple[dict[str, Any], bytes]


class Replica:
    """Answers requests, each given as a scope and a body, with the messages of the application.

    load      run as a process, it loads the model and answers through the connection it is given
    settings  how the application behaves
    steady    whether the model comes back by itself when it cannot answer for a while
    """

    def __init__(self, load: Callable[[Connection], None], settings: FrontSettings, steady: bool = False):
        set_up_log(settings.log_json)
        self._settings, self._steady, self._listening = settings, steady, False
        self._name = uuid4().hex[:8]
        ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=load, args=(theirs,), name="auraflux-model", daemon=False
        )
        self._process.start()
        # the model ends when nobody is at this end, however this process ends
        theirs.close()
        self._connection, self._link = ours, PipeLink(ours, settings.waiting, self._ended)
        self._service = Service(self._link, settings.limits)
        self._app = make_app(self._service, settings.access)
        template_process.warm_up()

    async def start(self) -> "Replica":
        """Wait until the model is loaded."""
        self._link.listen()
        self._listening = True
        while self._link.facts is None:
            if not self._process.is_alive():
                raise BackendError("the model's process ended while the model was loaded; the log above says why.")
            await asyncio.sleep(LOOK_S)
        return self

    def _ended(self) -> None:
        """End with the model, before anybody is told that it failed: the door asks another replica."""
        if self._listening and self._link.facts is not None:
            log.error("the model's process ended, and this replica with it")
            os._exit(1)

    def check_health(self) -> None:
        """Raise if this replica is of no use any more."""
        if not self._process.is_alive():
            raise BackendError("the model's process has ended.")
        if self._link.facts is None and not self._steady:
            raise BackendError(self._link.why_not)

    async def answer(self, asked: Asked) -> AsyncIterator[list[Message]]:
        """Give the messages of an answer, those that came together in one list."""
        told: asyncio.Queue[Message | None] = asyncio.Queue()
        answering = asyncio.ensure_future(self._app(*_received(asked), told.put))
        answering.add_done_callback(lambda _: told.put_nowait(None))
        try:
            more = True
            while more:
                came = [await told.get()]
                while not told.empty():
                    came.append(told.get_nowait())
                more = came[-1] is not None
                yield [message for message in came if message is not None]
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def whole(self, asked: Asked) -> tuple[str, int, bytes]:
        """Give this replica's name, and the status and body of an answer."""
        messages = [message async for part in self.answer(asked) for message in part]
        return self._name, messages[0]["status"], b"".join(message.get("body", b"") for message in messages[1:])

    async def close(self) -> None:
        """Finish what was begun, and end the model."""
        await self._service.drain(self._settings.grace_s)
        self._listening = False
        self._link.close()
        self._connection.close()
        await asyncio.to_thread(self._process.join, END_S)
        self._process.kill()


def _received(asked: Asked) -> tuple[Scope, Callable[[], Any]]:
    """What an application is called with."""
    scope, body = asked
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if parts:
            return parts.pop()
        # whoever asks for more waits for the client to leave, which ends the task
        return await asyncio.get_running_loop().create_future()

    return {**scope, "asgi": {"version": "3.0"}, "state": {}}, receive
