"""A small HTTP/1.1 client on asyncio's transports: connections are kept, and every arrival has its time."""

import asyncio
import ssl
import time
from typing import cast

from auraflux.bench.load.answer import Answer, NotHttp
from auraflux.bench.load.plan import Target
from auraflux.bench.load.record import Record, judge

MOST_REFUSALS = 100
USUAL_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # before a request that was refused is sent again
SHORTEST_PAUSE_S = 0.02
BUSY = 429


class Lost(Exception):
    """A kept connection was closed before it carried anything of an answer."""


class Connection(asyncio.Protocol):
    """Carries one request at a time."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.used = False
        self.open = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self.answer is None:
            # nothing was asked: the connection is of no more use
            self.close()
            return
        try:
            self.answer.feed(now, data)
        except NotHttp as err:
            self._finish(err)
            return
        if self.answer.whole:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self.answer is not None:
            self.answer.close()
        self._finish()

    async def send(self, request: bytes) -> Answer:
        """Send a request and take its answer, which may have broken off."""
        assert self._transport is not None
        answer = self.answer = Answer()
        self._done = asyncio.get_running_loop().create_future()
        again, self.used = self.used, True
        try:
            if self.open:
                self._transport.write(request)
                await self._done
        finally:
            self.answer = None
            if not answer.kept_open:
                self.close()
        if not answer.begun:
            raise Lost if again else ConnectionResetError
        return answer

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, error: Exception | None = None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class Client:
    """Sends requests to one server over as many connections as it takes."""

    def __init__(self, target: Target):
        self.target = target
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if target.secure else None

    async def get(self, path: str, timeout_s: float) -> Answer:
        async with asyncio.timeout(timeout_s):
            return await self._exchange(self._head("GET", path) + b"\r\n")

    async def ask(self, body: bytes, client: int, sent: float, timeout_s: float) -> Record:
        """Ask for a completion; whatever happens becomes part of the record."""
        refused = 0
        request = self._post(body)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    answer = await self._exchange(request)
                    if answer.status != BUSY or refused == MOST_REFUSALS:
                        return judge(answer, client, sent, refused)
                    refused += 1
                    await asyncio.sleep(pause_s(answer))
        except (OSError, NotHttp) as err:
            return Record(client, sent, time.monotonic(), refused=refused, failure=reason(err, timeout_s))

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, request: bytes) -> Answer:
        while True:
            connection = await self._connection()
            try:
                answer = await connection.send(request)
            except Lost:
                # the server tired of waiting, which is no failure
                continue
            if connection.open:
                self._idle.append(connection)
            return answer

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Connection, self.target.host, self.target.port, ssl=self._tls)
        return made

    def _post(self, body: bytes) -> bytes:
        head = self._head("POST", "/v1/completions")
        return head + f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    def _head(self, method: str, path: str) -> bytes:
        lines = [f"{method} {self.target.base}{path} HTTP/1.1", f"host: {self.target.host}:{self.target.port}", "accept: */*"]
        if self.target.api_key is not None:
            lines.append(f"authorization: Bearer {self.target.api_key}")
        return "".join(f"{line}\r\n" for line in lines).encode()


def pause_s(answer: Answer) -> float:
    """How long a server that is busy wants to be left alone."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            # in this order "nan" is the shortest pause
            return min(max(SHORTEST_PAUSE_S, float(answer.headers[name]) * unit_s), LONGEST_PAUSE_S)
        except (KeyError, ValueError):
            continue
    return USUAL_PAUSE_S


def reason(err: Exception, timeout_s: float) -> str:
    """Why there is no answer, in few words, the same for all that failed alike."""
    if isinstance(err, TimeoutError):
        return f"no whole answer within {timeout_s:g} s"
    if isinstance(err, ConnectionRefusedError):
        return "connection refused"
    if isinstance(err, ConnectionError):
        return "connection closed before an answer"
    if isinstance(err, NotHttp):
        return f"not HTTP: {err}"
    words = getattr(err, "strerror", None) or str(err) or type(err).__name__
    return f"no connection: {words}"
