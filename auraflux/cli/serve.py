"""`auraflux serve`: a model behind OpenAI's, Anthropic's and Ollama's APIs, and a chat page."""

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import check_loading
from auraflux.cli.options.model import options
from auraflux.cli.options.serve import SERVING, front_settings
from auraflux.cli.options.served_model import open_model_process
from auraflux.cli.serve_ray import REPLICAS, run_replicas
from auraflux.cli.serving.several import SEVERAL, catalog_of, serve_models
from auraflux.errors import BackendError, InputError, SettingsError

if TYPE_CHECKING:
    from auraflux.serve.several.catalog import Catalog
    from auraflux.serve.transport.http_process import HttpSettings

log = logging.getLogger("auraflux")


EVERYDAY = (
    "--host",
    "--port",
    "--models",
    "--ollama",
    "--name",
    "--api-key",
    "--max-sequences",
    "--cache-memory",
    "--prefix-disk",
    "--parallel",
    "--device",
    "--kv",
    "--context",
    "--quantize",
    "--gpu-memory",
    "--expert-memory",
    "--speculate",
)
EXAMPLES = (
    "auraflux serve model.gguf",
    "auraflux serve org/name --host 0.0.0.0 --api-key KEY",
    "auraflux serve model.gguf --max-sequences 16 --cache-memory 8GB",
    "auraflux serve --models models.toml",
)


@click.command(cls=Command, everyday=EVERYDAY, examples=EXAMPLES)
@options(SERVING)
@options(SEVERAL)
@options(REPLICAS)
def serve(model: str | None, host: str, port: int, log_json: bool, on_ray: bool, replicas: str, **chosen: Any) -> None:
    """Serve a model over HTTP.

    MODEL is a folder, a GGUF file or a name; without it, the built-in model. A folder of models, or --models, serves several:
    each is loaded when a request names it.
    Endpoints: OpenAI's chat completions, completions and responses, Anthropic's messages, and Ollama's API; a chat page at /,
    metrics at /metrics.
    """
    catalog = catalog_of(model, chosen)
    check_loading(model if catalog is None else None, chosen)
    settings = front_settings(host, log_json, chosen)
    if catalog is not None:
        _run_several(catalog, on_ray, host, port, settings, chosen)
        return
    if on_ray:
        run_replicas(model, host, port, replicas, settings, chosen)
        return
    listening = _listen(host, port)
    try:
        _run(model, listening, settings, chosen)
    finally:
        listening.close()


def _run_several(
    catalog: "Catalog", on_ray: bool, host: str, port: int, settings: "HttpSettings", chosen: dict[str, Any]
) -> None:
    if on_ray:
        raise SettingsError("--ray serves replicas of one model: leave it out, or give one model.")
    with closing(_listen(host, port)) as listening:
        serve_models(catalog, listening, _url(listening), settings, chosen)


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


def _run(model: str | None, listening: socket.socket, settings: "HttpSettings", chosen: dict[str, Any]) -> None:
    """Start the HTTP process, load the model in this one, and run it until the HTTP process exits."""
    import multiprocessing

    from auraflux.serve.transport import http_process

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=http_process.main, args=(theirs, listening, settings), name="auraflux-http", daemon=True
    )
    where = _url(listening)
    with _ignored_signals():
        process.start()
    theirs.close()
    # only the HTTP process accepts; once it stops, clients must be refused instead of waiting
    listening.close()
    try:
        _serve_model(model, ours, where, chosen)
        process.join(settings.grace_s + 10)
        if process.exitcode:
            raise BackendError(f"the HTTP process exited with code {process.exitcode}; see the log above.")
    finally:
        # the HTTP process exits when the pipe is closed
        ours.close()
        process.join(5)
        process.kill()
        process.join()


@contextmanager
def _ignored_signals() -> Iterator[None]:
    """Start processes that ignore SIGINT and SIGTERM: terminals and systemd signal all, and this process stops them."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _url(listening: socket.socket) -> str:
    address, port = listening.getsockname()[:2]
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"


def _serve_model(model: str | None, connection: Any, where: str, chosen: dict[str, Any]) -> None:
    @cache
    def announce() -> None:
        log.info("listening on %s (process %d); the model is being loaded", where, os.getpid())

    signal.signal(signal.SIGTERM, _stop_loading)
    model_process = open_model_process(model, connection, chosen, announce)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: model_process.stop())
    facts = model_process.facts
    size = f"{facts.max_sequences} sequences of up to {facts.context} tokens, KV cache {facts.kv}"
    log.info("ready: %s on %s, %s", facts.name, facts.device, size)
    log.info("requests that name no sampling settings: %s", facts.default_sampling)
    log.info("chat page %s/, OpenAI's clients %s/v1, Anthropic's and Ollama's %s", where, where, where)
    model_process.run()
    model_process.scheduler.prefix_cache.save_all()


def _stop_loading(*_: Any) -> None:
    raise SystemExit(0)
