"""`auraflux inspect`: a model's layers, formats and memory."""

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import Bits, check_model, check_sizes
from auraflux.cli.output.units import count, memory_size

if TYPE_CHECKING:
    from auraflux.weights.memory_plan import TensorTotals

SYMBOLS = {"now": "[green]✓[/green]", "alone": "[yellow]~[/yellow]", "no": "[red]✗[/red]"}


EXAMPLES = (
    "auraflux inspect model.gguf",
    "auraflux inspect org/name --gpu-memory 8GB",
)


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("path", metavar="[MODEL]", required=False)
@click.option("--quantize", type=Bits(), metavar="BITS", help="Count dense weights as if quantized to this many bits.")
@click.option("--gpu-memory", metavar="SIZE", help="Show how a GPU divides this much memory; by default what is free on it.")
@click.option("--expert-memory", metavar="SIZE", help="Show an expert cache of this size: a packed model's, or that of a GPU.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Kernels to show: those of a GPU are an H200's where there is none. By default those of this machine.",
)
@click.option("--headers", is_flag=True, help="Show only what the files' headers say: at once, and for any model type.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(
    path: str | None,
    quantize: int | None,
    gpu_memory: str | None,
    expert_memory: str | None,
    device: str | None,
    headers: bool,
    as_json: bool,
) -> None:
    """Show a model's layers and formats, and the memory it needs.

    MODEL is a folder, a GGUF file or a name; without it, the built-in model. Memory is that of the weights and the KV cache of
    one sequence, for each KV cache quantization. Sliding-window and recurrent layers do not grow with the context.

    For each weight format it shows whether the format is lossless here and which kernels run in decode and in prefill on this
    machine. `auraflux ops --explain` lists the kernels.

    For a packed model it measures the disk for a second and shows several sizes of the expert cache: whether the files are
    memory-mapped, how many experts are cached, and how long the reads of a token take.

    On a machine with a GPU it also shows how its memory is divided between weights, KV cache, workspace and expert slots, and
    the host memory for experts that have no slot. With --gpu-memory it shows this alone, for a GPU that need not be here.
    """
    check_sizes({"gpu_memory": gpu_memory, "expert_memory": expert_memory})
    if headers:
        _inspect_headers(path, as_json)
        return
    check_model(path)
    from auraflux.progress import on_terminal
    from auraflux.weights.download.pull import locate

    with on_terminal() as report:
        found = _collect(str(locate(path, report)), quantize, gpu_memory, expert_memory, device)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found, brief=gpu_memory is not None)


def _inspect_headers(name: str | None, as_json: bool) -> None:
    from auraflux.progress import on_terminal
    from auraflux.weights.download.pull import locate
    from auraflux.weights.formats.headers import read_headers

    with on_terminal() as report:
        path = locate(name, report)
    found = read_headers(path)
    if as_json:
        click.echo(json.dumps({"path": str(path), **asdict(found)}, indent=2))
        return
    parameters = "" if found.parameters is None else f"{count(found.parameters)} parameters, "
    context = "" if found.context is None else f"; context {found.context}"
    click.echo(f"{path}\n{found.model_type} ({found.form}){context}")
    click.echo(f"{parameters}{found.tensors} tensors, {memory_size(found.nbytes)} on disk")
    for kind, nbytes in found.formats.items():
        click.echo(f"  {kind:8} {memory_size(nbytes):>10}  {nbytes / max(1, found.nbytes):4.0%}")


