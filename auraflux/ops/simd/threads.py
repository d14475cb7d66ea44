"""The thread pool of CPU kernels: worker threads, and the job queue they share with the caller of a launch.

A launch runs a kernel as a number of jobs. The queue is one 64-bit word, the ticket: a thread claims the next job by an atomic
increment. The calling thread claims jobs like the workers and then waits only for jobs that have started, so a worker without
a core delays nothing. A job's result does not depend on the thread that runs it.

Idle workers spin for a while and then sleep on a condition variable, which leaves their cores to others. On an oversubscribed
machine a woken worker may preempt the caller that woke it, so after a slow wake-up no worker is woken for some time, unless
the jobs of a launch prove to take longer than a wake-up.

One launch uses the pool at a time; a concurrent launch runs all its jobs on its own thread.
"""

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import config as _config
from numba.extending import intrinsic

from auraflux.machine import compute_cores
from auraflux.ops.simd.atomics import WORD, call_libc, compare_exchange, fetch_add, load, pause, store
from auraflux.ops.simd.compile.cache_folder import our_cache
from auraflux.ops.simd.compile.compiler import KernelCompiler, jit_with
from auraflux.ops.simd.processor import LINE

# Numba sets its attributes at import, invisible to type checkers
config: Any = _config

# a few microseconds more than the gap between two launches of a step; about 70 us on a Neoverse-N1
SPINS = 3000
WAKE_BACKOFF = 8  # no wake-ups for this many times the duration of the last one

# byte offsets in the shared memory; words that are written often have their own cache line
TICKET = 0  # launch number, jobs in the launch, next job: 32, 16 and 16 bits
DONE = 1 * LINE  # finished jobs
CODE, ARGS = 2 * LINE, 2 * LINE + 8
BUSY = 3 * LINE  # 1 while a launch uses the pool
SLEEPERS, CALLER_SLEEPS, STOPPED = 4 * LINE, 4 * LINE + 8, 4 * LINE + 16
LOCK, UNLOCK, SLEEP, WAKE, CLOCK = (5 * LINE + 8 * n for n in range(5))  # addresses of libc functions
WAKE_AFTER = 5 * LINE + 40  # time in ns before which no worker is woken
TIMESPEC = 5 * LINE + 48  # the timespec that clock_gettime fills
WAKE_NS = 6 * LINE  # duration of the last wake-up
MUTEX, WORK_COND, DONE_COND = (
    7 * LINE,
    9 * LINE,
    11 * LINE,
)  # of pthreads; the conditions: work available, launch done
SHARED_NBYTES = 13 * LINE
MONOTONIC = time.CLOCK_MONOTONIC
MAX_JOBS = (1 << 16) - 1


inlined = jit_with("contract")


@intrinsic
def run_job(typingctx, code, args, job, jobs):
    """Run one job: call the kernel's machine code at an address."""

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [WORD, WORD, WORD])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@inlined
def _has_jobs(ticket):
    return (ticket & MAX_JOBS) < (ticket >> 16 & MAX_JOBS)


@inlined
def _take_jobs(shared):
    """Claim and run jobs until none are left; return whether this thread finished the last job of the launch."""
    last = False
    ticket = load(shared + TICKET)
    while _has_jobs(ticket):
        if compare_exchange(shared + TICKET, ticket, ticket + 1):
            # code and arguments stay valid until all jobs are finished
            jobs = ticket >> 16 & MAX_JOBS
            run_job(load(shared + CODE), load(shared + ARGS), ticket & MAX_JOBS, jobs)
            last = fetch_add(shared + DONE, 1) + 1 == jobs
        ticket = load(shared + TICKET)
    return last


@inlined
def _wake(shared, sleepers):
    # a thread that saw no work holds the lock until it sleeps, so the broadcast cannot be missed; it is sent after unlocking
    # because a woken thread would only block on the lock
    call_libc(load(shared + LOCK), shared + MUTEX, 0, 0)
    call_libc(load(shared + UNLOCK), shared + MUTEX, 0, 0)
    call_libc(load(shared + WAKE), shared + sleepers, 0, 0)


