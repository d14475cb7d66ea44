"""Warm-up before the first request: compile kernels and record graphs of the usual steps."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from auraflux.engine.engine import DECODE_SIZES, PREFILL_SIZES, Engine
from auraflux.loading.language_model import LanguageModel
from auraflux.progress import Report
from auraflux.scheduler.budget.prefill_budget import TOGETHER

if TYPE_CHECKING:
    from auraflux.ops.gpu.ahead import Compiler

log = logging.getLogger("auraflux")

DECODED = 8  # tokens of every sequence
DRY_RUN_DECODED = 2  # tokens of sequences that only show which kernels are launched
SHORT = 24, 48, 300  # tokens of prompts in a step without a graph: less than a page of the cache, about one, and several
TILE_STEP = 128  # prefill tokens between two batches: the tiling of matrix products depends on their number
ROUTE_STEP, MOST_ROUTED = 32, 512  # the same for routing, up to so many tokens


class WarmupBatch(NamedTuple):
    """Prompts that are submitted together.

    sequences  number of prompts
    tokens     of each prompt
    shared     all prompts are equal: one is prefilled, the others hit the prefix cache
    """

    sequences: int
    tokens: int
    shared: bool = False


class Warmup:
    """The steps that requests usually run, in parts; each part records the CUDA graphs of some.

    batches  of prompts
    counts   of decoding sequences in mixed batches
    """

    def __init__(self, loaded: LanguageModel):
        self.loaded = loaded
        self.batches = _fitting(loaded, standard_batches(loaded))
        self.counts = loaded.engine.mixed_batch_counts(loaded.scheduler.max_sequences)

    @property
    def in_background(self) -> bool:
        """Return whether some parts may wait until no request runs: a GPU's steps run without graphs until then."""
        # steps with experts on disk read them, which would delay requests
        return bool(self.batches) and compiles_ahead(self.loaded) and self.loaded.engine.graphs.runs_ahead

    def run(self, report: Report, parts: int | None = None) -> None:
        """Compile all kernels, and run the first parts; None for all parts."""
        loaded, total = self.loaded, len(self.batches) + len(self.counts)
        compile_ahead(loaded, self.batches, self.counts, report)
        for done, batch in enumerate(self.batches[:parts]):
            report(f"warming up: batch of {batch.sequences}", done, total)
            _run(loaded, batch, DECODED)
        for done, sequences in enumerate(self.counts if parts is None else (), len(self.batches)):
            report(f"warming up: mixed batch of {sequences}", done, total)
            loaded.engine.warm_up_mixed(sequences)
        loaded.scheduler.counts.reset()
        if loaded.scheduler.speculation is not None:
            loaded.scheduler.speculation.reset_counts()


def warm_up(loaded: LanguageModel, report: Report) -> None:
    """Compile kernels and record graphs of all usual steps."""
    Warmup(loaded).run(report)


def compiles_ahead(loaded: LanguageModel) -> bool:
    """Return whether a dry run finds the kernels of a model's steps: those of a GPU, in a single process."""
    engine = loaded.engine
    if engine.cache.bidirectional:
        # few kernels, and torch's attention
        return False
    # other ranks would have to join every step
    return engine.graphs.on_one_gpu and loaded.scheduler.speculation is None


def compile_ahead(loaded: LanguageModel, batches: list[WarmupBatch], counts: list[int], report: Report) -> None:
    """Compile the kernels of a GPU's steps on all cores; running the steps would compile them one by one."""
    if not batches or not compiles_ahead(loaded):
        return
    try:
        from auraflux.ops.gpu import ahead
    except ImportError:
        # no Triton, or an incompatible version
        return
    if not ahead.is_supported():
        return
    began, engine = time.perf_counter(), loaded.engine
    with engine.graphs.disabled(), ahead.compiler() as compiler:
        try:
            _dry_run(loaded, _dry_batches(loaded, batches), counts, compiler, report)
        except Exception as err:
            log.warning("compiling kernels one by one: %s", err)
    if compiler.compiled:
        took_s = time.perf_counter() - began
        log.info("compiled %d kernels in %.0f s; cached for the next start", len(compiler.compiled), took_s)


def _dry_batches(loaded: LanguageModel, batches: list[WarmupBatch]) -> list[WarmupBatch]:
    """Return the batches that launch all kernels; the longest prompt first.

    Short prompts launch the same kernels in layers with and without a sliding window.
    """
    more = _fitting(loaded, [*uncaptured_prefills(loaded.engine), *packed_prefills(loaded.engine.chunk)])
    return sorted(dict.fromkeys([*batches, *more]), key=lambda batch: (batch.sequences, -batch.tokens))


def launch_usual_steps(loaded: LanguageModel) -> None:
    """Run all steps that the dry run runs, with all layers."""
    warmup = Warmup(loaded)
    with loaded.engine.graphs.disabled():
        for batch in _dry_batches(loaded, warmup.batches):
            _run(loaded, batch, DRY_RUN_DECODED)
        for sequences in warmup.counts:
            loaded.engine.warm_up_mixed(sequences, times=1)


def _dry_run(
    loaded: LanguageModel, batches: list[WarmupBatch], counts: list[int], compiler: "Compiler", report: Report
) -> None:
    """Run steps without launching kernels, to compile them; stop after the first if all of its kernels were cached."""
    from auraflux.ops.gpu.ahead import compile_launches_ahead

    def progress(done: int, total: int) -> None:
        report("compiling kernels", done, total)

    model: Any = loaded.engine.model
    first, *others = batches
    with compile_launches_ahead(compiler) as launched:
        recorded = [RecordedLayer(layer, launched) for layer in model.layers]
        with _layers(model, recorded):
            _run(loaded, first, DRY_RUN_DECODED)
    if not compiler.begun:
        return
    # the kernels of the first are compiled meanwhile
    with compile_launches_ahead(compiler), _layers(model, one_layer_per_kind(recorded)):
        for done, batch in enumerate(others):
            report("finding kernels", done, len(others) + len(counts))
            _run(loaded, batch, DRY_RUN_DECODED)
        for done, sequences in enumerate(counts, len(others)):
            report("finding kernels", done, len(others) + len(counts))
            loaded.engine.warm_up_mixed(sequences, times=1)
    compiler.wait(progress)


