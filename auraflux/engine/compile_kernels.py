"""Parallel compilation of a model's CPU kernels before its first step."""

import copy
import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import CacheSettings
from auraflux.engine.calibrate import calibrate_keys
from auraflux.engine.engine import Engine
from auraflux.engine.sampler import Sampler, SamplerState
from auraflux.engine.sampling import Sampling
from auraflux.ops.simd.compile.ahead import collect_kernels, compile_all
from auraflux.ops.simd.compile.cache_folder import CACHE_FOLDER, PREBUILT
from auraflux.ops.simd.jit import Kernel
from auraflux.progress import Report

log = logging.getLogger("auraflux")

PROMPT = 16  # tokens
STORED = ".stored"  # of the empty files that name models whose kernels are all compiled


def compile_kernels(
    model: Any,
    shapes: list[Any],
    settings: CacheSettings,
    *,
    exact: bool,
    calibrate: Callable[[Report], Any] | None,
    dtype: torch.dtype,
    report: Report,
) -> Any:
    """Compile the kernels of a model and return the result of `calibrate`, which runs once its own kernels are compiled."""
    chosen = {"exact": exact, "calibrate": calibrate is not None, "dtype": dtype}
    first, kernels, later = _missing(model, shapes, settings, chosen)
    found: list[Any] = []

    def progress(name: str, done: int, total: int) -> None:
        report(f"compiling kernels: {name}", done, total)

    def meanwhile(pause: Callable[[], None]) -> None:
        def paused_report(what: str, done: int, total: int) -> None:
            pause()
            report(what, done, total)

        found.append(None if calibrate is None else calibrate(paused_report))

    compile_all(kernels, progress, later, first, meanwhile)
    return found[0]


def _missing(
    model: Any, shapes: list[Any], settings: CacheSettings, chosen: dict[str, Any]
) -> tuple[list[Kernel], list[Kernel], list[Kernel]]:
    """Return what `kernels_of` finds; nothing if an earlier process found all of them stored."""
    facts = (
        model.config,
        [*map(_signature, model.layers)],
        shapes,
        settings,
        chosen,
        None if PREBUILT is None else PREBUILT.folder,
    )
    note = Path(CACHE_FOLDER, hashlib.sha256(repr(facts).encode()).hexdigest()[:32]).with_suffix(STORED)
    if CACHE_FOLDER and note.exists():
        return [], [], []
    found = kernels_of(model, shapes, settings, **chosen)
    if CACHE_FOLDER and found[1] and all(kernel.is_cached() for kernels in found for kernel in kernels):
        # without the note the next process lists them again
        with suppress(OSError):
            note.touch()
    return found


def kernels_of(
    model: Any, shapes: list[Any], settings: CacheSettings, *, exact: bool, calibrate: bool, dtype: torch.dtype
) -> tuple[list[Kernel], list[Kernel], list[Kernel]]:
    """Return the kernels of calibration, of prefill and greedy decode, and of random sampling, found by a run on zeros."""
    shallow = _one_layer_per_kind(model, shapes)
    shapes = shapes[: len(shallow.layers)]
    sizes: dict[str, Any] = {"context": 2 * PROMPT, "chunk": PROMPT, "dtype": dtype, "device": "cpu"}
    first: list[Kernel] = []
    needed: list[Kernel] = []
    with collect_kernels() as kernels:
        try:
            if calibrate:
                calibrate_keys(shallow, shapes, [0] * PROMPT, dtype, "cpu")
                first = list(kernels)
            engine = Engine(shallow, shapes, settings, **sizes, exact=exact, graphs=False)
            sequence = engine.cache.open()
            if engine.cache.bidirectional:
                engine.prefill([sequence], [[0] * PROMPT], hidden=True)
                return [], list(kernels), []
            engine.prefill([sequence], [[0] * PROMPT])
            logits = engine.decode(engine.cache.batch([sequence]), [0])
            Sampler([SamplerState(Sampling())])(logits)
            needed = list(kernels)
            Sampler([SamplerState(Sampling(temperature=1.0, repetition_penalty=2.0))])(logits)
        # a kernel that zeros do not reach is compiled at its first call
        except Exception as err:
            log.debug("not all kernels are known before they run: %r", err)
    needed = needed or list(kernels)
    return first, needed, [each for each in kernels if each not in needed]


def _one_layer_per_kind(model: Any, shapes: list[Any]) -> Any:
    """Return the model cut after the first layers that include every kind of layer."""
    kinds = [(repr(shape), _signature(layer)) for layer, shape in zip(model.layers, shapes, strict=False)]
    count = max(kinds.index(kind) for kind in kinds) + 1
    shallow = copy.copy(model)
    shallow.layers, shallow.span = model.layers[:count], model.span[:count]
    return shallow


def _signature(part: Any) -> Any:
    """Return the types and shapes of all tensors below an object."""
    if isinstance(part, Tensor):
        return part.dtype, tuple(part.shape)
    if isinstance(part, list | tuple):
        return tuple(map(_signature, part))
    if type(part).__module__.startswith("auraflux."):
        return type(part), tuple((name, _signature(value)) for name, value in vars(part).items())
    return type(part)
