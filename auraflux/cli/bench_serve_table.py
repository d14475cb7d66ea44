"""What `auraflux bench serve` shows: a line for each level, then what went wrong."""

from typing import Any

from auraflux.cli.bench_run import busy

NOTHING = "-"
MERGED_FROM = 1.2  # tokens in an event, from where waits between tokens are means
AT_ONCE = ("clients", "prompt tokens/s", "decode tokens/s", "by difference", "first token ms", "between tokens ms")
COMING = (
    "clients",
    "requests/s",
    "tokens/s",
    "first token ms",
    "between tokens ms",
    "p99/p50",
    "whole answer s",
    "found",
    "failed",
)


def show(document: dict[str, Any]) -> None:
    """Print the tables of a document."""
    from rich.markup import escape

    from auraflux.cli.screen import stdout

    console, machine, rows = stdout(), document["machine"], document["results"]
    where = document["url"] or document["device"] or f"{machine['cpu']}, {machine['cores']} cores"
    shared = f", the first {document['shared_tokens']} the same" if document["shared_tokens"] else ""
    console.print(escape(f"{document['model']} at {where}"))
    console.print(f"prompts of {document['prompt_tokens']} tokens{shared}; {document['tokens']} tokens written for each")
    console.print("waits are p50 / p90 / p99; where several tokens arrive together, each took its share of the time")
    if warning := busy(document):
        console.print(f"{warning}: rates are too low")
    if closed := [row for row in rows if row["mode"] == "closed"]:
        title = "all begin at once; decode: while all write, or by the time that all tokens take beyond one"
        console.print(_table(title, AT_ONCE, [at_once(row) for row in closed]))
    console.print(_table("requests keep coming, and prompts arrive while others write", COMING, [coming(row) for row in rows]))
    for line in notes(document):
        console.print(escape(line))


def at_once(row: dict[str, Any]) -> list[str]:
    """A level whose clients began together, in words for each column."""
    return [
        _level(row),
        _rate(row["prompt_tokens_per_s"]),
        _rate(row["decode_tokens_per_s"]),
        _rate(row["decode_tokens_per_s_by_difference"]),
        _three(row["time_to_first_token_all_at_once_ms"], 0),
        _three(row["inter_token_ms"], 1),
    ]


def coming(row: dict[str, Any]) -> list[str]:
    """A level whose requests keep coming, in words for each column."""
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
    """What each level has to say of requests that did not go well."""
    lines = []
    for row in document["results"]:
        level = f"{row['clients']} clients" if row["mode"] == "closed" else f"{row['rate']:g} requests/s"
        lines += [f"failed at {level}, {count} times: {reason}" for reason, count in row["failures"].items()]
        if row["mode"] == "closed" and row["full_load_s"] is None:
            lines.append(f"uneven at {level}: some were through before all had begun; give more --requests")
        if row["refused"]:
            lines.append(f"busy at {level}: requests were refused {row['refused']} times and sent again")
        if row["short"]:
            lines.append(f"short at {level}: {row['short']} answers have fewer than {document['tokens']} tokens")
        if (row["tokens_per_event"] or 1) > MERGED_FROM:
            lines.append(
                f"merged at {level}: an event holds {row['tokens_per_event']:.1f} tokens, whose own times are not seen"
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


def _three(waits: dict[str, float] | None, places: int, unit: float = 1.0) -> str:
    return NOTHING if waits is None else " / ".join(f"{waits[name] / unit:,.{places}f}" for name in ("p50", "p90", "p99"))
