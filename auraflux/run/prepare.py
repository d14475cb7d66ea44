"""Compiling what a model needs on a CPU before its first step, several kernels at once."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import CacheSettings
from auraflux.ops.simd.ahead import compile_all, noted
from auraflux.ops.simd.jit import Kernel
from auraflux.run.calibrate import find_vectors
from auraflux.run.engine import Engine
from auraflux.run.progress import Report
from auraflux.run.sampler import Row, Sampler
from auraflux.run.sampling import Sampling

log = logging.getLogger("auraflux")

PROMPT = 16  # tokens


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
    """Compile what a model will need; what `calibrate` gives, which runs as soon as the kernels for it are there."""
    first, kernels, later = kernels_of(model, shapes, settings, exact=exact, calibrate=calibrate is not None, dtype=dtype)
    found: list[Any] = []

    def tell(name: str, done: int, total: int) -> None:
        report(f"compiling kernels: {name}", done, total)

    def meanwhile(pause: Callable[[], None]) -> None:
        def heard(what: str, done: int, total: int) -> None:
            pause()
            report(what, done, total)

        found.append(None if calibrate is None else calibrate(heard))

    compile_all(kernels, tell, later, first, meanwhile)
    return found[0]


def kernels_of(
    model: Any, shapes: list[Any], settings: CacheSettings, *, exact: bool, calibrate: bool, dtype: torch.dtype
) -> tuple[list[Kernel], list[Kernel], list[Kernel]]:
    """The kernels that calibrating calls, then all that reading a prompt and writing do, as far as running on zeros tells.

    Then those of drawing by chance, which the likeliest token does without.
    """
    few = _beginning(model, shapes)
    shapes = shapes[: len(few.layers)]
    sizes: dict[str, Any] = {"context": 2 * PROMPT, "chunk": PROMPT, "dtype": dtype, "device": "cpu"}
    first: list[Kernel] = []
    needed: list[Kernel] = []
    with noted() as kernels:
        try:
            if calibrate:
                find_vectors(few, shapes, [0] * PROMPT, dtype, "cpu")
                first = list(kernels)
            engine = Engine(few, shapes, settings, **sizes, exact=exact, graphs=False)
            sequence = engine.cache.open()
            engine.read([sequence], [[0] * PROMPT])
            logits = engine.decode(engine.cache.batch([sequence]), [0])
            Sampler([Row(Sampling())])(logits)
            needed = list(kernels)
            Sampler([Row(Sampling(temperature=1.0, repetition_penalty=2.0))])(logits)
        # zeros are no text: what they do not reach is compiled when it is needed
        except Exception as err:
            log.debug("not all kernels could be named before they run: %r", err)
    needed = needed or list(kernels)
    return first, needed, [each for each in kernels if each not in needed]


def _beginning(model: Any, shapes: list[Any]) -> Any:
    """The same model with no more of its first layers than it takes to have met all kinds of them."""
    kinds = [(repr(shape), _forms(layer)) for layer, shape in zip(model.layers, shapes, strict=False)]
    count = max(kinds.index(kind) for kind in kinds) + 1
    few = copy.copy(model)
    few.layers, few.span = model.layers[:count], model.span[:count]
    return few


def _forms(part: Any) -> Any:
    """Of what types and shapes the tensors below an object are."""
    if isinstance(part, Tensor):
        return part.dtype, tuple(part.shape)
    if isinstance(part, list | tuple):
        return tuple(map(_forms, part))
    if type(part).__module__.startswith("auraflux."):
        return type(part), tuple((name, _forms(value)) for name, value in vars(part).items())
    return type(part)
