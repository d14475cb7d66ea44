"""`auraflux plan`: how a model could be divided among machines, be they described, or there and measured."""

import json
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options import hush_torch
from auraflux.errors import SettingsError

if TYPE_CHECKING:
    from auraflux.run.ranks.measure import Measured

USUAL_WIRE = "1gbe"


@click.command()
@click.argument("model")
@click.option(
    "--hosts",
    required=True,
    metavar="A,B",
    help="Addresses or names of machines to measure, this one first: 10.0.0.1,10.0.0.2; or of each its memory, and what its "
    "disk reads a second: 16GB,32GB/3GB.",
)
@click.option(
    "--wire",
    help="The network between them: here, 10gbe, 1gbe or wifi; or its latency and bytes a second: 20us/45GB. By default as "
    f"measured, and {USUAL_WIRE} where nothing is.",
)
@click.option("--context", type=click.IntRange(1), help="Tokens of the text, which are kept and read too; by default none.")
@click.option("--kv", default="auto", show_default=True, metavar="KXVY", help="Bits of its keys and values, or none.")
@click.option(
    "--memory-speed",
    metavar="SIZE",
    help="That a machine's memory gives a second; by default as measured, and this one's where the others are not.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(model: str, hosts: str, as_json: bool, **chosen: Any) -> None:
    """Forecast how MODEL would run on several machines.

    Tells what fits where, how many tokens a second each way of dividing it would write, and what bounds it.
    Machines that are named by address are measured: the others run 'auraflux follow' with the same MODEL, which ends then.
    Figures are bytes over speeds: they say which way is worth trying, not what a benchmark will show.
    """
    hush_torch()
    found = _look(model, hosts, **chosen)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found)


def _look(
    model: str, hosts: str, wire: str | None, context: int | None, kv: str, memory_speed: str | None
) -> dict[str, list[dict[str, Any]]]:
    from auraflux.bench.forecast import parse_hosts, weights_of
    from auraflux.bench.forecast_ways import forecasts
    from auraflux.bench.machines import Machines, addresses_in, measured
    from auraflux.cache import CacheSettings
    from auraflux.models import family, family_name
    from auraflux.ops.simd.ceiling import read_ceiling
    from auraflux.run.progress import on_terminal
    from auraflux.run.ranks.wire import find_wire
    from auraflux.weights.checkpoint import open_checkpoint
    from auraflux.weights.pull import locate

    # what cannot be is refused before a model is fetched
    addresses, network, rate = addresses_in(hosts), None if wire is None else find_wire(wire), _rate(memory_speed)
    described = None if addresses else Machines(parse_hosts(hosts), find_wire(USUAL_WIRE))
    with on_terminal() as report:
        checkpoint = open_checkpoint(locate(model, report))
    settings = CacheSettings(kv).for_family(family_name(checkpoint.config))
    weights = weights_of(checkpoint, family(checkpoint.config), context, settings)
    if described is not None:
        machines = described.taken(network, rate or read_ceiling()["all_threads"])
    else:
        machines = measured(addresses, checkpoint).taken(network, rate)
    ways = [
        {"way": each.way, "parts": each.parts, "tokens_per_s": each.rate, "seconds": each.terms, "reason": each.reason}
        | {"bound": None if each.reason else each.bound, "options": each.options}
        for each in forecasts(weights, machines.hosts, machines.network)
    ]
    return {"measured": [_document(each) for each in machines.measured], "ways": ways}


def _document(measured: "Measured") -> dict[str, Any]:
    speeds, link = measured.speeds, measured.link
    return {
        "address": measured.address,
        "free_nbytes": measured.free_nbytes,
        "memory_nbytes_per_s": speeds.memory_rate,
        "disk_nbytes_per_s": speeds.disk_rate,
        "link_latency_s": None if link is None else link.latency_s,
        "link_nbytes_per_s": None if link is None else link.rate,
    }


def _rate(memory_speed: str | None) -> float | None:
    from auraflux.weights.expert_settings import parse_nbytes

    given = None if memory_speed is None else float(parse_nbytes(memory_speed))
    if given is not None and given <= 0:
        raise SettingsError(f"--memory-speed {memory_speed!r} is none. Write it like 40GB.")
    return given


def _show(found: dict[str, list[dict[str, Any]]]) -> None:
    from rich.console import Console

    console = Console(width=120)
    if found["measured"]:
        console.print(_machine_table(found["measured"]))
    console.print(_way_table(found["ways"]))


def _machine_table(measured: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("machine", "free memory", "memory reads", "disk reads", "latency to it", "link to it")
    for row in measured:
        disk, latency, link = (row[name] for name in ("disk_nbytes_per_s", "link_latency_s", "link_nbytes_per_s"))
        table.add_row(
            row["address"],
            f"{row['free_nbytes'] / 1e9:.2f} GB",
            f"{row['memory_nbytes_per_s'] / 1e9:.1f} GB/s",
            "-" if disk is None else f"{disk / 1e9:.2f} GB/s",
            "-" if latency is None else f"{latency * 1e3:.3f} ms",
            "-" if link is None else f"{link / 1e9:.3f} GB/s",
        )
    return table


def _way_table(ways: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("way", "on each machine", "tokens/s", "memory", "disk", "network", "bound by")
    for row in ways:
        parts = ", ".join(f"{nbytes / 1e9:.2f} GB" for nbytes in row["parts"])
        if row["reason"] is not None:
            table.add_row(row["way"], parts, "-", "", "", "", f"cannot be: {row['reason']}")
            continue
        times = (f"{row['seconds'].get(term, 0.0) * 1e3:.2f} ms" for term in ("memory", "disk", "network"))
        way = f"{row['way']} {row['options']}".rstrip()
        table.add_row(way, parts, f"{row['tokens_per_s']:.1f}", *times, row["bound"])
    return table