class RecordedLayer:
    """Layer that records the kernels it launches; `kind` lists them."""

    def __init__(self, layer: Any, launched: list[str]):
        self.layer, self.kind = layer, ""
        self._launched = launched

    def __call__(self, *args: Any) -> Any:
        return self._recorded(self.layer, args)

    def update_cache(self, *args: Any) -> Any:
        return self._recorded(self.layer.update_cache, args)

    def _recorded(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        before = len(self._launched)
        found = work(*args)
        self.kind += "".join(f"{each}\n" for each in self._launched[before:])
        return found


class SkippedLayer:
    """Identity in place of a layer whose kernels another layer launches; the model's output is then meaningless."""

    def __call__(self, x: Tensor, delta: Tensor | None, *others: Any) -> tuple[Tensor, Tensor | None]:
        return x, delta


def one_layer_per_kind(recorded: list[RecordedLayer]) -> list[Any]:
    """Skip all layers but the first of each kind and the last, which computes the last token's output only."""
    firsts = {each.kind: each for each in reversed(recorded)}.values()
    return [each.layer if each in firsts or each is recorded[-1] else SkippedLayer() for each in recorded]


@contextmanager
def _layers(model: Any, layers: list[Any]) -> Iterator[None]:
    """Replace the layers of a model inside the block."""
    before, model.layers = model.layers, layers
    try:
        yield
    finally:
        model.layers = before


def standard_batches(loaded: LanguageModel) -> list[WarmupBatch]:
    """Return the batches whose steps are recorded."""
    on_gpu = loaded.engine.device.type == "cuda"
    if on_gpu and loaded.engine.cache.bidirectional:
        return [*(WarmupBatch(1, size) for size in PREFILL_SIZES), WarmupBatch(TOGETHER, PREFILL_SIZES[3])]
    if loaded.experts is not None and not (on_gpu and loaded.engine.graphs.enabled):
        # reading experts from disk costs more than compiling
        return [WarmupBatch(1, 8)]
    if not on_gpu:
        return [WarmupBatch(1, 32), WarmupBatch(8, 32)]
    # a step is recorded on its second run, once per length bucket; longer ones than are recorded share their kernels
    captured = [size for size in PREFILL_SIZES if loaded.engine.graphs.captures(size)]
    alone = [WarmupBatch(1, size) for size in captured for _ in range(2)]
    if len(captured) < len(PREFILL_SIZES):
        alone.append(WarmupBatch(1, PREFILL_SIZES[-1]))
    together = [WarmupBatch(count, tokens, shared=True) for tokens in (16, 1024) for count in DECODE_SIZES]
    # prompts beyond the largest replayed step are prefilled as one batch, by kernels for powers of two of them
    several = [WarmupBatch(count, 2 * PREFILL_SIZES[-1] // count) for count in (2, 4, TOGETHER)]
    return [*alone, *together, *several, WarmupBatch(2 * TOGETHER, 1024), WarmupBatch(2 * TOGETHER, 1024)]


def uncaptured_prefills(engine: Engine) -> list[WarmupBatch]:
    """Return prompts that are not padded to a size that has a graph, for every number of tokens with its own tiling."""
    padded = max((size for size in PREFILL_SIZES if engine.graphs.captures(size)), default=0)
    if padded == PREFILL_SIZES[-1]:
        return []
    steps = range(ROUTE_STEP, MOST_ROUTED, ROUTE_STEP), range(MOST_ROUTED, PREFILL_SIZES[-1] + 1, TILE_STEP)
    # multiples of 16, of 2, and others, whether or not the last token is prefilled
    ends = (1, 0, -1, -2), (1, 0, -1)
    sizes = [size + end for sizes, each in zip(steps, ends, strict=True) for size in sizes for end in each if size > padded]
    together = [WarmupBatch(count, tokens) for tokens in SHORT for count in (2, 4, TOGETHER) if count * tokens > padded]
    return [*(WarmupBatch(1, size) for size in sizes), *together]


def packed_prefills(chunk: int) -> list[WarmupBatch]:
    """Return batches of prompts that are prefilled together, for every number of tokens with its own tiling."""
    return [WarmupBatch(TOGETHER, total // TOGETHER) for total in range(PREFILL_SIZES[-1] + TILE_STEP, chunk + 1, TILE_STEP)]


def _fitting(loaded: LanguageModel, batches: list[WarmupBatch]) -> list[WarmupBatch]:
    limit, room = loaded.scheduler.max_sequences, loaded.context - DECODED
    return [batch for batch in batches if batch.sequences <= limit and batch.tokens <= room]


def prompts_of(batch: WarmupBatch) -> list[list[int]]:
    """Return the prompts of a batch."""
    return [[0 if batch.shared else number] * batch.tokens for number in range(batch.sequences)]


def _run(loaded: LanguageModel, batch: WarmupBatch, decoded: int) -> None:
    prompts = prompts_of(batch)
    if loaded.engine.cache.bidirectional:
        loaded.embed(prompts)
        return
    loaded.generate_batch(prompts, max_tokens=decoded, ignore_eos=True)
    loaded.reset()
