"""`auraflux plan`: the expected speed of a model on several machines, described or measured."""

import json
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import check_model, check_sizes
from auraflux.cli.options.model import hush_torch
from auraflux.cli.options.renamed import Renamed
from auraflux.errors import SettingsError

if TYPE_CHECKING:
    from auraflux.distributed.measure import RankMeasurement

DEFAULT_NETWORK = "1gbe"


EXAMPLES = (
    "auraflux plan model.gguf --gpu-memory 8GB",
    "auraflux plan model.gguf --hosts 16GB,32GB --network 1gbe",
)


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("model")
@click.option(
    "--hosts",
    metavar="A,B",
    help="Hosts to measure, this machine first, such as 10.0.0.1,10.0.0.2; or the memory of each machine, and its disk "
    "bandwidth per second after a slash: 16GB,32GB/3GB.",
)
@click.option(
    "--network",
    "wire",
    cls=Renamed,
    old="--wire",
    help="Network between them: here, 10gbe, 1gbe or wifi, or latency and bandwidth per second such as 20us/45GB; by default "
    f"as measured, or {DEFAULT_NETWORK}.",
)
@click.option(
    "--gpu-memory", metavar="SIZE", help="Instead of --hosts: show how one GPU divides this much memory, such as 8GB."
)
@click.option("--context", type=click.IntRange(1), help="Context length to add to memory and reads; by default 0.")
@click.option("--kv", default="auto", show_default=True, metavar="KXVY", help="KV cache quantization.")
@click.option(
    "--memory-bandwidth",
    "memory_speed",
    cls=Renamed,
    old="--memory-speed",
    metavar="SIZE",
    help="Memory bandwidth per second of each machine; by default as measured, or that of this machine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(model: str, hosts: str | None, gpu_memory: str | None, as_json: bool, **chosen: Any) -> None:
    """Estimate how MODEL would run on several machines or a GPU.

    Shows the memory of each rank, the decode throughput of each kind of parallelism, and its bottleneck.
    With --gpu-memory it shows what of MODEL fits into one GPU instead.
    Machines named by address are measured: run 'auraflux follow' with the same MODEL on the others; it exits afterwards.
    Estimates are bytes divided by bandwidth: they show which placement to try, not what a benchmark will measure.
    """
    hush_torch()
    from auraflux.cache.settings import parse_kv

    if (hosts is None) == (gpu_memory is None):
        raise SettingsError("give --hosts, or --gpu-memory for one GPU.")
    check_sizes({"gpu_memory": gpu_memory})
    parse_kv(chosen["kv"])
    check_model(model)
    if hosts is None:
        _plan_gpu(model, gpu_memory, chosen["kv"], chosen["context"], as_json)
        return
    found = _estimate(model, hosts, **chosen)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found)


def _plan_gpu(model: str, gpu_memory: str | None, kv: str, context: int | None, as_json: bool) -> None:
    from auraflux.cli.output import gpu_memory as output
    from auraflux.cli.output.screen import stdout
    from auraflux.progress import on_terminal
    from auraflux.weights.download.pull import locate

    with on_terminal() as report:
        found = output.collect(locate(model, report), gpu_memory, kv=kv, context=context)
    assert found is not None
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        output.show(stdout(), found, model)


def _estimate(
    model: str, hosts: str, wire: str | None, context: int | None, kv: str, memory_speed: str | None
) -> dict[str, list[dict[str, Any]]]:
    from auraflux.bench.distributed.forecast import parse_hosts, weights_of
    from auraflux.bench.distributed.hosts import Machines, addresses_in, measured
    from auraflux.bench.distributed.layouts import forecasts
    from auraflux.cache import CacheSettings
    from auraflux.distributed.comm.slow_link import find_link
    from auraflux.models import family, family_name
    from auraflux.ops.simd.peak_bandwidth import peak_read_bandwidth
    from auraflux.progress import on_terminal
    from auraflux.weights.download.pull import locate
    from auraflux.weights.formats.checkpoint import open_checkpoint

    # refuse bad options before a model is downloaded
    addresses, network, rate = addresses_in(hosts), None if wire is None else find_link(wire), _rate(memory_speed)
    described = None if addresses else Machines(parse_hosts(hosts), find_link(DEFAULT_NETWORK))
    with on_terminal() as report:
        checkpoint = open_checkpoint(locate(model, report))
    settings = CacheSettings(kv).for_family(family_name(checkpoint.config))
    weights = weights_of(checkpoint, family(checkpoint.config), context, settings)
    if described is not None:
        machines = described.override(network, rate or peak_read_bandwidth()["all_threads"])
    else:
        machines = measured(addresses, checkpoint).override(network, rate)
    ways = [
        {"way": each.way, "parts": each.parts, "tokens_per_s": each.rate, "seconds": each.terms, "reason": each.reason}
        | {"bound": None if each.reason else each.bound, "options": each.options}
        for each in forecasts(weights, machines.hosts, machines.network)
    ]
    return {"measured": [_document(each) for each in machines.measured], "ways": ways}


def _document(measured: "RankMeasurement") -> dict[str, Any]:
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
    from auraflux.weights.experts.settings import parse_nbytes

    given = None if memory_speed is None else float(parse_nbytes(memory_speed))
    if given is not None and given <= 0:
        raise SettingsError(f"--memory-bandwidth {memory_speed!r} must be above 0. Write it like 40GB.")
    return given


def _show(found: dict[str, list[dict[str, Any]]]) -> None:
    from rich.console import Console

    console = Console(width=120)
    if found["measured"]:
        console.print(_machine_table(found["measured"]))
    console.print(_forecast_table(found["ways"]))


def _machine_table(measured: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("machine", "free memory", "memory bandwidth", "disk bandwidth", "network latency", "network bandwidth")
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


def _forecast_table(ways: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("parallelism", "memory per machine", "tokens/s", "memory", "disk", "network", "bottleneck")
    for row in ways:
        parts = ", ".join(f"{nbytes / 1e9:.2f} GB" for nbytes in row["parts"])
        if row["reason"] is not None:
            table.add_row(row["way"], parts, "-", "", "", "", f"not possible: {row['reason']}")
            continue
        times = (f"{row['seconds'].get(term, 0.0) * 1e3:.2f} ms" for term in ("memory", "disk", "network"))
        way = f"{row['way']} {row['options']}".rstrip()
        table.add_row(way, parts, f"{row['tokens_per_s']:.1f}", *times, row["bound"])
    return table
