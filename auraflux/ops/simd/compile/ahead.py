"""Ahead-of-time compilation of CPU kernels in parallel processes.

Two stages: a dry run of the model inside `collect_kernels` lists the kernels that it calls without running them, then
`compile_all` compiles them in forked processes, which leave the machine code in the JIT cache.
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
from functools import partial
from multiprocessing import connection
from typing import Any, NamedTuple

import torch
from numba.core.registry import CPUDispatcher, cpu_target

from auraflux.ops.simd import jit
from auraflux.ops.simd.compile.cache_folder import CACHE_FOLDER
from auraflux.ops.simd.jit import Kernel
from auraflux.ops.simd.replay import call_cache
from auraflux.ops.simd.threads import compile_launch, reserved_cores, thread_pool, warm_up

OnProgress = Callable[[str, int, int], None]  # name of a compiled kernel, number compiled, total
Overlap = Callable[[Callable[[], None]], None]  # work that calls its argument regularly, outside of ops, to receive progress


# functions that allocate memory, and their zero-filling counterparts
ALLOCATORS: tuple[tuple[Any, str, Any], ...] = (
    (torch, "empty", torch.zeros),
    (torch, "empty_like", torch.zeros_like),
    (torch.Tensor, "new_empty", torch.Tensor.new_zeros),
)


@contextmanager
def _zero_filled_memory() -> Iterator[None]:
    """Zero-fill new memory inside the block, so that outputs of skipped kernels are valid numbers, tokens and experts."""
    before = [getattr(place, name) for place, name, _ in ALLOCATORS]
    try:
        for place, name, zeros in ALLOCATORS:
            setattr(place, name, zeros)
        yield
    finally:
        for (place, name, _), made in zip(ALLOCATORS, before, strict=True):
            setattr(place, name, made)


_dry_run_lock = threading.Lock()
_background: list[Any] = []  # processes that compile in the background


@contextmanager
def collect_kernels() -> Iterator[dict[Kernel, None]]:
    """Yield the kernels that this thread calls inside the block, in order and without repeats; none of them runs."""
    with _dry_run_lock:
        run = jit.dry_run = jit.DryRun(threading.get_ident(), {})
        # starting the workers would compile their main loop here
        thread_pool.count_only_for = run.thread
        try:
            with _zero_filled_memory():
                yield run.kernels
        finally:
            jit.dry_run = thread_pool.count_only_for = None


class _EarlyCompile(NamedTuple):
    """A process that compiles kernels before `compile_all` requests them."""

    kernels: list[Kernel]
    process: Any


_early: list[_EarlyCompile] = []


def _max_processes() -> int:
    """Return how many processes may compile at once; 0 where no cache can be shared between them."""
    return len(os.sched_getaffinity(0)) if CACHE_FOLDER and sys.platform == "linux" else 0


def start_early(kernels: list[Kernel]) -> None:
    """Start compiling kernels that a later `compile_all` probably requests, on an otherwise idle core."""
    if _max_processes() >= 2 and not _early and not all(each.is_cached() for each in kernels):

        def work() -> None:
            compile_launch()
            call_cache.warm_up()
            for each in kernels:
                each.compile()

        _early.append(_EarlyCompile(kernels, _start(work)))


def cancel_early() -> None:
    """Stop the process of `start_early`."""
    while _early:
        _early.pop().process.terminate()


def _take_early(kernels: list[Kernel]) -> _EarlyCompile | None:
    """Return the early process if it compiles any of these kernels; otherwise stop it and return None."""
    early = _early.pop() if _early else None
    if early is not None and not set(early.kernels) & set(kernels):
        early.process.terminate()
        early = None
    return early


def compile_all(
    kernels: Iterable[Kernel],
    on_progress: OnProgress = lambda name, done, total: None,
    background: Iterable[Kernel] = (),
    first: Iterable[Kernel] = (),
    overlap: Overlap = lambda pause: None,
) -> None:
    """Compile the kernels that are not in the JIT cache, the largest first, in one process per core.

    background  kernels compiled after the others, by processes that continue after this call returns
    first       kernels compiled before the others
    overlap     work that needs only `first`; it runs while the others are compiled, on the remaining cores
    """
    # on a busy machine the background processes of the last call may still wait for a core; more of them would not help
    background = () if any(process.is_alive() for process in _background) else background
    needed_first, every = _missing_in_order(first), _missing_in_order(kernels)
    missing, deferred = [*needed_first, *(each for each in every if each not in needed_first)], _missing_in_order(background)
    early = _take_early(missing)
    workers = min(len(missing + deferred), _max_processes())
    # a single process is useful only if it continues in the background
    if workers >= (1 if deferred else 2):
        _compile_in_processes(missing, deferred, workers, on_progress, early, len(needed_first), overlap)
    else:
        _compile_here(missing, on_progress)
        overlap(lambda: None)
    # kernels whose process failed
    _compile_here(missing, on_progress)


def _compile_here(kernels: list[Kernel], on_progress: OnProgress) -> None:
    for done, kernel in enumerate(kernels):
        if not kernel.is_cached():
            on_progress(kernel.__name__, done, len(kernels))
        kernel.compile()


def _size(kernel: Kernel) -> int:
    """Return the bytes of bytecode in a kernel and the functions it calls, an estimate of its compile time."""
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


def _missing_in_order(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return the uncached kernels: the largest of every module, then the second largest of every module, and so on."""
    missing = sorted((each for each in kernels if not each.is_cached()), key=_size, reverse=True)
    before: Counter[str] = Counter()
    rank = {}
    for each in missing:
        rank[each] = before[each.body.__module__]
        before[each.body.__module__] += 1
    return sorted(missing, key=rank.__getitem__)


