"""`auraflux diff`: where two ways of running a model part."""

import json
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options import LOADING, load_model, model_argument, options
from auraflux.cli.stdin import read_all
from auraflux.errors import InputError, SettingsError

if TYPE_CHECKING:
    from auraflux.eval.parting import Parting, Trace

WIDEST = 40  # characters of a piece of text that are shown


@click.command()
@model_argument
@click.option("--a", "first", default="", metavar="OPTIONS", help="One way: options of 'generate', and --piece N.")
@click.option("--b", "second", default="", metavar="OPTIONS", help="The other, such as '--kv none --exact --piece 1'.")
@click.option("--prompt", "-p", required=True, help="The text that both read; - reads stdin.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff(model: str | None, first: str, second: str, prompt: str, as_json: bool) -> None:
    """Show where two ways of running MODEL part.

    At which token and layer first, and by how much. Both read the same text through their caches, --piece N tokens at a time.
    """
    from auraflux.eval.parting import part

    ways = [_way(words) for words in (first, second)]
    text = read_all() if prompt == "-" else prompt
    (a, tokens), (b, _) = (_trace(model, way, text) for way in ways)
    found = part(a, b)
    if as_json:
        click.echo(json.dumps({"a": first, "b": second, "tokens": tokens, **asdict(found)}, indent=2, ensure_ascii=False))
    else:
        _show(found, tokens)


def _way(words: str) -> dict[str, Any]:
    """What a way's options say."""

    @click.command("way", add_help_option=False)
    @options(LOADING)
    @click.option("--piece", type=click.IntRange(min=1))
    def way(**chosen: Any) -> dict[str, Any]:
        return chosen

    try:
        chosen = way.main(shlex.split(words), standalone_mode=False)
    except ValueError as err:
        raise InputError(f"{words!r} cannot be split into options: {err}.") from None
    except click.UsageError as err:
        raise InputError(f"{words!r} are not options of a way to run a model: {err.format_message()}") from None
    if chosen["speculate"] is not None:
        raise SettingsError("--speculate only changes how tokens are cut into steps. Use --piece N for that.")
    return chosen


def _trace(model: str | None, way: dict[str, Any], text: str) -> "tuple[Trace, list[str]]":
    from auraflux.eval.parting import trace
    from auraflux.run.request import Request

    # a step that is replayed cannot be watched
    loaded = load_model(model, {**way, "graphs": False}, sequences=1)
    if loaded.tokenizer is None:
        raise InputError(f"{loaded.path} has no tokenizer files, so text cannot be read.")
    ids = loaded.tokenizer.encode(text)
    loaded.scheduler.check(Request(tuple(ids)))
    return trace(loaded, ids, way["piece"]), [loaded.tokenizer.decode([token], special=True) for token in ids]


def _show(found: "Parting", tokens: list[str]) -> None:
    from rich.table import Table

    from auraflux.cli.screen import stdout

    def named(at: int) -> str:
        return f"token {at} of {len(tokens)}, {tokens[at][:WIDEST]!r}"

    if found.token is None:
        click.echo(f"no bit of any score differs, over {len(tokens)} tokens.")
        return
    where = "in the scores alone" if found.layer is None else f"in layer {found.layer}"
    click.echo(f"parts at {named(found.token)}, {where}")
    if found.choice is None:
        click.echo("the likeliest token is the same everywhere")
    else:
        (_, mine, theirs), (_, before, after) = found.likeliest
        click.echo(
            f"another token is likeliest after {named(found.choice)}: A's has {mine:.3f} in A and {theirs:.3f} in B, "
            f"B's {before:.3f} and {after:.3f}"
        )
    click.echo(f"KL mean {found.kl_mean:.2e}, largest {found.kl_most:.2e} after {named(found.kl_at)}")
    table = Table("layer", "first token", "relative RMS")
    for each in found.layers:
        table.add_row(str(each.layer), "" if each.token is None else str(each.token), f"{each.error:.2e}")
    stdout().print(table)
