"""Compile kernels by all cores, before the steps that launch them are taken.

Steps are taken without a launch: every launch is given to Triton for its build alone, which a thread compiles meanwhile (Triton
lets go of Python's lock for most of it). What kernels would have written is zero, so that whatever torch makes of it, places in
tables too, is inside; tables that are made once and kept are made by torch, and are right.
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
from auraflux.ops.hopper.launch import KNOWN, diverted

ATEN = torch.ops.aten
UNWRITTEN = {ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty, ATEN.new_empty_strided}


class Zeroed(TorchDispatchMode):
    """Inside the block memory that nobody has written to is zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func.overloadpacket in UNWRITTEN else found


@contextmanager
def compiled_ahead(report: Callable[[int, int], None]) -> Iterator[list[str]]:
    """Compile what is launched inside the block, and launch nothing; what cannot be compiled says so when it is launched.

    Gives a list to which what tells the build of every launch from others is added.

    report  called with how many builds are compiled, and of how many, while they are waited for
    """
    known: set[str] = set()
    launched: list[str] = []
    device = driver.active.get_current_device()

    def receive(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        binder = kernel.device_caches[device][-1]
        _, specialization, options = binder(*args, **named)
        launched.append(f"{id(kernel)} {specialization} {options}")
        if launched[-1] not in known:
            known.add(launched[-1])
            kernel.run(*args, grid=grid, warmup=True, **named)

    with ThreadPoolExecutor(usable_cores()) as threads, _async_compile.AsyncCompileMode(threads, ignore_errors=True) as mode:
        try:
            with diverted(receive), Zeroed():
                yield launched
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
        for done, _ in enumerate(as_completed(mode.raw_futures)):
            report(done, len(mode.raw_futures))


@contextmanager
def counted_builds() -> Iterator[list[str]]:
    """Collect the names of kernels that are compiled inside the block; those that Triton has kept are not."""
    names: list[str] = []
    before = knobs.compilation.listener

    def hear(**told: Any) -> None:
        if not told["cache_hit"]:
            names.append(told["metadata"]["name"])

    knobs.compilation.listener = hear
    try:
        yield names
    finally:
        knobs.compilation.listener = before


def serves() -> bool:
    """Whether this version of Triton is one whose builds can be made ahead."""
    return triton.__version__.startswith(KNOWN)
