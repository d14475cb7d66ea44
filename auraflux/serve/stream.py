"""Answers sent as they come, as server-sent events; and what happens when the client leaves or reads nothing."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from auraflux.serve.answer import Answer
from auraflux.serve.deltas import Delta, Finish
from auraflux.serve.failures import Failure, failure_of

log = logging.getLogger("auraflux.serve")
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
# a comment that clients skip; proxies and clients give up on a connection where nothing comes
ALIVE = b": alive\n\n"
ALIVE_S = 10.0
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


def sse(data: dict[str, Any] | str, event: str | None = None) -> bytes:
    """Spell one event; with `event`, it is named."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {text}\n\n".encode(errors="replace")


class EventStream(Response):
    """Sends parts as they come, until there are no more or the client has left or stopped reading.

    parts    bytes of one or more events each
    answers  they are made of, which are cancelled when the sending ends
    failed   spells an error that comes after the first byte
    idle_s   that one part may take to be sent
    """

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        answers: Sequence[Answer],
        failed: Callable[[Failure], bytes],
        idle_s: float = 60.0,
    ):
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._parts, self._answers, self._failed, self._idle_s = parts, answers, failed, idle_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await attended(receive, self._send_all(scope, send), self._answers)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        line = _Line(send, self._idle_s)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for part in self._parts:
                    await line.send(part)
            except Exception as err:
                await line.send(self._failed(self._said_of(err, scope)))
            await line.close()
        # some servers say so when the client has left
        except OSError:
            pass
        finally:
            line.rest()

    @staticmethod
    def _said_of(err: Exception, scope: Scope) -> Failure:
        failure = failure_of(err)
        if failure.status >= 500:
            about = None if isinstance(err, Failure) else err
            log.error("%s broke off: %s", scope.get("state", {}).get("request_id"), failure.message, exc_info=about)
        return failure


class _Line:
    """A connection to a client: ends the task that sends to one who does not read, tells one who waits that it is alive."""

    def __init__(self, send: Send, idle_s: float):
        self._send, self._idle_s = send, idle_s
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._since, self._sending, self._closed = self._loop.time(), False, False
        self._ping: asyncio.Task[None] | None = None
        self._step_s = min(ALIVE_S, idle_s) / 2
        self._timer = self._loop.call_later(self._step_s, self._look)

    async def send(self, part: bytes) -> None:
        self._since, self._sending = self._loop.time(), True
        await self._send({"type": "http.response.body", "body": part, "more_body": True})
        self._sending = False

    async def close(self) -> None:
        self._closed = self._sending = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def rest(self) -> None:
        self._closed = True
        self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

    def _look(self) -> None:
        waited = self._loop.time() - self._since
        if self._sending and waited > self._idle_s and self._task is not None:
            log.warning("a client read nothing for %.0f s; its answer is stopped", waited)
            self._task.cancel()
            return
        if not self._sending and waited > ALIVE_S:
            self._ping = self._loop.create_task(self._alive())
        self._timer = self._loop.call_later(self._step_s, self._look)

    async def _alive(self) -> None:
        if not self._closed:
            await self.send(ALIVE)


async def attended(receive: Receive, work: Coroutine[Any, Any, T], answers: Sequence[Answer] = ()) -> T | None:
    """Do the work while the client is there; None if it left before. The answers are over in any case."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() and not doing.cancelled() else None
    finally:
        for answer in answers:
            answer.cancel()
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, list[Delta]]]:
    """Give what comes of several answers, with the number of each."""
    if len(answers) == 1:
        async for deltas in answers[0].batches():
            yield 0, deltas
        return
    # no answer runs ahead of a client that reads slowly
    queue: asyncio.Queue[tuple[int, list[Delta] | Exception]] = asyncio.Queue(len(answers))
    pumps = [asyncio.ensure_future(_pump(queue, number, answer)) for number, answer in enumerate(answers)]
    try:
        left = len(answers)
        while left:
            number, came = await queue.get()
            if isinstance(came, Exception):
                raise came
            left -= isinstance(came[-1], Finish)
            yield number, came
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(queue: asyncio.Queue[tuple[int, list[Delta] | Exception]], number: int, answer: Answer) -> None:
    try:
        async for deltas in answer.batches():
            await queue.put((number, deltas))
    except Exception as err:
        await queue.put((number, err))
