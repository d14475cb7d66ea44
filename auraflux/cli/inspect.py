"""`auraflux inspect`: what a model is, and how much memory it needs here."""

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.units import memory_size

if TYPE_CHECKING:
    from auraflux.weights.plan import Share

MARKS = {"now": "[green]✓[/green]", "alone": "[yellow]~[/yellow]", "no": "[red]✗[/red]"}


@click.command()
@click.argument("path", metavar="[MODEL]", required=False)
@click.option("--quantize", type=int, metavar="BITS", help="Count dense weights as if they were loaded with so many bits.")
@click.option("--expert-memory", metavar="SIZE", help="Of a packed model, also show what this budget for experts means.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(path: str | None, quantize: int | None, expert_memory: str | None, as_json: bool) -> None:
    """Show what a model consists of, and the memory it needs.

    MODEL is a folder, a GGUF file or a name; with none, the built-in default. Memory is that of weights and cache together, for
    one sequence, with each setting of the cache: windows and recurrent layers do not grow with the context.

    Of each format it says what is exact of its weights, and how they are multiplied, by one token and by a prompt: on this
    machine's CPU, and on its GPU, or on an H200 where it has none. `auraflux ops --explain` tells which kernels these are.

    Of a packed model the disk is measured, for a second, and budgets for its experts are shown: which of them are mapped, how
    many experts are held otherwise, and how long a token's reads take.
    """
    from auraflux.run.progress import on_terminal
    from auraflux.weights.pull import locate

    with on_terminal() as report:
        found = _look(str(locate(path, report)), quantize, expert_memory)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found)


def _look(path: str, bits: int | None, expert_memory: str | None) -> dict[str, Any]:
    from auraflux.cache import CacheSettings
    from auraflux.cli import inspect_experts
    from auraflux.machine import free_nbytes, this_machine
    from auraflux.models import family
    from auraflux.models.config import experts_per_token
    from auraflux.quant import check_format
    from auraflux.run.calibration import kept_for
    from auraflux.weights.checkpoint import open_checkpoint
    from auraflux.weights.plan import cache_table, contexts, plain_nbytes, survey
    from auraflux.weights.speeds import advice, runs

    if bits is not None:
        check_format(bits, 64)
    checkpoint = open_checkpoint(path)
    kind = family(checkpoint.config)
    config = kind.Config.from_hf(checkpoint.config)
    shapes = kind.make_caches(config)
    further = kind.Model.mtp_place(config)
    beyond = () if further is None else further.beyond
    tensors = survey(checkpoint, kind.rename, bits, beyond=beyond)
    memory, free = this_machine().memory_nbytes, free_nbytes()
    weights = tensors.total.memory_nbytes
    experts = None if checkpoint.experts is None else checkpoint.experts.without(beyond)
    k = 0 if experts is None else experts_per_token(checkpoint.config)
    gpu, capability = _gpu()
    products = runs(checkpoint, kind.rename, bits, capability)
    return {
        "path": path,
        "form": checkpoint.form,
        "model_type": checkpoint.config["model_type"],
        "family": kind.__name__.rpartition(".")[2],
        "layers": dict(Counter(shape.title for shape in shapes)),
        "context": config.context,
        "notes": checkpoint.notes,
        "total": vars(tensors.total),
        "mtp": vars(tensors.mtp) if further is not None and further.is_in(checkpoint, kind.rename) else None,
        "unused": vars(tensors.unused),
        "rows": vars(tensors.rows),
        "parts": {name: vars(share) for name, share in _largest_first(tensors.kinds)},
        "formats": {name: vars(share) for name, share in _largest_first(tensors.formats)},
        "gpu": gpu,
        "runs": [each.told() for each in products],
        "advice": advice(products, path, weights, memory, experts is not None),
        "experts": None if experts is None else inspect_experts.look(experts, k, free, expert_memory),
        "plain": {
            "first": CacheSettings().plain_first,
            "newest": CacheSettings().plain_newest,
            "nbytes": plain_nbytes(shapes),
        },
        "calibration": kept_for(checkpoint.path),
        "machine": {"memory_nbytes": memory, "free_nbytes": free},
        "memory": [
            _setting(kv, cache, weights, memory, free) for kv, cache in cache_table(shapes, contexts(config.context)).items()
        ],
    }


def _gpu() -> tuple[str, tuple[int, int]]:
    """The GPU that kernels are asked for, and its compute capability."""
    import torch

    from auraflux.ops.assumed import HOPPER

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return "an H200", HOPPER


def _largest_first(shares: "dict[str, Share]") -> "list[tuple[str, Share]]":
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


