"""`auraflux eval`: the quality of a quantized KV cache, compared with those of other engines."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import Bits, check_device, check_model
from auraflux.cli.options.model import model_argument, options
from auraflux.cli.options.renamed import notice
from auraflux.errors import InputError, SettingsError

if TYPE_CHECKING:
    from auraflux.cache.key_calibration import ModelCalibration
    from auraflux.eval.run import Tasks
    from auraflux.eval.text import Text
    from auraflux.eval.tools import ToolQuestion
    from auraflux.loading.language_model import LanguageModel
    from auraflux.tokenizer.tokenizer import Tokenizer

COPY = 128  # tokens of a repeated passage
HAYSTACKS = 2  # contexts per length of the needle test
LOAD_CONTEXT = 64  # tokens; short, because measurements use separate caches

OLD_CHANGES = {
    "first": "sink_tokens",
    "newest": "recent_window",
    "protect_first": "skip_first_layers",
    "protect_last": "skip_last_layers",
}


class Lengths(click.ParamType):
    """Comma-separated numbers of tokens, or none."""

    name = "lengths"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        if not isinstance(value, str):
            return value
        try:
            found = [] if value == "none" else [int(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is neither 'none' nor comma-separated numbers.", param, ctx)
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
        help="Text file; may be given several times. By default the speeches in the package.",
    ),
    click.option(
        "--kv",
        default="none,k8v4,k4v4",
        show_default=True,
        metavar="A,B",
        help="Settings to measure, such as none,fp8,k4v4,k4v4+recent_window=128+calibrate=off.",
    ),
    click.option("--peers", is_flag=True, help="Also measure the KV caches of other engines, simulated."),
    click.option("--ablations", is_flag=True, help="Also vary the first quantized setting, one change at a time."),
    click.option("--chat", is_flag=True, help="Wrap every window in the chat template, as an answer."),
    click.option("--window", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens per window of text."),
    click.option(
        "--windows", type=click.IntRange(min=1), default=8, show_default=True, help="Number of windows, spread over all files."
    ),
    _lengths("--copy", "distances", "512", "Copy test: distance in tokens between a passage and its repetition, or none."),
    _lengths("--needle", "needles", "1024", "Needle test: context lengths, or none."),
    _lengths("--tools", "tools", "none", "Function-calling test: context lengths, or none."),
    click.option(
        "--questions",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="BFCL questions for --tools, next to possible_answer/. By default those in the package.",
    ),
    _lengths("--speed", "speeds", "128,1024", "Decode speed: context lengths, or none."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
    click.option("--quantize", type=Bits(), metavar="BITS", help="Quantize dense weights for all settings, none included."),
    click.option("--exact/--fast", default=True, help="Use float32 or int8 activations; speed is always measured with int8."),
    click.option(
        "--calibrate", default="auto", show_default=True, metavar="auto|FILE", help="Key calibration: auto, or a saved file."
    ),
    click.option("--fresh", is_flag=True, help="Discard the results of an interrupted run."),
    click.option(
        "--task",
        "tasks",
        multiple=True,
        metavar="NAME",
        help="Run this task of lm-eval instead, for each --kv.",
    ),
    click.option("--task-folder", type=click.Path(path_type=Path), metavar="FOLDER", help="Folder with more tasks for --task."),
    click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Items per --task; by default all."),
]


EVERYDAY = (
    "--text",
    "--kv",
    "--peers",
    "--window",
    "--windows",
    "--needle",
    "--speed",
    "--task",
    "--device",
    "--quantize",
    "--json",
    "--save",
)
EXAMPLES = (
    "auraflux eval model.gguf",
    "auraflux eval model.gguf --kv none,k8v4,k4v4 --needle 1024,4096 --save results",
)


@click.command("eval", cls=Command, everyday=EVERYDAY, examples=EXAMPLES)
@model_argument
@options(OPTIONS)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--save", type=click.Path(path_type=Path), metavar="FOLDER", help="Write the results as JSON and PNG plots.")
def evaluate(model: str | None, as_json: bool, save: Path | None, **chosen: Any) -> None:
    """Measure the quality of a quantized KV cache.

    MODEL is a folder, a GGUF file or a name; without it, the built-in model. Every setting is compared, token by token, with a
    full-precision KV cache and the same weights. An interrupted run resumes when it is started again.

    A setting is none, bits of keys and values such as k4v4, or another engine's KV cache, simulated: fp8, q4_0, q4_0-hadamard,
    kivi4, kivi2, mlx4. Changes follow a plus: sink_tokens, recent_window, skip_first_layers, skip_last_layers, sparse_v, seed,
    quantize, and calibrate (all, off, centres or scales).

    With --task the model is served, and lm-eval, which must be installed, measures its tasks through the server.
    """
    check_device(chosen["device"])
    check_model(model)
    if chosen["tasks"]:
        _run_tasks(model, as_json, chosen)
        return
    from auraflux.bench.report import save as write
    from auraflux.engine.calibration import OFF
    from auraflux.eval.plot import check_folder, draw_all
    from auraflux.eval.setting import parse_all
    from auraflux.eval.text import read_files, tokenized
    from auraflux.eval.tools import read_questions

    settings = parse_all(_current_names(chosen["kv"]), chosen["peers"], chosen["ablations"])
    if chosen["calibrate"] == OFF:
        raise SettingsError("calibration is disabled per setting: give --kv k4v4+calibrate=off.")
    files = read_files(list(chosen["paths"]))
    questions = read_questions(chosen["questions"]) if chosen["tools"] else []
    if save is not None:
        check_folder(save)
    loaded = _load(model, chosen, chosen["quantize"])
    if loaded.tokenizer is None:
        raise InputError(f"{loaded.path} has no tokenizer files, so files cannot be tokenized.")
    tokens = tokenized(files, loaded.tokenizer, chosen["chat"])
    plan = _plan(tokens, questions, loaded.tokenizer, loaded.engine.model.config.context, chosen)
    document = _document(loaded, plan, list(files), _measure(model, loaded, settings, plan, chosen))
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _show(document)
    if save is not None:
        write(document, save / "eval.json")
        for path in [save / "eval.json", *draw_all(document["results"], save)]:
            click.echo(f"wrote {path}", err=True)


def _run_tasks(model: str | None, as_json: bool, chosen: dict[str, Any]) -> None:
    from auraflux.cli.serving.lm_eval import run_tasks, show

    rows = run_tasks(model, chosen["tasks"], chosen["task_folder"], chosen["limit"], chosen)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        show(rows)


def _current_names(settings: str) -> str:
    """Replace old names of changes, with a notice."""
    for old, new in OLD_CHANGES.items():
        changed = settings.replace(f"+{old}=", f"+{new}=")
        if changed != settings:
            notice(click.get_current_context(), f"+{old}=", f"+{new}=")
        settings = changed
    return settings


def _load(model: str | None, chosen: dict[str, Any], quantize: int | None) -> "LanguageModel":
    from auraflux.loading.load import load

    return load(model, chosen["device"], "none", quantize, chosen["exact"], LOAD_CONTEXT, max_sequences=1)


def _measure(
    model: str | None, loaded: "LanguageModel", settings: list[Any], plan: "Tasks", chosen: dict[str, Any]
) -> list[dict[str, Any]]:
    """Measure the settings, resuming an interrupted run; return one row per setting."""
    import auraflux
    from auraflux.eval.run import Evaluation
    from auraflux.eval.state import State, digest
    from auraflux.machine import cache_folder
    from auraflux.weights.fingerprint import fingerprint

    facts = (
        auraflux.__version__,
        chosen["quantize"],
        chosen["exact"],
        _calibration_key(chosen["calibrate"]),
        str(loaded.engine.device),
        plan.digest,
    )
    state_file = cache_folder() / "eval" / f"{digest(fingerprint(loaded.path, *facts))}.jsonl"
    if chosen["fresh"]:
        state_file.unlink(missing_ok=True)
    state = State(state_file)
    if len(state):
        click.echo(f"note: {len(state)} results of an interrupted run are reused; --fresh measures them again.", err=True)
    try:
        with _progress() as report:
            bases = _bases(model, loaded, chosen)
            calibrations = _calibrations(bases, loaded.path, chosen["calibrate"])
            engines = lambda bits: bases(bits).engine  # noqa: E731
            rows = Evaluation(engines, calibrations, settings, plan, state, chosen["exact"], report).run()
    finally:
        state.close()
    state.remove()
    return rows


def _calibration_key(calibrate: str) -> tuple[Any, ...]:
    """Return what identifies the key calibration: its recipe, or the file with its size and time."""
    from auraflux.engine.calibrate import RECIPE
    from auraflux.engine.calibration import AUTO
    from auraflux.weights.formats.untrusted import regular_file

    if calibrate == AUTO:
        return AUTO, RECIPE
    file = regular_file(Path(calibrate))
    return str(file), file.stat().st_size, file.stat().st_mtime_ns


def _plan(
    documents: "list[Text]", questions: "list[ToolQuestion]", tokenizer: "Tokenizer", trained: int, chosen: dict[str, Any]
) -> "Tasks":
    """Return the tasks of the options; refuse lengths beyond the documents or the model's context."""
    from auraflux.eval.needle import haystack
    from auraflux.eval.run import Tasks
    from auraflux.eval.text import copies, windows
    from auraflux.eval.tools import conversations

    longest = max(documents, key=lambda document: len(document.ids))
    wanted = [
        chosen["window"],
        *(n + COPY for n in chosen["distances"]),
        *chosen["needles"],
        *chosen["tools"],
        *chosen["speeds"],
    ]
    if max(wanted) > trained:
        raise SettingsError(f"{max(wanted)} tokens exceed the model's context of {trained}.")
    cut = windows(documents, chosen["window"], chosen["windows"])
    for length in chosen["speeds"]:
        if length > len(longest.ids):
            raise InputError(
                f"no file has the {length} tokens that --speed needs as context; the longest has {len(longest.ids)}."
            )
    return Tasks(
        cut,
        copies(documents, chosen["distances"], COPY),
        {length: [haystack(longest, tokenizer, length, number) for number in range(HAYSTACKS)] for length in chosen["needles"]},
        {length: conversations(questions, longest, tokenizer, length) for length in chosen["tools"]},
        {length: list(longest.ids[:length]) for length in chosen["speeds"]},
    )


