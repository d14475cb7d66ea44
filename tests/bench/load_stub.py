"""A stub server with scripted responses: complete streams and their failure modes. Also runs as a program."""

import asyncio
import json
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

VOCAB = 500
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(content: Any) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def json_response(status: int, content: Any, *headers: str) -> bytes:
    body = json.dumps(content).encode()
    lines = [f"HTTP/1.1 {status} Status", "content-type: application/json", f"content-length: {len(body)}", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body


def token(text: str = "a", finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(prompt: int, tokens: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens, **details}


class Stub:
    """Answers /v1/completions with the next of its `behaviours`, by default `complete`; `bodies` are the requests received."""

    def __init__(self, *behaviours: str):
        self.behaviours = deque(behaviours)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.connections = 0
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\r\n")[1:])}
        self.keys.append(headers.get("authorization"))
        if method == "GET":
            entry = {"id": "stub", "object": "model", "vocab_size": VOCAB}
            writer.write(json_response(200, {"object": "list", "data": [entry]} if path.endswith("/v1/models") else {}))
            return True
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.bodies.append(body)
        return await getattr(self, self.behaviours.popleft() if self.behaviours else "complete")(body, writer)

    async def complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        count, stats = body["max_tokens"], usage(len(body["prompt"]), body["max_tokens"], len(body["prompt"]) // 2)
        if not body["stream"]:
            writer.write(json_response(200, {"choices": [{"text": "a" * count}], "usage": stats}))
            return True
        writer.write(HEAD)
        for i in range(count):
            writer.write(chunk(token(finish="length" if i == count - 1 else None)))
            await writer.drain()
            # yield to the event loop, so that tokens are sent separately
            await asyncio.sleep(0.001)
        writer.write(chunk(event({"choices": [], "usage": stats})) + chunk(event(b"[DONE]")) + chunk(b""))
        return True

    async def truncated(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD + chunk(token()) + chunk(token())[:-9])
        return False

    async def error(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD + chunk(token()) + chunk(event({"error": {"message": "out of pages"}})) + chunk(b""))
        return True

    async def busy(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(json_response(429, {"error": {"message": "too many"}}, "retry-after: 0"))
        return True

    async def server_error(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(json_response(500, {"error": {"message": "of our making"}}))
        return True

    async def no_response(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        return False

    async def invalid_json(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(b"SSH-2.0-OpenSSH\r\n")
        return False

    async def closing(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Answer completely, then close the keep-alive connection."""
        await self.complete(body, writer)
        return False

    async def serve(self, port: int = 0) -> asyncio.Server:
        server = await asyncio.start_server(self.handle, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]
        return server


@contextmanager
def running(stub: Stub) -> Iterator[str]:
    """Serve from a thread; yield the address."""
    loop, there, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def main() -> None:
        server = await stub.serve()
        there.set()
        await ended.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    there.wait()
    try:
        yield f"http://127.0.0.1:{stub.port}"
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


async def _program(port: int) -> None:
    async with await Stub().serve(port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    if "--refuse" in sys.argv:
        sys.exit("error: there is no model.")
    asyncio.run(_program(int(sys.argv[sys.argv.index("--port") + 1])))
