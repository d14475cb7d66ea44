"""`auraflux bench ops --threads`: the kernels of a CPU with several numbers of threads."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from auraflux.cli.output.failure import Failure


def bench_threads(
    names: tuple[str, ...], case: str | None, counts: list[int], seconds: float | None, as_json: bool, save: Path | None
) -> None:
    """Time the benchmark cases with each number of threads, and show or save the table."""
    from auraflux.bench.ops import BUDGET_S, bench_cases, run_by_threads
    from auraflux.bench.report import document, place, row
    from auraflux.bench.report import save as write
    from auraflux.machine import load, this_machine
    from auraflux.ops.simd.peak_bandwidth import read_bandwidths
    from auraflux.ops.simd.threads import threads

    if (most := threads()) < counts[-1]:
        raise Failure(f"--threads is {counts[-1]}; this process has {most}. Set NUMBA_NUM_THREADS for more.")
    target = place(save, f"{this_machine().slug}-threads") if save is not None else None
    load_before = load()
    peaks = read_bandwidths([*{*counts, 1, most}])
    found = list(run_by_threads(bench_cases(names, case), counts, seconds or BUDGET_S, lambda text: click.echo(text, err=True)))
    command, ends = shlex.join(["auraflux", *sys.argv[1:]]), {"all_threads": peaks[most], "one_thread": peaks[1]}
    made = document(command, "cpu", most, load_before, ends, [])
    made["read_ceiling_gb_per_s"] |= {f"{count}_threads": round(peaks[count] / 1e9, 2) for count in counts}
    made["results"] = [{"threads": count, **row(result, peaks[count])} for count, result in found]
    if target is not None:
        write(made, target)
    if as_json:
        click.echo(json.dumps(made, indent=2))
    else:
        _show(made, counts)
    if wrong := [f"{result.op} {result.case}" for _, result in found if result.state == "wrong"]:
        raise Failure(f"kernels that differ from their reference: {', '.join(wrong)}.")


def _show(made: dict[str, Any], counts: list[int]) -> None:
    from rich.table import Table

    from auraflux.cli.output.screen import stdout

    table, cells = Table(box=None), dict[str, dict[int, str]]()
    table.add_column("case, µs (share of the peak)")
    for count in counts:
        table.add_column(f"{count} threads", justify="right")
    for found in made["results"]:
        name = f"{found['op']} {found['case']}"
        share = f" ({found['ceiling_share']:.0%})" if found["ceiling_share"] is not None else ""
        value = f"{found['time_us']:.1f}{share}" if found["time_us"] is not None else found["state"]
        cells.setdefault(name, {})[found["threads"]] = value
    for name, values in cells.items():
        table.add_row(name, *(values.get(count, "") for count in counts))
    peaks = made["read_ceiling_gb_per_s"]
    table.add_row("peak read bandwidth, GB/s", *(str(peaks[f"{count}_threads"]) for count in counts))
    stdout().print(table)
