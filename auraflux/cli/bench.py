"""`auraflux bench`: how fast the operations are here, beside other libraries and the machine's own limit."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.bench_model import bench_model
from auraflux.cli.bench_peers import losses, peer_cell
from auraflux.cli.bench_ranks import bench_ranks
from auraflux.cli.bench_run import busy
from auraflux.cli.bench_serve import bench_serve
from auraflux.cli.bench_speculate import bench_speculate
from auraflux.cli.bench_stream import bench_stream
from auraflux.cli.failure import Failure
from auraflux.cli.units import size

if TYPE_CHECKING:
    from auraflux.bench.result import Result
    from auraflux.ops._cases import Case


@click.group()
def bench() -> None:
    """Measure speed."""


bench.add_command(bench_model)
bench.add_command(bench_ranks)
bench.add_command(bench_serve)
bench.add_command(bench_speculate)
bench.add_command(bench_stream)


@bench.command("ops")
@click.option("--op", "names", multiple=True, metavar="NAME", help="Only this op; may be given several times.")
@click.option("--case", metavar="NAME", help="Only cases of this name; it may hold * for any text.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to run.")
@click.option("--peers/--no-peers", default=True, show_default=True, help="Time other libraries on the same work.")
@click.option("--routes", is_flag=True, help="On a GPU, in place of peers: what runs without the kernel that is taken.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.01),
    help="Time given to each contender; by default 1 on CPU, 0.2 on a GPU.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--save", type=click.Path(path_type=Path), help="Also write the JSON to a file, or into a folder.")
def bench_ops(
    names: tuple[str, ...],
    case: str | None,
    device: str,
    peers: bool,
    routes: bool,
    seconds: float | None,
    as_json: bool,
    save: Path | None,
) -> None:
    """Time the kernels.

    Each kernel is held to its reference first; a wrong one is shown as WRONG, not timed, and the exit code is 1. Operands of a
    megabyte and more are rotated through copies larger than the cache. GB/s counts what a call must move, and its share is of
    the fastest read of memory measured in the same run. A peer's ratio is its time over ours: below 1 it is faster.

    On a GPU, calls are timed as CUDA graphs at sizes of large models. Rates are shares of the fastest read or of the fastest
    bf16 product measured in the same run, whichever is nearer.
    """
    from auraflux.bench.document import document, place
    from auraflux.bench.document import save as write
    from auraflux.bench.ops import BUDGET_S, bench_cases
    from auraflux.bench.parity import check_device
    from auraflux.cli.bench_gpu import bench_gpu
    from auraflux.machine import load, this_machine

    check_device(device)
    if device == "cuda":
        bench_gpu(names, case, peers, routes, seconds, as_json, save)
        return
    if routes:
        raise Failure("--routes is for --device cuda.")
    target = place(save, this_machine().slug) if save is not None else None
    load_before = load()
    results, ceiling, threads = _run(bench_cases(names, case), peers, seconds or BUDGET_S)
    found = document(shlex.join(["auraflux", *sys.argv[1:]]), device, threads, load_before, ceiling, results)
    if target is not None:
        write(found, target)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found)
    if wrong := [f"{r.op} {r.case}" for r in results if r.state == "wrong"]:
        raise Failure(f"kernels that differ from their reference: {', '.join(wrong)}.")


def _run(cases: "list[Case]", peers: bool, seconds: float) -> tuple["list[Result]", dict[str, float], int]:
    """Measure the ceiling, then the cases, with progress on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from auraflux.bench.ops import run
    from auraflux.ops.simd.ceiling import read_ceiling
    from auraflux.ops.simd.threads import threads

    stderr = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("read ceiling", total=len(cases))
        first = read_ceiling()
        results = []
        for result in run(cases, peers, first["all_threads"], seconds, lambda text: progress.update(task, description=text)):
            results.append(result)
            progress.advance(task)
        progress.update(task, description="read ceiling again")
        # the machine may have been busier before than during the run
        ceiling = {name: max(rate, first[name]) for name, rate in read_ceiling().items()}
    return results, ceiling, threads()


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    from auraflux.cli.screen import stdout

    machine, ceiling = found["machine"], found["read_ceiling_gb_per_s"]
    console = stdout()
    console.print(f"{machine['cpu']} ({machine['architecture']}), {found['threads']} threads; device {found['device']}")
    console.print(f"read ceiling {ceiling['all_threads']:.1f} GB/s, one thread {ceiling['one_thread']:.1f} GB/s")
    if warning := busy(found):
        console.print(f"{warning}: all times are too long")
    table = Table("op", "case", "contract")
    for title in ("µs", "bytes", "GB/s", "of ceiling", "GFLOP/s"):
        table.add_column(title, justify="right")
    table.add_column("peers: µs, ratio")
    for row in found["results"]:
        table.add_row(row["op"], row["case"], row["contract"], *_figures(row), "\n".join(map(peer_cell, row["peers"])))
    console.print(table)
    for line in losses(found["results"]):
        console.print(line)


def _figures(row: dict[str, Any]) -> list[str]:
    """The five measured columns; for a case that was not timed, why not."""
    from rich.markup import escape

    if row["state"] == "wrong":
        return [f"[bold red]WRONG[/bold red] {escape(row['note'])}", "", "", "", ""]
    if row["state"] != "timed":
        return [f"[dim]{escape(row['note'])}[/dim]", "", "", "", ""]
    gflops = f"{row['gflop_per_s']:.1f}" if row["gflop_per_s"] is not None else ""
    return [f"{row['time_us']:.1f}", size(row["nbytes"], 1), f"{row['gb_per_s']:.2f}", f"{row['ceiling_share']:.0%}", gflops]
