"""The tables of `auraflux bench serve`: a line for each load level, then notes on failures."""

from typing import Any

from auraflux.cli.bench.signals import busy

NOTHING = "-"
MERGED_FROM = 1.2  # tokens in an event, above which ITL is a mean
AT_ONCE = ("clients", "prefill tokens/s", "decode tokens/s", "by difference", "TTFT ms", "ITL ms")
ARRIVING = (
    "clients",
    "requests/s",
    "tokens/s",
    "TTFT ms",
    "ITL ms",
    "p99/p50",
    "end to end s",
    "cache hits",
    "failed",
)


def show(document: dict[str, Any]) -> None:
    """Print the tables of a document."""
    from rich.markup import escape

    from auraflux.cli.output.screen import stdout

    console, machine, rows = stdout(), document["machine"], document["results"]
    where = document["url"] or document["device"] or f"{machine['cpu']}, {machine['cores']} cores"
    shared = f", the first {document['shared_tokens']} the same" if document["shared_tokens"] else ""
    console.print(escape(f"{document['model']} at {where}"))
    console.print(f"prompts of {document['prompt_tokens']} tokens{shared}; {document['tokens']} output tokens each")
    console.print("latencies are p50 / p90 / p99; where several tokens arrive together, the time is divided among them")
    if warning := busy(document):
        console.print(f"{warning}: rates are too low")
    if closed := [row for row in rows if row["mode"] == "closed"]:
        title = "all start at once; decode: while all decode, or by the time that all tokens take beyond one"
        console.print(_table(title, AT_ONCE, [at_once(row) for row in closed]))
    console.print(_table("requests keep arriving, and prefill while others decode", ARRIVING, [arriving(row) for row in rows]))
    for line in notes(document):
        console.print(escape(line))


def at_once(row: dict[str, Any]) -> list[str]:
    """Return the columns of a level whose clients start together."""
    return [
        _level(row),
        _rate(row["prompt_tokens_per_s"]),
        _rate(row["decode_tokens_per_s"]),
        _rate(row["decode_tokens_per_s_by_difference"]),
        _three(row["time_to_first_token_all_at_once_ms"], 0),
        _three(row["inter_token_ms"], 1),
    ]


def arriving(row: dict[str, Any]) -> list[str]:
    """Return the columns of a level whose requests keep arriving."""
    return [
        _level(row),
        _number(row["requests_per_s"], ",.2f"),
        _rate(row["output_tokens_per_s"]),
        _three(row["time_to_first_token_ms"], 0),
        _three(row["inter_token_while_prompts_arrive_ms"], 1),
        _number(row["inter_token_p99_over_p50"], ".2f"),
        _three(row["end_to_end_ms"], 2, 1e3),
        _number(row["found_share"], ".0%"),
        f"[bold red]{row['failed']}[/bold red]" if row["failed"] else "0",
    ]


def notes(document: dict[str, Any]) -> list[str]:
    """Return notes on failed, refused, short and merged responses of each level."""
    lines = []
    for row in document["results"]:
        level = f"{row['clients']} clients" if row["mode"] == "closed" else f"{row['rate']:g} requests/s"
        lines += [f"failed at {level}, {count} times: {reason}" for reason, count in row["failures"].items()]
        if row["mode"] == "closed" and row["full_load_s"] is None:
            lines.append(f"uneven at {level}: some clients ended before all had started; give more --requests")
        if row["refused"]:
            lines.append(f"busy at {level}: requests were refused {row['refused']} times and sent again")
        if row["short"]:
            lines.append(f"short at {level}: {row['short']} answers have fewer than {document['tokens']} tokens")
        if (row["tokens_per_event"] or 1) > MERGED_FROM:
            lines.append(
                f"merged at {level}: an event holds {row['tokens_per_event']:.1f} tokens, which have no times of their own"
            )
    return lines


def _table(title: str, columns: tuple[str, ...], lines: list[list[str]]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for line in lines:
        table.add_row(*line)
    return table


def _level(row: dict[str, Any]) -> str:
    return str(row["clients"]) if row["mode"] == "closed" else f"{row['rate']:g}/s"


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def _rate(value: float | None) -> str:
    return _number(value, ",.0f" if value is not None and value >= 100 else ",.1f")


def _three(latencies: dict[str, float] | None, places: int, unit: float = 1.0) -> str:
    return (
        NOTHING if latencies is None else " / ".join(f"{latencies[name] / unit:,.{places}f}" for name in ("p50", "p90", "p99"))
    )
