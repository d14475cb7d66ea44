"""`auraflux run`: download a model by its name, then chat with it or let it answer once."""

from typing import Any

import click

from auraflux.cli.chat import EVERYDAY, converse
from auraflux.cli.options.command import Command
from auraflux.cli.options.model import LOADING, RANKS, SAMPLING, options

EXAMPLES = (
    "auraflux run qwen3:4b",
    'auraflux run smollm2 "Name the capital of France."',
    "auraflux run org/name/model.gguf --context 8192",
)


@click.command(cls=Command, short_help="Download a model and chat with it.", everyday=EVERYDAY, examples=EXAMPLES)
@click.argument("model", metavar="NAME")
@click.argument("question", required=False)
@click.option("--system", metavar="TEXT", help="System message.")
@options(LOADING)
@options(RANKS)
@options(SAMPLING)
@click.option("--stats", is_flag=True, help="Show the expert cache's hits, misses and reads after each answer.")
def run(model: str, question: str | None, system: str | None, stats: bool, **chosen: Any) -> None:
    """Download a model unless it is here, and chat with it; with QUESTION, answer that and end.

    NAME is a short name, which `auraflux list --remote` lists, or whatever `auraflux chat` takes.
    """
    converse(model, system, stats, chosen, question)
