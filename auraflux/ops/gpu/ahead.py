"""Kernels compiled on all cores, before the steps that launch them run.

Steps run without launching: each launch only asks Triton for the compiled kernel, which a thread compiles meanwhile (Triton
releases the GIL for most of it). Outputs of kernels are zeros, so that indices computed from them by torch stay in range;
tables that are computed once and cached come from torch, and are correct.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime import _async_compile, driver

from auraflux.machine import usable_cores
from auraflux.ops.gpu.launch import TRITON_VERSION, redirect_launches, supported_options

ATEN = torch.ops.aten
EMPTY_OPS = {ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty, ATEN.new_empty_strided}


class ZeroedEmptyTensors(TorchDispatchMode):
    """Mode in which torch's uninitialised tensors are zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func.overloadpacket in EMPTY_OPS else found


@contextmanager
def compile_launches_ahead(report: Callable[[int, int], None]) -> Iterator[list[str]]:
    """Compile the kernels launched inside the block without launching them; errors are raised when they are launched.

    Yields a list to which a key of the compiled kernel of every launch is added.

    report  called with the number of kernels compiled, and of all, while waiting for them
    """
    known: set[str] = set()
    launched: list[str] = []
    device = driver.active.get_current_device()

    def receive(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        named = supported_options(named)
        binder = kernel.device_caches[device][-1]
        _, specialization, options = binder(*args, **named)
        launched.append(f"{id(kernel)} {specialization} {options}")
        if launched[-1] not in known:
            known.add(launched[-1])
            kernel.run(*args, grid=grid, warmup=True, **named)

    with ThreadPoolExecutor(usable_cores()) as threads, _async_compile.AsyncCompileMode(threads, ignore_errors=True) as mode:
        try:
            with redirect_launches(receive), ZeroedEmptyTensors():
                yield launched
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
        for done, _ in enumerate(as_completed(mode.raw_futures)):
            report(done, len(mode.raw_futures))


@contextmanager
def record_compilations() -> Iterator[list[str]]:
    """Collect the names of kernels compiled inside the block; those found in Triton's cache are not."""
    names: list[str] = []
    before = knobs.compilation.listener

    def listen(**event: Any) -> None:
        if not event["cache_hit"]:
            names.append(event["metadata"]["name"])

    knobs.compilation.listener = listen
    try:
        yield names
    finally:
        knobs.compilation.listener = before


def is_supported() -> bool:
    """Return whether this version of Triton can compile launches ahead."""
    return triton.__version__.startswith(TRITON_VERSION)
