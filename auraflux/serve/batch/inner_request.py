"""`call`: a request to the application from within its process."""

import asyncio
import json
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message


async def call(app: ASGIApp, path: str, body: dict[str, Any], caller: str) -> tuple[int, str, Any]:
    """POST a body to a path; return the status, the request's id and the response.

    caller  owner of the request, for fair queueing
    """
    content, request_id = json.dumps(body).encode(), f"req-{uuid4().hex}"
    parts: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    status, received = 500, bytearray()

    async def receive() -> Message:
        if parts:
            return parts.pop()
        # the next message would be the disconnect, which cancels the task instead
        return await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            received.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
        "client": ("batch", 0),
        "server": None,
        "state": {"caller": caller},
    }
    await app(scope, receive, send)
    return status, request_id, json.loads(bytes(received) or b"null")
