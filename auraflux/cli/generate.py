"""`auraflux generate`: complete a prompt, or answer a message, once."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import check_model
from auraflux.cli.options.images import image_option, user_message
from auraflux.cli.options.model import LOADING, RANKS, SAMPLING, first_adapter, load_model, model_argument, options, sampling
from auraflux.cli.options.stdin import read_all
from auraflux.cli.output.expert_stats import show_expert_stats, summary
from auraflux.cli.output.units import size
from auraflux.errors import InputError

if TYPE_CHECKING:
    from auraflux.scheduler.stats import Stats


FINISH_REASONS = {"stop": "end token", "stop_string": "stop string", "length": "token limit", "cancelled": "interrupted"}
EVERYDAY = (
    "--prompt",
    "--chat",
    "--system",
    "--image",
    "--max-tokens",
    "--temperature",
    "--top-p",
    "--seed",
    "--stop",
    "--device",
    "--kv",
    "--context",
    "--quantize",
    "--gpu-memory",
    "--expert-memory",
    "--speculate",
    "--stats",
    "--json",
)
EXAMPLES = (
    'auraflux generate -p "Once upon a time" -n 50',
    'auraflux generate org/name -p "Why is the sky blue?" --chat',
    "auraflux generate model.gguf -p - --chat < question.txt",
    'auraflux generate org/name -p "What is in this picture?" --image cat.jpg',
    'auraflux generate packed-model -p "Hello" --expert-memory 4GB',
)


@click.command(cls=Command, everyday=EVERYDAY, examples=EXAMPLES)
@model_argument
@click.option("--prompt", "-p", "prompts", multiple=True, help="Prompt; - reads stdin. Several prompts run as one batch.")
@click.option("--chat", is_flag=True, help="Send the prompt as a user message in the model's chat template.")
@click.option("--system", metavar="TEXT", help="System message; implies --chat.")
@image_option
@options(LOADING)
@options(RANKS)
@options(SAMPLING)
@click.option("--stats", is_flag=True, help="Also show the expert cache's hits, misses and reads by layer.")
@click.option("--json", "as_json", is_flag=True, help="Print the output and statistics as JSON at the end.")
def generate(
    model: str | None,
    prompts: tuple[str, ...],
    chat: bool,
    system: str | None,
    images: tuple[Path, ...],
    stats: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Complete a prompt, or answer it with --chat.

    MODEL is a folder, a GGUF file or a name; without it, the built-in model.
    The output streams to stdout; statistics go to stderr.
    """
    prompts = tuple(read_all() if prompt == "-" else prompt for prompt in prompts)
    if not prompts:
        check_model(model)
        raise InputError("there is no prompt. Give one with -p TEXT, or -p - to read stdin.")
    settings = sampling(chosen) | first_adapter(chosen)
    chat = chat or system is not None or bool(images)
    # spaces alone are a prompt, but not a message
    if not all(prompt.strip() if chat else prompt for prompt in prompts):
        raise InputError("the prompt is empty. Give one with -p TEXT, or -p - to read stdin.")
    loaded = load_model(model, chosen, chat=chat, sequences=len(prompts))
    one, several = (loaded.chat, loaded.chat_batch) if chat else (loaded.generate, loaded.generate_batch)
    inputs: list[Any] = [_messages(prompt, system, images) for prompt in prompts] if chat else list(prompts)
    stopped: KeyboardInterrupt | None = None
    if len(inputs) == 1:
        output, stopped = _stream(one(inputs[0], **settings), as_json)
        outputs = [output]
    else:
        outputs = several(inputs, **settings)
        for prompt, output in zip(prompts, outputs, strict=True):
            if not as_json:
                click.echo(f"> {prompt}\n{output}\n")
    line = figures(loaded.stats, loaded.engine.cache.settings.kv)
    if as_json:
        click.echo(json.dumps({"texts": outputs, "stats": asdict(loaded.stats)}, indent=2, ensure_ascii=False))
    if stopped is not None:
        raise stopped if as_json else KeyboardInterrupt(line)
    if not as_json:
        click.echo(f"{loaded.default_sampling} · {line}", err=True)
        if stats:
            show_expert_stats(loaded.stats.experts)


def _messages(text: str, system: str | None, images: tuple[Path, ...]) -> list[dict[str, Any]]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, user_message(text, images)]


def _stream(deltas: Iterator[str], quiet: bool) -> tuple[str, KeyboardInterrupt | None]:
    """Print an output while it streams; return it, and the interrupt that ended it."""
    received: list[str] = []
    stopped = None
    try:
        for delta in deltas:
            received.append(delta)
            if not quiet:
                click.echo(delta, nl=False)
    except KeyboardInterrupt as err:
        stopped = err
    # if printing was interrupted, the sequence ends here
    del deltas
    if not quiet and (received or stopped is None):
        click.echo()
    return "".join(received), stopped


def figures(stats: "Stats", kv: str) -> str:
    """Summarize a generation in one line."""
    parts = [f"prompt {_tokens(stats.prompt_tokens)}{_rate(stats.prefill_rate)}"]
    if stats.reused_tokens:
        parts[0] += f" ({stats.reused_tokens} reused)"
    parts.append(f"generated {_tokens(stats.tokens)}{_rate(stats.decode_rate)}")
    if stats.finish_reasons:
        parts[-1] += f" ({_finish(stats.finish_reasons)})"
    if stats.drafted:
        parts[-1] += f", {stats.tokens_per_step:.1f} per step, accepted {stats.accepted} of {stats.drafted} draft tokens"
    parts.append(_cache_figures(stats, kv))
    if stats.experts is not None:
        parts.append(summary(stats.experts.total))
    if stats.invariant:
        parts.append("batch-invariant")
    return " · ".join(parts)


def _rate(per_s: float) -> str:
    """Format a throughput; nothing where there was none, as after a single token."""
    return f", {per_s:.1f}/s" if per_s else ""


def _finish(reasons: tuple[str, ...]) -> str:
    """Say why the sequences ended."""
    counts = Counter(FINISH_REASONS.get(reason, reason) for reason in reasons)
    return ", ".join(reason if n == len(reasons) else f"{n} {reason}" for reason, n in counts.most_common())


def _cache_figures(stats: "Stats", kv: str) -> str:
    """Summarize the memory of the KV cache: used, allocated, and what --kv none would use."""
    used, uncompressed = stats.cache_nbytes, stats.uncompressed_nbytes
    text = f"KV cache {size(used)} ({kv}) of {size(stats.allocated_nbytes)} allocated"
    # nearly all of a shorter sequence is sink and recent tokens in full precision
    if 0 < used < uncompressed:
        text += f", {uncompressed / used:.1f}x smaller than uncompressed ({size(uncompressed)})"
    return text


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
