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
from functools import partial
from multiprocessing import connection
from typing import Any, NamedTuple

import torch
from numba.core.registry import CPUDispatcher, cpu_target

from auraflux.ops.simd import jit, prepared
from auraflux.ops.simd.folder import CACHE_FOLDER
from auraflux.ops.simd.jit import Kernel
from auraflux.ops.simd.threads import compile_launches, crew, make_ready, shared_processors

Tell = Callable[[str, int, int], None]  # what was compiled, how many so far, of how many
Meanwhile = Callable[[Callable[[], None]], None]  # calls what it is given now and then, outside of ops


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


class _Early(NamedTuple):
    """A process that compiles what will most likely be needed."""

    kernels: list[Kernel]
    process: Any


_early: list[_Early] = []


def _processors() -> int:
    """How many processes may compile at once; 0 where they cannot leave anything for each other."""
    return len(os.sched_getaffinity(0)) if CACHE_FOLDER and sys.platform == "linux" else 0


def begin(kernels: list[Kernel]) -> None:
    """Compile kernels that `compile_all` will most likely be asked for, on a processor that would have nothing to do."""
    if _processors() >= 2 and not _early and not all(each.is_kept() for each in kernels):

        def work() -> None:
            compile_launches()
            prepared.make_ready()
            for each in kernels:
                each.compile()

        _early.append(_Early(kernels, _start(work)))


def end_early() -> None:
    """Stop what `begin` began, where nobody will ask for it."""
    while _early:
        _early.pop().process.terminate()


def _taken_early(kernels: list[Kernel]) -> _Early | None:
    """Who compiles some of these kernels already; who compiles only others is stopped."""
    early = _early.pop() if _early else None
    if early is not None and not set(early.kernels) & set(kernels):
        early.process.terminate()
        early = None
    return early


def compile_all(
    kernels: Iterable[Kernel],
    tell: Tell = lambda name, done, total: None,
    later: Iterable[Kernel] = (),
    first: Iterable[Kernel] = (),
    meanwhile: Meanwhile = lambda pause: None,
) -> None:
    """Compile what is not in the cache yet, the largest first, with as many processes as there are processors.

    later      kernels that are compiled after the others, by processes that go on while this one does other things
    first      those of the kernels that come before the others
    meanwhile  what needs only these, and is done while the others are compiled, on the processors that this leaves
    """
    # on a busy machine those of the last call may not have had a processor yet: more of them would not get one sooner
    later = () if any(process.is_alive() for process in _going_on) else later
    begins, every = _in_turn(first), _in_turn(kernels)
    missing, rest = [*begins, *(each for each in every if each not in begins)], _in_turn(later)
    early = _taken_early(missing)
    workers = min(len(missing + rest), _processors())
    # one alone is of use only where it goes on in the background
    if workers >= (1 if rest else 2):
        _share(missing, rest, workers, tell, early, len(begins), meanwhile)
    else:
        _compile_here(missing, tell)
        meanwhile(lambda: None)
    # what no process has left in the cache
    _compile_here(missing, tell)


def _compile_here(kernels: list[Kernel], tell: Tell) -> None:
    for done, kernel in enumerate(kernels):
        if not kernel.is_kept():
            tell(kernel.__name__, done, len(kernels))
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


def _share(
    missing: list[Kernel],
    rest: list[Kernel],
    workers: int,
    tell: Tell,
    early: _Early | None,
    begins: int,
    meanwhile: Meanwhile,
) -> None:
    """Let processes compile kernels in turn, and wait for those that are missing.

    begins  how many of them `meanwhile` needs
    """
    context = multiprocessing.get_context("fork")
    taken, later = context.Array("b", len(missing)), context.Array("b", len(rest))
    receiver, sender = context.Pipe(duplex=False)
    begun = [number for number, each in enumerate(missing) if early is not None and each in early.kernels]
    for number in begun:
        taken[number] = 1

    def work(after: _Early | None) -> None:
        receiver.close()
        if after is not None:
            connection.wait([after.process.sentinel])
            for each in begun:
                missing[each].compile()
                sender.send(each)
        mine: set[str] = set()
        while (number := _next(missing, taken, mine)) is not None:
            missing[number].compile()
            sender.send(number)
        if rest:
            # only where nobody else wants a processor
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        while (number := _next(rest, later, mine)) is not None:
            rest[number].compile()

    for each in missing[:1]:
        tell(each.__name__, 0, len(missing))
    # the first takes the place of who began early
    processes = [_start(partial(work, None if number else early)) for number in range(workers)]
    sender.close()
    _going_on[:] = processes + [process for process in _going_on if process.is_alive()]
    done: set[int] = set()

    def hear(numbers: Iterable[int]) -> None:
        """Wait for kernels; a process that ends before its time leaves some to be compiled here."""
        with suppress(EOFError):
            while not done.issuperset(numbers) or (len(done) < len(missing) and receiver.poll()):
                number = receiver.recv()
                done.add(number)
                tell(missing[number].__name__, len(done), len(missing))

    try:
        if early is None:
            _make_ready()
        hear(range(begins))
        _compile_here(missing[:begins], tell)
        _make_ready()
        with shared_processors() as leave:

            def pause() -> None:
                hear(())
                leave(min(workers, len(missing) - len(done)))

            pause()
            meanwhile(pause)
        hear(range(len(missing)))
    except BaseException:
        stopped = [*processes, *([early.process] if early else ())]
        for process in stopped:
            process.terminate()
        _join(stopped)
        raise
    if not rest:
        _join(processes)


def _join(processes: list[Any]) -> None:
    """Wait for some processes alone: those of earlier calls may have to wait for a processor for long."""
    for process in processes:
        process.join()
        if process in _going_on:
            _going_on.remove(process)


def _make_ready() -> None:
    """Have what launches kernels."""
    make_ready()
    prepared.make_ready()


def _start(work: Callable[[], Any]) -> Any:
    """Have a process of its own do something."""
    # what each of them would begin with
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    process = multiprocessing.get_context("fork").Process(target=_quietly, args=(work,), daemon=True)
    with warnings.catch_warnings():
        # other threads of this process hold no lock that compiling needs
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def _quietly(work: Callable[[], None]) -> None:
    """Whatever goes wrong here goes wrong again where somebody hears of it."""
    # a twelfth of the time of compiling, and the process ends soon
    gc.disable()
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)
