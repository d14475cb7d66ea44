"""`auraflux bench ops --device cuda`: the run, its progress and its table."""

import json
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.bench.peers import losses, peer_cell
from auraflux.cli.output.failure import Failure
from auraflux.errors import BackendError

if TYPE_CHECKING:
    from auraflux.bench.gpu.peaks import Peaks
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
        raise BackendError("triton is not installed, so there are no kernels for the GPU. Run pip install triton.")
    from auraflux.bench.gpu.report import document, this_gpu
    from auraflux.bench.gpu.routes import without_each
    from auraflux.bench.gpu.run import BUDGET_S, gpu_cases, libraries, no_peers
    from auraflux.bench.report import place
    from auraflux.bench.report import save as write

    gpu = this_gpu()
    target = place(save, gpu.slug) if save is not None else None
    peers_of = without_each if routes else libraries if peers else no_peers
    results, peaks, stopped = run_cases(gpu_cases(names, case), peers_of, seconds or BUDGET_S)
    found = document(shlex.join(["auraflux", *sys.argv[1:]]), gpu, peaks, results)
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


def run_cases(cases: "list[Case]", peers_of: "PeersOf", seconds: float) -> tuple["list[Result]", "Peaks", BaseException | None]:
    """Measure the peaks, the cases and the peaks again, with progress on stderr; return the results so far if interrupted."""
    from rich.console import Console

    from auraflux.bench.gpu.graph_timing import Graph
    from auraflux.bench.gpu.peaks import measure
    from auraflux.bench.gpu.run import run

    results: list[Result] = []
    stderr = Console(stderr=True)
    with stderr.status("measured peaks") as status:
        peaks = measure(Graph)
        try:
            for result in run(cases, peers_of, seconds, lambda text: status.update(text)):
                results.append(result)
                if not stderr.is_terminal:
                    click.echo(f"{len(results)}/{len(cases)} {_line(result)}", err=True)
            status.update("measured peaks again")
            return results, peaks.best(measure(Graph)), None
        except (KeyboardInterrupt, BackendError) as stopped:
            return results, peaks, stopped


def _line(result: "Result") -> str:
    took = "" if result.timing is None else f" {1e6 * result.timing.median_s:.1f} µs"
    return f"{result.op} {result.case}: {result.state}{took}"


def show(found: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=WIDTH)
    if (older := found["gpu"].get("passes_for")) is not None:
        console.print(f"with the kernels and limits of compute capability {older}: no such GPU was measured")
    console.print(f"{found['gpu']['name']}, CUDA {found['gpu']['cuda']}, torch {found['versions']['torch']}", end="; ")
    console.print(f"triton {found['versions']['triton']}; {found['timing']}")
    read, matmul = found["read_ceiling_tb_per_s"], found["matmul_ceiling_tflop_per_s"]
    console.print(f"measured peaks: read {read:.2f} TB/s, bf16 matmul {matmul:.0f} TFLOP/s; share is of the nearer one")
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
        table.add_row(f"  {row['case']}", *figures(row), _peers_or_note(row))
    console.print(table)
    for line in [*_absent(found["results"]), *losses(found["results"])]:
        console.print(line)


def figures(row: dict[str, Any]) -> list[str]:
    """Return the four measured columns; for a case that was not timed, its state."""
    if row["state"] != "timed":
        return ["[bold red]WRONG[/bold red]" if row["state"] == "wrong" else f"[dim]{row['state']}[/dim]", "", "", ""]
    matmul = row["bound"] == "matmul"
    rate = f"{row['tflop_per_s']:.0f} TFLOP/s" if matmul else f"{row['tb_per_s']:.2f} TB/s"
    launches = "" if row["launches"] is None else f"{row['launches']:.0f}"
    return [f"{row['time_us']:.1f}", launches, rate, f"{row['matmul_share' if matmul else 'read_share']:.0%}"]


def _peers_or_note(row: dict[str, Any]) -> str:
    """Return the peers of a case, or the reason why it was not timed."""
    from rich.markup import escape

    return (
        ", ".join(peer_cell(peer, LONGEST_NOTE) for peer in row["peers"])
        if row["state"] == "timed"
        else f"[dim]{escape(row['note'] or '')}[/dim]"
    )


def _absent(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each peer that is not installed."""
    notes = {peer["name"]: peer["note"] for row in rows for peer in row["peers"]}
    yield from (f"{name}: {note}" for name, note in notes.items() if note is not None and note.endswith("not installed"))
