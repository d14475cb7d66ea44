"""`auraflux ps`: the models that running servers have loaded."""

import json
import time
from datetime import UTC, datetime
from typing import Any

import click

from auraflux.cli.models.server import NoServer, addresses, ask, url_option
from auraflux.cli.options.command import Command
from auraflux.cli.output.units import size

# a model that is not unloaded has a date centuries ahead
FOREVER_S = 10 * 365 * 86_400


@click.command(cls=Command, examples=("auraflux ps", "auraflux ps --url http://10.0.0.5:8000 --json"))
@url_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ps(url: str | None, as_json: bool) -> None:
    """List the models that running servers have loaded.

    A server that requires an API key gets that of AURAFLUX_API_KEY.
    """
    rows, silent = [], []
    for address in addresses(url):
        try:
            rows += [{"server": address, **_row(model)} for model in ask(address, "/api/ps").get("models", [])]
        except NoServer as err:
            silent.append(err)
    if len(silent) == len(addresses(url)):
        raise silent[0] if url is not None else NoServer("no server runs on ports 8000 and 11434; --url gives another address.")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows:
        _show(rows)
    else:
        click.echo("no model is loaded.", err=True)


def _row(model: dict[str, Any]) -> dict[str, Any]:
    until = datetime.fromisoformat(str(model["expires_at"]).replace("Z", "+00:00"))
    remaining = (until - datetime.fromtimestamp(time.time(), UTC)).total_seconds()
    return {
        "name": str(model["name"]).removesuffix(":latest"),
        "nbytes": int(model["size"]),
        "device": "cuda" if model.get("size_vram") else "cpu",
        "context": model.get("context_length"),
        "unloaded_in_s": None if remaining > FOREVER_S else max(0, round(remaining)),
    }


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from auraflux.cli.output.screen import stdout

    table = Table("name")
    for title, justify in (
        ("size", "right"),
        ("device", "left"),
        ("context", "right"),
        ("unloaded", "left"),
        ("server", "left"),
    ):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        left = "never" if row["unloaded_in_s"] is None else f"in {row['unloaded_in_s']} s"
        context = "" if row["context"] is None else f"{row['context']:,}"
        table.add_row(escape(row["name"]), size(row["nbytes"]), row["device"], context, left, escape(row["server"]))
    stdout().print(table)
