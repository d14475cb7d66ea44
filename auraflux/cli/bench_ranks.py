"""`auraflux bench ranks`: what dividing a model among ranks costs, on networks of different speed."""

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.bench_run import ended_by_signals
from auraflux.cli.options import EXPERTS, expert_settings, hush_torch, options

if TYPE_CHECKING:
    from auraflux.bench.ranks import RanksRun


@click.command("ranks")
@click.argument("model")
@click.option(
    "--way", "ways", multiple=True, metavar="MODE=N", help="pipeline=2, experts=2, pipeline=2,experts=2, ...; several times."
)
@click.option("--wire", "wires", multiple=True, metavar="NAME", help="here, 10gbe, 1gbe or wifi; may be given several times.")
@click.option("--prompt", type=click.IntRange(2, 1 << 20), default=128, show_default=True, help="Tokens of the prompt.")
@click.option("--tokens", type=click.IntRange(1, 1 << 20), default=32, show_default=True, help="Tokens to write.")
@click.option("--texts", type=click.IntRange(1, 256), default=4, show_default=True, help="Texts that are written together.")
@click.option("--kv", default="k4v4", show_default=True, metavar="KXVY", help="Bits of keys and values, or none.")
@click.option("--quantize", type=int, metavar="BITS", help="Round dense weights to so many bits while loading.")
@options(EXPERTS)
@click.option("--disk", metavar="SIZE", help="Pretend disks that give so much a second, one for each rank: 50MB.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_ranks(model: str, ways: tuple[str, ...], wires: tuple[str, ...], as_json: bool, **chosen: Any) -> None:
    """Time MODEL on one process and on ranks of this machine.

    Ranks share this machine's cores and memory, so nothing here is faster for being divided: what is seen is what ranks cost.
    Slower networks are pretended: every row of numbers comes as late as its latency and bandwidth would have it.
    """
    hush_torch()
    from auraflux.bench.ranks import bench_ranks as measure
    from auraflux.run.ranks.parallel import parse_parallel
    from auraflux.run.ranks.wire import WIRES, find_wire

    asked = [parse_parallel(way) for way in ways or ("pipeline=2",)]
    for wire in wires:
        find_wire(wire)
    runs = [replace(each, wire=wire) for each in asked for wire in wires or WIRES]
    sizes = {name: chosen[name] for name in ("prompt", "tokens", "texts", "kv", "quantize")}
    experts = replace(expert_settings(chosen), disk=chosen["disk"])
    with ended_by_signals():
        found = measure(model, runs, **sizes, device="cpu", calibrate="off", expert_memory=experts)
    if as_json:
        click.echo(json.dumps([asdict(run) for run in found], indent=2))
    else:
        _show(found)


def _show(found: "list[RanksRun]") -> None:
    from rich.console import Console
    from rich.table import Table

    columns = "way", "network", "prompt/s", "one text/s", "several/s", "ms a token", "best", "more than one"
    table = Table(*columns, "network's part", "sent", "disks/s")
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
