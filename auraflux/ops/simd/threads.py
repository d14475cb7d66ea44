"""The threads that run kernels, and how jobs reach them.

A launch is a number of jobs, written down in one word: whoever raises it by one has the next job. The calling thread takes jobs
like the others and waits only for those that somebody has begun, so a thread that gets no core holds nothing up. Which thread
has a job makes no difference to its result. Threads look for work for a while and then sleep, so that they do not take a busy
machine's cores from each other. Where more want to run than there are cores, one that is woken may take the core of who wakes
it: for some time after that nobody is woken.

One launch has the threads at a time; the jobs of another that comes meanwhile stay on the thread it comes from.
"""

import atexit
import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core import config as _config
from numba.extending import intrinsic

from auraflux.ops.simd.compiler import KernelCompiler, jit_with
from auraflux.ops.simd.folder import our_cache

# its names are made when it is imported, out of sight of type checkers
config: Any = _config
LINE = 64  # bytes of a cache line
WORD = ir.IntType(64)

# a few microseconds beyond what lies between two launches of a step; some 70 us on a Neoverse-N1
LOOKS = 3000
REST = 8  # times as long as waking took, nobody is woken

# where what the threads share lies, in bytes; each on a line of its own, if it is written often
TICKET = 0  # launches, jobs of this one, the next of them: 32, 16 and 16 bits
DONE = 1 * LINE  # jobs that are finished
CODE, ARGS = 2 * LINE, 2 * LINE + 8
TAKEN = 3 * LINE  # whether a launch has the threads
SLEEPERS, AWAITED, STOPPED = 4 * LINE, 4 * LINE + 8, 4 * LINE + 16
LOCK, UNLOCK, SLEEP, WAKE, CLOCK = (5 * LINE + 8 * n for n in range(5))  # the system's functions
RESTED = 5 * LINE + 40  # when sleepers may be woken again
NOW = 5 * LINE + 48  # two words that the clock writes
MUTEX, WORK, END = 6 * LINE, 8 * LINE, 10 * LINE  # what they need: a lock, sleepers that wait for work and for a launch's end
SHARED_NBYTES = 12 * LINE
MONOTONIC = time.CLOCK_MONOTONIC
MOST_JOBS = (1 << 16) - 1


part = jit_with("contract")


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, WORD.as_pointer())


