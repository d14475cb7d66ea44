"""`auraflux serve`: a model for OpenAI's and Anthropic's clients, LangChain, a browser."""

import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options import HOSTS, LOADING, load_model, model_argument, options
from auraflux.errors import BackendError, InputError, SettingsError

if TYPE_CHECKING:
    from auraflux.run.language import LanguageModel
    from auraflux.serve.front import FrontSettings

KEY_VARIABLE = "AURAFLUX_API_KEY"
log = logging.getLogger("auraflux")
MOST_TEXTS = 1024
LOOPBACK = ("127.0.0.1", "localhost", "::1")
RANDOM = [
    click.option("--random", "invented", is_flag=True, hidden=True, help="Serve random weights of --shape."),
    click.option("--shape", hidden=True, help="Of random weights: llama-8b, qwen3-30b-a3b, ..."),
    click.option("--layers", type=int, hidden=True, help="Of random weights."),
]


def texts_and_ranks(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> int | None:
    """Take what says how the model is divided out of --parallel; what is left is a number of texts."""
    context.params["divided"] = next((value for value in reversed(values) if "=" in value), None)
    texts: Any = click.IntRange(1, MOST_TEXTS)
    numbers = [texts.convert(value, option, context) for value in values if "=" not in value]
    return numbers[-1] if numbers else None


@click.command()
@model_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on. Another than loopback needs a key.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes any that is free.")
@click.option("--name", metavar="TEXT", help="What clients call the model; by default its folder's or file's name.")
@click.option("--api-key", metavar="KEY", envvar=KEY_VARIABLE, help=f"That clients must show; also from ${KEY_VARIABLE}.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="A file with keys, one a line.")
@click.option("--no-auth", is_flag=True, help="Let everybody in, also from other machines.")
@click.option("--cors", "origins", multiple=True, metavar="ORIGIN", help="A web page's origin that may use the server, or *.")
@click.option(
    "--allow-host", "hosts", multiple=True, metavar="NAME", help="Another name the server is called by, behind a proxy."
)
@click.option(
    "--parallel",
    multiple=True,
    callback=lambda context, option, values: texts_and_ranks(context, option, values),
    metavar="N",
    help="Texts written at once; by default 8, on a GPU 64. Also MODE=N, such as pipeline=2: divide the model among N ranks.",
)
@options(HOSTS)
@click.option("--restart", is_flag=True, help="Bring ranks back when one is gone.")
@click.option("--queue", type=click.IntRange(0), default=256, show_default=True, metavar="N", help="Requests that may wait.")
@click.option("--cache-memory", metavar="SIZE", help="For keys and values, kept prefixes too; by default half of what is free.")
@click.option("--prefix-disk", metavar="SIZE", help="Disk space for prefixes that memory has no room for, such as 20GB.")
@click.option("--prefix-folder", type=click.Path(path_type=Path), help="Where they are; by default in the user's cache.")
@click.option("--grace", "grace_s", type=float, default=30.0, show_default=True, help="Seconds to finish in when stopped.")
@click.option("--deadline", "deadline_s", type=float, metavar="S", help="Most seconds that an answer may take.")
@click.option("--log-json", is_flag=True, help="Write the log as JSON, one object a line.")
@options(LOADING)
@options(RANDOM)
def serve(model: str | None, host: str, port: int, log_json: bool, **chosen: Any) -> None:
    """Serve MODEL over HTTP: a folder, a GGUF file or a name; without one, the built-in default.

    OpenAI's chat completions, completions and responses, Anthropic's messages, a chat page at /, metrics at /metrics.
    """
    settings = _front(host, log_json, chosen)
    listening = _listen(host, port)
    try:
        _run(model, listening, settings, chosen)
    finally:
        listening.close()


def _front(host: str, log_json: bool, chosen: dict[str, Any]) -> "FrontSettings":
    """How the HTTP process shall behave; what is not safe is refused before anything is loaded."""
    try:
        from auraflux.serve.front import FrontSettings, set_up_log
    except ImportError as err:
        raise BackendError(f"{err.name} is not installed. The server needs: pip install 'auraflux[serve]'.") from err
    from auraflux.serve.guard import LOOPBACK as LOCAL
    from auraflux.serve.guard import Access
    from auraflux.serve.limits import Limits

    keys, local = _keys(chosen), host in LOOPBACK
    if not local and not keys and not chosen["no_auth"]:
        raise SettingsError(
            f"--host {host} lets other machines in. Give --api-key, for example {secrets.token_urlsafe(16)}, or --no-auth."
        )
    set_up_log(log_json)
    access = Access(keys, (*LOCAL, *chosen["hosts"]) if local else chosen["hosts"], chosen["origins"])
    return FrontSettings(access, Limits(deadline_s=chosen["deadline_s"]), chosen["queue"], chosen["grace_s"], log_json)


def _keys(chosen: dict[str, Any]) -> tuple[str, ...]:
    keys = [chosen["api_key"]] if chosen["api_key"] else []
    path = chosen["api_key_file"]
    if path is not None:
        try:
            keys += [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as err:
            raise InputError(f"the keys in {path} cannot be read: {err}.") from err
        if not keys:
            raise InputError(f"{path} holds no key.")
    return tuple(keys)


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
    from auraflux.serve.desk import Desk, facts_of

    log.info("listening on %s (process %d); the model is being loaded", where, os.getpid())
    signal.signal(signal.SIGTERM, _stop_loading)
    loaded = _load(model, chosen)
    facts = facts_of(loaded, chosen["name"])
    _warm_up(loaded)
    desk = Desk(loaded, connection, facts, chosen["restart"])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: desk.stop())
    size = f"{facts.parallel} at once of up to {facts.context} tokens, cache {facts.kv}"
    log.info("ready: %s on %s, texts: %s", facts.name, facts.device, size)
    log.info("chat page %s/, OpenAI's clients %s/v1, Anthropic's %s", where, where, where)
    desk.run()
    loaded.scheduler.prefixes.save_all()


def _warm_up(loaded: "LanguageModel") -> None:
    """Let kernels be compiled and steps recorded before the first client waits for it."""
    scheduler, written = loaded.scheduler, 8
    for texts, tokens, alike in _usual_loads(loaded):
        if texts <= scheduler.parallel and tokens + written <= loaded.context:
            prompts = [[0 if alike else number] * tokens for number in range(texts)]
            loaded.generate_batch(prompts, max_tokens=written, endless=True)
            loaded.reset()
    scheduler.counts = type(scheduler.counts)()
    if scheduler.speculation is not None:
        scheduler.speculation.forget_counts()


def _usual_loads(loaded: "LanguageModel") -> list[tuple[int, int, bool]]:
    """How many texts are written at once, how many tokens their prompts have, and whether these are alike: one is read then."""
    from auraflux.run.engine import COUNTS, SIZES

    if loaded.experts is not None:
        # tokens of experts that are read from disk cost more than compiling
        return [(1, 8, False)]
    if loaded.engine.device.type == "cpu":
        return [(1, 32, False), (8, 32, False)]
    # a step is recorded the second time, and for texts of other lengths anew
    alone = [(1, size, False) for size in SIZES for _ in range(2)]
    together = [(count, tokens, True) for tokens in (16, 1024) for count in COUNTS]
    return [*alone, *together, (16, 1024, False), (16, 1024, False)]


def _stop_loading(*_: Any) -> None:
    raise SystemExit(0)


def _load(model: str | None, chosen: dict[str, Any]) -> "LanguageModel":
    from auraflux.run.device import find_device

    parallel = chosen["parallel"] or (64 if find_device(chosen["device"]).type == "cuda" else 8)
    if chosen["invented"] or chosen["shape"]:
        from auraflux.cli.bench_model import random_loaded

        context = chosen["context"] or 4096
        return random_loaded(model, chosen["shape"], chosen["invented"], chosen["layers"], parallel, context, chosen)
    memory = {"cache_memory": chosen["cache_memory"] or "half", "prefix_disk": chosen["prefix_disk"]}
    return load_model(model, chosen, sequences=parallel, **memory, prefix_folder=chosen["prefix_folder"])
