"""`auraflux generate`: continue a text, or answer a question, once."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options import LOADING, RANKS, SAMPLING, load_model, model_argument, options, sampling
from auraflux.cli.stdin import read_all
from auraflux.cli.traffic import show_traffic, summary
from auraflux.cli.units import size
from auraflux.errors import InputError

if TYPE_CHECKING:
    from auraflux.run.stats import Stats


@click.command()
@model_argument
@click.option("--prompt", "-p", "prompts", multiple=True, help="The text to continue; - reads stdin. Several run together.")
@click.option("--chat", is_flag=True, help="Take the prompt as a message to answer, in the model's chat format.")
@click.option("--system", metavar="TEXT", help="What the model is told before the message; implies --chat.")
@options(LOADING)
@options(RANKS)
@options(SAMPLING)
@click.option("--stats", is_flag=True, help="Also show what was read of a packed model's experts, layer by layer.")
@click.option("--json", "as_json", is_flag=True, help="Print text and figures as JSON when all is done.")
def generate(
    model: str | None, prompts: tuple[str, ...], chat: bool, system: str | None, stats: bool, as_json: bool, **chosen: Any
) -> None:
    """Continue a text, or answer it with --chat.

    MODEL is a folder, a GGUF file or a name; with none, the built-in default.
    The text goes to stdout as it is written, the figures to stderr.
    """
    texts = [read_all() if text == "-" else text for text in prompts]
    if not texts:
        raise InputError("there is no prompt. Give one with -p TEXT, or -p - to read stdin.")
    settings = sampling(chosen)
    chat = chat or system is not None
    loaded = load_model(model, chosen, chat=chat, sequences=len(texts))
    one, several = (loaded.chat, loaded.chat_batch) if chat else (loaded.generate, loaded.generate_batch)
    asked: list[Any] = [_messages(text, system) for text in texts] if chat else texts
    if len(asked) == 1:
        written = _stream(one(asked[0], **settings), as_json)
    else:
        written = several(asked, **settings)
        for text, answer in zip(texts, written, strict=True):
            if not as_json:
                click.echo(f"> {text}\n{answer}\n")
    if as_json:
        click.echo(json.dumps({"texts": written, "stats": asdict(loaded.stats)}, indent=2, ensure_ascii=False))
    else:
        click.echo(figures(loaded.stats, loaded.engine.cache.settings.kv), err=True)
        if stats:
            show_traffic(loaded.stats.experts)


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": text}]


def _stream(written: Iterable[str], quiet: bool) -> list[str]:
    """Show the text as it comes."""
    pieces = []
    for piece in written:
        pieces.append(piece)
        if not quiet:
            click.echo(piece, nl=False)
    if not quiet:
        click.echo()
    return ["".join(pieces)]


def figures(stats: "Stats", kv: str) -> str:
    """One line about a generation."""
    parts = [f"prompt {_tokens(stats.prompt_tokens)}, {stats.prefill_rate:.1f}/s"]
    if stats.reused_tokens:
        parts[0] += f" ({stats.reused_tokens} more were still there)"
    parts.append(f"written {_tokens(stats.tokens)}, {stats.decode_rate:.1f}/s")
    if stats.drafted:
        parts[-1] += f", {stats.tokens_per_step:.1f} a step, {stats.accepted} of {stats.drafted} guesses right"
    held = f"cache {size(stats.cache_nbytes)}"
    if kv != "none" and stats.cache_nbytes:
        kept = f", {size(stats.kept_nbytes)} of it as it is" if stats.kept_nbytes else ""
        held += f" ({kv}{kept}); uncompressed {size(stats.plain_nbytes)}"
        # a short text is mostly what is kept as it is
        if stats.plain_nbytes > stats.cache_nbytes:
            held += f", {stats.plain_nbytes / stats.cache_nbytes:.1f}x"
    parts.append(held)
    if stats.experts is not None:
        parts.append(summary(stats.experts.total))
    if stats.invariant:
        parts.append("invariant")
    return " · ".join(parts)


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