@inlined
def _now(shared):
    """Return the monotonic clock in nanoseconds."""
    call_libc(load(shared + CLOCK), MONOTONIC, shared + TIMESPEC, 0)
    return load(shared + TIMESPEC) * 1_000_000_000 + load(shared + TIMESPEC + 8)


@inlined
def _wake_workers(shared):
    """Wake sleeping workers for a launch, unless the back-off of the last wake-up still runs."""
    now = _now(shared)
    if now >= load(shared + WAKE_AFTER):
        _wake_at(shared, now)


@inlined
def _wake_at(shared, now):
    _wake(shared, WORK_COND)
    after = _now(shared)
    store(shared + WAKE_NS, after - now)
    store(shared + WAKE_AFTER, after + WAKE_BACKOFF * (after - now))


@inlined
def _take_jobs_and_wake(shared):
    """Claim and run jobs of this thread's launch; wake sleeping workers after a job that took longer than a wake-up."""
    ticket = load(shared + TICKET)
    while _has_jobs(ticket):
        if compare_exchange(shared + TICKET, ticket, ticket + 1):
            began = _now(shared) if load(shared + SLEEPERS) != 0 else 0
            run_job(load(shared + CODE), load(shared + ARGS), ticket & MAX_JOBS, ticket >> 16 & MAX_JOBS)
            fetch_add(shared + DONE, 1)
            if began != 0 and _has_jobs(load(shared + TICKET)) and load(shared + SLEEPERS) != 0:
                now = _now(shared)
                if now - began > load(shared + WAKE_NS):
                    _wake_at(shared, now)
        ticket = load(shared + TICKET)


def _worker(shared):
    """Run jobs until the pool is stopped: the main loop of a worker thread."""
    spins = 0
    while load(shared + STOPPED) == 0:
        if _has_jobs(load(shared + TICKET)):
            if _take_jobs(shared) and load(shared + CALLER_SLEEPS) != 0:
                _wake(shared, DONE_COND)
            spins = 0
        elif spins < SPINS:
            spins += 1
            pause()
        else:
            call_libc(load(shared + LOCK), shared + MUTEX, 0, 0)
            fetch_add(shared + SLEEPERS, 1)
            # a launch checks for sleepers after it stores the ticket
            if not _has_jobs(load(shared + TICKET)) and load(shared + STOPPED) == 0:
                call_libc(load(shared + SLEEP), shared + WORK_COND, shared + MUTEX, 0)
            fetch_add(shared + SLEEPERS, -1)
            call_libc(load(shared + UNLOCK), shared + MUTEX, 0, 0)
            spins = 0
    return 0


@inlined
def _wait_for_jobs(shared, jobs):
    """Wait until all jobs of the launch are finished."""
    for _ in range(SPINS):
        if load(shared + DONE) == jobs:
            return
        pause()
    call_libc(load(shared + LOCK), shared + MUTEX, 0, 0)
    store(shared + CALLER_SLEEPS, 1)
    while load(shared + DONE) != jobs:
        call_libc(load(shared + SLEEP), shared + DONE_COND, shared + MUTEX, 0)
    store(shared + CALLER_SLEEPS, 0)
    call_libc(load(shared + UNLOCK), shared + MUTEX, 0, 0)


@inlined
def launch_jobs(shared, code, args, jobs):
    """Run all jobs of a kernel on the pool and return when they are finished."""
    if jobs == 1 or jobs > MAX_JOBS or not compare_exchange(shared + BUSY, 0, 1):
        for job in range(jobs):
            run_job(code, args, job, jobs)
        return
    store(shared + CODE, code)
    store(shared + ARGS, args)
    store(shared + DONE, 0)
    store(shared + TICKET, ((load(shared + TICKET) >> 32) + 1) << 32 | jobs << 16)
    if load(shared + SLEEPERS) != 0:
        _wake_workers(shared)
    _take_jobs_and_wake(shared)
    _wait_for_jobs(shared, jobs)
    store(shared + BUSY, 0)


