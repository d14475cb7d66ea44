"""Compiling kernels before they are needed, several at once.

Inside `noted` kernels do not run: whoever runs a model there learns what it will need. `compile_all` then compiles that in
processes of their own, which leave it in the cache.
"""

import gc
import multiprocessing
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from numba.core.registry import CPUDispatcher, cpu_target

from auraflux.ops.simd import jit, prepared
from auraflux.ops.simd.folder import CACHE_FOLDER
from auraflux.ops.simd.jit import Kernel
from auraflux.ops.simd.threads import crew, make_ready

Tell = Callable[[str, int, int], None]  # what was compiled, how many so far, of how many


# what makes memory, and what makes the same filled with zeros
FRESH: tuple[tuple[Any, str, Any], ...] = (
    (torch, "empty", torch.zeros),
    (torch, "empty_like", torch.zeros_like),
    (torch.Tensor, "new_empty", torch.Tensor.new_zeros),
)


@contextmanager
def _zeroed() -> Iterator[None]:
    """Inside, new memory is zero, so that what kernels do not write is a valid number, token or expert all the same."""
    before = [getattr(place, name) for place, name, _ in FRESH]
    try:
        for place, name, zeros in FRESH:
            setattr(place, name, zeros)
        yield
    finally:
        for (place, name, _), made in zip(FRESH, before, strict=True):
            setattr(place, name, made)


_one = threading.Lock()
_going_on: list[Any] = []  # processes that compile what is not needed yet


@contextmanager
def noted() -> Iterator[dict[Kernel, None]]:
    """Collect the kernels that this thread calls inside the block, in order and each once, instead of running them."""
    with _one:
        taken = jit.notes = jit.Notes(threading.get_ident(), {})
        # what the threads run has to be compiled too
        crew.asked_by = taken.thread
        try:
            with _zeroed():
                yield taken.found
        finally:
            jit.notes = crew.asked_by = None


def compile_all(kernels: Iterable[Kernel], tell: Tell = lambda name, done, total: None, later: Iterable[Kernel] = ()) -> None:
    """Compile what is not in the cache yet, the largest first, with as many processes as there are processors.

    later  kernels that are compiled after the others, by processes that go on while this one does other things
    """
    # on a busy machine those of the last call may not have had a processor yet: more of them would not get one sooner
    later = () if any(process.is_alive() for process in _going_on) else later
    missing, rest = _in_turn(kernels), _in_turn(later)
    workers = min(len(missing + rest), len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 0
    # one alone is of use only where it goes on in the background
    if workers >= (1 if rest else 2) and CACHE_FOLDER and sys.platform == "linux":
        _share(missing, rest, workers, tell)
    # what no process has left in the cache
    for done, kernel in enumerate(missing):
        if not kernel.is_kept():
            tell(kernel.__name__, done, len(missing))
        kernel.compile()


def _size(kernel: Kernel) -> int:
    """Bytes of Python code that a kernel is made of."""
    found: set[Any] = set()
    waiting: list[Any] = [kernel.body]
    size = 0
    while waiting:
        function = waiting.pop()
        size += len(function.__code__.co_code)
        for name in function.__code__.co_names:
            part = function.__globals__.get(name)
            if isinstance(part, CPUDispatcher) and part not in found:
                found.add(part)
                waiting.append(part.py_func)
    return size


def _in_turn(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Kernels that are not in the cache yet: of every module the largest, then of every module the next."""
    missing = sorted((each for each in kernels if not each.is_kept()), key=_size, reverse=True)
    before: Counter[str] = Counter()
    rank = {}
    for each in missing:
        rank[each] = before[each.body.__module__]
        before[each.body.__module__] += 1
    return sorted(missing, key=rank.__getitem__)


def _next(kernels: list[Kernel], taken: Any, mine: set[str]) -> int | None:
    """Take the next kernel, first of the modules whose parts this process has compiled; gives its number."""
    with taken.get_lock():
        free = [number for number, is_taken in enumerate(taken) if not is_taken]
        number = next((each for each in free if kernels[each].body.__module__ in mine), free[0] if free else None)
        if number is not None:
            taken[number] = 1
            mine.add(kernels[number].body.__module__)
        return number


def wait() -> None:
    """Wait for what is compiled in the background."""
    while _going_on:
        _going_on.pop().join()


def _share(missing: list[Kernel], rest: list[Kernel], workers: int, tell: Tell) -> None:
    """Let processes compile kernels in turn, and wait for those that are missing."""
    context = multiprocessing.get_context("fork")
    taken, later = context.Array("b", len(missing)), context.Array("b", len(rest))
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        receiver.close()
        # a twelfth of the time of compiling, and the process ends soon
        gc.disable()
        mine: set[str] = set()
        while (number := _next(missing, taken, mine)) is not None:
            missing[number].compile()
            sender.send(number)
        # only where nobody else wants a processor
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        while (number := _next(rest, later, mine)) is not None:
            rest[number].compile()

    # what each of them would begin with
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    with warnings.catch_warnings():
        # other threads of this process hold no lock that compiling needs
        warnings.simplefilter("ignore", DeprecationWarning)
        processes = [context.Process(target=_quietly, args=(work,), daemon=True) for _ in range(workers)]
        for each in missing[:1]:
            tell(each.__name__, 0, len(missing))
        for process in processes:
            process.start()
    sender.close()
    _going_on[:] = processes + [process for process in _going_on if process.is_alive()]
    try:
        make_ready()
        prepared.make_ready()
        # a process that ends before its time leaves some to be compiled here
        with suppress(EOFError):
            for done in range(1, len(missing) + 1):
                tell(missing[receiver.recv()].__name__, done, len(missing))
    except BaseException:
        for process in processes:
            process.terminate()
        wait()
        raise
    if not rest:
        wait()


def _quietly(work: Callable[[], None]) -> None:
    """Whatever goes wrong here goes wrong again where somebody hears of it."""
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)
