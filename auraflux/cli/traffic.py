"""What was read of a packed model's experts, as a table."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from auraflux.weights.traffic import ExpertTraffic, Traffic


def summary(total: "Traffic") -> str:
    """A few words for the line of figures."""
    found = f"experts {total.hit_rate:.0%} there, {total.nbytes / 1e9:.2f} GB read, {total.bandwidth / 1e9:.2f} GB/s"
    return f"{found}, {total.guessed} of {total.misses} reads for guesses" if total.guessed else found


def show_traffic(found: "ExpertTraffic | None") -> None:
    """Print a line for each layer and one for all, on stderr."""
    if found is None:
        click.echo("no experts were read as they were chosen: all are in memory, or mapped.", err=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("layer")
    for name in ("hits", "ahead", "misses", "hit rate", "MB read", "GB/s", "read s", "stalled s"):
        table.add_column(name, justify="right")
    for name, traffic in [*found.layers.items(), ("[bold]all[/bold]", found.total)]:
        table.add_row(name, *_cells(traffic))
    console = Console(stderr=True, highlight=False)
    (console if console.is_terminal else Console(stderr=True, highlight=False, width=120)).print(table)


def _cells(traffic: "Traffic") -> list[str]:
    return [
        *map(str, (traffic.hits, traffic.ahead, traffic.misses)),
        f"{traffic.hit_rate:.1%}",
        f"{traffic.nbytes / 1e6:.1f}",
        f"{traffic.bandwidth / 1e9:.2f}",
        f"{traffic.read_s:.2f}",
        f"{traffic.stall_s:.2f}",
    ]
