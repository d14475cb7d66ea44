"""The loop of threads that compute experts for a GPU: poll a mailbox, share the chunks of a request, answer.

A request is there when `request_seq` changes. The first thread that sees it opens it: it stores the request's number, the
number of its chunks and the next chunk, 0, in one word, the ticket. All threads claim chunks by atomic increments of it, and
the thread that finishes the last one stores `done_seq`. No thread waits for another to join, so one without a core delays
nothing; one that is late finds another number in the ticket. A claim that succeeds proves that the request is unfinished, and
so that its fields did not change since the thread read them.

Threads poll for SPIN_NS after the last request. Then they sleep; the first one wakes up to poll and wakes the others.
"""

import ctypes
import time

import numba
from numba import types

from auraflux.ops.moe.cpu.expert_chunks import ERROR, FIRST_PHASE, PLAN_ARRAYS, TOTAL, fail, make_plan
from auraflux.ops.simd.atomics import call_libc, compare_exchange, fetch_add, load, load_int32, pause, store, store_int32
from auraflux.ops.simd.compile.cache_folder import our_cache
from auraflux.ops.simd.compile.compiler import KernelCompiler, jit_with
from auraflux.ops.simd.jit import LINE, int64s
from auraflux.ops.simd.threads import run_job

SPIN_NS = 2_000_000  # of polling after a request or a wake-up
POLL_NS = 50_000  # between polls of an idle mailbox
LONG_IDLE_NS, LONG_POLL_NS = 1_000_000_000, 500_000  # the same for a mailbox that stays idle
POLLS_PER_CLOCK = POLLS_PER_YIELD = 64  # a poll takes about 50 ns, most of it in the spin-wait hint
MONOTONIC, REALTIME = time.CLOCK_MONOTONIC, time.CLOCK_REALTIME
SECOND_NS = 1_000_000_000

# byte offsets in the memory that threads share; words that are written often have a line each
TICKET = 0  # number of the request, its chunks, next chunk: 32, 16 and 16 bits
DONE = LINE  # finished chunks
STOPPED, WAKES, SLEEPERS = 2 * LINE, 2 * LINE + 8, 2 * LINE + 16
CODE, SETUP, REQUEST_SEQ, DONE_SEQ, ERROR_AT = (3 * LINE + 8 * n for n in range(5))
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
LOW_32, LOW_16 = 0xFFFFFFFF, 0xFFFF

inlined = jit_with("contract")


def init_shared(shared: int, code: int, setup: int, fields: tuple[int, int, int]) -> None:
    """Initialise shared memory for threads that are not started yet.

    code    address of the machine code of `chunk_kernel`
    setup   address of its setup
    fields  addresses of request_seq, done_seq and error
    """
    ctypes.memset(shared, 0, SHARED_NBYTES)
    system = ctypes.CDLL(None)
    libc = [ctypes.cast(getattr(system, name), ctypes.c_void_p).value or 0 for name in LIBC]
    for start, words in ((CODE, (code, setup, *fields)), (LOCK, libc)):
        for n, word in enumerate(words):
            ctypes.c_int64.from_address(shared + start + 8 * n).value = word
    done = ctypes.c_uint32.from_address(fields[1]).value
    ctypes.c_uint64.from_address(shared + TICKET).value = done << 32
    system.pthread_mutex_init(ctypes.c_void_p(shared + MUTEX), None)
    system.pthread_cond_init(ctypes.c_void_p(shared + COND), None)


@inlined
def _now(shared, clock, room):
    """Return a clock in nanoseconds; `room` is the address of a timespec."""
    call_libc(load(shared + CLOCK), clock, room, 0)
    return load(room) * SECOND_NS + load(room + 8)


@inlined
def _poll(shared, polls):
    """Pause once, and let another thread run from time to time: with fewer cores than threads, the awaited one may be it."""
    pause()
    if (polls + 1) % POLLS_PER_YIELD == 0:
        call_libc(load(shared + YIELD), 0, 0, 0)
    return polls + 1


@inlined
def _wake_all(shared):
    # a thread that goes to sleep holds the lock until it sleeps, so the broadcast cannot be missed
    call_libc(load(shared + LOCK), shared + MUTEX, 0, 0)
    call_libc(load(shared + UNLOCK), shared + MUTEX, 0, 0)
    call_libc(load(shared + BROADCAST), shared + COND, 0, 0)


