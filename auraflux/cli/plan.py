"""`auraflux plan`: how a model could be divided among machines, before any of them is bought or started."""

import json
from typing import Any

import click

from auraflux.errors import SettingsError


@click.command()
@click.argument("model")
@click.option(
    "--hosts", required=True, metavar="A,B", help="Memory of each machine, and what its disk reads a second: 16GB,32GB/3GB."
)
@click.option(
    "--wire",
    default="1gbe",
    show_default=True,
    help="The network between them: here, 10gbe, 1gbe or wifi; or its latency and bytes a second: 20us/45GB.",
)
@click.option("--context", type=click.IntRange(1), help="Tokens of the text, which are kept and read too; by default none.")
@click.option("--kv", default="auto", show_default=True, metavar="KXVY", help="Bits of its keys and values, or none.")
@click.option("--memory-speed", metavar="SIZE", help="That a machine's memory gives a second; by default this one's, measured.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(model: str, hosts: str, wire: str, context: int | None, kv: str, memory_speed: str | None, as_json: bool) -> None:
    """Tell what of MODEL fits where, how many tokens a second each way would write, and what bounds it.

    Figures are bytes over speeds: they say which way is worth trying, not what a benchmark will show.
    """
    found = _look(model, hosts, wire, context, kv, memory_speed)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found)


def _look(model: str, hosts: str, wire: str, context: int | None, kv: str, memory_speed: str | None) -> list[dict[str, Any]]:
    from auraflux.bench.ceiling import read_ceiling
    from auraflux.bench.forecast import parse_hosts, weights_of
    from auraflux.bench.forecast_ways import forecasts
    from auraflux.cache import CacheSettings
    from auraflux.models import family, family_name
    from auraflux.run.progress import on_terminal
    from auraflux.run.ranks.wire import find_wire
    from auraflux.weights.checkpoint import open_checkpoint
    from auraflux.weights.expert_settings import parse_nbytes
    from auraflux.weights.pull import locate

    machines, network = parse_hosts(hosts), find_wire(wire)
    with on_terminal() as report:
        checkpoint = open_checkpoint(locate(model, report))
    settings = CacheSettings(kv).for_family(family_name(checkpoint.config))
    weights = weights_of(checkpoint, family(checkpoint.config), context, settings)
    given = None if memory_speed is None else float(parse_nbytes(memory_speed))
    if given is not None and given <= 0:
        raise SettingsError(f"--memory-speed {memory_speed!r} is none. Write it like 40GB.")
    rate = given or read_ceiling()["all_threads"]
    return [
        {"way": each.way, "parts": each.parts, "tokens_per_s": each.rate, "seconds": each.terms, "reason": each.reason}
        | {"bound": None if each.reason else each.bound, "options": each.options}
        for each in forecasts(weights, machines, rate, network)
    ]


def _show(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("way", "on each machine", "tokens/s", "memory", "disk", "network", "bound by")
    for row in found:
        parts = ", ".join(f"{nbytes / 1e9:.2f} GB" for nbytes in row["parts"])
        if row["reason"] is not None:
            table.add_row(row["way"], parts, "-", "", "", "", f"cannot be: {row['reason']}")
            continue
        times = (f"{row['seconds'].get(term, 0.0) * 1e3:.2f} ms" for term in ("memory", "disk", "network"))
        way = f"{row['way']} {row['options']}".rstrip()
        table.add_row(way, parts, f"{row['tokens_per_s']:.1f}", *times, row["bound"])
    Console(width=120).print(table)
