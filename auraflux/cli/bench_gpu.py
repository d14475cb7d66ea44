"""`auraflux bench ops --device cuda`: the run, its progress and its table."""

import json
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.bench_peers import losses, peer_cell
from auraflux.cli.failure import Failure
from auraflux.errors import BackendError

if TYPE_CHECKING:
    from auraflux.bench.gpu.ceilings import Ceilings
    from auraflux.bench.gpu.run import PeersOf
    from auraflux.bench.result import Result
    from auraflux.ops._cases import Case

WIDTH = 120  # columns where output is no terminal
LONGEST_NOTE = 60  # characters in the table; the document has all of it


def bench_gpu(
    names: tuple[str, ...],
    case: str | None,
    peers: bool,
    routes: bool,
    seconds: float | None,
    as_json: bool,
    save: Path | None,
) -> None:
    if find_spec("triton") is None:
        raise BackendError("triton is not installed, so there are no kernels for the GPU. Run pip install 'auraflux[cuda]'.")
    from auraflux.bench.document import place
    from auraflux.bench.document import save as write
    from auraflux.bench.gpu.document import document, this_gpu
    from auraflux.bench.gpu.routes import without_each
    from auraflux.bench.gpu.run import BUDGET_S, gpu_cases, libraries, no_peers

    gpu = this_gpu()
    target = place(save, gpu.slug) if save is not None else None
    beside = without_each if routes else libraries if peers else no_peers
    results, ceilings, stopped = _run(gpu_cases(names, case), beside, seconds or BUDGET_S)
    found = document(shlex.join(["auraflux", *sys.argv[1:]]), gpu, ceilings, results)
    if target is not None and stopped is None:
        write(found, target)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        show(found)
    if stopped is not None:
        raise stopped
    if wrong := [f"{r.op} {r.case}" for r in results if r.state == "wrong"]:
        raise Failure(f"kernels that differ from their reference: {', '.join(wrong)}.")


def _run(cases: "list[Case]", beside: "PeersOf", seconds: float) -> tuple["list[Result]", "Ceilings", BaseException | None]:
    """Measure the ceilings, the cases and the ceilings again, with progress on stderr; give what was measured before a stop."""
    from rich.console import Console

    from auraflux.bench.gpu.ceilings import measure
    from auraflux.bench.gpu.clock import Graph
    from auraflux.bench.gpu.run import run

    results: list[Result] = []
    stderr = Console(stderr=True)
    with stderr.status("ceilings") as status:
        ceilings = measure(Graph)
        try:
            for result in run(cases, beside, seconds, lambda text: status.update(text)):
                results.append(result)
                if not stderr.is_terminal:
                    click.echo(f"{len(results)}/{len(cases)} {_line(result)}", err=True)
            status.update("ceilings again")
            return results, ceilings.best(measure(Graph)), None
        except (KeyboardInterrupt, BackendError) as stopped:
            return results, ceilings, stopped


def _line(result: "Result") -> str:
    took = "" if result.timing is None else f" {1e6 * result.timing.median_s:.1f} µs"
    return f"{result.op} {result.case}: {result.state}{took}"


def show(found: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=WIDTH)
    console.print(f"{found['gpu']['name']}, CUDA {found['gpu']['cuda']}, torch {found['versions']['torch']}", end="; ")
    console.print(f"triton {found['versions']['triton']}; {found['timing']}")
    read, matmul = found["read_ceiling_tb_per_s"], found["matmul_ceiling_tflop_per_s"]
    console.print(f"ceilings: read {read:.2f} TB/s, bf16 matmul {matmul:.0f} TFLOP/s; share is of the nearer one")
    table = Table("case", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("µs", "kernels", "rate", "share"):
        table.add_column(title, justify="right")
    table.add_column("peers: µs, ratio")
    op = None
    for row in found["results"]:
        if row["op"] != op:
            op = row["op"]
            table.add_section()
            table.add_row(f"[bold]{op}[/bold]")
        table.add_row(f"  {row['case']}", *figures(row), _beside(row))
    console.print(table)
    for line in [*_absent(found["results"]), *losses(found["results"])]:
        console.print(line)


def figures(row: dict[str, Any]) -> list[str]:
    """The four measured columns; for a case that was not timed, its state."""
    if row["state"] != "timed":
        return ["[bold red]WRONG[/bold red]" if row["state"] == "wrong" else f"[dim]{row['state']}[/dim]", "", "", ""]
    matmul = row["bound"] == "matmul"
    rate = f"{row['tflop_per_s']:.0f} TFLOP/s" if matmul else f"{row['tb_per_s']:.2f} TB/s"
    launches = "" if row["launches"] is None else f"{row['launches']:.0f}"
    return [f"{row['time_us']:.1f}", launches, rate, f"{row['matmul_share' if matmul else 'read_share']:.0%}"]


def _beside(row: dict[str, Any]) -> str:
    """The peers of a case, or why it was not timed."""
    from rich.markup import escape

    return (
        ", ".join(peer_cell(peer, LONGEST_NOTE) for peer in row["peers"])
        if row["state"] == "timed"
        else f"[dim]{escape(row['note'] or '')}[/dim]"
    )


def _absent(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each peer that could not be imported."""
    notes = {peer["name"]: peer["note"] for row in rows for peer in row["peers"]}
    yield from (f"{name}: {note}" for name, note in notes.items() if note is not None and note.endswith("not installed"))