@inlined
def _sleep(shared, first, last, wakes, poll_ns, room):
    """Sleep until woken; the first thread at most for `poll_ns`."""
    call_libc(load(shared + LOCK), shared + MUTEX, 0, 0)
    fetch_add(shared + SLEEPERS, 1)
    idle = load_int32(load(shared + REQUEST_SEQ)) == last and load(shared + WAKES) == wakes
    if idle and load(shared + STOPPED) == 0:
        if first:
            until = _now(shared, REALTIME, room) + poll_ns
            store(room, until // SECOND_NS)
            store(room + 8, until % SECOND_NS)
            call_libc(load(shared + TIMED_WAIT), shared + COND, shared + MUTEX, room)
        else:
            call_libc(load(shared + WAIT), shared + COND, shared + MUTEX, 0)
    fetch_add(shared + SLEEPERS, -1)
    call_libc(load(shared + UNLOCK), shared + MUTEX, 0, 0)


@inlined
def _open(shared, number, ticket, scratch):
    """Publish the chunks of a request; answer one without chunks, which is empty or wrong."""
    plan = int64s(scratch, PLAN_ARRAYS)
    if compare_exchange(shared + TICKET, ticket, (number & LOW_32) << 32 | plan[TOTAL] << 16) and plan[TOTAL] == 0:
        if plan[ERROR]:
            fail(load(shared + SETUP), scratch)
            store_int32(load(shared + ERROR_AT), plan[ERROR])
        store_int32(load(shared + DONE_SEQ), number)


@inlined
def _run_chunk(shared, number, chunk, total, scratch):
    """Compute a claimed chunk; answer the request after its last one."""
    code, setup, first = load(shared + CODE), load(shared + SETUP), int64s(scratch, PLAN_ARRAYS)[FIRST_PHASE]
    if chunk >= first and load(shared + DONE) < first:
        run_job(code, setup, -1 - chunk, scratch)
        polls = 0
        while load(shared + DONE) < first:
            polls = _poll(shared, polls)
    run_job(code, setup, chunk, scratch)
    if fetch_add(shared + DONE, 1) + 1 == total:
        store(shared + DONE, 0)
        store_int32(load(shared + DONE_SEQ), number)


@inlined
def _take_chunks(shared, number, scratch):
    """Claim and compute chunks of a request until none is left."""
    planned, polls = False, 0
    while True:
        ticket = load(shared + TICKET)
        is_open = ticket >> 32 & LOW_32 == number & LOW_32
        chunk, total = ticket & LOW_16, ticket >> 16 & LOW_16
        if is_open and chunk >= total:
            return
        if not is_open:
            # read after the ticket: a request that is over must not be opened again
            if load_int32(load(shared + REQUEST_SEQ)) != number:
                return
            if load_int32(load(shared + DONE_SEQ)) & LOW_32 != ticket >> 32 & LOW_32:
                if load(shared + STOPPED) != 0:
                    return
                polls = _poll(shared, polls)
                continue
        if not planned:
            make_plan(load(shared + SETUP), scratch)
            planned = True
        if not is_open:
            _open(shared, number, ticket, scratch)
        elif compare_exchange(shared + TICKET, ticket, ticket + 1):
            _run_chunk(shared, number, chunk, total, scratch)


with our_cache():

    @numba.njit(nogil=True, cache=True, pipeline_class=KernelCompiler)
    def serve(shared, first, scratch, room):
        """Answer requests until stopped; `first` is 1 for the thread that polls an idle mailbox, `room` a timespec."""
        number_at, last = load(shared + REQUEST_SEQ), load_int32(load(shared + DONE_SEQ))
        wakes, active, polls = load(shared + WAKES), _now(shared, MONOTONIC, room), 0
        while load(shared + STOPPED) == 0:
            number = load_int32(number_at)
            if number != last:
                if load(shared + SLEEPERS) != 0:
                    _wake_all(shared)
                _take_chunks(shared, number, scratch)
                last, polls, active = number, 0, _now(shared, MONOTONIC, room)
                continue
            polls = _poll(shared, polls)
            if polls % POLLS_PER_CLOCK == 0:
                now, woken = _now(shared, MONOTONIC, room), load(shared + WAKES)
                if woken != wakes:
                    wakes, active = woken, now
                elif now - active > SPIN_NS:
                    poll_ns = LONG_POLL_NS if now - active > LONG_IDLE_NS else POLL_NS
                    _sleep(shared, first, last, wakes, poll_ns, room)
                    polls = POLLS_PER_CLOCK - 1
        return 0

    @numba.njit(nogil=True, cache=True, pipeline_class=KernelCompiler)
    def wake(shared, stop):
        """Wake all threads, to end if `stop` is 1."""
        if stop:
            store(shared + STOPPED, 1)
        fetch_add(shared + WAKES, 1)
        if stop or load(shared + SLEEPERS) != 0:
            _wake_all(shared)
        return 0


def compile_loop() -> None:
    """Compile the functions, or load them from the JIT cache."""
    serve.compile((types.int64,) * 4)
    wake.compile((types.int64,) * 2)
