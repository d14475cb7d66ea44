"""Threads that poll a mailbox in host memory: shared words, the spin-wait, sleeping and waking.

Threads poll for SPIN_NS after the last request. Then they sleep; the first one wakes up to poll and wakes the others.
"""

import ctypes
import time

import numba
from numba import types

from auraflux.ops.simd.atomics import call_libc, fetch_add, load, load_int32, pause, store
from auraflux.ops.simd.compile.cache_folder import our_cache
from auraflux.ops.simd.compile.compiler import KernelCompiler, jit_with
from auraflux.ops.simd.jit import LINE

SPIN_NS = 2_000_000  # of polling after a request or a wake-up
POLL_NS = 50_000  # between polls of an idle mailbox
LONG_IDLE_NS, LONG_POLL_NS = 1_000_000_000, 500_000  # the same for a mailbox that stays idle
POLLS_PER_CLOCK = POLLS_PER_YIELD = 64  # a poll takes about 50 ns, most of it in the spin-wait hint
MONOTONIC, REALTIME = time.CLOCK_MONOTONIC, time.CLOCK_REALTIME
SECOND_NS = 1_000_000_000
TIMESPEC_NBYTES = 16

# byte offsets in the memory that threads share; the first two lines belong to the loop
STOPPED, WAKES, SLEEPERS = 2 * LINE, 2 * LINE + 8, 2 * LINE + 16
REQUEST_SEQ = 3 * LINE  # address of the number of the last request
FIELDS = 3 * LINE + 8  # up to 7 words of the loop
LOCK, UNLOCK, WAIT, TIMED_WAIT, BROADCAST, CLOCK, YIELD = (4 * LINE + 8 * n for n in range(7))  # addresses of libc functions
MUTEX, COND = 5 * LINE, 7 * LINE
SHARED_NBYTES = 9 * LINE
LIBC = (
    "pthread_mutex_lock",
    "pthread_mutex_unlock",
    "pthread_cond_wait",
    "pthread_cond_timedwait",
    "pthread_cond_broadcast",
    "clock_gettime",
    "sched_yield",
)

inlined = jit_with("contract")


def init_polling(shared: int, request_seq: int, fields: tuple[int, ...]) -> None:
    """Initialise shared memory for threads that are not started yet.

    request_seq  address of the number of the last request
    fields       words of the loop
    """
    ctypes.memset(shared, 0, SHARED_NBYTES)
    system = ctypes.CDLL(None)
    for start, words in ((REQUEST_SEQ, (request_seq, *fields)), (LOCK, libc_addresses(*LIBC))):
        for n, word in enumerate(words):
            ctypes.c_int64.from_address(shared + start + 8 * n).value = word
    system.pthread_mutex_init(ctypes.c_void_p(shared + MUTEX), None)
    system.pthread_cond_init(ctypes.c_void_p(shared + COND), None)


def libc_addresses(*names: str) -> list[int]:
    """Return the addresses of libc functions."""
    system = ctypes.CDLL(None)
    return [ctypes.cast(getattr(system, name), ctypes.c_void_p).value or 0 for name in names]


@inlined
def now_ns(shared, clock, room):
    """Return a clock in nanoseconds; `room` is the address of a timespec."""
    call_libc(load(shared + CLOCK), clock, room, 0)
    return load(room) * SECOND_NS + load(room + 8)


@inlined
def poll(shared, polls):
    """Pause once, and let another thread run from time to time: with fewer cores than threads, the awaited one may be it."""
    pause()
    if (polls + 1) % POLLS_PER_YIELD == 0:
        call_libc(load(shared + YIELD), 0, 0, 0)
    return polls + 1


@inlined
def wake_all(shared):
    """Wake the threads that sleep."""
    # a thread that goes to sleep holds the lock until it sleeps, so the broadcast cannot be missed
    call_libc(load(shared + LOCK), shared + MUTEX, 0, 0)
    call_libc(load(shared + UNLOCK), shared + MUTEX, 0, 0)
    call_libc(load(shared + BROADCAST), shared + COND, 0, 0)


@inlined
def sleep(shared, first, last, wakes, poll_ns, room, claimed, posted):
    """Sleep until woken; the first thread at most for `poll_ns`.

    claimed, posted  addresses of words that are equal while there is no work; may be the same
    """
    call_libc(load(shared + LOCK), shared + MUTEX, 0, 0)
    fetch_add(shared + SLEEPERS, 1)
    idle = load_int32(load(shared + REQUEST_SEQ)) == last and load(shared + WAKES) == wakes
    if idle and load(claimed) == load(posted) and load(shared + STOPPED) == 0:
        if first:
            until = now_ns(shared, REALTIME, room) + poll_ns
            store(room, until // SECOND_NS)
            store(room + 8, until % SECOND_NS)
            call_libc(load(shared + TIMED_WAIT), shared + COND, shared + MUTEX, room)
        else:
            call_libc(load(shared + WAIT), shared + COND, shared + MUTEX, 0)
    fetch_add(shared + SLEEPERS, -1)
    call_libc(load(shared + UNLOCK), shared + MUTEX, 0, 0)


with our_cache():

    @numba.njit(nogil=True, cache=True, pipeline_class=KernelCompiler)
    def wake(shared, stop):
        """Wake all threads, to end if `stop` is 1."""
        if stop:
            store(shared + STOPPED, 1)
        fetch_add(shared + WAKES, 1)
        if stop or load(shared + SLEEPERS) != 0:
            wake_all(shared)
        return 0


def compile_wake() -> None:
    """Compile `wake`, or load it from the JIT cache."""
    wake.compile((types.int64,) * 2)
