"""Server-sent events; clients that disconnect or stop reading end their requests."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from auraflux.serve.chat.deltas import Delta, Finish
from auraflux.serve.chat.output import ChatOutput
from auraflux.serve.failures import Failure, failure_of

log = logging.getLogger("auraflux.serve")
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
# a comment that clients skip; proxies and clients close idle connections
ALIVE = b": alive\n\n"
ALIVE_S = 10.0
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


def sse(data: dict[str, Any] | str, event: str | None = None) -> bytes:
    """Return one event as bytes; `event` is its name."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {text}\n\n".encode(errors="replace")


class EventStream(Response):
    """Response that streams events until they end, or the client disconnects or stops reading.

    chunks       bytes of one or more events each
    outputs      their sources, cancelled when the response ends
    error_chunk  returns the event for an error after the first byte
    idle_s       seconds that sending one chunk may take
    """

    media_headers: ClassVar[dict[str, str]] = HEADERS
    keep_alive: ClassVar[bytes | None] = ALIVE

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        outputs: Sequence[ChatOutput],
        error_chunk: Callable[[Failure], bytes],
        idle_s: float = 60.0,
    ):
        super().__init__(headers=self.media_headers)
        del self.headers["content-length"]
        self._chunks, self._outputs, self._error_chunk, self._idle_s = chunks, outputs, error_chunk, idle_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(receive, self._send_all(scope, send), self._outputs)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        connection = _Connection(send, self._idle_s, self.keep_alive)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for chunk in self._chunks:
                    await connection.send(chunk)
            except Exception as err:
                await connection.send(self._error_chunk(self._logged(err, scope)))
            await connection.close()
        # some servers raise it when the client has disconnected
        except OSError:
            pass
        finally:
            connection.stop_timer()

    @staticmethod
    def _logged(err: Exception, scope: Scope) -> Failure:
        """Return the failure of an exception; log server errors."""
        failure = failure_of(err)
        if failure.status >= 500:
            trace = None if isinstance(err, Failure) else err
            log.error(
                "%s failed while streaming: %s", scope.get("state", {}).get("request_id"), failure.message, exc_info=trace
            )
        return failure


class _Connection:
    """Connection to a client: cancels the sending task if the client stops reading, and sends keep-alive bytes."""

    def __init__(self, send: Send, idle_s: float, keep_alive: bytes | None):
        self._send, self._idle_s, self._alive = send, idle_s, keep_alive
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._since, self._sending, self._closed = self._loop.time(), False, False
        self._ping: asyncio.Task[None] | None = None
        self._step_s = min(ALIVE_S, idle_s) / 2
        self._timer = self._loop.call_later(self._step_s, self._check)

    async def send(self, chunk: bytes) -> None:
        self._since, self._sending = self._loop.time(), True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sending = False

    async def close(self) -> None:
        self._closed = self._sending = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def stop_timer(self) -> None:
        self._closed = True
        self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

    def _check(self) -> None:
        waited = self._loop.time() - self._since
        if self._sending and waited > self._idle_s and self._task is not None:
            log.warning("a client read nothing for %.0f s; its request is cancelled", waited)
            self._task.cancel()
            return
        if not self._sending and waited > ALIVE_S and self._alive is not None:
            self._ping = self._loop.create_task(self._send_alive(self._alive))
        self._timer = self._loop.call_later(self._step_s, self._check)

    async def _send_alive(self, alive: bytes) -> None:
        if not self._closed:
            await self.send(alive)


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T], outputs: Sequence[ChatOutput] = ()) -> T | None:
    """Run `work` until it ends or the client disconnects (None); cancel the outputs in either case."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() and not working.cancelled() else None
    finally:
        for output in outputs:
            output.cancel()
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merge_outputs(outputs: Sequence[ChatOutput]) -> AsyncIterator[tuple[int, list[Delta]]]:
    """Yield the deltas of several outputs, each with its output's number."""
    if len(outputs) == 1:
        async for deltas in outputs[0].batches():
            yield 0, deltas
        return
    # bounded, so that no output runs ahead of a slow client
    queue: asyncio.Queue[tuple[int, list[Delta] | Exception]] = asyncio.Queue(len(outputs))
    pumps = [asyncio.ensure_future(_pump(queue, number, output)) for number, output in enumerate(outputs)]
    try:
        running = len(outputs)
        while running:
            number, received = await queue.get()
            if isinstance(received, Exception):
                raise received
            running -= isinstance(received[-1], Finish)
            yield number, received
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(queue: asyncio.Queue[tuple[int, list[Delta] | Exception]], number: int, output: ChatOutput) -> None:
    try:
        async for deltas in output.batches():
            await queue.put((number, deltas))
    except Exception as err:
        await queue.put((number, err))
