"""`auraflux eval`: what a compressed cache costs in quality, beside other engines' caches."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options import model_argument, options
from auraflux.errors import InputError, SettingsError

if TYPE_CHECKING:
    from auraflux.cache.calibration import ModelVectors
    from auraflux.eval.run import Plan
    from auraflux.eval.text import Text
    from auraflux.eval.tools import Question
    from auraflux.run.language import LanguageModel
    from auraflux.run.tokenizer import Tokenizer

COPY = 128  # tokens of a passage that is repeated
TURNS = 2  # texts of each length of the needle test
OPEN = 64  # tokens; the model is loaded with a context as short as that, and measured with caches of their own


class Lengths(click.ParamType):
    """Numbers of tokens with commas between them, or none."""

    name = "lengths"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        if not isinstance(value, str):
            return value
        try:
            found = [] if value == "none" else [int(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is neither 'none' nor numbers with commas between them.", param, ctx)
        if any(n < 1 for n in found):
            self.fail(f"{value!r} has a length below 1.", param, ctx)
        return found


def _lengths(flag: str, name: str, default: str, text: str) -> Any:
    return click.option(flag, name, type=Lengths(), default=default, show_default=True, metavar="N,M", help=text)


OPTIONS = [
    click.option(
        "--text",
        "paths",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A text; may be given several times. Without it, the addresses that come along.",
    ),
    click.option(
        "--kv",
        default="none,k8v4,k4v4",
        show_default=True,
        metavar="A,B",
        help="Settings to measure, as in none,fp8,k4v4,k4v4+newest=128+calibrate=off.",
    ),
    click.option("--peers", is_flag=True, help="Also caches of other engines, simulated."),
    click.option("--ablations", is_flag=True, help="Also the first compressed setting with one thing changed at a time."),
    click.option("--chat", is_flag=True, help="Put every window of text into the model's chat format, as an answer."),
    click.option("--window", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens of a window of text."),
    click.option("--windows", type=click.IntRange(min=1), default=8, show_default=True, help="Windows, spread over all texts."),
    _lengths("--copy", "distances", "512", "Tokens after which a passage is repeated, or none."),
    _lengths("--needle", "needles", "1024", "Tokens of texts in which facts are hidden, or none."),
    _lengths("--tools", "tools", "none", "Tokens of conversations that end with calls of functions, or none."),
    click.option(
        "--questions",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="BFCL's questions for --tools, with possible_answer/ beside them. Without it, those that come along.",
    ),
    _lengths("--speed", "speeds", "128,1024", "Tokens before those whose writing is timed, or none."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
    click.option("--quantize", type=int, metavar="BITS", help="Round dense weights for all settings, the uncompressed too."),
    click.option("--exact/--fast", default=True, help="Multiply float32 activations, or int8 ones; speed is of the latter."),
    click.option(
        "--calibrate", default="auto", show_default=True, metavar="WHAT", help="What is known of keys: auto, or a file."
    ),
    click.option("--fresh", is_flag=True, help="Forget what an interrupted run has measured."),
]


@click.command("eval")
@model_argument
@options(OPTIONS)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--save", type=click.Path(path_type=Path), metavar="FOLDER", help="Write JSON and PNG pictures.")
def evaluate(model: str | None, as_json: bool, save: Path | None, **chosen: Any) -> None:
    """Measure what compressing the cache does to answers.

    MODEL is a folder, a GGUF file or a name; with none, the built-in default. Every setting is compared with the uncompressed
    run of the same weights, token by token. A run that was interrupted goes on where it ended when it is started again.

    A setting is none, bits of keys and values such as k4v4, or another engine's cache, simulated: fp8, q4_0, q4_0-hadamard,
    kivi4, kivi2, mlx4. Changes come after a plus: first, newest, protect_first, protect_last, sparse_v, seed, quantize, and
    calibrate (all, off, centres or scales).
    """
    from auraflux.bench.document import save as write
    from auraflux.eval.plot import check_folder, draw_all
    from auraflux.eval.setting import parse_all
    from auraflux.eval.text import read_files, tokenized
    from auraflux.eval.tools import read_questions
    from auraflux.run.calibration import OFF

    settings = parse_all(chosen["kv"], chosen["peers"], chosen["ablations"])
    if chosen["calibrate"] == OFF:
        raise SettingsError("settings are measured without calibration one by one: give --kv k4v4+calibrate=off.")
    texts = read_files(list(chosen["paths"]))
    questions = read_questions(chosen["questions"]) if chosen["tools"] else []
    if save is not None:
        check_folder(save)
    loaded = _load(model, chosen, chosen["quantize"])
    if loaded.tokenizer is None:
        raise InputError(f"{loaded.path} has no tokenizer files, so texts cannot be read.")
    tokens = tokenized(texts, loaded.tokenizer, chosen["chat"])
    plan = _plan(tokens, questions, loaded.tokenizer, loaded.engine.model.config.context, chosen)
    document = _document(loaded, plan, list(texts), _measure(model, loaded, settings, plan, chosen))
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _show(document)
    if save is not None:
        write(document, save / "eval.json")
        for path in [save / "eval.json", *draw_all(document["results"], save)]:
            click.echo(f"wrote {path}", err=True)


def _load(model: str | None, chosen: dict[str, Any], quantize: int | None) -> "LanguageModel":
    from auraflux.run.load import load

    return load(model, chosen["device"], "none", quantize, chosen["exact"], OPEN, sequences=1)


def _measure(
    model: str | None, loaded: "LanguageModel", settings: list[Any], plan: "Plan", chosen: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run what has not been run before: one row for each setting."""
    import auraflux
    from auraflux.eval.run import Evaluation
    from auraflux.eval.state import State, digest
    from auraflux.machine import cache_folder
    from auraflux.weights.fingerprint import fingerprint

    facts = (
        auraflux.__version__,
        chosen["quantize"],
        chosen["exact"],
        _calibrated(chosen["calibrate"]),
        str(loaded.engine.device),
        plan.digest,
    )
    state_file = cache_folder() / "eval" / f"{digest(fingerprint(loaded.path, *facts))}.jsonl"
    if chosen["fresh"]:
        state_file.unlink(missing_ok=True)
    state = State(state_file)
    if len(state):
        click.echo(f"note: {len(state)} results of an interrupted run are taken over; --fresh measures them again.", err=True)
    try:
        with _progress() as tell:
            bases = _bases(model, loaded, chosen)
            vectors = _vectors(bases, loaded.path, chosen["calibrate"])
            engines = lambda bits: bases(bits).engine  # noqa: E731
            rows = Evaluation(engines, vectors, settings, plan, state, chosen["exact"], tell).run()
    finally:
        state.close()
    state.remove()
    return rows


