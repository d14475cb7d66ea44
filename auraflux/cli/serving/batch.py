"""`auraflux batch`: run a file of requests without a server."""

import asyncio
import multiprocessing
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import check_loading
from auraflux.cli.options.model import DEFAULT_SAMPLING, LOADING, options
from auraflux.cli.options.served_model import open_model_process
from auraflux.errors import InputError

if TYPE_CHECKING:
    from auraflux.serve.batch.journal import Journal
    from auraflux.serve.batch.lines import BatchLine

EXAMPLES = (
    "auraflux batch requests.jsonl responses.jsonl --model model.gguf",
    "auraflux batch requests.jsonl responses.jsonl --max-sequences 16",
)
END_S = 10.0  # for the requests to stop after an interruption
# options of a server that a batch has no use for
UNUSED: dict[str, Any] = {"name": None, "restart": False, "invented": False, "shape": None, "layers": None, "ranks": None}
UNUSED |= {"target_itl": None, "prefix_disk": None, "prefix_folder": None}


@click.command(
    cls=Command,
    short_help="Run a file of requests without a server.",
    everyday=("--model", "--max-sequences", "--device", "--kv", "--context"),
    examples=EXAMPLES,
)
@click.argument("requests", type=click.Path(path_type=Path))
@click.argument("responses", type=click.Path(path_type=Path))
@click.option("--model", metavar="MODEL", help="A folder, a GGUF file or a name; by default the built-in model.")
@click.option(
    "--max-sequences",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Maximum sequences of a batch; by default 8, on a GPU 64.",
)
@click.option("--cache-memory", metavar="SIZE", help="Memory for the KV cache; by default half of the free memory.")
@options(DEFAULT_SAMPLING)
@options(LOADING)
def batch(requests: Path, responses: Path, model: str | None, **chosen: Any) -> None:
    """Run the requests of a file, and write their responses to another.

    REQUESTS has one request per line, as for OpenAI's Batch API: custom_id, method, url and body. The url is
    /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings or /v1/rerank; the body's model counts only
    if it is the name of an --adapter.
    RESPONSES gets a line for each as soon as it is complete. Run the command again after an interruption: requests that
    RESPONSES has are not run again.
    """
    from auraflux.serve.batch.journal import Journal

    check_loading(model, chosen)
    lines = _read(requests)
    if responses.exists() and responses.samefile(requests):
        raise InputError(f"{requests} holds the requests; give another file for the responses.")
    try:
        journal = Journal(responses)
    except OSError as err:
        raise InputError(f"{responses} cannot be written: {err.strerror or err}.") from err
    with journal:
        if all(line.id in journal.done for line in lines):
            click.echo(f"all {len(lines)} responses are in {responses} already.", err=True)
            return
        _run(model, {**UNUSED, **chosen}, lines, journal)
    click.echo(f"{len(lines)} responses are in {responses}.", err=True)


def _read(path: Path) -> "list[BatchLine]":
    from auraflux.serve.batch.lines import read_lines

    try:
        with path.open("rb") as file:
            return list(read_lines(file))
    except OSError as err:
        raise InputError(f"the requests in {path} cannot be read: {err.strerror or err}.") from err
    except InputError as err:
        raise InputError(f"{path}: {err}") from err


def _run(model: str | None, chosen: dict[str, Any], lines: "list[BatchLine]", journal: "Journal") -> None:
    """Run the model in this thread, and the requests in another."""
    ours, theirs = multiprocessing.Pipe()
    failure: list[BaseException] = []

    def requests() -> None:
        try:
            asyncio.run(_requests(theirs, lines, journal))
        except BaseException as err:
            failure.append(err)
        finally:
            # ends the model
            theirs.close()

    thread = threading.Thread(target=requests, name="auraflux-batch", daemon=True)
    # the pipe must be read while the model loads: it sends its tokenizer
    thread.start()
    try:
        open_model_process(model, ours, chosen).run()
    finally:
        ours.close()
        thread.join(END_S)
    if failure:
        raise failure[0]


async def _requests(connection: Any, lines: "list[BatchLine]", journal: "Journal") -> None:
    """Run the requests once the model is loaded; stop if its process ends."""
    from dataclasses import replace

    from auraflux.progress import on_terminal
    from auraflux.serve.app import make_inner_app
    from auraflux.serve.batch.work import run_lines
    from auraflux.serve.service import Service
    from auraflux.serve.transport.model_names import adapter_of
    from auraflux.serve.transport.pipe import PipeLink

    ready = asyncio.Event()
    link = PipeLink(connection, waiting=len(lines), on_stop=ready.set, on_ready=ready.set)
    link.listen()
    await ready.wait()
    if link.facts is None:
        return

    facts = link.facts
    app, at_once = make_inner_app(Service(link)), 2 * facts.max_sequences
    # a body names any model; only the name of an adapter counts
    lines = [replace(line, body={**line.body, "model": adapter_of(facts, (), line.body.get("model"))}) for line in lines]
    with on_terminal() as report:

        def show() -> None:
            report("running: requests", sum(line.id in journal.done for line in lines), len(lines))

        same: dict[str, Any] = {"outputs": journal, "errors": journal}
        work = asyncio.ensure_future(run_lines(app, lines, caller="batch", at_once=at_once, on_done=show, **same))

        def stop() -> None:
            work.cancel()

        link.on_stop = stop
        await work
    link.on_stop = lambda: None
    link.close()
