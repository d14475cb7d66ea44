"""The HTTP process: separate from the model process, so that neither waits for the other's GIL."""

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
from pathlib import Path

import uvicorn

from auraflux.serve.app import make_app, make_inner_app
from auraflux.serve.auth import Access
from auraflux.serve.batch.batches import Batches
from auraflux.serve.limits import Limits
from auraflux.serve.service import Service
from auraflux.serve.services import Services
from auraflux.serve.transport.pipe import PipeLink
from auraflux.tokenizer.template_process import process as template_process

# answers stopped at the end of the grace period still send their error
EXTRA_GRACE_S = 5
FIELDS = ("request_id", "method", "path", "status", "seconds")


@dataclass(frozen=True)
class HttpSettings:
    """Settings of the HTTP process.

    waiting   length of the request queue; further requests are refused
    grace_s   seconds for running requests to finish at shutdown
    log_json  log one JSON object per line
    files     folder of clients' files and batches; None to keep none
    """

    access: Access = field(default_factory=Access)
    limits: Limits = field(default_factory=Limits)
    waiting: int = 256
    grace_s: float = 30.0
    log_json: bool = False
    files: Path | None = None


class JsonFormatter(logging.Formatter):
    """Formatter of log lines as JSON."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "message": record.getMessage()}
        line |= {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_log(as_json: bool) -> None:
    """Send this package's log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    log = logging.getLogger("auraflux")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


class Server(uvicorn.Server):
    """A uvicorn server that drains running requests before it closes connections."""

    def __init__(self, services: Services, settings: HttpSettings):
        self.batches = None if settings.files is None else Batches(settings.files)
        app = make_app(services, settings.access, self.batches)
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
        self.services, self.settings = services, settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and run the batches."""
        await super().startup(sockets)
        if self.batches is not None:
            self.batches.start(make_inner_app(self.services))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, drain running requests, then close."""
        for server in self.servers:
            server.close()
        started = time.monotonic()
        if self.batches is not None:
            await self.batches.stop()
        await self.services.drain(self.settings.grace_s)
        # slow clients may still be reading
        left = max(0.0, self.settings.grace_s - (time.monotonic() - started))
        self.config.timeout_graceful_shutdown = int(left) + EXTRA_GRACE_S
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the model process, which sends the stop message."""
        yield


async def serve(connection: Connection, listening: socket.socket, settings: HttpSettings) -> None:
    """Serve until the model process sends the stop message."""
    link = PipeLink(connection, settings.waiting)
    server = Server(Service(link, settings.limits), settings)

    def stop() -> None:
        server.should_exit = True

    link.on_stop = stop
    link.listen()
    await server.serve(sockets=[listening])


def main(connection: Connection, listening: socket.socket, settings: HttpSettings) -> None:
    """Run the HTTP process."""
    set_up_log(settings.log_json)
    template_process.warm_up()
    if sys.platform == "win32":
        asyncio.run(serve(connection, listening, settings))
        return
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(connection, listening, settings))
