"""Who may ask: keys, host names, and a name for every request."""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from auraflux.serve.failures import Failure, failure_of

log = logging.getLogger("auraflux.serve")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
PROBES = ("/health", "/ready", "/metrics")  # asked every few seconds by what watches the server
REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
Answering = Callable[[Failure, Scope], Response]


@dataclass(frozen=True)
class Access:
    """Who may ask.

    keys     any of which a client must show; none lets everybody in
    hosts    names that the server may be called by, without port; none allows any. A server that only listens on
             loopback takes LOOPBACK: else any web page could reach it by a name of its own that points there
    origins  web pages of other hosts that may use it; "*" for all
    """

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


def caller(request: Request, user: str | None = None) -> str:
    """Say whose a request is, for fair queueing: the key or address it came from, and the user that the client names."""
    who = request.scope.get("state", {}).get("caller") or (request.client.host if request.client else "")
    return f"{who}/{user}" if user else who


class Names:
    """Gives every request an id, logs how it went, and lets no exception out."""

    def __init__(self, app: ASGIApp, answering: Answering):
        self._app, self._answering = app, answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        begun, status = time.perf_counter(), 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception as err:
            log.exception("%s failed", request_id)
            if not status:
                await self._answering(failure_of(err), scope)(scope, receive, named)
        finally:
            _log(scope, request_id, status, time.perf_counter() - begun)


def _log(scope: MutableMapping[str, Any], request_id: str, status: int, seconds: float) -> None:
    """Tell of a request what is no secret: neither query nor body."""
    path = scope.get("raw_path", b"").decode("ascii", "replace").partition("?")[0] or scope["path"]
    about = {"request_id": request_id, "method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 4)}
    level = logging.DEBUG if path in PROBES else logging.INFO
    log.log(level, "%s %s %r %d %.3f s", request_id, scope["method"], path, status, seconds, extra=about)


class Keys:
    """Refuses requests without a key, and those to a name that is not the server's.

    free  says which paths need no key
    """

    def __init__(self, app: ASGIApp, access: Access, free: Callable[[str], bool], answering: Answering):
        self._app, self._access, self._free, self._answering = app, access, free, answering
        # hashes are as long as each other, so comparing them tells nothing of a key's length
        self._digests = [_digest(key) for key in access.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = self._refusal(scope) if scope["type"] == "http" else None
        if failure is None:
            await self._app(scope, receive, send)
        else:
            await self._answering(failure, scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Failure | None:
        headers = Headers(scope=scope)
        if self._access.hosts and _host(headers.get("host", "")) not in self._access.hosts:
            return Failure(403, "The server is not called by this host name; --allow-host NAME lets it be.", code="wrong_host")
        if not self._digests or self._free(scope["path"]):
            return None
        shown = _digest(_key(headers))
        # every key is compared, so that the time tells nothing
        if sum(hmac.compare_digest(shown, known) for known in self._digests):
            scope.setdefault("state", {})["caller"] = shown.hex()[:16]
            return None
        message = "This server needs a key that it knows: send it as Authorization: Bearer KEY."
        return Failure(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _key(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _host(header: str) -> str:
    """Leave out the port."""
    end = header.rfind("]") + 1 if header.startswith("[") else header.find(":")
    return (header if end < 1 else header[:end]).lower()
