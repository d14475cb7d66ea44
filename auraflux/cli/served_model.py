"""The model that `auraflux serve` answers with: loaded, warmed up, and at its end of the pipe."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from auraflux.cli.options import load_model
from auraflux.errors import SettingsError

if TYPE_CHECKING:
    from auraflux.run.language import LanguageModel
    from auraflux.run.progress import Report
    from auraflux.serve.desk import Desk

WRITTEN = 8  # tokens of every text that is written to prepare for others


def open_desk(
    model: str | None, connection: Connection, chosen: dict[str, Any], announce: Callable[[], None] = lambda: None
) -> "Desk":
    """Load a model and let it take requests from a pipe.

    announce  called, again and again, once all is checked that can be before weights are fetched or read
    """
    from auraflux.run.progress import on_terminal
    from auraflux.serve.desk import Desk, facts_of

    with on_terminal() as draw:

        def report(what: str, done: int, total: int) -> None:
            announce()
            draw(what, done, total)

        loaded = _load(model, chosen, report)
        announce()
        facts = facts_of(loaded, chosen["name"])
        _warm_up(loaded, draw)
    return Desk(loaded, connection, facts, chosen["restart"])


def _warm_up(loaded: "LanguageModel", report: "Report") -> None:
    """Let kernels be compiled and steps recorded before the first client waits for it."""
    scheduler, engine = loaded.scheduler, loaded.engine
    fits = [load for load in _usual_loads(loaded) if load[0] <= scheduler.parallel and load[1] + WRITTEN <= loaded.context]
    counts = engine.counts_beside(scheduler.parallel)
    for done, (texts, tokens, alike) in enumerate(fits):
        report(f"preparing steps: {texts} at once", done, len(fits) + len(counts))
        prompts = [[0 if alike else number] * tokens for number in range(texts)]
        loaded.generate_batch(prompts, max_tokens=WRITTEN, endless=True)
        loaded.reset()
    for done, texts in enumerate(counts, len(fits)):
        report(f"preparing steps: {texts} at once and a prompt", done, len(fits) + len(counts))
        engine.rehearse_beside(texts)
    scheduler.counts = type(scheduler.counts)()
    if scheduler.speculation is not None:
        scheduler.speculation.forget_counts()


def _usual_loads(loaded: "LanguageModel") -> list[tuple[int, int, bool]]:
    """How many texts are written at once, how many tokens their prompts have, and whether these are alike: one is read then."""
    from auraflux.run.engine import COUNTS, SIZES
    from auraflux.run.pace import TOGETHER

    if loaded.experts is not None:
        # tokens of experts that are read from disk cost more than compiling
        return [(1, 8, False)]
    if loaded.engine.device.type == "cpu":
        return [(1, 32, False), (8, 32, False)]
    # a step is recorded the second time, and for texts of other lengths anew
    alone = [(1, size, False) for size in SIZES for _ in range(2)]
    together = [(count, tokens, True) for tokens in (16, 1024) for count in COUNTS]
    # prompts that have more tokens than a step that is replayed are read as one, by kernels for powers of two of them
    crowds = [(count, 2 * SIZES[-1] // count, False) for count in (2, 4, TOGETHER)]
    return [*alone, *together, *crowds, (2 * TOGETHER, 1024, False), (2 * TOGETHER, 1024, False)]


def _load(model: str | None, chosen: dict[str, Any], report: "Report") -> "LanguageModel":
    from auraflux.run.device import find_device

    parallel = chosen["parallel"] or (64 if find_device(chosen["device"]).type == "cuda" else 8)
    if chosen["invented"] or chosen["shape"]:
        from auraflux.cli.bench_model import random_loaded

        if chosen["prefix_disk"] is not None:
            raise SettingsError("--prefix-disk is for models: random weights are others at the next start.")
        context = chosen["context"] or 4096
        return random_loaded(model, chosen["shape"], chosen["invented"], chosen["layers"], parallel, context, chosen)
    memory = {"cache_memory": chosen["cache_memory"] or "half", "prefix_disk": chosen["prefix_disk"]}
    return load_model(model, chosen, sequences=parallel, **memory, prefix_folder=chosen["prefix_folder"], report=report)
