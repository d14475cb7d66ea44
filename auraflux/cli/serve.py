"""`auraflux serve`: a model for OpenAI's and Anthropic's clients, LangChain, a browser."""

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options import options
from auraflux.cli.serve_options import SERVING, front_settings
from auraflux.cli.serve_ray import REPLICAS, run_replicas
from auraflux.cli.served_model import open_desk
from auraflux.errors import BackendError, InputError

if TYPE_CHECKING:
    from auraflux.serve.front import FrontSettings

log = logging.getLogger("auraflux")


@click.command()
@options(SERVING)
@options(REPLICAS)
def serve(model: str | None, host: str, port: int, log_json: bool, on_ray: bool, replicas: str, **chosen: Any) -> None:
    """Serve a model over HTTP.

    MODEL is a folder, a GGUF file or a name; with none, the built-in default.
    It answers OpenAI's chat completions, completions and responses, and Anthropic's messages; a chat page is at /, metrics
    are at /metrics.
    """
    settings = front_settings(host, log_json, chosen)
    if on_ray:
        run_replicas(model, host, port, replicas, settings, chosen)
        return
    listening = _listen(host, port)
    try:
        _run(model, listening, settings, chosen)
    finally:
        listening.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)
    except OSError as err:
        listening.close()
        raise InputError(f"cannot listen on {host}:{port}: {err.strerror or err}. Another --port may be free.") from err
    return listening


def _run(model: str | None, listening: socket.socket, settings: "FrontSettings", chosen: dict[str, Any]) -> None:
    """Start the HTTP process, load the model beside it, and run that until the other ends."""
    import multiprocessing

    from auraflux.serve import front

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=front.main, args=(theirs, listening, settings), name="auraflux-http", daemon=True
    )
    where = _where(listening)
    with _unsignalled():
        process.start()
    theirs.close()
    # only the other process accepts; when it stops to, clients shall be refused and not wait
    listening.close()
    try:
        _answer(model, ours, where, chosen)
        process.join(settings.grace_s + 10)
        if process.exitcode:
            raise BackendError(f"the HTTP process ended with code {process.exitcode}; the log above says why.")
    finally:
        # it ends by itself when nobody is at the other end
        ours.close()
        process.join(5)
        process.kill()
        process.join()


@contextmanager
def _unsignalled() -> Iterator[None]:
    """Let processes that are started here ignore what stops this one: terminals and systemd signal all, this one tells them."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _where(listening: socket.socket) -> str:
    address, port = listening.getsockname()[:2]
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"


def _answer(model: str | None, connection: Any, where: str, chosen: dict[str, Any]) -> None:
    @cache
    def announce() -> None:
        log.info("listening on %s (process %d); the model is being loaded", where, os.getpid())

    signal.signal(signal.SIGTERM, _stop_loading)
    desk = open_desk(model, connection, chosen, announce)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: desk.stop())
    facts = desk.facts
    size = f"{facts.parallel} at once of up to {facts.context} tokens, cache {facts.kv}"
    log.info("ready: %s on %s, texts: %s", facts.name, facts.device, size)
    log.info("chat page %s/, OpenAI's clients %s/v1, Anthropic's %s", where, where, where)
    desk.run()
    desk.scheduler.prefixes.save_all()


def _stop_loading(*_: Any) -> None:
    raise SystemExit(0)
