"""`auraflux bench speculate`: the speedup of speculative decoding."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.bench.model import random_loaded
from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import check_loading
from auraflux.cli.options.model import LOADING, load_model, model_argument, options
from auraflux.cli.output.phases import phases
from auraflux.errors import InputError

if TYPE_CHECKING:
    from auraflux.bench.speculation import Gain
    from auraflux.loading.language_model import LanguageModel


EVERYDAY = (
    "--speculate",
    "--tokens",
    "--random",
    "--shape",
    "--draft-layers",
    "--accept",
    "--device",
    "--kv",
    "--json",
)
EXAMPLES = ("auraflux bench speculate model.gguf --speculate ngram",)


def _tasks(
    model: str | None, tokens: int, repeat: int, chosen: dict[str, Any], progress: Callable[[str], None]
) -> "Iterator[Gain]":
    """Measure speculation on tasks."""
    from auraflux.bench.speculation import measure

    loaded = load_model(model, {**chosen, "speculate": chosen["speculate"] or "ngram"}, sequences=1)
    if loaded.tokenizer is None:
        raise InputError(f"{loaded.path} has no tokenizer files, so it cannot generate text.")
    return measure(loaded, tokens, repeat, progress)


def _forced(
    whole: "LanguageModel",
    small: "LanguageModel",
    at: int,
    tokens: int,
    accept: float,
    repeat: int,
    progress: Callable[[str], None],
) -> "Iterator[Gain]":
    """Measure speculation at a given acceptance rate."""
    from auraflux.bench.speculation import measure_forced
    from auraflux.engine.calibrate import random_tokens

    output = random_tokens(at + tokens, whole.engine.model.config.vocab)
    return measure_forced(whole, small.engine, output, at, accept, repeat, progress)


@click.command("speculate", cls=Command, everyday=EVERYDAY, examples=EXAMPLES)
@model_argument
@click.option("--tokens", type=click.IntRange(min=2), default=200, show_default=True, help="Tokens to decode for each task.")
@click.option("--random", "invented", is_flag=True, help="Fill --shape with random weights, with a smaller draft model.")
@click.option("--shape", metavar="NAME", help="With --random: the shape of a known model, such as llama-8b.")
@click.option("--layers", type=click.IntRange(min=1), metavar="N", help="With --random: number of layers instead of all.")
@click.option(
    "--draft-layers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="With --random: layers of the draft model.",
)
@click.option(
    "--accept",
    type=click.FloatRange(0, 1),
    default=0.7,
    show_default=True,
    help="With --random: acceptance rate of draft tokens, whatever the draft model predicts.",
)
@click.option("--at", type=click.IntRange(min=1), default=1024, show_default=True, help="With --random: tokens of the prompt.")
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Rounds; the best counts.")
@options(LOADING)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_speculate(
    model: str | None,
    tokens: int,
    invented: bool,
    shape: str | None,
    layers: int | None,
    draft_layers: int,
    accept: float,
    at: int,
    repeat: int,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Time decode with and without speculation, alternately.

    --speculate names the source of draft tokens, by default ngram.
    With --random: 1 to 8 draft tokens in every step, accepted at a given rate; the output is forced.
    """
    if not invented and shape is None:
        check_loading(model, chosen)
    from rich.table import Table

    from auraflux.cli.output.screen import stdout

    with phases() as progress:
        if invented or shape is not None:
            progress(f"making random weights of {shape}")
            sizes: dict[str, Any] = {"shape": shape, "invented": invented, "batch": 1, "context": at + tokens + 16}
            whole, small = (random_loaded(model, layers=count, chosen=chosen, **sizes) for count in (layers, draft_layers))
            found = list(_forced(whole, small, at, tokens, accept, repeat, progress))
        else:
            found = list(_tasks(model, tokens, repeat, chosen, progress))
    if as_json:
        click.echo(json.dumps([asdict(gain) for gain in found], indent=2))
        return
    table = Table("task", "plain tokens/s", "speculative", "", "tokens a step", "accepted", "same output")
    for gain in found:
        rates = f"{gain.plain_rate:.1f}", f"{gain.rate:.1f}", f"{gain.rate / gain.plain_rate:.2f}x"
        right = f"{gain.accepted} of {gain.drafted}"
        table.add_row(gain.task, *rates, f"{gain.tokens_per_step:.1f}", right, "yes" if gain.same else "no")
    stdout().print(table)