def _calibrated(calibrate: str) -> tuple[Any, ...]:
    """Tell what is known of keys from what else might be: the recipe, or the file as it is now."""
    from auraflux.run.calibrate import RECIPE
    from auraflux.run.calibration import AUTO
    from auraflux.weights.boundary import regular

    if calibrate == AUTO:
        return AUTO, RECIPE
    file = regular(Path(calibrate))
    return str(file), file.stat().st_size, file.stat().st_mtime_ns


def _plan(
    texts: "list[Text]", questions: "list[Question]", tokenizer: "Tokenizer", trained: int, chosen: dict[str, Any]
) -> "Plan":
    """What the options ask for; refuses what the texts or the model are too short for."""
    from auraflux.eval.needle import haystack
    from auraflux.eval.run import Plan
    from auraflux.eval.text import copies, windows
    from auraflux.eval.tools import conversations

    longest = max(texts, key=lambda text: len(text.ids))
    wanted = [
        chosen["window"],
        *(n + COPY for n in chosen["distances"]),
        *chosen["needles"],
        *chosen["tools"],
        *chosen["speeds"],
    ]
    if max(wanted) > trained:
        raise SettingsError(f"{max(wanted)} tokens are more than the {trained} that the model was made for.")
    cut = windows(texts, chosen["window"], chosen["windows"])
    for length in chosen["speeds"]:
        if length > len(longest.ids):
            raise InputError(
                f"no text has {length} tokens to read before writing is timed; the longest has {len(longest.ids)}."
            )
    return Plan(
        cut,
        copies(texts, chosen["distances"], COPY),
        {length: [haystack(longest, tokenizer, length, turn) for turn in range(TURNS)] for length in chosen["needles"]},
        {length: conversations(questions, longest, tokenizer, length) for length in chosen["tools"]},
        {length: list(longest.ids[:length]) for length in chosen["speeds"]},
    )


def _bases(model: str | None, loaded: "LanguageModel", chosen: dict[str, Any]) -> "Callable[[int | None], LanguageModel]":
    """Models by the bits of their weights: the one that is loaded, and one more at a time."""
    other: dict[int, LanguageModel] = {}

    def base(bits: int | None) -> "LanguageModel":
        if bits is None:
            return loaded
        if bits not in other:
            other.clear()
            other[bits] = _load(model, chosen, bits)
        return other[bits]

    return base


def _vectors(
    bases: "Callable[[int | None], LanguageModel]", path: Path, calibrate: str
) -> "Callable[[int | None], ModelVectors]":
    """Those of the keys of models by the bits of their weights."""
    from auraflux.run import calibration
    from auraflux.run.engine import nbytes

    known: dict[int | None, ModelVectors] = {}

    def found(bits: int | None) -> "ModelVectors":
        if bits not in known:
            base = bases(bits)
            engine, cache = base.engine, base.engine.cache
            count = calibration.enough_tokens(nbytes(engine.model), engine.device, base.experts is not None)
            options: dict[str, Any] = {"dtype": cache.dtype, "device": engine.device}
            subject = engine.model, cache.shapes, path, base.tokenizer, count
            known[bits] = calibration.vectors_for(calibrate, *subject, **options)
        return known[bits]

    return found


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("")
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


def _document(loaded: "LanguageModel", plan: "Plan", texts: list[str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    from dataclasses import asdict

    import auraflux
    from auraflux.bench.document import commit
    from auraflux.machine import load, this_machine

    return {
        "machine": asdict(this_machine()),
        "version": auraflux.__version__,
        "command": shlex.join(["auraflux", *sys.argv[1:]]),
        "commit": commit(),
        "load": round(load(), 2),
        "device": str(loaded.engine.device),
        "model": loaded.path.name,
        "texts": texts,
        "windows": len(plan.windows),
        "tokens": sum(passage.measured for passage in plan.windows),
        "results": rows,
    }


def _show(document: dict[str, Any]) -> None:
    from auraflux.cli.eval_table import needle_table, quality_table, speed_table, tools_table
    from auraflux.cli.screen import stdout

    console = stdout()
    windows = "1 window" if document["windows"] == 1 else f"{document['windows']} windows"
    console.print(f"{document['model']} on {document['device']}, {document['tokens']} tokens in {windows}")
    for table in (quality_table, needle_table, tools_table, speed_table):
        made = table(document["results"])
        if made is not None:
            console.print(made)