with our_cache():

    @numba.njit(nogil=True, cache=True, pipeline_class=KernelCompiler)
    def launch(shared, code, args, jobs):
        """Run all jobs of a kernel; zero jobs stop the worker threads."""
        if jobs:
            launch_jobs(shared, code, args, jobs)
        else:
            store(shared + STOPPED, 1)
            _wake(shared, WORK_COND)


class _ThreadPool:
    """Worker threads, started at the first launch, and the memory they share with callers.

    count           of threads including the caller; 0 before the workers start
    workers         threads other than the caller
    count_only_for  id of a thread that reads the count without starting the workers
    """

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(SHARED_NBYTES + LINE)
        start = ctypes.addressof(self._memory)
        self.shared = start + -start % LINE
        self.count = 0
        self.count_only_for: int | None = None
        self.workers: list[ctypes.c_void_p] = []
        self._lock = threading.Lock()

    def compile(self) -> None:
        """Compile the worker loop, or load it from the JIT cache."""
        with our_cache():
            # an attribute, because the machine code lives as long as this object
            self._worker = numba.cfunc(types.int64(types.int64), cache=True, pipeline_class=KernelCompiler)(_worker)

    def start(self, count: int) -> int:
        """Start the workers unless they run, `count` threads including the caller; return the number of threads."""
        with self._lock:
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
            for each in (WORK_COND, DONE_COND):
                system.pthread_cond_init(ctypes.c_void_p(self.shared + each), None)
            for _ in range(count - 1):
                thread = ctypes.c_void_p()
                # the system may refuse more threads; the others share the work
                entry = ctypes.c_void_p(self._worker.address), ctypes.c_void_p(self.shared)
                if system.pthread_create(ctypes.byref(thread), None, *entry):
                    break
                self.workers.append(thread)
            self.count = 1 + len(self.workers)
            # torch does not know the CPU quota of a container
            if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > (cores := compute_cores()):
                torch.set_num_threads(cores)
            return self.count

    def stop(self) -> None:
        """Stop and join all workers before their machine code is freed."""
        with self._lock:
            if self.workers:
                launch(self.shared, 0, 0, 0)
                system = ctypes.CDLL(None)
                for thread in self.workers:
                    system.pthread_join(thread, None)
                self.workers.clear()

    def reset_after_fork(self) -> None:
        """Reset the pool in a forked process, which has none of the threads."""
        ctypes.memset(self.shared, 0, SHARED_NBYTES)
        self.workers.clear()
        self.count = 0
        self._lock = threading.Lock()


thread_pool = _ThreadPool()
atexit.register(thread_pool.stop)
os.register_at_fork(after_in_child=thread_pool.reset_after_fork)


def threads() -> int:
    """Return the number of threads, which is the number of jobs that occupies them all."""
    if not thread_pool.count and thread_pool.count_only_for == threading.get_ident():
        return default_count()
    return thread_pool.count or thread_pool.start(default_count())


def several_jobs(each: int) -> int:
    """Return `each` jobs for every thread, which evens out threads of different speed; one if some threads are reserved."""
    count = threads()
    # any thread takes a further job, also a reserved one
    return count if count <= len(thread_pool.workers) else each * count


@cache
def default_count() -> int:
    """Return the number of threads that the environment sets, or one per core that this process may use."""
    return config.NUMBA_NUM_THREADS if "NUMBA_NUM_THREADS" in os.environ else compute_cores()


def compile_launch() -> None:
    """Compile the worker loop and the launch function into the JIT cache."""
    thread_pool.compile()
    launch.compile((types.int64,) * 4)


def warm_up() -> None:
    """Start the workers and compile the launch function before the first launch."""
    threads()
    launch.compile((types.int64,) * 4)


def set_threads(count: int) -> None:
    """Set the number of jobs per kernel; the number of worker threads stays."""
    threads()
    thread_pool.count = count


@contextmanager
def reserved_cores() -> Iterator[Callable[[int], None]]:
    """Yield a function that reserves a number of cores for others: kernels and torch use the rest, at least one."""
    before = threads(), torch.get_num_threads()

    def reserve(busy: int) -> None:
        set_threads(max(1, before[0] - busy))
        torch.set_num_threads(max(1, before[1] - busy))

    try:
        yield reserve
    finally:
        reserve(0)
