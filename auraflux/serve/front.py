"""The HTTP process: it answers while the model's process computes, so that neither waits for the other's Python."""

import asyncio
import json
import logging
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import uvicorn

from auraflux.run.template_process import process as template_process
from auraflux.serve.app import make_app
from auraflux.serve.guard import Access
from auraflux.serve.limits import Limits
from auraflux.serve.pipe import PipeLink
from auraflux.serve.service import Service

# what is stopped at the end of the grace is told so, which takes a moment
MOMENT_S = 5
FIELDS = ("request_id", "method", "path", "status", "seconds")


@dataclass(frozen=True)
class FrontSettings:
    """How the HTTP process behaves.

    waiting   most requests that wait; one more is refused
    grace_s   in which what was begun may be finished when the server is stopped
    log_json  write the log as one JSON object a line
    """

    access: Access = field(default_factory=Access)
    limits: Limits = field(default_factory=Limits)
    waiting: int = 256
    grace_s: float = 30.0
    log_json: bool = False


class JsonLines(logging.Formatter):
    """A log line as JSON."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "message": record.getMessage()}
        line |= {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_log(as_json: bool) -> None:
    """Write this package's log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    log = logging.getLogger("auraflux")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


class Server(uvicorn.Server):
    """A server that finishes what was begun before it closes connections."""

    def __init__(self, service: Service, settings: FrontSettings):
        app = make_app(service, settings.access)
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="error",
                server_header=False,
            )
        )
        self.service, self.settings = service, settings

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing new on, finish or end what was begun, then close."""
        for server in self.servers:
            server.close()
        begun = time.monotonic()
        await self.service.drain(self.settings.grace_s)
        # for clients that are slow to read
        left = max(0.0, self.settings.grace_s - (time.monotonic() - begun))
        self.config.timeout_graceful_shutdown = int(left) + MOMENT_S
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: the model's process has them, and says when to stop."""
        yield


async def serve(connection: Connection, listening: socket.socket, settings: FrontSettings) -> None:
    """Answer until told to stop."""
    link = PipeLink(connection, settings.waiting)
    server = Server(Service(link, settings.limits), settings)

    def stop() -> None:
        server.should_exit = True

    link.on_stop = stop
    link.listen()
    await server.serve(sockets=[listening])


def main(connection: Connection, listening: socket.socket, settings: FrontSettings) -> None:
    """Run as a process of its own."""
    set_up_log(settings.log_json)
    template_process.warm_up()
    if sys.platform == "win32":
        asyncio.run(serve(connection, listening, settings))
        return
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(connection, listening, settings))