def _show(found: dict[str, Any]) -> None:
    from rich.markup import escape

    from auraflux.cli import inspect_experts
    from auraflux.cli.screen import stdout

    console = stdout()
    total = found["total"]
    layers = ", ".join(f"{count} x {title}" for title, count in found["layers"].items())
    console.print(f"[bold]{escape(found['path'])}[/bold]")
    console.print(f"{found['model_type']} ({found['form']}); {layers}; context {found['context']}")
    console.print(f"{_count(total['parameters'])} parameters, {memory_size(total['nbytes'])} on disk")
    for note in found["notes"]:
        console.print(f"[yellow]note[/yellow] {escape(note)}")
    console.print(_shares("part", found["parts"], total))
    console.print(_shares("format", found["formats"], total))
    console.print(_products(found))
    for line in found["advice"]:
        console.print(f"[yellow]advice[/yellow] {escape(line)}")
    if found["mtp"] is not None:
        size = memory_size(found["mtp"]["memory_nbytes"])
        console.print(f"a layer that predicts further tokens: {size} more in memory with --speculate mtp")
    if found["rows"]["tensors"]:
        sizes = memory_size(found["rows"]["nbytes"]), memory_size(found["rows"]["memory_nbytes"])
        console.print(
            f"rows on disk: {sizes[0]} are read row by row as tokens need them; at most {sizes[1]} of them stay in memory"
        )
    if found["unused"]["tensors"]:
        console.print(f"not used: {found['unused']['tensors']} tensors, {memory_size(found['unused']['nbytes'])}")
    if found["experts"] is not None:
        inspect_experts.show(console, found["experts"])
    console.print(_memory(found))
    for line in _about_keys(found):
        console.print(escape(line))
    machine = found["machine"]
    console.print(
        f"this machine has {memory_size(machine['memory_nbytes'])} of memory, {memory_size(machine['free_nbytes'])} free: "
        f"{MARKS['now']} fits now, {MARKS['alone']} fits when nothing else runs, {MARKS['no']} does not fit"
    )
    for setting in found["memory"]:
        if setting["refused"] is not None:
            console.print(f"[dim]{escape(setting['refused'])}[/dim]")


def _about_keys(found: dict[str, Any]) -> list[str]:
    """What is kept beside codes, and what is known of the model's keys."""
    plain, calibration = found["plain"], found["calibration"]
    lines = []
    if plain["nbytes"]:
        what = f"the first {plain['first']} and newest {plain['newest']} positions"
        lines.append(f"beside codes, a text keeps {what} as they are: {memory_size(plain['nbytes'])}")
    if calibration is not None:
        lines.append(f"keys were calibrated with {calibration['tokens']} tokens: {calibration['file']}")
    return lines


def _shares(title: str, shares: dict[str, dict[str, int]], total: dict[str, int]) -> Any:
    from rich.table import Table

    table = Table(title)
    for name in ("tensors", "parameters", "on disk", "in memory", "bits each"):
        table.add_column(name, justify="right")
    for name, share in [*shares.items(), ("[bold]all[/bold]", total)]:
        each = f"{share['memory_nbytes'] * 8 / max(1, share['parameters']):.2f}"
        sizes = memory_size(share["nbytes"]), memory_size(share["memory_nbytes"])
        table.add_row(name, str(share["tensors"]), _count(share["parameters"]), *sizes, each)
    return table


def _products(found: dict[str, Any]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table("products of", "on", "one token", "a prompt", title_justify="left")
    for each in found["runs"]:
        name = f"{each['format']}{', experts' if each['experts'] else ''}: {each['kept']}"
        for backend, paces in each["paces"].items():
            cells = [f"{pace['does']}: {pace['fast']}" for pace in paces.values()]
            table.add_row(escape(name), {"cpu": "CPU", "cuda": escape(found["gpu"])}[backend], *map(escape, cells))
            name = ""
    return table


def _memory(found: dict[str, Any]) -> Any:
    from rich.table import Table

    lengths = max(([need["context"] for need in setting["contexts"]] for setting in found["memory"]), key=len)
    what = "weights + cache" if found["experts"] is None else "weights without packed experts + cache"
    table = Table("kv", title=f"{what}, by context", title_justify="left")
    for length in lengths:
        table.add_column(f"{length:,}", justify="right")
    for setting in found["memory"]:
        cells = [
            f"{MARKS[need['fits']]} {memory_size(need['nbytes'])} [dim](cache {memory_size(need['cache_nbytes'])})[/dim]"
            for need in setting["contexts"]
        ]
        table.add_row(setting["kv"], *(cells or ["[dim]cannot be honoured[/dim]"]))
    return table


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
