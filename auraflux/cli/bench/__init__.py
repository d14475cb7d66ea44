"""`auraflux bench`: speed of ops, models and servers, with other libraries and the machine's measured peak."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.bench.model import bench_model
from auraflux.cli.bench.peers import losses, peer_cell
from auraflux.cli.bench.ranks import bench_ranks
from auraflux.cli.bench.serve import bench_serve
from auraflux.cli.bench.signals import busy
from auraflux.cli.bench.speculate import bench_speculate
from auraflux.cli.bench.stream import bench_stream
from auraflux.cli.bench.threads import bench_threads
from auraflux.cli.options.command import Command, Group
from auraflux.cli.output.failure import Failure
from auraflux.cli.output.units import size

if TYPE_CHECKING:
    from auraflux.bench.result import Result
    from auraflux.ops._cases import Case


@click.group(cls=Group)
def bench() -> None:
    """Measure speed."""


bench.add_command(bench_model)
bench.add_command(bench_ranks)
bench.add_command(bench_serve)
bench.add_command(bench_speculate)
bench.add_command(bench_stream)


@bench.command("ops", cls=Command)
@click.option("--op", "names", multiple=True, metavar="NAME", help="Only this op; may be given several times.")
@click.option("--case", metavar="NAME", help="Only cases of this name; * matches any characters.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to run.")
@click.option("--peers/--no-peers", default=True, show_default=True, help="Time other libraries on the same work.")
@click.option("--routes", is_flag=True, help="On a GPU, instead of peers: the kernel that would run without the chosen one.")
@click.option("--as", "older", metavar="8.9", help="On a GPU: the kernels and limits of a GPU of this compute capability.")
@click.option(
    "--threads",
    "counts",
    multiple=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="On CPU, instead of peers: time each case with so many threads; may be given several times.",
)
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
    older: str | None,
    counts: tuple[int, ...],
    seconds: float | None,
    as_json: bool,
    save: Path | None,
) -> None:
    """Time the kernels.

    Each kernel is checked against its reference first; a wrong one is shown as WRONG, not timed, and the exit code is 1.
    Operands of a megabyte and more are rotated through copies larger than the cache. GB/s counts the bytes that a call must
    move, as a share of the peak read bandwidth measured in the same run. A peer's ratio is its time over ours: below 1 it is
    faster.

    On a GPU, calls are timed as CUDA graphs at sizes of large models. Rates are shares of the measured peak of reads or of
    bf16 matmul, whichever is nearer. With --as the GPU passes for another one; times are still those of the GPU that is there.
    """
    if older is not None:
        if device != "cuda":
            raise Failure("--as is for --device cuda.")
        # read when the kernels are imported
        os.environ["AURAFLUX_AS_GPU"] = older
    from auraflux.bench.ops import BUDGET_S, bench_cases
    from auraflux.bench.parity import check_device
    from auraflux.bench.report import document, place
    from auraflux.bench.report import save as write
    from auraflux.cli.bench.gpu import bench_gpu
    from auraflux.machine import load, this_machine

    if counts and device != "cpu":
        raise Failure("--threads is for --device cpu.")
    check_device(device)
    if counts:
        bench_threads(names, case, sorted({*counts}), seconds, as_json, save)
        return
    if device == "cuda":
        bench_gpu(names, case, peers, routes, seconds, as_json, save)
        return
    if routes:
        raise Failure("--routes is for --device cuda.")
    target = place(save, this_machine().slug) if save is not None else None
    load_before = load()
    results, peak, threads = run_cases(bench_cases(names, case), peers, seconds or BUDGET_S)
    found = document(shlex.join(["auraflux", *sys.argv[1:]]), device, threads, load_before, peak, results)
    if target is not None:
        write(found, target)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found)
    if wrong := [f"{r.op} {r.case}" for r in results if r.state == "wrong"]:
        raise Failure(f"kernels that differ from their reference: {', '.join(wrong)}.")


def run_cases(cases: "list[Case]", peers: bool, seconds: float) -> tuple["list[Result]", dict[str, float], int]:
    """Measure the peak read bandwidth, then the cases, with progress on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from auraflux.bench.ops import run
    from auraflux.ops.simd.peak_bandwidth import peak_read_bandwidth
    from auraflux.ops.simd.threads import threads

    stderr = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("peak read bandwidth", total=len(cases))
        first = peak_read_bandwidth()
        results = []
        for result in run(cases, peers, first["all_threads"], seconds, lambda text: progress.update(task, description=text)):
            results.append(result)
            progress.advance(task)
        progress.update(task, description="peak read bandwidth again")
        # the machine may have been busier before than during the run
        peak = {name: max(rate, first[name]) for name, rate in peak_read_bandwidth().items()}
    return results, peak, threads()


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    from auraflux.cli.output.screen import stdout

    machine, peak = found["machine"], found["read_ceiling_gb_per_s"]
    console = stdout()
    console.print(f"{machine['cpu']} ({machine['architecture']}), {found['threads']} threads; device {found['device']}")
    console.print(f"peak read bandwidth {peak['all_threads']:.1f} GB/s, one thread {peak['one_thread']:.1f} GB/s")
    if warning := busy(found):
        console.print(f"{warning}: all times are too long")
    table = Table("op", "case", "contract")
    for title in ("µs", "bytes", "GB/s", "of peak", "GFLOP/s"):
        table.add_column(title, justify="right")
    table.add_column("peers: µs, ratio")
    for row in found["results"]:
        table.add_row(row["op"], row["case"], row["contract"], *_figures(row), "\n".join(map(peer_cell, row["peers"])))
    console.print(table)
    for line in losses(found["results"]):
        console.print(line)


def _figures(row: dict[str, Any]) -> list[str]:
    """Return the five measured columns; for a case that was not timed, the reason."""
    from rich.markup import escape

    if row["state"] == "wrong":
        return [f"[bold red]WRONG[/bold red] {escape(row['note'])}", "", "", "", ""]
    if row["state"] != "timed":
        return [f"[dim]{escape(row['note'])}[/dim]", "", "", "", ""]
    gflops = f"{row['gflop_per_s']:.1f}" if row["gflop_per_s"] is not None else ""
    return [f"{row['time_us']:.1f}", size(row["nbytes"], 1), f"{row['gb_per_s']:.2f}", f"{row['ceiling_share']:.0%}", gflops]
