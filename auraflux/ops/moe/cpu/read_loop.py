"""The loop of threads that read experts from disk into slots of host memory, as a GPU asks for them.

The first thread polls the mailbox (`DiskMailbox` in `ops/moe/pool.py`). It answers experts that have a slot at once, finds
slots for the others, and posts a job for each. All threads claim chunks of jobs by incrementing NEXT, which never exceeds END.
A job is complete when its last chunk is; the thread that read it checks the expert and answers.

A request is finished when all of its jobs are. So a claim proves that the request is not finished, and that its jobs do not
change. Slots of a request are kept until the next one: kernels copy from them.
"""

import math

import numba
import numpy as np
from numba import types

from auraflux.ops.moe.cpu import polling
from auraflux.ops.moe.cpu import read_setup as at
from auraflux.ops.moe.cpu.polling import inlined
from auraflux.ops.simd.atomics import compare_exchange, fetch_add, load, load_int32, read_libc, store, store_int32
from auraflux.ops.simd.compile.cache_folder import our_cache
from auraflux.ops.simd.compile.compiler import KernelCompiler
from auraflux.ops.simd.crc32 import advanced, crc32, crc32_of_quarters
from auraflux.ops.simd.jit import LINE, doubles, int32s, int64s, octets

# byte offsets in the memory that threads share
NEXT, END = 0, LINE  # chunks claimed and posted since the start
SETUP = polling.FIELDS
EINTR = 4
ABSOLUTE = 1  # TIMER_ABSTIME
LATE_NS = 60_000  # by which Linux wakes a sleeping thread late


@inlined
def _layer_row(setup, layer):
    return int64s(setup[at.LAYER_ROWS] + 8 * at.LAYER_WORDS * layer, at.LAYER_WORDS)


@inlined
def _job(setup, number):
    return int64s(setup[at.JOBS] + 8 * at.JOB_WORDS * number, at.JOB_WORDS)


@inlined
def _answer(setup, counters_at, number, expert, slot):
    """Answer one expert of a request; slot -1 says that it could not be read."""
    place = fetch_add(counters_at + 8 * at.ANSWERED, 1)
    store(setup[at.ANSWERS] + 8 * place, number << 32 | expert << at.SLOT_BITS | slot + 1)


@inlined
def _record_failure(counters_at, code, layer, expert, detail):
    """Record the first failure."""
    if compare_exchange(counters_at + 8 * at.FAIL_LOCK, 0, 1):
        store(counters_at + 8 * at.FAIL_LAYER, layer)
        store(counters_at + 8 * at.FAIL_EXPERT, expert)
        store(counters_at + 8 * at.FAIL_DETAIL, detail)
        store(counters_at + 8 * at.FAIL_CODE, code)


@inlined
def _end_of_slice(shared, setup, counters_at, nbytes, room):
    """Return when a simulated disk, which serves one read after the other, finishes a read that starts now."""
    until_at = counters_at + 8 * at.BUSY_UNTIL
    while True:
        before = load(until_at)
        now = polling.now_ns(shared, polling.MONOTONIC, room)
        until = max(before, now) + nbytes * polling.SECOND_NS // setup[at.BANDWIDTH]
        if compare_exchange(until_at, before, until):
            return until


