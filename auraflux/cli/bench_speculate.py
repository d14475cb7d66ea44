"""`auraflux bench speculate`: what guesses are worth on texts that repeat themselves, and on texts that do not."""

import json
from dataclasses import asdict
from typing import Any

import click

from auraflux.cli.options import LOADING, load_model, model_argument, options
from auraflux.errors import InputError


@click.command("speculate")
@model_argument
@click.option("--tokens", type=click.IntRange(min=2), default=200, show_default=True, help="Tokens to write of each text.")
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Rounds; the best counts.")
@options(LOADING)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_speculate(model: str | None, tokens: int, repeat: int, as_json: bool, **chosen: Any) -> None:
    """Time writing with MODEL, with guesses and without by turns; --speculate says whose, by default ngram."""
    from rich.console import Console
    from rich.table import Table

    from auraflux.bench.speculation import measure
    from auraflux.cli.screen import stdout

    loaded = load_model(model, {**chosen, "speculate": chosen["speculate"] or "ngram"}, sequences=1)
    if loaded.tokenizer is None:
        raise InputError(f"{loaded.path} has no tokenizer files, so it can write no text.")
    with Console(stderr=True).status("") as status:
        found = list(measure(loaded, tokens, repeat, status.update))
    if as_json:
        click.echo(json.dumps([asdict(gain) for gain in found], indent=2))
        return
    table = Table("text", "plain tokens/s", "with guesses", "", "tokens a step", "guesses right", "same text")
    for gain in found:
        rates = f"{gain.plain_rate:.1f}", f"{gain.rate:.1f}", f"{gain.rate / gain.plain_rate:.2f}x"
        right = f"{gain.accepted} of {gain.drafted}"
        table.add_row(gain.task, *rates, f"{gain.tokens_per_step:.1f}", right, "yes" if gain.same else "no")
    stdout().print(table)
