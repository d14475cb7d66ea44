"""The tables of `auraflux eval`."""

from typing import Any

from rich.table import Table

Rows = list[dict[str, Any]]
WHOLE = "same_top", "unbroken"


def quality_table(rows: Rows) -> Table:
    """Divergence from the uncompressed run over windows of text, and over second copies of a passage."""
    distances = list(rows[0]["copy"])
    table = Table("", "bytes/token", "perplexity", "KL mean", "median", "99 %", "99.9 %", "same top")
    for distance in distances:
        table.add_column(f"copy after {distance}: perplexity")
        table.add_column("KL mean")
    for row in rows:
        text, copied = row["text"], [row["copy"][distance] for distance in distances]
        kl = [f"{text[key]:.4f}" for key in ("kl_mean", "kl_median", "kl_p99", "kl_p99_9")]
        cells = [cell for found in copied for cell in (f"{found['perplexity']:.3f}", f"{found['kl_mean']:.4f}")]
        table.add_row(
            row["title"], str(row["token_nbytes"]), f"{text['perplexity']:.3f}", *kl, f"{text['same_top']:.1%}", *cells
        )
    return table


def needle_table(rows: Rows) -> Table | None:
    """Probability of the right fact among the facts of the text."""
    lengths = list(rows[0]["needle"])
    if not lengths:
        return None
    table = Table("probability of the right fact")
    for length in lengths:
        table.add_column(f"{length} tokens")
        for depth in rows[0]["needle"][length]["by_depth"]:
            table.add_column(f"depth {float(depth):.0%}")
    for row in rows:
        found = [row["needle"][length] for length in lengths]
        table.add_row(row["title"], *(f"{p:.3f}" for each in found for p in (each["mean"], *each["by_depth"].values())))
    return table


def tools_table(rows: Rows) -> Table | None:
    """What became of calls of functions at the end of conversations, for each length."""
    lengths = list(rows[0]["tools"])
    if not lengths:
        return None
    table = Table("calls", "tokens", "right name", "KL mean", "99 %", "same top", "whole call")
    for length in lengths:
        for row in rows:
            found = row["tools"][length]
            kl = [f"{found[key]:.4f}" for key in ("kl_mean", "kl_p99")]
            table.add_row(row["title"], str(length), f"{found['name']:.3f}", *kl, *(f"{found[key]:.1%}" for key in WHOLE))
    return table


def speed_table(rows: Rows) -> Table | None:
    """Tokens per second of reading and writing; peers are simulated, so they have none."""
    timed = [row for row in rows if row["speed"]]
    if not timed:
        return None
    table = Table("tokens/s")
    for length in timed[0]["speed"]:
        table.add_column(f"reading {length}")
        table.add_column(f"writing after {length}")
    for row in timed:
        rates = [rate for found in row["speed"].values() for rate in found.values()]
        table.add_row(row["title"], *(f"{rate:.1f}" for rate in rates))
    return table
