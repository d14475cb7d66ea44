"""Authentication, host checks, and request ids."""

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
PROBES = ("/health", "/ready", "/metrics")  # polled every few seconds, so logged at debug level
REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ErrorResponder = Callable[[Failure, Scope], Response]


@dataclass(frozen=True)
class Access:
    """Access control.

    keys     accepted API keys; none allows every client
    hosts    accepted Host headers, without port; none allows any. A server on loopback uses LOOPBACK, against DNS rebinding:
             otherwise a web page could reach it through a host name that resolves to 127.0.0.1
    origins  origins allowed by CORS; "*" for all
    manage_models  whether clients may download and delete models
    """

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    manage_models: bool = False


def caller(request: Request, user: str | None = None) -> str:
    """Return the owner of a request, for fair queueing: its key or address, and the user named by the client."""
    owner = request.scope.get("state", {}).get("caller") or (request.client.host if request.client else "")
    return f"{owner}/{user}" if user else owner


class RequestIdMiddleware:
    """Middleware that gives every request an id, logs its outcome, and converts exceptions to error responses."""

    def __init__(self, app: ASGIApp, error_response: ErrorResponder):
        self._app, self._error_response = app, error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as err:
            log.exception("%s failed", request_id)
            if not status:
                await self._error_response(failure_of(err), scope)(scope, receive, send_with_id)
        finally:
            _log(scope, request_id, status, time.perf_counter() - started)


def _log(scope: MutableMapping[str, Any], request_id: str, status: int, seconds: float) -> None:
    """Log a request without its query and body, which may hold secrets."""
    path = scope.get("raw_path", b"").decode("ascii", "replace").partition("?")[0] or scope["path"]
    about = {"request_id": request_id, "method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 4)}
    level = logging.DEBUG if path in PROBES else logging.INFO
    log.log(level, "%s %s %r %d %.3f s", request_id, scope["method"], path, status, seconds, extra=about)


class AuthMiddleware:
    """Middleware that refuses requests without a valid key, and those with an unknown Host header.

    is_public  returns whether a path needs no key
    """

    def __init__(self, app: ASGIApp, access: Access, is_public: Callable[[str], bool], error_response: ErrorResponder):
        self._app, self._access, self._is_public, self._error_response = app, access, is_public, error_response
        # digests have one length, so that comparing them does not leak a key's length
        self._digests = [_digest(key) for key in access.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = self._refusal(scope) if scope["type"] == "http" else None
        if failure is None:
            await self._app(scope, receive, send)
        else:
            await self._error_response(failure, scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Failure | None:
        headers = Headers(scope=scope)
        if self._access.hosts and _host(headers.get("host", "")) not in self._access.hosts:
            return Failure(
                403, "This Host header is not allowed; start the server with --allow-host NAME to allow it.", code="wrong_host"
            )
        if not self._digests or self._is_public(scope["path"]):
            return None
        digest = _digest(_key(headers))
        # every key is compared, so that timing leaks nothing
        if sum(hmac.compare_digest(digest, known) for known in self._digests):
            scope.setdefault("state", {})["caller"] = digest.hex()[:16]
            return None
        message = "This server requires a valid API key: send it as Authorization: Bearer KEY."
        return Failure(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _key(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _host(header: str) -> str:
    """Return a Host header without its port."""
    end = header.rfind("]") + 1 if header.startswith("[") else header.find(":")
    return (header if end < 1 else header[:end]).lower()
