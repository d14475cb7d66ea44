"""Run the HTTP server of several models."""

import asyncio
import signal
import socket
import sys

from auraflux.serve.several.catalog import Catalog
from auraflux.serve.several.model_pool import ModelPool
from auraflux.serve.several.model_slot import Start
from auraflux.serve.transport.http_process import HttpSettings, Server
from auraflux.tokenizer.template_process import process as template_process


def run(catalog: Catalog, start: Start, memory_nbytes: int, listening: socket.socket, settings: HttpSettings) -> None:
    """Serve until a signal arrives."""
    template_process.warm_up()
    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(catalog, start, memory_nbytes, listening, settings))


async def serve(catalog: Catalog, start: Start, memory_nbytes: int, listening: socket.socket, settings: HttpSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain running requests and unload all models."""
    pool = ModelPool(catalog, start, memory_nbytes, settings.limits, settings.waiting)
    server = Server(pool, settings)

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    pool.start()
    try:
        await server.serve(sockets=[listening])
    finally:
        await pool.close()
