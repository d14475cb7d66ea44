"""The HTTP client of `bench serve`, on aiohttp: connections are reused, and every arrival of a stream has its time."""

import asyncio
import re
import time
from types import SimpleNamespace
from typing import Any

from auraflux.bench.load.record import Record, judge
from auraflux.bench.load.response import ProtocolError, Response
from auraflux.bench.load.workload import Target
from auraflux.errors import BackendError

try:
    import aiohttp
    from aiohttp import ClientError
except ImportError as err:
    raise BackendError("`auraflux bench serve` needs aiohttp. Install it with: pip install aiohttp") from err

MAX_REFUSALS = 100
# before a request that was refused is sent again
DEFAULT_PAUSE_S, MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 0.02, 30.0
KEEPALIVE_S = 3600.0
BUSY = 429
QUOTED, MAX_QUOTED = re.compile(r"b'.*'|b\".*\""), 40


class Client:
    """Sends requests to one server over as many connections as there are requests at once."""

    def __init__(self, target: Target):
        self.target = target
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, timeout_s: float) -> Response:
        async with asyncio.timeout(timeout_s):
            return await self._send("GET", path)

    async def complete(self, body: bytes, client: int, sent: float, timeout_s: float) -> Record:
        """Request a completion; a failure of any kind becomes part of the record."""
        refused = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    response = await self._send("POST", "/v1/completions", body)
                    if response.status != BUSY or refused == MAX_REFUSALS:
                        return judge(response, client, sent, refused)
                    refused += 1
                    await asyncio.sleep(pause_s(response))
        except (OSError, ClientError, ProtocolError) as err:
            return Record(client, sent, time.monotonic(), refused=refused, failure=reason(err, timeout_s))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _send(self, method: str, path: str, body: bytes | None = None) -> Response:
        """Send a request; the response may have broken off."""
        session = self._session = self._session or self._open()
        url = f"{self.target.url}{path}"
        while True:
            use, response = SimpleNamespace(reused=False), Response()
            try:
                async with session.request(method, url, data=body, allow_redirects=False, trace_request_ctx=use) as arriving:
                    response.begin(time.monotonic(), arriving.status, arriving.headers)
                    async for data in arriving.content.iter_any():
                        response.feed(time.monotonic(), data)
                    response.complete = True
            except aiohttp.ClientConnectionError:
                # a server may close an idle connection at any time, which is no failure
                if use.reused and not response.status:
                    continue
                if not response.status:
                    raise
            except aiohttp.ClientPayloadError:
                # it broke off: `complete` stays False
                pass
            return response

    def _open(self) -> "aiohttp.ClientSession":
        async def note_reuse(session: Any, context: Any, params: Any) -> None:
            context.trace_request_ctx.reused = True

        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(note_reuse)
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if self.target.api_key is not None:
            headers["authorization"] = f"Bearer {self.target.api_key}"
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[trace],
        )


def pause_s(response: Response) -> float:
    """Return how long a busy server wants no request."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            # in this order "nan" is the shortest pause
            return min(max(MIN_PAUSE_S, float(response.headers[name]) * unit_s), MAX_PAUSE_S)
        except (KeyError, ValueError):
            continue
    return DEFAULT_PAUSE_S


def reason(err: Exception, timeout_s: float) -> str:
    """Describe in few words why there is no response, the same for equal failures."""
    if isinstance(err, TimeoutError):
        return f"no whole answer within {timeout_s:g} s"
    if isinstance(err, aiohttp.ClientConnectorError):
        cause = err.os_error
        words = cause.strerror or str(cause) or type(cause).__name__
        return "connection refused" if isinstance(cause, ConnectionRefusedError) else f"no connection: {words}"
    if isinstance(err, aiohttp.ClientConnectionError | ConnectionError):
        return "connection closed before an answer"
    if isinstance(err, aiohttp.ClientResponseError):
        # aiohttp quotes the line that it cannot parse
        line = QUOTED.search(err.message)
        return f"not HTTP: {f'an answer that begins with {line[0][:MAX_QUOTED]}' if line else err.message.splitlines()[0]}"
    if isinstance(err, ProtocolError):
        return f"not HTTP: {err}"
    return f"no connection: {' '.join(str(err).split()) or type(err).__name__}"
