"""`auraflux show`: facts about a downloaded model, a model of a running server, or a short name."""

import json
from typing import Any

import click

from auraflux.cli.inspect import inspect
from auraflux.cli.models.server import NoServer, addresses, ask, url_option
from auraflux.cli.options.command import Command
from auraflux.cli.output.units import size
from auraflux.errors import AurafluxError, InputError


@click.command(
    cls=Command,
    short_help="Show a model, downloaded or served.",
    examples=("auraflux show qwen3:4b", "auraflux show coder --url http://127.0.0.1:8000"),
)
@click.argument("name")
@url_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def show(ctx: click.Context, name: str, url: str | None, as_json: bool) -> None:
    """Show a model: a downloaded one as `auraflux inspect` does, or one of a running server.

    NAME is a short name, a name that `auraflux list` shows, a path, or with --url the name of a server's model. Nothing is
    downloaded.
    """
    from auraflux.weights.download.local_models import find_downloaded
    from auraflux.weights.download.pull import find_local

    path = None if url is not None else find_downloaded(name)
    if path is None and url is None:
        try:
            path = find_local(name)
        except AurafluxError:
            path = None
    if path is not None:
        ctx.invoke(inspect, path=str(path), as_json=as_json)
    elif (found := _served(name, addresses(url), required=url is not None)) is not None:
        _print_served(name, found, as_json)
    else:
        _print_remote(name, as_json)


def _served(name: str, urls: tuple[str, ...], required: bool) -> dict[str, Any] | None:
    """Return what a running server tells about a model; None if none has it. A server that is `required` must have it."""
    for url in urls:
        try:
            return {"server": url, **ask(url, "/api/show", {"model": name})}
        except NoServer:
            if required:
                raise
        except InputError:
            if required:
                raise
    return None


def _print_served(name: str, found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    details, info = found.get("details", {}), found.get("model_info", {})
    click.echo(f"{name} at {found['server']}")
    click.echo(f"{details.get('family')} ({details.get('format')}), {details.get('parameter_size')} parameters")
    click.echo(f"weights       {details.get('quantization_level')}")
    context = next((value for key, value in info.items() if key.endswith(".context_length")), None)
    if context is not None:
        click.echo(f"context       {context}")
    click.echo(f"capabilities  {', '.join(found.get('capabilities', []))}")
    for line in str(found.get("parameters", "")).splitlines():
        key, _, value = line.partition(" ")
        click.echo(f"{key:13} {value}")


def _print_remote(name: str, as_json: bool) -> None:
    from auraflux.weights.download.short_names import full_name, short_names

    row = next((each for each in short_names() if each.model == full_name(name)), None)
    if row is None:
        raise InputError(
            f"{name[:200]!r} is neither downloaded nor served at {' or '.join(addresses(None))}, and is no short name. "
            "'auraflux list' and 'auraflux list --remote' list names."
        )
    if as_json:
        click.echo(json.dumps({"name": row.name, "model": row.model, "nbytes": row.nbytes, "downloaded": False}, indent=2))
        return
    click.echo(f"{row.name} is {row.model}, about {size(row.nbytes)}; it is not downloaded. 'auraflux pull {row.name}' does.")
