"""`auraflux bench stream`: speed of experts that are offloaded to disk."""

import json
import shlex
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.bench.signals import busy, ended_by_signals
from auraflux.cli.options.command import Command
from auraflux.errors import InputError

if TYPE_CHECKING:
    from auraflux.bench.offload.random_experts import Shape
    from auraflux.weights.experts.packed_files import ExpertFiles

BAR = 30  # characters of the longest bar


@click.command("stream", cls=Command)
@click.option(
    "--shape",
    "shape_text",
    default="35b-a3b",
    show_default=True,
    metavar="NAME",
    help="Of the MoE layers: 35b-a3b, 397b-a17b, deepseek-v3, or H,I,E,k in numbers.",
)
@click.option("--layers", type=click.IntRange(min=1), default=4, show_default=True, help="MoE layers to build.")
@click.option("--budget", default="25%", show_default=True, help="Memory for experts: a share of all, or a size such as 1GB.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Compute on the CPU, or on a GPU whose slots are above the memory for experts.",
)
@click.option("--slots", default="10%", show_default=True, help="With --device cuda: GPU memory for experts, like --budget.")
@click.option("--disk", metavar="SIZE", help="With --device cuda: simulate a disk of this bandwidth, such as 3GB.")
@click.option("--scratch", type=click.Path(path_type=Path), help="Folder on the disk to measure; by default the system's /tmp.")
@click.option("--tokens", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens of each round.")
@click.option(
    "--trace",
    "traces",
    type=click.Choice(["uniform", "zipf"]),
    multiple=True,
    default=["uniform", "zipf"],
    show_default=True,
    help="How tokens choose experts; may be given twice.",
)
@click.option("--repeat", type=click.IntRange(min=1), default=7, show_default=True, help="Rounds; the median counts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--save", type=click.Path(path_type=Path), help="Also write the JSON to a file, or into a folder.")
def bench_stream(
    shape_text: str,
    layers: int,
    budget: str,
    device: str,
    slots: str,
    disk: str | None,
    scratch: Path | None,
    tokens: int,
    traces: tuple[str, ...],
    repeat: int,
    as_json: bool,
    save: Path | None,
) -> None:
    """Time MoE layers whose experts are on disk.

    Builds layers of random experts in a scratch folder, which is removed afterwards. Only the MoE layers run. The disk's raw
    bandwidth is that of the same reads without compute. Mapped files get the same memory: pages that would not fit are dropped
    between calls. "Next router run early" predicts 80% of the next layer's experts.

    On a GPU the layers are replayed as a CUDA graph, and missing experts are read into host memory and copied into slots.
    """
    from auraflux.bench.offload.random_experts import parse_shape
    from auraflux.bench.parity import check_device
    from auraflux.bench.report import place
    from auraflux.bench.report import save as write
    from auraflux.machine import load, this_machine

    check_device(device)
    if device == "cpu" and disk is not None:
        raise InputError("--disk needs --device cuda: on the CPU the real disk is measured.")
    shape = parse_shape(shape_text)
    home = Path(tempfile.gettempdir()) if scratch is None else scratch
    if not home.is_dir():
        raise InputError(f"there is no folder {home} to build experts in; name one with --scratch.")
    target = place(save, f"stream-{shape_text.replace(',', '-')}-{this_machine().slug}") if save is not None else None
    before = load()
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="auraflux-stream-", dir=home) as folder:
        files = _build(Path(folder), shape, layers, device)
        granted = parse_budget(budget, files.nbytes)
        if device == "cpu":
            found, notes = _measure(files, shape, granted, tokens, traces, repeat)
        else:
            memory = parse_budget(slots, files.nbytes), granted
            found, notes = _measure_on_gpu(files, shape, memory, disk, tokens, traces, repeat)
        document = _document(files, shape_text, shape, granted, tokens, before, found, notes)
    if target is not None:
        write(document, target)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _show(document)


def parse_budget(text: str, whole: int) -> int:
    """Parse bytes: a share of the whole, such as 25%, or a size, such as 1GB."""
    from auraflux.weights.experts.settings import parse_nbytes

    if not text.endswith("%"):
        return parse_nbytes(text)
    try:
        share = float(text[:-1])
    except ValueError:
        share = 0.0
    if not 0 < share <= 100:
        raise InputError(f"--budget {text!r} is no share. Write it like 25%, or a size like 1GB.")
    return int(whole * share / 100)


def _build(folder: Path, shape: "Shape", layers: int, device: str) -> "ExpertFiles":
    from auraflux.bench.offload.random_experts import build
    from auraflux.ops.simd.isa import ISA
    from auraflux.progress import on_terminal

    done, total = 0, layers * shape.count * shape.expert_nbytes
    with on_terminal() as report:

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            report("building experts", done, total)

        return build(folder, shape, layers, advance, ISA.lanes if device == "cpu" else 1)


def _measure(
    files: "ExpertFiles", shape: "Shape", budget: int, tokens: int, traces: tuple[str, ...], repeat: int
) -> tuple[list[dict[str, Any]], list[str]]:
    from rich.console import Console

    from auraflux.bench.offload.measure import measure, rows

    notes = _reader_notes(files)
    with Console(stderr=True).status("") as status:
        return rows(list(measure(files, shape, budget, tokens, list(dict.fromkeys(traces)), repeat, status.update))), notes