def _collect(
    path: str, bits: int | None, gpu_memory: str | None, expert_memory: str | None, device: str | None
) -> dict[str, Any]:
    from auraflux.cache import CacheSettings
    from auraflux.cli.output import inspect_experts
    from auraflux.cli.output.gpu_memory import collect
    from auraflux.engine.calibration import find_cached
    from auraflux.engine.model_runner import rounded_bits
    from auraflux.machine import free_nbytes, this_machine
    from auraflux.models import family
    from auraflux.models.config import experts_per_token
    from auraflux.ops._dispatch import activation_bits
    from auraflux.quant import check_format
    from auraflux.weights.format_speed import advice, format_speeds
    from auraflux.weights.formats.checkpoint import open_checkpoint
    from auraflux.weights.memory_plan import cache_table, contexts, full_precision_nbytes, plan_memory

    if bits is not None:
        check_format(bits, 64)
    checkpoint = open_checkpoint(path)
    kind = family(checkpoint.config)
    config = kind.Config.from_hf(checkpoint.config)
    shapes = kind.make_caches(config)
    mtp = kind.Model.mtp_names(config)
    mtp_prefixes = () if mtp is None else mtp.prefixes
    tensors = plan_memory(checkpoint, kind.rename, bits, mtp_prefixes=mtp_prefixes)
    memory, free = this_machine().memory_nbytes, free_nbytes()
    weights = tensors.total.memory_nbytes
    experts = None if checkpoint.experts is None else checkpoint.experts.without(mtp_prefixes)
    k = 0 if experts is None else experts_per_token(checkpoint.config)
    gpu, capability = _gpu(device)
    with activation_bits(rounded_bits(config.hidden)):
        products = format_speeds(checkpoint, kind.rename, bits, capability)
    return {
        "path": path,
        "form": checkpoint.form,
        "model_type": checkpoint.config["model_type"],
        "family": kind.__name__.rpartition(".")[2],
        "layers": dict(Counter(shape.title for shape in shapes)),
        "context": config.context,
        "notes": checkpoint.notes,
        "total": vars(tensors.total),
        "mtp": vars(tensors.mtp) if mtp is not None and mtp.is_in(checkpoint, kind.rename) else None,
        "unused": vars(tensors.unused),
        "rows": vars(tensors.rows),
        "parts": {name: vars(share) for name, share in _largest_first(tensors.kinds)},
        "formats": {name: vars(share) for name, share in _largest_first(tensors.formats)},
        "gpu": gpu,
        "runs": [each.to_json() for each in products],
        "advice": advice(products, path, weights, memory, experts is not None),
        "gpu_memory": collect(checkpoint.path, gpu_memory, bits=bits, expert_memory=expert_memory),
        "experts": None if experts is None else inspect_experts.measure(experts, k, free, expert_memory),
        "full_precision": {
            "sink_tokens": CacheSettings().resolved_sink_tokens,
            "recent_window": CacheSettings().for_device("cpu").resolved_recent_window,
            "nbytes": full_precision_nbytes(shapes),
        },
        "calibration": find_cached(checkpoint.path),
        "machine": {"memory_nbytes": memory, "free_nbytes": free},
        "memory": [
            _setting(kv, cache, weights, memory, free) for kv, cache in cache_table(shapes, contexts(config.context)).items()
        ],
    }


def _gpu(device: str | None) -> tuple[str | None, tuple[int, int] | None]:
    """Return the name and compute capability of the GPU whose kernels are shown; None for the CPU alone."""
    import torch

    from auraflux.ops.fake_gpu import HOPPER

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return ("an H200", HOPPER) if device == "cuda" else (None, None)


def _largest_first(shares: "dict[str, TensorTotals]") -> "list[tuple[str, TensorTotals]]":
    return sorted(shares.items(), key=lambda item: -item[1].nbytes)


def _setting(kv: str, cache: dict[int, int] | str, weights: int, memory: int, free: int) -> dict[str, Any]:
    if isinstance(cache, str):
        return {"kv": kv, "refused": cache, "contexts": []}
    needs = [
        {
            "context": context,
            "cache_nbytes": nbytes,
            "nbytes": weights + nbytes,
            "fits": "now" if weights + nbytes <= free else "alone" if weights + nbytes <= memory else "no",
        }
        for context, nbytes in cache.items()
    ]
    return {"kv": kv, "refused": None, "contexts": needs}


