"""`auraflux bench ranks`: the cost of parallel layouts, on networks of different speed."""

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.bench.signals import ended_by_signals
from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import Bits, check_model
from auraflux.cli.options.model import EXPERTS, hush_torch, options
from auraflux.cli.options.renamed import Renamed
from auraflux.cli.options.settings import expert_settings

if TYPE_CHECKING:
    from auraflux.bench.distributed.ranks import RanksRun


EXAMPLES = ("auraflux bench ranks model.gguf --parallel pipeline=2",)


@click.command("ranks", cls=Command, examples=EXAMPLES)
@click.argument("model")
@click.option(
    "--parallel",
    "layouts",
    cls=Renamed,
    old="--way",
    multiple=True,
    metavar="MODE=N",
    help="pipeline=2, experts=2, pipeline=2,experts=2, ...; may be repeated.",
)
@click.option(
    "--network",
    "networks",
    cls=Renamed,
    old="--wire",
    multiple=True,
    metavar="NAME",
    help="here, 10gbe, 1gbe or wifi; may be repeated.",
)
@click.option("--prompt", type=click.IntRange(2, 1 << 20), default=128, show_default=True, help="Tokens of the prompt.")
@click.option("--tokens", type=click.IntRange(1, 1 << 20), default=32, show_default=True, help="Tokens to decode.")
@click.option(
    "--sequences",
    cls=Renamed,
    old="--texts",
    type=click.IntRange(1, 256),
    default=4,
    show_default=True,
    help="Batch size of the batched run.",
)
@click.option("--kv", default="k4v4", show_default=True, metavar="KXVY", help="Bits of keys and values, or none.")
@click.option("--quantize", type=Bits(), metavar="BITS", help="Quantize dense weights to this many bits while loading.")
@options(EXPERTS)
@click.option("--disk", metavar="SIZE", help="Simulate a disk of this bandwidth per second for each rank: 50MB.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_ranks(model: str, layouts: tuple[str, ...], networks: tuple[str, ...], as_json: bool, **chosen: Any) -> None:
    """Time MODEL on one process and on ranks of this machine.

    Ranks share this machine's cores and memory, so no layout is faster than one process: the difference is the cost of ranks.
    Slower networks are simulated: messages are delayed by their latency and bandwidth.
    """
    hush_torch()
    check_model(model)
    from auraflux.bench.distributed.ranks import bench_ranks as measure
    from auraflux.distributed.comm.slow_link import LINKS, find_link
    from auraflux.distributed.parallel import parse_parallel
    from auraflux.loading.options import LoadOptions

    requested = [parse_parallel(layout) for layout in layouts or ("pipeline=2",)]
    for network in networks:
        find_link(network)
    runs = [replace(each, network=network) for each in requested for network in networks or LINKS]
    experts = replace(expert_settings(chosen), disk=chosen["disk"])
    how = LoadOptions(device="cpu", kv=chosen["kv"], quantize=chosen["quantize"], calibrate="off", expert_memory=experts)
    with ended_by_signals():
        found = measure(
            model, runs, prompt=chosen["prompt"], tokens=chosen["tokens"], sequences=chosen["sequences"], options=how
        )
    if as_json:
        click.echo(json.dumps([asdict(run) for run in found], indent=2))
    else:
        _show(found)


def _show(found: "list[RanksRun]") -> None:
    from rich.console import Console
    from rich.table import Table

    columns = "layout", "network", "prefill/s", "decode/s", "batched/s", "ms a token", "best", "over one process"
    table = Table(*columns, "network", "sent", "disks/s")
    alone = found[0].best_s
    for run in found:
        more = "" if run.size == 1 else f"{(run.best_s - alone) * 1e3:+.2f} ms"
        cells = (
            f"{run.prefill:.0f}",
            f"{run.decode:.1f}",
            f"{run.together:.1f}",
            f"{run.token_s * 1e3:.2f}",
            f"{run.best_s * 1e3:.2f}",
            more,
        )
        read = f"{run.read_rate / 1e6:.1f} MB" if run.read_rate else ""
        wired = "" if run.size == 1 else f"{run.wire_s * 1e3:.2f} ms"
        table.add_row(run.way, run.wire, *cells, wired, "" if run.size == 1 else f"{run.sent_nbytes / 1e3:.1f} kB", read)
    Console(width=120).print(table)