@intrinsic
def _read(typingctx, address):
    """Read a word that others write."""

    def codegen(context, builder, signature, values):
        return builder.load_atomic(_pointer(builder, values[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _write(typingctx, address, value):
    """Write a word that others read."""

    def codegen(context, builder, signature, values):
        builder.store_atomic(values[1], _pointer(builder, values[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _add(typingctx, address, value):
    """Add to a word; gives what it was."""

    def codegen(context, builder, signature, values):
        return builder.atomic_rmw("add", _pointer(builder, values[0]), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _replace(typingctx, address, before, after):
    """Write a word if it still is what it was; gives whether it was."""

    def codegen(context, builder, signature, values):
        found = builder.cmpxchg(_pointer(builder, values[0]), values[1], values[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def _pause(typingctx):
    """Let a moment pass."""
    on_arm = platform.machine() in ("aarch64", "arm64")
    name, given = ("llvm.aarch64.isb", [ir.Constant(ir.IntType(32), 15)]) if on_arm else ("llvm.x86.sse2.pause", [])

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in given])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _system(typingctx, function, first, second):
    """Call one of the system's functions on two addresses; those that take one do not look at the other."""

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.IntType(32), [WORD, WORD])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def run_job(typingctx, code, args, job, jobs):
    """Call the machine code at an address."""

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [WORD, WORD, WORD])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@part
def _left(ticket):
    return (ticket & MOST_JOBS) < (ticket >> 16 & MOST_JOBS)


@part
def _take_jobs(shared):
    """Run jobs of the launch for as long as there are any; gives whether the last one to finish was among them."""
    last = False
    ticket = _read(shared + TICKET)
    while _left(ticket):
        if _replace(shared + TICKET, ticket, ticket + 1):
            # nothing of a launch changes before all its jobs are finished
            jobs = ticket >> 16 & MOST_JOBS
            run_job(_read(shared + CODE), _read(shared + ARGS), ticket & MOST_JOBS, jobs)
            last = _add(shared + DONE, 1) + 1 == jobs
        ticket = _read(shared + TICKET)
    return last


@part
def _wake(shared, sleepers):
    # whoever has seen nothing to do sleeps when the lock is free; woken while it is taken, it would only wait for that
    _system(_read(shared + LOCK), shared + MUTEX, 0)
    _system(_read(shared + UNLOCK), shared + MUTEX, 0)
    _system(_read(shared + WAKE), shared + sleepers, 0)


@part
def _now(shared):
    """Nanoseconds on a clock that only goes forward."""
    _system(_read(shared + CLOCK), MONOTONIC, shared + NOW)
    return _read(shared + NOW) * 1_000_000_000 + _read(shared + NOW + 8)


@part
def _call_sleepers(shared):
    """Wake threads for a launch, unless they were woken just now."""
    before = _now(shared)
    if before >= _read(shared + RESTED):
        _wake(shared, WORK)
        after = _now(shared)
        _write(shared + RESTED, after + REST * (after - before))


def _serve(shared):
    """Take jobs, until there are to be none."""
    looks = 0
    while _read(shared + STOPPED) == 0:
        if _left(_read(shared + TICKET)):
            if _take_jobs(shared) and _read(shared + AWAITED) != 0:
                _wake(shared, END)
            looks = 0
        elif looks < LOOKS:
            looks += 1
            _pause()
        else:
            _system(_read(shared + LOCK), shared + MUTEX, 0)
            _add(shared + SLEEPERS, 1)
            # who launches looks for sleepers after writing down the jobs
            if not _left(_read(shared + TICKET)) and _read(shared + STOPPED) == 0:
                _system(_read(shared + SLEEP), shared + WORK, shared + MUTEX)
            _add(shared + SLEEPERS, -1)
            _system(_read(shared + UNLOCK), shared + MUTEX, 0)
            looks = 0
    return 0


@part
def _await(shared, jobs):
    """Wait until all jobs are finished."""
    for _ in range(LOOKS):
        if _read(shared + DONE) == jobs:
            return
        _pause()
    _system(_read(shared + LOCK), shared + MUTEX, 0)
    _write(shared + AWAITED, 1)
    while _read(shared + DONE) != jobs:
        _system(_read(shared + SLEEP), shared + END, shared + MUTEX)
    _write(shared + AWAITED, 0)
    _system(_read(shared + UNLOCK), shared + MUTEX, 0)


@part
def launch_jobs(shared, code, args, jobs):
    """Run all jobs of a kernel, and come back when they are finished."""
    if jobs == 1 or jobs > MOST_JOBS or not _replace(shared + TAKEN, 0, 1):
        for job in range(jobs):
            run_job(code, args, job, jobs)
        return
    _write(shared + CODE, code)
    _write(shared + ARGS, args)
    _write(shared + DONE, 0)
    _write(shared + TICKET, ((_read(shared + TICKET) >> 32) + 1) << 32 | jobs << 16)
    if _read(shared + SLEEPERS) != 0:
        _call_sleepers(shared)
    _take_jobs(shared)
    _await(shared, jobs)
    _write(shared + TAKEN, 0)


with our_cache():

    @numba.njit(nogil=True, cache=True, pipeline_class=KernelCompiler)
    def launch(shared, code, args, jobs):
        """Run all jobs of a kernel, or with no jobs stop the threads."""
        if jobs:
            launch_jobs(shared, code, args, jobs)
        else:
            _write(shared + STOPPED, 1)
            _wake(shared, WORK)


class _Crew:
    """The threads, begun when they are first needed, and the memory they share with those that launch."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(SHARED_NBYTES + LINE)
        start = ctypes.addressof(self._memory)
        self.shared = start + -start % LINE
        self.count = 0  # of threads, the calling one too; 0 before they are begun
        self.asked_by: int | None = None  # a thread that only wants to know how many there will be
        self._threads: list[ctypes.c_void_p] = []
        self._one = threading.Lock()

    def compile(self) -> None:
        """Compile what threads do, or fetch it from the cache."""
        with our_cache():
            # kept, because the machine code lives as long as this object
            self._serve = numba.cfunc(types.int64(types.int64), cache=True, pipeline_class=KernelCompiler)(_serve)

    def begin(self, count: int) -> int:
        """Have so many threads, the calling one too, unless there are some; gives their number."""
        with self._one:
            if self.count:
                return self.count
            self.compile()
            system = ctypes.CDLL(None)
            needed = (
                "pthread_mutex_lock",
                "pthread_mutex_unlock",
                "pthread_cond_wait",
                "pthread_cond_broadcast",
                "clock_gettime",
            )
            for n, name in enumerate(needed):
                address = ctypes.cast(getattr(system, name), ctypes.c_void_p)
                ctypes.memmove(self.shared + LOCK + 8 * n, ctypes.byref(address), 8)
            system.pthread_mutex_init(ctypes.c_void_p(self.shared + MUTEX), None)
            for each in (WORK, END):
                system.pthread_cond_init(ctypes.c_void_p(self.shared + each), None)
            for _ in range(count - 1):
                thread = ctypes.c_void_p()
                # the system may refuse more threads; those there are share the work
                begun = ctypes.c_void_p(self._serve.address), ctypes.c_void_p(self.shared)
                if system.pthread_create(ctypes.byref(thread), None, *begun):
                    break
                self._threads.append(thread)
            self.count = 1 + len(self._threads)
            return self.count

    def end(self) -> None:
        """Stop all threads, before their code goes."""
        with self._one:
            if self._threads:
                launch(self.shared, 0, 0, 0)
                system = ctypes.CDLL(None)
                for thread in self._threads:
                    system.pthread_join(thread, None)
                self._threads.clear()

    def forget(self) -> None:
        """Be as new, in a process that was forked: it has none of the threads."""
        ctypes.memset(self.shared, 0, SHARED_NBYTES)
        self._threads.clear()
        self.count = 0
        self._one = threading.Lock()


crew = _Crew()
atexit.register(crew.end)
os.register_at_fork(after_in_child=crew.forget)


def threads() -> int:
    """How many jobs keep every thread busy."""
    if not crew.count and crew.asked_by == threading.get_ident():
        return config.NUMBA_NUM_THREADS
    return crew.count or crew.begin(config.NUMBA_NUM_THREADS)


def compile_launches() -> None:
    """Compile the code that launches, for the cache."""
    crew.compile()
    launch.compile((types.int64,) * 4)


def make_ready() -> None:
    """Have the threads, and the code that launches, before they are needed."""
    threads()
    launch.compile((types.int64,) * 4)


def set_threads(count: int) -> None:
    """Have kernels run as so many jobs from now on; there are no more threads for them than at first."""
    threads()
    crew.count = count


@contextmanager
def shared_processors() -> Iterator[Callable[[int], None]]:
    """Inside, kernels and torch leave as many processors to others as is said last, and have at least one."""
    before = threads(), torch.get_num_threads()

    def leave(busy: int) -> None:
        set_threads(max(1, before[0] - busy))
        torch.set_num_threads(max(1, before[1] - busy))

    try:
        yield leave
    finally:
        leave(0)