def _bases(model: str | None, loaded: "LanguageModel", chosen: dict[str, Any]) -> "Callable[[int | None], LanguageModel]":
    """Return a function from weight bits to a model: the loaded one, and one other at a time."""
    other: dict[int, LanguageModel] = {}

    def base(bits: int | None) -> "LanguageModel":
        if bits is None:
            return loaded
        if bits not in other:
            other.clear()
            other[bits] = _load(model, chosen, bits)
        return other[bits]

    return base


def _calibrations(
    bases: "Callable[[int | None], LanguageModel]", path: Path, calibrate: str
) -> "Callable[[int | None], ModelCalibration]":
    """Return a function from weight bits to the key calibration of that model."""
    from auraflux.engine import calibration
    from auraflux.engine.engine import nbytes

    known: dict[int | None, ModelCalibration] = {}

    def found(bits: int | None) -> "ModelCalibration":
        if bits not in known:
            base = bases(bits)
            engine, cache = base.engine, base.engine.cache
            count = calibration.calibration_tokens(nbytes(engine.model), engine.device, base.experts is not None)
            options: dict[str, Any] = {"dtype": cache.dtype, "device": engine.device}
            subject = engine.model, cache.shapes, path, base.tokenizer, count
            known[bits] = calibration.load_or_calibrate(calibrate, *subject, **options)
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


def _document(loaded: "LanguageModel", plan: "Tasks", files: list[str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    from dataclasses import asdict

    import auraflux
    from auraflux.bench.report import commit
    from auraflux.machine import load, this_machine

    return {
        "machine": asdict(this_machine()),
        "version": auraflux.__version__,
        "command": shlex.join(["auraflux", *sys.argv[1:]]),
        "commit": commit(),
        "load": round(load(), 2),
        "device": str(loaded.engine.device),
        "model": loaded.path.name,
        "texts": files,
        "windows": len(plan.windows),
        "tokens": sum(passage.measured for passage in plan.windows),
        "results": rows,
    }


def _show(document: dict[str, Any]) -> None:
    from auraflux.cli.output.eval_table import needle_table, quality_table, speed_table, tools_table
    from auraflux.cli.output.screen import stdout

    console = stdout()
    windows = "1 window" if document["windows"] == 1 else f"{document['windows']} windows"
    console.print(f"{document['model']} on {document['device']}, {document['tokens']} tokens in {windows}")
    for table in (quality_table, needle_table, tools_table, speed_table):
        made = table(document["results"])
        if made is not None:
            console.print(made)