def _next(kernels: list[Kernel], claimed: Any, mine: set[str]) -> int | None:
    """Claim the next kernel, preferably of a module whose functions this process has compiled; return its number."""
    with claimed.get_lock():
        free = [number for number, is_claimed in enumerate(claimed) if not is_claimed]
        number = next((each for each in free if kernels[each].body.__module__ in mine), free[0] if free else None)
        if number is not None:
            claimed[number] = 1
            mine.add(kernels[number].body.__module__)
        return number


def wait_for_background() -> None:
    """Wait until the background processes end."""
    while _background:
        _background.pop().join()


def _compile_in_processes(
    missing: list[Kernel],
    deferred: list[Kernel],
    workers: int,
    on_progress: OnProgress,
    early: _EarlyCompile | None,
    first_count: int,
    overlap: Overlap,
) -> None:
    """Compile kernels in several processes and wait for the missing ones.

    deferred     kernels that continue in the background
    first_count  how many of the missing kernels `overlap` needs
    """
    context = multiprocessing.get_context("fork")
    claimed, deferred_claimed = context.Array("b", len(missing)), context.Array("b", len(deferred))
    receiver, sender = context.Pipe(duplex=False)
    early_numbers = [number for number, each in enumerate(missing) if early is not None and each in early.kernels]
    for number in early_numbers:
        claimed[number] = 1

    def work(after: _EarlyCompile | None) -> None:
        receiver.close()
        if after is not None:
            connection.wait([after.process.sentinel])
            for each in early_numbers:
                missing[each].compile()
                sender.send(each)
        mine: set[str] = set()
        while (number := _next(missing, claimed, mine)) is not None:
            missing[number].compile()
            sender.send(number)
        if deferred:
            # use only idle cores
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        while (number := _next(deferred, deferred_claimed, mine)) is not None:
            deferred[number].compile()

    for each in missing[:1]:
        on_progress(each.__name__, 0, len(missing))
    # the first process waits for the early one, which occupies its core
    processes = [_start(partial(work, None if number else early)) for number in range(workers)]
    sender.close()
    _background[:] = processes + [process for process in _background if process.is_alive()]
    done: set[int] = set()

    def receive(numbers: Iterable[int]) -> None:
        """Wait for kernels; those of a process that fails are compiled here later."""
        with suppress(EOFError):
            while not done.issuperset(numbers) or (len(done) < len(missing) and receiver.poll()):
                number = receiver.recv()
                done.add(number)
                on_progress(missing[number].__name__, len(done), len(missing))

    try:
        if early is None:
            _warm_up_launches()
        receive(range(first_count))
        _compile_here(missing[:first_count], on_progress)
        _warm_up_launches()
        with reserved_cores() as reserve:

            def pause() -> None:
                receive(())
                reserve(min(workers, len(missing) - len(done)))

            pause()
            overlap(pause)
        receive(range(len(missing)))
    except BaseException:
        stopped = [*processes, *([early.process] if early else ())]
        for process in stopped:
            process.terminate()
        _join(stopped)
        raise
    if not deferred:
        _join(processes)


def _join(processes: list[Any]) -> None:
    """Wait for these processes only: those of earlier calls may wait long for a core."""
    for process in processes:
        process.join()
        if process in _background:
            _background.remove(process)


def _warm_up_launches() -> None:
    """Start the worker threads and compile launch and replay."""
    warm_up()
    call_cache.warm_up()


def _start(work: Callable[[], Any]) -> Any:
    """Run a function in a forked process."""
    # done once here instead of in each process
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    process = multiprocessing.get_context("fork").Process(target=_run_and_exit, args=(work,), daemon=True)
    with warnings.catch_warnings():
        # other threads of this process hold no lock that compilation needs
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def _run_and_exit(work: Callable[[], None]) -> None:
    """Run a function and exit the process; a failure is ignored because the parent compiles again and raises."""
    # garbage collection takes a twelfth of the compile time
    gc.disable()
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)
