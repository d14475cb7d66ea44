"""Peers in the tables of benchmarks: their cells, and the lines about those that are faster."""

from collections.abc import Iterator
from typing import Any


def peer_cell(peer: dict[str, Any], longest_note: int | None = None) -> str:
    """Return a peer's time and its ratio to ours, or the reason why it has none."""
    from rich.markup import escape

    if peer["ratio"] is None:
        note = peer["note"] or "not timed"
        if longest_note is not None and len(note) > longest_note:
            note = f"{note[: longest_note - 1]}…"
        return f"[dim]{peer['name']}: {escape(note)}[/dim]"
    colour = "green" if peer["ratio"] >= 1 else "bold red"
    return f"{peer['name']} {peer['time_us']:.1f} [{colour}]{peer['ratio']:.2f}x[/{colour}]"


def losses(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each case in which a peer is faster."""
    for row in rows:
        faster = [peer for peer in row["peers"] if peer["ratio"] is not None and peer["ratio"] < 1]
        if faster:
            best = min(faster, key=lambda peer: peer["ratio"])
            yield f"[bold red]slower[/bold red] {row['op']} {row['case']}: {best['name']} takes {best['ratio']:.2f} of our time"
