"""`auraflux bench model`: how fast a whole model reads and writes."""

import json
import resource
import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options import LOADING, load_model, model_argument, options

if TYPE_CHECKING:
    from auraflux.bench.model import Contender, Speed
    from auraflux.run.language import LanguageModel


@click.command("model")
@model_argument
@click.option("--at", "lengths", multiple=True, type=int, metavar="N", help="Prompt length; may be given several times.")
@click.option("--tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens to write at each length.")
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Rounds; the best counts.")
@click.option("--peers/--no-peers", default=True, show_default=True, help="Also time llama.cpp on a GGUF file, if installed.")
@options(LOADING)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_model(
    model: str | None, lengths: tuple[int, ...], tokens: int, repeat: int, peers: bool, as_json: bool, **chosen: Any
) -> None:
    """Time reading a prompt and writing after it with MODEL, at several lengths.

    Prompts are random tokens. Contenders take turns, so that a busy machine is busy for all of them.
    """
    from rich.console import Console

    from auraflux.bench.model import Ours, check_lengths, measure

    loaded = load_model(model, chosen)
    at = list(lengths) or [n for n in (128, 512, 2048) if n + tokens <= loaded.context]
    check_lengths(at, tokens, loaded.context)
    contenders: list[Contender] = [Ours(loaded), *(_llama_cpp(loaded, max(at) + tokens) if peers else [])]
    stderr = Console(stderr=True)
    with stderr.status("") as status:
        found = list(measure(contenders, at, loaded.engine.model.config.vocab, tokens, repeat, status.update))
    document = _document(loaded, found)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _show(document, found)


def _llama_cpp(loaded: "LanguageModel", context: int) -> list[Any]:
    import numba

    from auraflux.bench.model import LlamaCpp

    if loaded.path.suffix != ".gguf":
        return []
    try:
        return [LlamaCpp(loaded.path, context, numba.get_num_threads())]
    except ImportError:
        click.echo("note: llama-cpp-python is not installed, so there is nothing to compare with.", err=True)
        return []


def _document(loaded: "LanguageModel", found: "list[Speed]") -> dict[str, Any]:
    from auraflux.bench.document import commit
    from auraflux.machine import load, this_machine
    from auraflux.run.engine import nbytes

    return {
        "machine": asdict(this_machine()),
        "command": shlex.join(["auraflux", *sys.argv[1:]]),
        "commit": commit(),
        "load": round(load(), 2),
        "model": loaded.path.name,
        "weights_nbytes": nbytes(loaded.engine.model),
        "peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "results": [asdict(speed) for speed in found],
    }


def _show(document: dict[str, Any], found: "list[Speed]") -> None:
    from rich.table import Table

    from auraflux.cli.generate import megabytes
    from auraflux.cli.screen import stdout

    console = stdout()
    console.print(f"{document['model']} on {document['machine']['cpu']}, {document['machine']['cores']} cores")
    weights, peak = megabytes(document["weights_nbytes"]), megabytes(document["peak_nbytes"])
    console.print(f"weights {weights}, peak memory of the process {peak}, load {document['load']}")
    table = Table("prompt", "", *("prefill tokens/s", "ratio", "decode tokens/s", "ratio", "cache"))
    ours = {speed.context: speed for speed in found if speed.who.startswith("auraflux")}
    for speed in found:
        mine = ours[speed.context]
        ratios = [mine.prefill_rate / speed.prefill_rate, mine.decode_rate / speed.decode_rate]
        shown = ["" if speed is mine else f"{ratio:.2f}x" for ratio in ratios]
        held = megabytes(speed.cache_nbytes) if speed.cache_nbytes is not None else ""
        rates = f"{speed.prefill_rate:.1f}", f"{speed.decode_rate:.1f}"
        table.add_row(str(speed.context), speed.who, rates[0], shown[0], rates[1], shown[1], held)
    console.print(table)
