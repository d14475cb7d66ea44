"""The model of `auraflux serve`: loaded, warmed up, and connected to the HTTP process by a pipe."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from auraflux.cli.options.model import load_model
from auraflux.errors import SettingsError

if TYPE_CHECKING:
    from auraflux.loading.language_model import LanguageModel
    from auraflux.progress import Report
    from auraflux.serve.transport.model_process import ModelProcess

FIRST_PARTS = 2  # of the warm-up, before a server is ready: a short prompt, with the graphs of its steps


def open_model_process(
    model: str | None, connection: Connection, chosen: dict[str, Any], announce: Callable[[], None] = lambda: None
) -> "ModelProcess":
    """Load a model that takes requests from a pipe.

    announce  called repeatedly once all checks before loading weights have passed
    """
    from auraflux.loading.background_warmup import BackgroundWarmup
    from auraflux.loading.warmup import Warmup
    from auraflux.progress import on_terminal
    from auraflux.serve.transport.model_process import ModelProcess, facts_of

    with on_terminal() as draw:

        def report(what: str, done: int, total: int) -> None:
            announce()
            draw(what, done, total)

        loaded = _load(model, chosen, report)
        announce()
        facts = facts_of(loaded, chosen["name"])
        warmup, rest = Warmup(loaded), None
        if warmup.in_background and not chosen.get("full_warm_up"):
            warmup.run(draw, FIRST_PARTS)
            rest = BackgroundWarmup(warmup, FIRST_PARTS)
        else:
            warmup.run(draw)
    return ModelProcess(loaded, connection, facts, chosen["restart"], rest)


def _load(model: str | None, chosen: dict[str, Any], report: "Report") -> "LanguageModel":
    parallel = load_sequences(chosen)
    if chosen["invented"] or chosen["shape"]:
        from auraflux.cli.bench.model import random_loaded

        if chosen["prefix_disk"] is not None:
            raise SettingsError("--prefix-disk needs a model: random weights differ at the next start.")
        context = chosen["context"] or 4096
        return random_loaded(model, chosen["shape"], chosen["invented"], chosen["layers"], parallel, context, chosen)
    chosen = {**chosen, "cache_memory": chosen["cache_memory"] or "half"}
    return load_model(model, chosen, sequences=parallel, report=report)


def load_sequences(chosen: dict[str, Any]) -> int:
    """Return how many sequences decode at once."""
    return chosen["max_sequences"] or _default_sequences(chosen)


def _default_sequences(chosen: dict[str, Any]) -> int:
    """Return how many sequences decode at once by default: fewer on a small GPU, as each reserves memory."""
    from auraflux.engine.device import find_device, free_device_nbytes
    from auraflux.loading.gpu_division import SMALL_GPU_NBYTES
    from auraflux.weights.experts.settings import parse_nbytes

    device, given = find_device(chosen["device"]), chosen.get("gpu_memory")
    if device.type != "cuda":
        return 8
    total = free_device_nbytes(device) if given is None else parse_nbytes(given)
    return 16 if total <= SMALL_GPU_NBYTES else 64
