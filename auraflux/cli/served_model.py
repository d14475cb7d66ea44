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


def open_desk(
    model: str | None, connection: Connection, chosen: dict[str, Any], announce: Callable[[], None] = lambda: None
) -> "Desk":
    """Load a model and let it take requests from a pipe.

    announce  called, again and again, once all is checked that can be before weights are fetched or read
    """
    from auraflux.run.progress import on_terminal
    from auraflux.run.warmup import warm_up
    from auraflux.serve.desk import Desk, facts_of

    with on_terminal() as draw:

        def report(what: str, done: int, total: int) -> None:
            announce()
            draw(what, done, total)

        loaded = _load(model, chosen, report)
        announce()
        facts = facts_of(loaded, chosen["name"])
        warm_up(loaded, draw)
    return Desk(loaded, connection, facts, chosen["restart"])


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
