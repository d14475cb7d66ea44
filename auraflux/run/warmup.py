"""What is done before the first client waits for it: kernels are compiled and steps recorded."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from auraflux.run.engine import COUNTS, SIZES
from auraflux.run.language import LanguageModel
from auraflux.run.pace import TOGETHER
from auraflux.run.progress import Report

log = logging.getLogger("auraflux")

WRITTEN = 8  # tokens of every text
FOUND = 2  # of those that are only to show what is launched
LEAP = 128  # tokens by which prompts that are read as one are told apart: by how many there are, products are cut differently


class Load(NamedTuple):
    """So many texts at once, whose prompts have so many tokens; if they are alike, one is read and found by the others."""

    texts: int
    tokens: int
    alike: bool = False


def warm_up(loaded: LanguageModel, report: Report) -> None:
    """Let kernels be compiled, and steps of all usual kinds be recorded."""
    scheduler, engine = loaded.scheduler, loaded.engine
    loads, counts = _fitting(loaded, usual_loads(loaded)), engine.counts_beside(scheduler.parallel)
    compile_ahead(loaded, loads, counts, report)
    for done, load in enumerate(loads):
        report(f"preparing steps: {load.texts} at once", done, len(loads) + len(counts))
        _take(loaded, load, WRITTEN)
    for done, texts in enumerate(counts, len(loads)):
        report(f"preparing steps: {texts} at once and a prompt", done, len(loads) + len(counts))
        engine.rehearse_beside(texts)
    scheduler.counts = type(scheduler.counts)()
    if scheduler.speculation is not None:
        scheduler.speculation.forget_counts()


def compile_ahead(loaded: LanguageModel, loads: list[Load], counts: list[int], report: Report) -> None:
    """Compile what a GPU's steps launch by all cores; steps that are taken one after the other would compile it one by one."""
    engine = loaded.engine
    # ranks take every step together, and experts that are read from disk would be
    if not loads or not engine.replayer.ahead or loaded.experts is not None or loaded.scheduler.speculation is not None:
        return
    try:
        from auraflux.ops.hopper import ahead
    except ImportError:
        # no Triton, or one that has other parts
        return
    if not ahead.serves():
        return
    began, loads = time.perf_counter(), list(dict.fromkeys([*loads, *_fitting(loaded, crowds(engine.chunk))]))
    with engine.replayer.unrecorded(), ahead.counted_builds() as fresh:
        try:
            _find(loaded, loads, counts, fresh, report)
        except Exception as err:
            log.warning("kernels are compiled one by one: %s", err)
    if fresh:
        log.info("%d kernels compiled in %.0f s; the next start finds them", len(fresh), time.perf_counter() - began)


def _find(loaded: LanguageModel, loads: list[Load], counts: list[int], fresh: list[str], report: Report) -> None:
    """Take steps without a launch, all but the first only if `fresh` names kernels that no earlier start has left."""
    from auraflux.ops.hopper.ahead import compiled_ahead

    def tell(done: int, total: int) -> None:
        report("compiling kernels", done, total)

    model: Any = loaded.engine.model
    # the longest prompt: layers with a window and those without launch the same for short ones
    first, *others = sorted(loads, key=lambda load: (load.texts, -load.tokens))
    with compiled_ahead(tell) as launched:
        watched = [Watched(layer, launched) for layer in model.layers]
        with _layers(model, watched):
            _take(loaded, first, FOUND)
    if not fresh:
        return
    with compiled_ahead(tell), _layers(model, one_of_each(watched)):
        for done, load in enumerate(others):
            report("finding kernels", done, len(others) + len(counts))
            _take(loaded, load, FOUND)
        for done, texts in enumerate(counts, len(others)):
            report("finding kernels", done, len(others) + len(counts))
            loaded.engine.rehearse_beside(texts, times=1)


class Watched:
    """A layer of which it is noted what it launches."""

    def __init__(self, layer: Any, launched: list[str]):
        self.layer, self.kind = layer, ""
        self._launched = launched

    def __call__(self, *given: Any) -> Any:
        return self._noted(self.layer, given)

    def remember(self, *given: Any) -> Any:
        return self._noted(self.layer.remember, given)

    def _noted(self, work: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        before = len(self._launched)
        found = work(*given)
        self.kind += "".join(f"{each}\n" for each in self._launched[before:])
        return found


class Passed:
    """In the place of a layer that launches what another does; what comes out of such a model means nothing."""

    def __call__(self, x: Tensor, delta: Tensor | None, *others: Any) -> tuple[Tensor, Tensor | None]:
        return x, delta


def one_of_each(watched: list[Watched]) -> list[Any]:
    """The first layer of each kind and, as something else is asked of it, the last one."""
    firsts = {each.kind: each for each in reversed(watched)}.values()
    return [each.layer if each in firsts or each is watched[-1] else Passed() for each in watched]


@contextmanager
def _layers(model: Any, layers: list[Any]) -> Iterator[None]:
    """Give a model other layers inside the block."""
    before, model.layers = model.layers, layers
    try:
        yield
    finally:
        model.layers = before


def usual_loads(loaded: LanguageModel) -> list[Load]:
    """What steps are recorded for."""
    if loaded.experts is not None:
        # tokens of experts that are read from disk cost more than compiling
        return [Load(1, 8)]
    if loaded.engine.device.type == "cpu":
        return [Load(1, 32), Load(8, 32)]
    # a step is recorded the second time, and for texts of other lengths anew
    alone = [Load(1, size) for size in SIZES for _ in range(2)]
    together = [Load(count, tokens, alike=True) for tokens in (16, 1024) for count in COUNTS]
    # prompts that have more tokens than a step that is replayed are read as one, by kernels for powers of two of them
    several = [Load(count, 2 * SIZES[-1] // count) for count in (2, 4, TOGETHER)]
    return [*alone, *together, *several, Load(2 * TOGETHER, 1024), Load(2 * TOGETHER, 1024)]


def crowds(chunk: int) -> list[Load]:
    """Prompts that are read as one, of every number of tokens for which kernels may be cut differently."""
    return [Load(TOGETHER, total // TOGETHER) for total in range(SIZES[-1] + LEAP, chunk + 1, LEAP)]


def _fitting(loaded: LanguageModel, loads: list[Load]) -> list[Load]:
    parallel, room = loaded.scheduler.parallel, loaded.context - WRITTEN
    return [load for load in loads if load.texts <= parallel and load.tokens <= room]


def _take(loaded: LanguageModel, load: Load, written: int) -> None:
    prompts = [[0 if load.alike else number] * load.tokens for number in range(load.texts)]
    loaded.generate_batch(prompts, max_tokens=written, endless=True)
    loaded.reset()