def _measure_on_gpu(
    files: "ExpertFiles",
    shape: "Shape",
    memory: tuple[int, int],
    disk: str | None,
    tokens: int,
    traces: tuple[str, ...],
    repeat: int,
) -> tuple[list[dict[str, Any]], list[str]]:
    from rich.console import Console

    from auraflux.bench.offload.gpu_stream import GpuRun, measure
    from auraflux.weights.experts.settings import parse_nbytes

    run, notes = GpuRun(*memory, None if disk is None else max(1, parse_nbytes(disk))), _reader_notes(files)
    if disk is not None:
        notes.append(f"a disk of {disk}/s is simulated.")
    with Console(stderr=True).status("") as status:
        return list(measure(files, shape, run, tokens, list(dict.fromkeys(traces)), repeat, status.update)), notes


def _reader_notes(files: "ExpertFiles") -> list[str]:
    from auraflux.weights.experts.disk_reader import DiskReader

    reader = DiskReader(verify=False)
    reader.open_files(files.files)
    reader.close()
    return list(reader.notes)


def _document(
    files: "ExpertFiles",
    name: str,
    shape: "Shape",
    budget: int,
    tokens: int,
    load_before: float,
    found: list[dict[str, Any]],
    notes: list[str],
) -> dict[str, Any]:
    import platform
    from datetime import UTC, datetime

    import auraflux
    from auraflux.bench.report import PACKAGES, commit
    from auraflux.machine import this_machine, versions

    return {
        "machine": asdict(this_machine()),
        "versions": {"auraflux": auraflux.__version__, "python": platform.python_version(), **versions(*PACKAGES)},
        "command": shlex.join(["auraflux", *sys.argv[1:]]),
        "commit": commit(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_before": round(load_before, 2),
        "shape": {"name": name, **asdict(shape), "expert_nbytes": shape.expert_nbytes},
        "layers": len(files.files),
        "nbytes": files.nbytes,
        "budget_nbytes": budget,
        "tokens": tokens,
        "notes": notes,
        "results": found,
    }


def _show(document: dict[str, Any]) -> None:
    from rich.table import Table

    from auraflux.cli.output.screen import stdout

    console, machine, shape = stdout(), document["machine"], document["shape"]
    console.print(f"{machine['cpu']} ({machine['architecture']}), {machine['cores']} cores")
    console.print(
        f"{shape['name']}: {document['layers']} layers of {shape['count']} experts of {shape['expert_nbytes'] / 1e6:.2f} MB, "
        f"{shape['k']} for each token"
    )
    console.print(
        f"{document['nbytes'] / 1e9:.2f} GB on disk, with an expert cache of {document['budget_nbytes'] / 1e9:.2f} GB"
    )
    for note in document["notes"]:
        console.print(f"note: {note}")
    if warning := busy(document):
        console.print(f"{warning}: rates are too low")
    if document["results"][0]["who"] == "gpu":
        _show_gpu(console, document["results"])
        return
    for trace in dict.fromkeys(row["trace"] for row in document["results"]):
        table = Table("", title=f"{trace} choice of experts", title_justify="left")
        for title in ("tokens/s", "read GB/s", "disk GB/s", "of disk", "best", "hits", "prefetched", "stalled", "x mapped"):
            table.add_column(title, justify="right")
        table.add_column("")
        rows = [row for row in document["results"] if row["trace"] == trace]
        most = max(row["tokens_per_s"] for row in rows)
        for row in rows:
            colour = "red" if row["who"] == "mapped" else "green" if row["who"] == "streamed" else "blue"
            bar = "█" * max(1, round(BAR * row["tokens_per_s"] / most))
            table.add_row(row["who"], *_figures(row), f"[{colour}]{bar}[/{colour}]")
        console.print(table)


def _show_gpu(console: Any, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    first = rows[0]
    console.print(f"slots for {first['gpu_slots']} experts on the GPU and for {first['host_slots']} in host memory")
    table = Table("choice of experts")
    titles = "tokens/s", "misses/token", "from disk", "MB/token", "read GB/s", "disk GB/s", "of disk", "best"
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row["trace"],
            f"{row['tokens_per_s']:.2f}",
            f"{row['misses_per_token']:.1f}",
            f"{row['disk_reads_per_token']:.1f}",
            f"{row['read_mb_per_token']:.0f}",
            f"{row['read_gb_per_s']:.2f}",
            f"{row['raw_gb_per_s']:.2f}",
            f"{row['raw_share']:.0%}",
            f"{row['best_raw_share']:.0%}",
        )
    console.print(table)


def _figures(row: dict[str, Any]) -> list[str]:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        f"{row['tokens_per_s']:.1f}",
        f"{row['read_gb_per_s']:.2f}",
        shown(row["raw_gb_per_s"], ".2f"),
        shown(row["raw_share"], ".0%"),
        shown(row["best_raw_share"], ".0%"),
        f"{row['hit_rate']:.0%}",
        f"{row['ahead_rate']:.0%}",
        shown(row["stall"], ".0%"),
        shown(row["mapped_ratio"], ".2f"),
    ]
