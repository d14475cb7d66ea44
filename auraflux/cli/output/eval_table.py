"""The tables of `auraflux eval`."""

from typing import Any

from rich.table import Table

Rows = list[dict[str, Any]]
CALL_KEYS = "same_top", "unbroken"


def quality_table(rows: Rows) -> Table:
    """Return a table of the divergence from the uncompressed run, over windows of text and repeated passages."""
    distances = list(rows[0]["copy"])
    table = Table("", "bytes/token", "perplexity", "KL mean", "p50", "p99", "p99.9", "same top token")
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
    """Return a table of the probability of the right fact among the facts of the context; None without a needle test."""
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
    """Return a table of function calls at the end of conversations, by length; None without a function-calling test."""
    lengths = list(rows[0]["tools"])
    if not lengths:
        return None
    table = Table("calls", "tokens", "right name", "KL mean", "p99", "same top token", "complete call")
    for length in lengths:
        for row in rows:
            found = row["tools"][length]
            kl = [f"{found[key]:.4f}" for key in ("kl_mean", "kl_p99")]
            table.add_row(row["title"], str(length), f"{found['name']:.3f}", *kl, *(f"{found[key]:.1%}" for key in CALL_KEYS))
    return table


def speed_table(rows: Rows) -> Table | None:
    """Return a table of prefill and decode speed; simulated peers have none."""
    timed = [row for row in rows if row["speed"]]
    if not timed:
        return None
    table = Table("tokens/s")
    for length in timed[0]["speed"]:
        table.add_column(f"prefill of {length}")
        table.add_column(f"decode after {length}")
    for row in timed:
        rates = [rate for found in row["speed"].values() for rate in found.values()]
        table.add_row(row["title"], *(f"{rate:.1f}" for rate in rates))
    return table