def _show(found: dict[str, Any], brief: bool) -> None:
    """Print the tables; `brief` for the one of a GPU's memory alone."""
    from rich.markup import escape

    from auraflux.cli.output import gpu_memory, inspect_experts
    from auraflux.cli.output.screen import stdout

    console = stdout()
    total = found["total"]
    layers = ", ".join(f"{count} x {title}" for title, count in found["layers"].items())
    console.print(f"[bold]{escape(found['path'])}[/bold]")
    console.print(f"{found['model_type']} ({found['form']}); {layers}; context {found['context']}")
    console.print(f"{count(total['parameters'])} parameters, {memory_size(total['nbytes'])} on disk")
    for note in found["notes"]:
        console.print(f"[yellow]note[/yellow] {escape(note)}")
    if not brief:
        console.print(_shares("part", found["parts"], total))
        console.print(_shares("format", found["formats"], total))
        console.print(_products(found))
        for line in found["advice"]:
            console.print(f"[yellow]advice[/yellow] {escape(line)}")
    if found["mtp"] is not None:
        size = memory_size(found["mtp"]["memory_nbytes"])
        console.print(f"MTP head: {size} more in memory with --speculate mtp")
    if found["rows"]["tensors"]:
        sizes = memory_size(found["rows"]["nbytes"]), memory_size(found["rows"]["memory_nbytes"])
        console.print(f"on-disk tables: {sizes[0]} are read row by row on demand; at most {sizes[1]} are cached in memory")
    if found["unused"]["tensors"]:
        console.print(f"unused: {found['unused']['tensors']} tensors, {memory_size(found['unused']['nbytes'])}")
    if found["experts"] is not None:
        inspect_experts.show(console, found["experts"])
    if found["gpu_memory"] is not None:
        gpu_memory.show(console, found["gpu_memory"], found["path"])
    if brief:
        return
    console.print(_memory(found))
    for line in _kv_lines(found):
        console.print(escape(line))
    machine = found["machine"]
    console.print(
        f"this machine has {memory_size(machine['memory_nbytes'])} of memory, {memory_size(machine['free_nbytes'])} free: "
        f"{SYMBOLS['now']} fits now, {SYMBOLS['alone']} fits if nothing else runs, {SYMBOLS['no']} does not fit"
    )
    for setting in found["memory"]:
        if setting["refused"] is not None:
            console.print(f"[dim]{escape(setting['refused'])}[/dim]")


def _kv_lines(found: dict[str, Any]) -> list[str]:
    """Return lines about the full-precision part of a quantized KV cache and about key calibration."""
    window, calibration = found["full_precision"], found["calibration"]
    lines = []
    if window["nbytes"]:
        tokens = f"{window['sink_tokens']} sink tokens and {window['recent_window']} recent tokens"
        lines.append(f"in full precision per sequence: {tokens}, {memory_size(window['nbytes'])}")
    if calibration is not None:
        lines.append(f"key calibration from {calibration['tokens']} tokens: {calibration['file']}")
    return lines


def _shares(title: str, shares: dict[str, dict[str, int]], total: dict[str, int]) -> Any:
    from rich.table import Table

    table = Table(title)
    for name in ("tensors", "parameters", "on disk", "in memory", "bits/weight: on disk", "in memory"):
        table.add_column(name, justify="right")
    for name, share in [*shares.items(), ("[bold]all[/bold]", total)]:
        bits = (f"{share[key] * 8 / max(1, share['parameters']):.2f}" for key in ("nbytes", "memory_nbytes"))
        sizes = memory_size(share["nbytes"]), memory_size(share["memory_nbytes"])
        table.add_row(name, str(share["tensors"]), count(share["parameters"]), *sizes, *bits)
    return table


def _products(found: dict[str, Any]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table("weights", "device", "decode", "prefill", title_justify="left")
    for each in found["runs"]:
        name = f"{each['format']}{', experts' if each['experts'] else ''}: {each['precision']}"
        for backend, speeds in each["speeds"].items():
            cells = [f"{speed['method']}: {speed['speed']}" for speed in speeds.values()]
            table.add_row(escape(name), "CPU" if backend == "cpu" else escape(found["gpu"]), *map(escape, cells))
            name = ""
    return table


def _memory(found: dict[str, Any]) -> Any:
    from rich.table import Table

    lengths = max(([need["context"] for need in setting["contexts"]] for setting in found["memory"]), key=len)
    what = "weights + KV cache" if found["experts"] is None else "weights without packed experts + KV cache"
    table = Table("kv", title=f"{what}, by context", title_justify="left")
    for length in lengths:
        table.add_column(f"{length:,}", justify="right")
    for setting in found["memory"]:
        cells = [
            f"{SYMBOLS[need['fits']]} {memory_size(need['nbytes'])} [dim](KV {memory_size(need['cache_nbytes'])})[/dim]"
            for need in setting["contexts"]
        ]
        table.add_row(setting["kv"], *(cells or ["[dim]not supported[/dim]"]))
    return table
