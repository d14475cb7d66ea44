"""`auraflux pull` and `auraflux list`: download a model; list those that are downloaded."""

import json
import os
from dataclasses import asdict
from typing import Any

import click

from auraflux.cli.options.command import Command
from auraflux.cli.output.units import size
from auraflux.errors import AurafluxError

EXAMPLES = (
    "auraflux pull",
    "auraflux pull org/name/model.Q4_K_M.gguf",
)


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("name", required=False)
def pull(name: str | None) -> None:
    """Download a model and print its path.

    NAME is a repository on the Hugging Face hub (org/name, org/name@revision, or org/name/file.gguf), a built-in name, or a
    short name such as qwen3:4b, which `auraflux list --remote` lists. Without it, SmolLM2-135M-Instruct is downloaded. Files
    that are already here are not downloaded again. All files are of one commit, and are checked against the hashes of the
    hub.
    """
    from auraflux.progress import on_terminal
    from auraflux.weights.download.pull import locate

    with on_terminal() as report:
        path = locate(name, report)
    # as bytes: a file name need not be valid text
    click.echo(os.fsencode(path))


@click.command("list", cls=Command, examples=("auraflux list", "auraflux list --remote"))
@click.option("--remote", is_flag=True, help="List the short names of models that can be downloaded; uses no network.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_models(remote: bool, as_json: bool) -> None:
    """List the downloaded models.

    Every other command takes the name in the first column. Only the files' headers are read.
    """
    if remote:
        _list_remote(as_json)
        return
    from auraflux.weights.download.local_models import local_models
    from auraflux.weights.formats.headers import read_headers

    rows: list[dict[str, Any]] = []
    for name, path in local_models():
        try:
            rows.append({"name": name, "path": str(path), **asdict(read_headers(path)), "error": None})
        except AurafluxError as err:
            rows.append({"name": name, "path": str(path), "error": str(err)})
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows:
        _show(rows)
    else:
        click.echo("no model is downloaded yet. 'auraflux pull' downloads the built-in one.", err=True)


def _list_remote(as_json: bool) -> None:
    from auraflux.weights.download.local_models import local_models
    from auraflux.weights.download.short_names import short_names

    here = {name for name, _ in local_models()}
    rows = [{**asdict(each), "downloaded": each.model in here} for each in short_names()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from rich.table import Table

    from auraflux.cli.output.screen import stdout

    table = Table("name", "also")
    table.add_column("size", justify="right")
    table.add_column("downloaded")
    table.add_column("model", overflow="fold")
    for row in rows:
        here_or_not = "yes" if row["downloaded"] else ""
        table.add_row(row["name"], ", ".join(row["aliases"]), size(row["nbytes"]), here_or_not, row["model"])
    stdout().print(table)


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from auraflux.cli.output.screen import stdout
    from auraflux.cli.output.units import count

    table = Table("name")
    for title, justify in (("size", "right"), ("parameters", "right"), ("model type", "left"), ("weights", "left")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        if row["error"] is not None:
            table.add_row(escape(row["name"]), "", "", "[red]cannot be read[/red]", escape(row["error"]))
            continue
        parameters = "" if row["parameters"] is None else count(row["parameters"])
        weights = ", ".join(list(row["formats"])[:3])
        table.add_row(escape(row["name"]), size(row["nbytes"]), parameters, escape(row["model_type"]), escape(weights))
    stdout().print(table)
