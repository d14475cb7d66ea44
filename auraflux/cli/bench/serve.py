"""`auraflux bench serve`: throughput, TTFT and ITL of a server under load."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from auraflux.cli.bench.signals import ended_by_signals
from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import check_loading
from auraflux.cli.options.model import LOADING, model_argument, options
from auraflux.cli.options.renamed import Renamed
from auraflux.cli.output.failure import Failure
from auraflux.errors import InputError, SettingsError

if TYPE_CHECKING:
    from auraflux.bench.load.server import Served
    from auraflux.bench.load.workload import Target, Work

GPU_CLIENTS, CPU_CLIENTS = [1, 8, 32, 128], [1, 8]
GPU_FILE = Path("/dev/nvidiactl")  # there where an NVIDIA driver is
MAX_CLIENTS = 4096
RANDOM = ("invented", "shape", "layers")
SERVER = [
    click.option("--url", metavar="URL", help="Measure the server at this address instead of starting one."),
    click.option("--random", "invented", is_flag=True, help="Serve --shape with random weights; no checkpoint is needed."),
    click.option("--shape", metavar="NAME", help="With --random: the shape of a known model, such as llama-8b."),
    click.option("--layers", type=click.IntRange(min=1), metavar="N", help="With --random: number of layers instead of all."),
    click.option(
        "--max-sequences",
        cls=Renamed,
        old="--parallel",
        type=click.IntRange(min=1),
        metavar="N",
        help="Batch size of the server: maximum number of running sequences.",
    ),
    click.option("--server-options", metavar="TEXT", default="", help="More options for the server that is started."),
    click.option("--api-key", envvar="AURAFLUX_API_KEY", metavar="KEY", help="The server's key; also AURAFLUX_API_KEY."),
]
ASKING = [
    click.option("--clients", metavar="N,N,…", help="Clients at once; by default 1,8,32,128 on a GPU, else 1,8."),
    click.option("--rate", metavar="R,R,…", help="Requests a second as a Poisson process, instead of --clients or with them."),
    click.option("--prompt-tokens", type=click.IntRange(min=1), default=1024, show_default=True, help="Tokens of a prompt."),
    click.option("--shared", type=click.IntRange(min=0), default=0, metavar="N", help="Prompts share their first N tokens."),
    click.option("--tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Output tokens of each request."),
    click.option(
        "--temperature", type=click.FloatRange(0, 100), default=0, show_default=True, help="Of sampling; 0 is greedy."
    ),
    click.option("--requests", type=click.IntRange(min=1), metavar="N", help="At each level; by default three a client."),
    click.option("--warmup", type=click.IntRange(min=0), metavar="N", help="Not counted; by default one per client."),
    click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="All at once; the best counts."),
    click.option("--stream/--no-stream", default=True, help="Stream tokens, or send all at the end."),
    click.option(
        "--timeout", type=click.FloatRange(min=0.1), default=600, show_default=True, help="Most seconds of a request."
    ),
    click.option("--seed", type=int, help="Of the prompts; random by default, so that prefix caches have no hits."),
]


EVERYDAY = (
    "--url",
    "--clients",
    "--rate",
    "--prompt-tokens",
    "--tokens",
    "--requests",
    "--max-sequences",
    "--random",
    "--shape",
    "--device",
    "--kv",
    "--json",
    "--save",
    "--plot",
)
EXAMPLES = (
    "auraflux bench serve model.gguf --clients 1,8",
    "auraflux bench serve served-name --url http://127.0.0.1:8000",
)


@click.command("serve", cls=Command, everyday=EVERYDAY, examples=EXAMPLES)
@model_argument
@options(SERVER)
@options(ASKING)
@options(LOADING)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--save", type=click.Path(path_type=Path), help="Also write the JSON to a file, or into a folder.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.png", help="Also draw latency against load.")
def bench_serve(model: str | None, as_json: bool, save: Path | None, plot: Path | None, **chosen: Any) -> None:
    """Time a server under load.

    That is MODEL's, one with random weights, or any with OpenAI's API at --url.

    At each number of clients all start at once, for one token and then for all, which measures prefill and decode throughput.
    Then each sends its next request when its last has ended, so that prefill and decode mix, which measures TTFT and ITL.
    Where several tokens arrive together, the time is divided among them. With --url, MODEL is the name on that server.
    """
    from auraflux.bench.load.plot import check_plot, draw
    from auraflux.bench.report import place
    from auraflux.bench.report import save as write
    from auraflux.cli.bench.serve_table import show
    from auraflux.machine import load, this_machine

    if chosen["url"] is None and not chosen["invented"]:
        check_loading(model, chosen)
    clients, rates = _levels(chosen)
    if chosen["shared"] > chosen["prompt_tokens"]:
        raise InputError(f"--shared {chosen['shared']} is more than --prompt-tokens {chosen['prompt_tokens']}.")
    words = _server_words(click.get_current_context(), model, max(clients or [], default=None))
    target_file = place(save, f"serve-{this_machine().slug}") if save is not None else None
    if plot is not None:
        check_plot(plot)
    before = load()
    served, work, rows = _measure(words, model, clients, rates, chosen)
    document = _document(served, work, rows, before, chosen)
    if target_file is not None:
        write(document, target_file)
    if plot is not None:
        draw(document, plot)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        show(document)
    _check_answers(rows)


def parse_numbers(text: str, option: str, kind: Callable[[str], Any], most: float) -> list[Any]:
    """Parse a list such as 1,8,32: each above 0, sorted, without duplicates."""
    try:
        numbers = [kind(part) for part in text.replace(",", " ").split()]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number <= most for number in numbers):
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{option} {text!r} is not a list of {what} above 0 and up to {most:g}, such as 1,8,32.")
    return sorted(set(numbers))


def _levels(chosen: dict[str, Any]) -> tuple[list[int] | None, list[float]]:
    """Return the numbers of clients and the rates; None for the default numbers of clients."""
    clients, rate = chosen["clients"], chosen["rate"]
    rates = [] if rate is None else parse_numbers(rate, "--rate", float, 1e5)
    if clients is None:
        return ([] if rates else None), rates
    return parse_numbers(clients, "--clients", int, MAX_CLIENTS), rates


def _server_words(context: click.Context, model: str | None, most: int | None) -> list[str] | None:
    """Return the options of the server to be started; None for one that runs already."""
    from auraflux.bench.shapes import shape_of

    chosen = context.params
    loading = _given(context, {str(option.name) for option in click.command(options(LOADING)(lambda: None)).params})
    invented = _given(context, set(RANDOM))
    if chosen["url"] is not None:
        if refused := [*loading, *invented, *_given(context, {"max_sequences", "server_options"})]:
            raise SettingsError(f"--url measures a server that runs already, which cannot be given {refused[0]}.")
        return None
    if invented:
        if not chosen["invented"] or chosen["shape"] is None or model is not None:
            raise SettingsError("random weights need --random and --shape NAME, and no MODEL.")
        shape_of(chosen["shape"], chosen["layers"])
    try:
        more = shlex.split(chosen["server_options"])
    except ValueError as err:
        raise InputError(f"--server-options cannot be split into words: {err}.") from None
    sequences = chosen["max_sequences"] or most or (max(GPU_CLIENTS) if _on_gpu(chosen["device"]) else max(CPU_CLIENTS))
    return [*([model] if model is not None else []), *invented, *loading, "--max-sequences", str(sequences), *more]


def _given(context: click.Context, names: set[str]) -> list[str]:
    """Return the given options of a group as command-line words."""
    words: list[str] = []
    for option in context.command.params:
        source = context.get_parameter_source(str(option.name))
        if option.name not in names or source is not ParameterSource.COMMANDLINE or not isinstance(option, click.Option):
            continue
        value = context.params[option.name]
        if option.is_flag:
            words.append(option.opts[0] if value else option.secondary_opts[0])
        else:
            words += [option.opts[0], str(value)]
    return words


def _on_gpu(device: str) -> bool:
    """Return True if a server here would run on a GPU; works without torch."""
    return device.startswith("cuda") or (device == "auto" and GPU_FILE.exists())


def _measure(
    words: list[str] | None, model: str | None, clients: list[int] | None, rates: list[float], chosen: dict[str, Any]
) -> tuple["Served", "Work", list[dict[str, Any]]]:
    """Measure all levels, with progress on stderr."""
    import random

    from rich.console import Console

    from auraflux.bench.load.server import ask_models, usable_vocab
    from auraflux.bench.load.sweep import Amounts, measure
    from auraflux.bench.load.workload import Work

    amounts = Amounts(chosen["requests"], chosen["warmup"], chosen["rounds"])
    seed = random.SystemRandom().randrange(2**31) if chosen["seed"] is None else chosen["seed"]
    with ended_by_signals(), Console(stderr=True).status("") as status, _target(words, chosen, status.update) as target:
        served = ask_models(target, model if words is None else None)
        work = Work(
            served.model,
            usable_vocab(served),
            chosen["prompt_tokens"],
            chosen["tokens"],
            chosen["shared"],
            chosen["stream"],
            seed,
            chosen["timeout"],
            chosen["temperature"],
        )
        if clients is None:
            clients = GPU_CLIENTS if _on_gpu(served.device or chosen["device"]) else CPU_CLIENTS
        return served, work, list(measure(target, work, clients, rates, amounts, status.update))


@contextmanager
def _target(words: list[str] | None, chosen: dict[str, Any], progress: Callable[[str], None]) -> "Iterator[Target]":
    from auraflux.bench.load.server import started
    from auraflux.bench.load.workload import parse_url

    if words is None:
        yield parse_url(chosen["url"], chosen["api_key"])
        return
    with started(words, chosen["api_key"], progress) as target:
        yield target


def _document(
    served: "Served", work: "Work", rows: list[dict[str, Any]], load_before: float, chosen: dict[str, Any]
) -> dict[str, Any]:
    import platform
    from datetime import UTC, datetime

    import auraflux
    from auraflux.bench.report import PACKAGES, commit
    from auraflux.machine import this_machine, versions

    return {
        "machine": asdict(this_machine()),
        "versions": {"auraflux": auraflux.__version__, "python": platform.python_version(), **versions(*PACKAGES)},
        "command": _command(chosen["api_key"]),
        "commit": commit(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_before": round(load_before, 2),
        "model": served.model if chosen["shape"] is None else f"{chosen['shape']}, random weights",
        "device": served.device,
        "url": chosen["url"],
        "prompt_tokens": work.prompt,
        "shared_tokens": work.shared,
        "tokens": work.tokens,
        "stream": work.stream,
        "seed": work.seed,
        "several_at_once": "where several tokens arrive together, the time since the last arrival is divided among them",
        "results": rows,
    }


def _command(api_key: str | None) -> str:
    """Return the command line without the key."""
    words = [word if api_key is None else word.replace(api_key, "KEY") for word in sys.argv[1:]]
    return shlex.join(["auraflux", *words])


def _check_answers(rows: list[dict[str, Any]]) -> None:
    """Fail if no request at all was answered."""
    if all(row["failed"] == row["requests"] for row in rows):
        reasons = {reason: None for row in rows for reason in row["failures"]}
        raise Failure(f"no request was answered: {'; '.join(reasons)}.")