@inlined
def _sleep_until(setup, until, room):
    store(room, until // polling.SECOND_NS)
    store(room + 8, until % polling.SECOND_NS)
    read_libc(setup[at.SLEEP_UNTIL], polling.MONOTONIC, ABSOLUTE, room, 0)


@inlined
def _finish_slice(shared, setup, until, room):
    """Wait for the end of a simulated read; polls at last, as a thread that sleeps wakes up late."""
    if until - polling.now_ns(shared, polling.MONOTONIC, room) > LATE_NS:
        _sleep_until(setup, until - LATE_NS, room)
    polls = 0
    while polling.now_ns(shared, polling.MONOTONIC, room) < until:
        polls = polling.poll(shared, polls)


@inlined
def _read_bytes(setup, row, job, start, stop):
    """Read a part of an expert into its slot; record an error in the job."""
    target = setup[at.MEMORY] + job[at.JOB_SLOT] * setup[at.SLOT_NBYTES]
    first = job[at.JOB_EXPERT] * row[at.STRIDE]
    while start < stop:
        found = read_libc(setup[at.READ], row[at.HANDLE], target + start, stop - start, first + start)
        if found < 0:
            errno = load_int32(read_libc(setup[at.WHERE_ERRNO], 0, 0, 0, 0))
            if errno == EINTR:
                continue
            job[at.JOB_DETAIL], job[at.JOB_ERROR] = errno, at.READ_FAILED
            return
        if row[at.DIRECT] == 0:
            read_libc(setup[at.FADVISE], row[at.HANDLE], first + start, found, at.DONTNEED)
        start += found
        if found == 0 or (row[at.DIRECT] != 0 and start % at.PAGE_NBYTES != 0):
            job[at.JOB_ERROR] = at.TRUNCATED
            return


@inlined
def _chunk_crc(setup, row, job, chunk):
    """Return the CRC-32 of the bytes of an expert that a chunk holds."""
    address = setup[at.MEMORY] + job[at.JOB_SLOT] * setup[at.SLOT_NBYTES] + chunk * at.CHUNK_NBYTES
    nbytes = row[at.NBYTES] - chunk * at.CHUNK_NBYTES
    if nbytes >= at.CHUNK_NBYTES:
        return crc32_of_quarters(setup[at.STEP_TABLE], setup[at.QUARTER_TABLE], address, at.CHUNK_NBYTES)
    return crc32(setup[at.STEP_TABLE], address, max(nbytes, 0))


@inlined
def _expert_crc(setup, row, crcs):
    """Return the CRC-32 of an expert from those of its chunks."""
    found = np.uint32(crcs[0])
    for chunk in range(1, row[at.CHUNKS]):
        nbytes = row[at.NBYTES] - chunk * at.CHUNK_NBYTES
        if nbytes > 0:
            table = setup[at.CHUNK_TABLE] if nbytes >= at.CHUNK_NBYTES else row[at.REST_TABLE]
            found = advanced(table, found) ^ np.uint32(crcs[chunk])
    return found


@inlined
def _complete(setup, counters_at, number, layer, job, crcs):
    """Check an expert that has been read, add its biases, enter its slot in the tables, and answer."""
    row, expert, slot = _layer_row(setup, layer), job[at.JOB_EXPERT], job[at.JOB_SLOT]
    each = layer * setup[at.EXPERTS] + expert
    if job[at.JOB_ERROR] == 0 and job[at.JOB_MODIFIED] != 0:
        found = np.int64(_expert_crc(setup, row, crcs))
        if found != int64s(setup[at.SUMS] + 8 * each, 1)[0]:
            job[at.JOB_DETAIL], job[at.JOB_ERROR] = found, at.NOT_THE_CHECKSUM
        else:
            int64s(setup[at.VERIFIED] + 8 * each, 1)[0] = job[at.JOB_MODIFIED]
    if job[at.JOB_ERROR] != 0:
        _record_failure(counters_at, job[at.JOB_ERROR], layer, expert, job[at.JOB_DETAIL])
        slot = -1
    else:
        nbytes = row[at.BIAS_NBYTES]
        source = octets(row[at.BIASES] + expert * nbytes, nbytes)
        target = octets(setup[at.MEMORY] + slot * setup[at.SLOT_NBYTES] + row[at.NBYTES], nbytes)
        for i in range(nbytes):
            target[i] = source[i]
        int64s(setup[at.SLOT_OF] + 8 * each, 1)[0] = slot
        int64s(setup[at.OWNERS] + 8 * slot, 1)[0] = each
    _answer(setup, counters_at, number, expert, slot)
    fetch_add(counters_at + 8 * at.FINISHED, 1)


@inlined
def _read_chunk(shared, claimed, room):
    """Read a claimed chunk; complete its job after the last one."""
    setup = int64s(load(shared + SETUP), at.SETUP_WORDS)
    counters_at, header = setup[at.COUNTERS], int32s(setup[at.HEADER], 4)
    # the request is not finished, so its header does not change
    layer, number = np.int64(header[0]), np.int64(header[3])
    row = _layer_row(setup, layer)
    place = claimed - load(counters_at + 8 * at.BASE)
    which, chunk = place // row[at.CHUNKS], place % row[at.CHUNKS]
    job, crcs = _job(setup, which), int64s(setup[at.CRCS] + 8 * which * row[at.CHUNKS], row[at.CHUNKS])
    start = chunk * at.CHUNK_NBYTES
    stop = min(start + at.CHUNK_NBYTES, row[at.STRIDE])
    if job[at.JOB_ERROR] == 0:
        until = 0
        if setup[at.BANDWIDTH] != 0:
            until = _end_of_slice(shared, setup, counters_at, stop - start, room)
        _read_bytes(setup, row, job, start, stop)
        if job[at.JOB_MODIFIED] != 0:
            crcs[chunk] = np.int64(_chunk_crc(setup, row, job, chunk))
        if until != 0:
            _finish_slice(shared, setup, until, room)
    if fetch_add(setup[at.JOBS] + 8 * (at.JOB_WORDS * which + at.JOB_LEFT), -1) == 1:
        _complete(setup, counters_at, number, layer, job, crcs)


@inlined
def _read_chunks(shared, room):
    """Claim and read chunks until none is left; return whether there was one."""
    some = False
    while True:
        claimed = load(shared + NEXT)
        if claimed >= load(shared + END):
            return some
        if compare_exchange(shared + NEXT, claimed, claimed + 1):
            some = True
            _read_chunk(shared, claimed, room)


@inlined
def _count_use(uses, slot, now):
    """Add one to a decayed use count, all in log2."""
    old = uses[slot]
    uses[slot] = max(old, now) + math.log2(1.0 + 2.0 ** -abs(old - now))


@inlined
def _find_victim(setup, counters, number):
    """Return a free slot, or the one whose expert was used least, among some slots; -1 if this request needs all slots."""
    slots = setup[at.SLOTS]
    owners, uses, held = int64s(setup[at.OWNERS], slots), doubles(setup[at.USES], slots), int64s(setup[at.HELD], slots)
    first = counters[at.WINDOW_FROM]
    for _ in range(slots // at.WINDOW + 1):
        best, cost = -1, math.inf
        for i in range(min(at.WINDOW, slots)):
            slot = (first + i) % slots
            mine = -math.inf if owners[slot] < 0 else uses[slot]
            if held[slot] != number and (best < 0 or mine < cost):
                best, cost = slot, mine
        if best >= 0:
            return best
        first = (first + at.WINDOW) % slots
    return -1


@inlined
def _modified_ns(setup, handle, room):
    """Return a file's modification time; 1 if it is unknown."""
    if read_libc(setup[at.SYSCALL], setup[at.FSTAT], handle, room + polling.TIMESPEC_NBYTES, 0) != 0:
        return 1
    stat = room + polling.TIMESPEC_NBYTES
    return load(stat + at.MODIFIED_S_AT) * polling.SECOND_NS + load(stat + at.MODIFIED_NS_AT)


@inlined
def _post_job(shared, setup, counters, number, which, layer, expert, use, room):
    """Evict an expert for one that is missing, and post the job that reads it; return whether there was a slot."""
    slot, experts = _find_victim(setup, counters, number), setup[at.EXPERTS]
    if slot < 0:
        return False
    slots, row, each = setup[at.SLOTS], _layer_row(setup, layer), layer * experts + expert
    owners, slot_of = int64s(setup[at.OWNERS], slots), int64s(setup[at.SLOT_OF], setup[at.LAYERS] * experts)
    if owners[slot] >= 0:
        slot_of[owners[slot]] = -1
    owners[slot], int64s(setup[at.HELD], slots)[slot], doubles(setup[at.USES], slots)[slot] = -1, number, use
    job = _job(setup, which)
    job[at.JOB_EXPERT], job[at.JOB_SLOT], job[at.JOB_LEFT], job[at.JOB_ERROR] = expert, slot, row[at.CHUNKS], 0
    job[at.JOB_MODIFIED] = 0
    if setup[at.VERIFY] != 0:
        modified = _modified_ns(setup, row[at.HANDLE], room)
        if modified != int64s(setup[at.VERIFIED] + 8 * each, 1)[0]:
            job[at.JOB_MODIFIED] = modified
    counters[at.READS] += 1
    counters[at.READ_NBYTES] += row[at.STRIDE]
    fetch_add(shared + END, row[at.CHUNKS])
    return True


@inlined
def _answer_hits(setup, counters, number, layer, count, streamed, now):
    """Answer the experts of a request that have a slot, and hold these slots."""
    experts, slots, first = setup[at.EXPERTS], setup[at.SLOTS], layer * setup[at.EXPERTS]
    uses, held, wanted = doubles(setup[at.USES], slots), int64s(setup[at.HELD], slots), int32s(setup[at.LIST], experts)
    slot_of = int64s(setup[at.SLOT_OF], setup[at.LAYERS] * experts)
    for i in range(count):
        expert = np.int64(wanted[i])
        slot = slot_of[first + expert] if 0 <= expert < experts else -1
        if slot >= 0:
            held[slot] = number
            if not streamed:
                _count_use(uses, slot, now)
            counters[at.HITS] += 1
            _answer(setup, setup[at.COUNTERS], number, expert, slot)


@inlined
def _post_misses(shared, setup, counters, number, layer, count, use, room):
    """Post jobs for the experts of a request that have no slot, and return their number; answer those that are wrong."""
    experts, slots, posted = setup[at.EXPERTS], setup[at.SLOTS], 0
    held, wanted = int64s(setup[at.HELD], slots), int32s(setup[at.LIST], experts)
    slot_of = int64s(setup[at.SLOT_OF], setup[at.LAYERS] * experts)
    for i in range(count):
        expert, code = np.int64(wanted[i]), 0
        if not 0 <= layer < setup[at.LAYERS]:
            code = at.BAD_LAYER
        elif not 0 <= expert < experts:
            code = at.BAD_EXPERT
        else:
            slot = slot_of[layer * experts + expert]
            if slot >= 0 and held[slot] == number:
                continue
            if _post_job(shared, setup, counters, number, posted, layer, expert, use, room):
                posted += 1
            else:
                code = at.NO_SLOT
        if code != 0:
            _record_failure(setup[at.COUNTERS], code, layer, expert, 0)
            _answer(setup, setup[at.COUNTERS], number, 0, -1)
    return posted


@inlined
def _serve_request(shared, number, room):
    """Answer the experts that have a slot, post jobs for the others, help to read them, and wait for the last one."""
    setup = int64s(load(shared + SETUP), at.SETUP_WORDS)
    counters_at, header, slots = setup[at.COUNTERS], int32s(setup[at.HEADER], 4), setup[at.SLOTS]
    counters = int64s(counters_at, at.COUNTER_WORDS)
    layer, count, streamed = np.int64(header[0]), min(np.int64(header[1]), setup[at.EXPERTS]), header[2] != 0
    header[3] = number
    counters[at.ANSWERED] = counters[at.FINISHED] = 0
    counters[at.BASE] = load(shared + END)
    counters[at.WINDOW_FROM] = (counters[at.WINDOW_FROM] + at.WINDOW) % slots if slots > at.WINDOW else 0
    counters[at.CLOCK] += 1
    now = counters[at.CLOCK] / setup[at.HALF_LIFE]
    # before the first expert is evicted
    if 0 <= layer < setup[at.LAYERS]:
        _answer_hits(setup, counters, number, layer, count, streamed, now)
    began = polling.now_ns(shared, polling.MONOTONIC, room)
    posted = _post_misses(shared, setup, counters, number, layer, count, at.NEVER_USED if streamed else now, room)
    if posted > 0:
        if load(shared + polling.SLEEPERS) != 0:
            polling.wake_all(shared)
        _read_chunks(shared, room)
        polls = 0
        while load(counters_at + 8 * at.FINISHED) < posted:
            polls = polling.poll(shared, polls)
        counters[at.BUSY_NS] += polling.now_ns(shared, polling.MONOTONIC, room) - began


with our_cache():

    @numba.njit(nogil=True, cache=True, pipeline_class=KernelCompiler)
    def serve_reads(shared, first, spin_ns, room):
        """Read experts until stopped.

        first    1 for the thread that answers requests
        spin_ns  of polling after a request
        room     scratch memory of this thread
        """
        number_at, last = load(shared + polling.REQUEST_SEQ), 0
        wakes, active, polls = load(shared + polling.WAKES), polling.now_ns(shared, polling.MONOTONIC, room), 0
        while load(shared + polling.STOPPED) == 0:
            number = load_int32(number_at)
            if number != last and first:
                if load(shared + polling.SLEEPERS) != 0:
                    polling.wake_all(shared)
                _serve_request(shared, number, room)
            if _read_chunks(shared, room) or number != last:
                last, polls, active = number, 0, polling.now_ns(shared, polling.MONOTONIC, room)
                continue
            polls = polling.poll(shared, polls)
            if polls % polling.POLLS_PER_CLOCK == 0:
                now, woken = polling.now_ns(shared, polling.MONOTONIC, room), load(shared + polling.WAKES)
                if woken != wakes:
                    wakes, active = woken, now
                elif now - active > spin_ns:
                    poll_ns = polling.LONG_POLL_NS if now - active > polling.LONG_IDLE_NS else polling.POLL_NS
                    polling.sleep(shared, first, last, wakes, poll_ns, room, shared + NEXT, shared + END)
                    polls = polling.POLLS_PER_CLOCK - 1
        return 0

    @numba.njit(nogil=True, cache=True, pipeline_class=KernelCompiler)
    def await_answer(shared, place, number, patience_ns, room):
        """Return an answer to a request of the host, once it is there; 0 after some nanoseconds without."""
        setup = int64s(load(shared + SETUP), at.SETUP_WORDS)
        polls, until = 0, polling.now_ns(shared, polling.MONOTONIC, room) + patience_ns
        spin_until = until - patience_ns + polling.SPIN_NS
        while True:
            word = load(setup[at.ANSWERS] + 8 * place)
            if word >> 32 == number:
                return word
            polls = polling.poll(shared, polls)
            if polls % polling.POLLS_PER_CLOCK == 0:
                now = polling.now_ns(shared, polling.MONOTONIC, room)
                if now > until:
                    return 0
                if now > spin_until:
                    _sleep_until(setup, now + polling.POLL_NS, room)

    @numba.njit(nogil=True, cache=True, pipeline_class=KernelCompiler)
    def post_request(request_at, number):
        """Post a request from the host, after its fields."""
        store_int32(request_at, number)
        return 0


def compile_loop() -> None:
    """Compile the functions, or load them from the JIT cache."""
    serve_reads.compile((types.int64,) * 4)
    await_answer.compile((types.int64,) * 5)
    post_request.compile((types.int64,) * 2)
    polling.compile_wake()
