"""Expert cache statistics of a packed model, as a phrase and as a table."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from auraflux.weights.experts.stats import ExpertCacheStats, ExpertCacheStatsByLayer


def summary(total: "ExpertCacheStats") -> str:
    """Return the expert cache statistics as part of the summary line."""
    # copies on a GPU are not timed
    read = f"read at {total.bandwidth / 1e9:.2f} GB/s" if total.read_s else "copied"
    line = f"expert cache hit rate {total.hit_rate:.0%}, {total.nbytes / 1e9:.2f} GB {read}"
    return f"{line}, {total.draft_misses} of {total.misses} misses for draft tokens" if total.draft_misses else line


def show_expert_stats(stats: "ExpertCacheStatsByLayer | None") -> None:
    """Print the statistics of each layer and of all layers on stderr."""
    if stats is None:
        click.echo("no experts were read on demand: all are in memory or memory-mapped.", err=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("layer")
    for name in ("hits", "prefetched", "misses", "hit rate", "MB read", "GB/s", "read s", "stalled s"):
        table.add_column(name, justify="right")
    for name, layer in [*stats.layers.items(), ("[bold]all[/bold]", stats.total)]:
        table.add_row(name, *_cells(layer))
    console = Console(stderr=True, highlight=False)
    (console if console.is_terminal else Console(stderr=True, highlight=False, width=120)).print(table)


def _cells(stats: "ExpertCacheStats") -> list[str]:
    return [
        *map(str, (stats.hits, stats.prefetched, stats.misses)),
        f"{stats.hit_rate:.1%}",
        f"{stats.nbytes / 1e6:.1f}",
        f"{stats.bandwidth / 1e9:.2f}",
        f"{stats.read_s:.2f}",
        f"{stats.stall_s:.2f}",
    ]
