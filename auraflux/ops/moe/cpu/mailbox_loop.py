"""The loop of threads that compute experts for a GPU: poll a mailbox, share the chunks of a request, answer.

A request is there when `request_seq` changes. The first thread that sees it opens it: it stores the request's number, the
number of its chunks and the next chunk, 0, in one word, the ticket. All threads claim chunks by atomic increments of it, and
the thread that finishes the last one stores `done_seq`. No thread waits for another to join, so one without a core delays
nothing; one that is late finds another number in the ticket. A claim that succeeds proves that the request is unfinished, and
so that its fields did not change since the thread read them.

Idle threads sleep (`polling.py`).
"""

import ctypes

import numba
from numba import types

from auraflux.ops.moe.cpu.expert_chunks import ERROR, FIRST_PHASE, PLAN_ARRAYS, TOTAL, fail, make_plan
from auraflux.ops.moe.cpu.polling import (
    FIELDS,
    LONG_IDLE_NS,
    LONG_POLL_NS,
    MONOTONIC,
    POLL_NS,
    POLLS_PER_CLOCK,
    REQUEST_SEQ,
    SLEEPERS,
    SPIN_NS,
    STOPPED,
    WAKES,
    compile_wake,
    init_polling,
    inlined,
    now_ns,
    poll,
    sleep,
    wake_all,
)
from auraflux.ops.simd.atomics import compare_exchange, fetch_add, load, load_int32, store, store_int32
from auraflux.ops.simd.compile.cache_folder import our_cache
from auraflux.ops.simd.compile.compiler import KernelCompiler
from auraflux.ops.simd.jit import LINE, int64s
from auraflux.ops.simd.threads import run_job

# byte offsets in the memory that threads share; words that are written often have a line each
TICKET = 0  # number of the request, its chunks, next chunk: 32, 16 and 16 bits
DONE = LINE  # finished chunks
CODE, SETUP, DONE_SEQ, ERROR_AT = (FIELDS + 8 * n for n in range(4))
LOW_32, LOW_16 = 0xFFFFFFFF, 0xFFFF


def init_shared(shared: int, code: int, setup: int, fields: tuple[int, int, int]) -> None:
    """Initialise shared memory for threads that are not started yet.

    code    address of the machine code of `chunk_kernel`
    setup   address of its setup
    fields  addresses of request_seq, done_seq and error
    """
    init_polling(shared, fields[0], (code, setup, *fields[1:]))
    done = ctypes.c_uint32.from_address(fields[1]).value
    ctypes.c_uint64.from_address(shared + TICKET).value = done << 32


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
            polls = poll(shared, polls)
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
                polls = poll(shared, polls)
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
        wakes, active, polls = load(shared + WAKES), now_ns(shared, MONOTONIC, room), 0
        while load(shared + STOPPED) == 0:
            number = load_int32(number_at)
            if number != last:
                if load(shared + SLEEPERS) != 0:
                    wake_all(shared)
                _take_chunks(shared, number, scratch)
                last, polls, active = number, 0, now_ns(shared, MONOTONIC, room)
                continue
            polls = poll(shared, polls)
            if polls % POLLS_PER_CLOCK == 0:
                now, woken = now_ns(shared, MONOTONIC, room), load(shared + WAKES)
                if woken != wakes:
                    wakes, active = woken, now
                elif now - active > SPIN_NS:
                    poll_ns = LONG_POLL_NS if now - active > LONG_IDLE_NS else POLL_NS
                    sleep(shared, first, last, wakes, poll_ns, room, shared, shared)
                    polls = POLLS_PER_CLOCK - 1
        return 0


def compile_loop() -> None:
    """Compile the functions, or load them from the JIT cache."""
    serve.compile((types.int64,) * 4)
    compile_wake()
