"""`auraflux diff`: where two configurations of a model diverge."""

import json
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import check_loading
from auraflux.cli.options.model import LOADING, load_model, model_argument, options
from auraflux.cli.options.renamed import Renamed
from auraflux.cli.options.stdin import read_all
from auraflux.errors import InputError, SettingsError

if TYPE_CHECKING:
    from auraflux.eval.divergence import Divergence, Trace

MAX_CHARACTERS = 40  # of a token that is shown


EXAMPLES = ("auraflux diff model.gguf -p 'The sky is blue' --b '--kv none --exact'",)


@click.command(cls=Command, examples=EXAMPLES)
@model_argument
@click.option(
    "--a", "first", default="", metavar="OPTIONS", help="First configuration: options of 'generate', and --prefill-chunk N."
)
@click.option("--b", "second", default="", metavar="OPTIONS", help="Second one, such as '--kv none --exact --prefill-chunk 1'.")
@click.option("--prompt", "-p", required=True, help="Prompt for both; - reads stdin.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff(model: str | None, first: str, second: str, prompt: str, as_json: bool) -> None:
    """Show where two configurations of MODEL diverge.

    Prints the first token and layer that differ, and the error. Both prefill the same prompt, --prefill-chunk tokens per step.
    """
    configurations = [_configuration(words) for words in (first, second)]
    for each in configurations:
        check_loading(model, each)
    from auraflux.eval.divergence import compare_traces

    text = read_all() if prompt == "-" else prompt
    (a, tokens), (b, _) = (_trace(model, each, text) for each in configurations)
    found = compare_traces(a, b)
    if as_json:
        click.echo(json.dumps({"a": first, "b": second, "tokens": tokens, **asdict(found)}, indent=2, ensure_ascii=False))
    else:
        _show(found, tokens)


def _configuration(words: str) -> dict[str, Any]:
    """Parse the options of a configuration."""

    @click.command("configuration", add_help_option=False)
    @options(LOADING)
    @click.option("--prefill-chunk", cls=Renamed, old="--piece", type=click.IntRange(min=1))
    def parse(**chosen: Any) -> dict[str, Any]:
        return chosen

    try:
        chosen = parse.main(shlex.split(words), standalone_mode=False, parent=click.get_current_context())
    except ValueError as err:
        raise InputError(f"{words!r} cannot be split into options: {err}.") from None
    except click.UsageError as err:
        raise InputError(f"{words!r} are not options of a configuration: {err.format_message()}") from None
    if chosen["speculate"] is not None:
        raise SettingsError("--speculate only changes how tokens are split into steps. Use --prefill-chunk N for that.")
    return chosen


def _trace(model: str | None, chosen: dict[str, Any], text: str) -> "tuple[Trace, list[str]]":
    from auraflux.engine.request import Request
    from auraflux.eval.divergence import trace

    # hooks do not run in replayed steps
    loaded = load_model(model, {**chosen, "graphs": False}, sequences=1)
    if loaded.tokenizer is None:
        raise InputError(f"{loaded.path} has no tokenizer files, so the prompt cannot be tokenized.")
    ids = loaded.tokenizer.encode(text)
    loaded.scheduler.check(Request(tuple(ids)))
    return trace(loaded, ids, chosen["prefill_chunk"]), [loaded.tokenizer.decode([token], special=True) for token in ids]


def _show(found: "Divergence", tokens: list[str]) -> None:
    from rich.table import Table

    from auraflux.cli.output.screen import stdout

    def named(at: int) -> str:
        return f"token {at} of {len(tokens)}, {tokens[at][:MAX_CHARACTERS]!r}"

    if found.token is None:
        click.echo(f"all logits are bit-identical, over {len(tokens)} tokens.")
        return
    where = "in the logits only" if found.layer is None else f"in layer {found.layer}"
    click.echo(f"diverges at {named(found.token)}, {where}")
    if found.choice is None:
        click.echo("the most likely token is the same at every position")
    else:
        (_, mine, theirs), (_, before, after) = found.likeliest
        click.echo(
            f"the most likely token differs after {named(found.choice)}: probability of A's token {mine:.3f} in A, "
            f"{theirs:.3f} in B; of B's token {before:.3f} in A, {after:.3f} in B"
        )
    click.echo(f"KL mean {found.kl_mean:.2e}, largest {found.kl_most:.2e} after {named(found.kl_at)}")
    table = Table("layer", "first token", "relative RMS")
    for each in found.layers:
        table.add_row(str(each.layer), "" if each.token is None else str(each.token), f"{each.error:.2e}")
    stdout().print(table)
