"""`auraflux recommend`: the largest quantization of a model that fits this machine, and how fast it would decode."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import check_sizes
from auraflux.cli.output.units import size

if TYPE_CHECKING:
    from auraflux.loading.recommendation import Fit, Resources
    from auraflux.weights.download.quantizations import Offer

GPU_READ_NBYTES = 1 << 29
DISK_S = 1.0  # of reading a file that is here
EXAMPLES = (
    "auraflux recommend org/name-GGUF",
    "auraflux recommend /srv/models/name-GGUF --gpu-memory 8GB",
)
NOTES = {
    "GPU": "all weights in GPU memory",
    "GPU + memory": "experts that do not fit into GPU memory stay in host memory",
    "memory": "all weights in memory, computed by the CPU",
    "disk": "experts are read from disk while it decodes, after auraflux pack",
}


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("model")
@click.option("--gpu-memory", metavar="SIZE", help="Assume so much GPU memory, such as 8GB; by default what is free.")
@click.option("--memory", metavar="SIZE", help="Assume so much host memory, such as 16GB; by default what is free.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def recommend(model: str, gpu_memory: str | None, memory: str | None, as_json: bool) -> None:
    """Choose the largest quantization of MODEL that fits this machine.

    MODEL is a repository on the Hugging Face hub, of which only the list of files is read, or a folder of files. Bandwidths of
    memory, GPU and disk are measured for a few seconds. Speeds are bytes divided by bandwidth: an upper bound for one sequence.
    """
    check_sizes({"gpu_memory": gpu_memory, "expert_memory": memory})
    from auraflux.loading.recommendation import fit, recommended
    from auraflux.weights.download.quantizations import find_quantizations

    offer = find_quantizations(model)
    machine = _machine(offer, gpu_memory, memory)
    fits = [fit(each, offer.mixture, machine, offer.local) for each in offer.quantizations]
    chosen = recommended(fits)
    if as_json:
        found = {"machine": asdict(machine), "fits": [asdict(each) for each in fits]}
        click.echo(json.dumps({**found, "recommended": None if chosen is None else chosen.quantization.name}, indent=2))
    else:
        _show(offer, machine, fits, chosen)


def _machine(offer: "Offer", gpu_memory: str | None, memory: str | None) -> "Resources":
    """Measure what this machine has."""
    import torch

    from auraflux.loading.recommendation import Resources
    from auraflux.machine import cache_home, free_nbytes
    from auraflux.ops.simd.peak_bandwidth import peak_read_bandwidth
    from auraflux.weights.experts.settings import parse_nbytes

    free = free_nbytes() if memory is None else parse_nbytes(memory)
    gpu, rate = None if gpu_memory is None else parse_nbytes(gpu_memory), None
    if torch.cuda.is_available():
        from auraflux.bench.gpu.graph_timing import Graph
        from auraflux.bench.gpu.peaks import memory_peaks

        gpu = torch.cuda.mem_get_info()[0] if gpu is None else gpu
        rate = max(memory_peaks(Graph, nbytes=GPU_READ_NBYTES))
    return Resources(
        memory_nbytes=free,
        memory_rate=peak_read_bandwidth()["all_threads"],
        gpu_nbytes=gpu,
        gpu_rate=rate,
        disk_nbytes=None if offer.local else shutil.disk_usage(_existing(cache_home())).free,
        disk_rate=_disk_rate(offer) if offer.local else None,
    )


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())


def _disk_rate(offer: "Offer") -> float | None:
    """Measure the disk with the largest file that is here; None for a small one."""
    from auraflux.weights.experts.read_speed import FileChunks, direct_speed

    path = Path(offer.quantizations[0].name)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    chunks = FileChunks.of(max(files, key=lambda each: each.stat().st_size))
    return direct_speed(chunks, DISK_S) if chunks.count else None


def _show(offer: "Offer", machine: "Resources", fits: "list[Fit]", chosen: "Fit | None") -> None:
    from rich.markup import escape
    from rich.table import Table

    from auraflux.cli.output.screen import stdout

    console = stdout()
    console.print(_machine_line(machine))
    table = Table("quantization", title_justify="left")
    for name in ("size", "bits/weight", "runs in", "tokens/s, at most"):
        table.add_column(name, justify="right")
    for each in fits:
        found = each.quantization
        mark = "[green]→[/green] " if each is chosen else "  "
        bits = "" if offer.parameters is None else f"{found.nbytes * 8 / offer.parameters:.1f}"
        speed = "" if each.place is None else "?" if each.tokens_per_s is None else f"{each.tokens_per_s:.1f}"
        table.add_row(mark + escape(found.label), size(found.nbytes), bits, each.place or "[red]does not fit[/red]", speed)
    console.print(table)
    for place in dict.fromkeys(each.place for each in fits if each.place is not None):
        console.print(f"[dim]{place}: {NOTES[place]}[/dim]")
    for reason in dict.fromkeys(each.reason for each in fits if each.reason):
        console.print(f"[dim]does not fit: {reason}[/dim]")
    if chosen is None:
        console.print("No quantization fits this machine.")
        return
    console.print(f"Recommended: {escape(chosen.quantization.label)}\n  auraflux chat {escape(chosen.quantization.name)}")


def _machine_line(machine: "Resources") -> str:
    """Say what was measured."""
    parts = [f"memory {size(machine.memory_nbytes, 1)} free, {machine.memory_rate / 1e9:.0f} GB/s"]
    if machine.gpu_nbytes is not None:
        rate = "bandwidth not known" if machine.gpu_rate is None else f"{machine.gpu_rate / 1e9:.0f} GB/s"
        parts.insert(0, f"GPU {size(machine.gpu_nbytes, 1)}, {rate}")
    if machine.disk_rate is not None:
        parts.append(f"disk {machine.disk_rate / 1e9:.1f} GB/s")
    return "This machine: " + "; ".join(parts)
