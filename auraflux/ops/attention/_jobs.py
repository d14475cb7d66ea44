"""Which thread does what: attention over a batch as jobs that threads take one after the other.

A job is one key head of one sequence, a block of its queries, and a part of its keys. Keys are split only where there would be
fewer jobs than threads can use; the thread that ends the last part of a block joins them. All blocks of a key head come one
after the other, while its keys are near; the late queries first, since they see the most keys.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numba import prange

from auraflux.ops._jit import floats, int32s, int64s, jit, jit_parallel
from auraflux.ops.attention._calls import address_of, call_at
from auraflux.ops.attention._decode import decode_scratch, decoder_address
from auraflux.ops.attention._panel_tiles import PANEL
from auraflux.ops.attention._panels import ROWS, Keys, Rows, attend_panels, gatherer_address, panel_scratch
from auraflux.ops.attention._softmax import NOTHING, merge_row
from auraflux.ops.attention._tiles import LANES, element_of, fetch_add

JOBS_PER_THREAD = 4
KEYS_PER_JOB = 256  # at least, where keys are split


class Batch(NamedTuple):
    """Addresses and sizes of a call; see `Rows` and `Keys` for the names. What follows `value_width` the entries fill in."""

    q: int
    q2: int
    width: int
    width2: int
    heads: int
    a: int
    b: int
    width_a: int
    width_b: int
    key_heads: int
    page: int
    table: int
    table_width: int
    lengths: int
    starts: int
    sequences: int
    reach: int
    sinks: int
    out: int
    value_width: int
    gather: int
    decode: int
    options: int = 0
    plan: int = 0
    counters: int = 0
    partials: int = 0


class Line(NamedTuple):
    """The plan of a sequence: its first job, blocks of queries, rows in one, parts of the keys, start of its partial sums."""

    job: int
    blocks: int
    rows: int
    splits: int
    partial: int


LINE = len(Line._fields)


@jit
def survey(table_at, width, lengths_at, starts_at, sequences, tokens, page, count, reach):
    """Give how many pairs of a query and a key there may be, or -1 if any of this leads outside the pages."""
    lengths, starts = int32s(lengths_at, sequences), int32s(starts_at, sequences + 1)
    if starts[0] != 0 or starts[sequences] != tokens:
        return -1
    pairs = 0
    for b in range(sequences):
        new, length = np.int64(starts[b + 1]) - starts[b], np.int64(lengths[b])
        if new < 0 or (new > 0 and length < new):
            return -1
        if new == 0:
            continue
        first, needed = max(0, length - new - reach), (length + page - 1) // page
        if needed > width:
            return -1
        table = int32s(table_at + 4 * b * width, width)
        for i in range(first // page, needed):
            if table[i] < 0 or table[i] >= count:
                return -1
        pairs += new * (length - first)
    return pairs


@jit
def _batch(params):
    p = int64s(params, 26)
    one = p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[11], p[12]
    two = p[13], p[14], p[15], p[16], p[17], p[18], p[19], p[20], p[21], p[22], p[23], p[24], p[25]
    return Batch(*one, *two)


@jit
def _line(batch, b):
    p = int64s(batch.plan + 8 * LINE * b, LINE)
    return Line(p[0], p[1], p[2], p[3], p[4])


@jit
def _sequence(batch, b):
    """(first token, new tokens, first position touched, length)."""
    starts = int32s(batch.starts, batch.sequences + 1)
    new, length = np.int64(starts[b + 1]) - starts[b], np.int64(int32s(batch.lengths, batch.sequences)[b])
    return np.int64(starts[b]), new, max(0, length - new - batch.reach), length


@jit
def _plan(batch, threads):
    """Divide the batch; give the lines, how many jobs there are, and how many floats all partial sums take.

    One more line holds the number of jobs and, as its rows, those of the largest block.
    """
    plan = np.zeros((batch.sequences + 1) * LINE, np.int64)
    group = batch.heads // batch.key_heads
    narrow = batch.width2 == 0 and min(batch.width, batch.value_width) >= LANES and group < PANEL
    work = jobs = partial = most = 0
    for b in range(batch.sequences):
        _, new, first, length = _sequence(batch, b)
        work += (length - first) * new * batch.heads
    share = work // (JOBS_PER_THREAD * threads) + 1
    for b in range(batch.sequences):
        _, new, first, length = _sequence(batch, b)
        rows = group if narrow and new == 1 else ROWS
        blocks, parts = (new * group + rows - 1) // rows, 1
        most = max(most, rows if new else 0)
        if threads > 1:
            parts = min(min(rows, new * group) * (length - first) // share + 1, (length - first) // KEYS_PER_JOB)
            parts = max(parts, 1)
        here = LINE * b
        plan[here], plan[here + 1], plan[here + 2], plan[here + 3], plan[here + 4] = jobs, blocks, rows, parts, partial
        jobs += blocks * batch.key_heads * parts
        if parts > 1:
            partial += blocks * batch.key_heads * parts * rows * (batch.value_width + 2)
    plan[LINE * batch.sequences], plan[LINE * batch.sequences + 2] = jobs, most
    return plan, jobs, partial


@jit
def _keys(batch, b, head):
    table, joined = batch.table + 4 * b * batch.table_width, np.int64(batch.width2 > 0)
    cache = batch.page, batch.a, batch.b, batch.key_heads, head, batch.width_a, batch.width_b
    return Keys(batch.gather, table, *cache, joined)


@jit
def _job(batch, line, b, head, block, split, slot, work):
    """Do one part of the keys for one block of queries."""
    start, new, first, length = _sequence(batch, b)
    group, rows = batch.heads // batch.key_heads, line.rows
    position, row, end = length - new, block * rows, min(new * group, (block + 1) * rows)
    # from the first position that the block's first row sees to the last row's own
    first = max(first, position + row // group - batch.reach)
    length = position + (end - 1) // group + 1
    step = (length - first + line.splits - 1) // line.splits
    last = min(length, first + (split + 1) * step)
    first += split * step
    scale, softcap = floats(batch.options, 2)[0], floats(batch.options, 2)[1]
    q, q2 = batch.q + 4 * start * batch.heads * batch.width, batch.q2 + 4 * start * batch.heads * batch.width2
    keys = _keys(batch, b, head)
    if rows == ROWS:
        queries = Rows(
            q, q2, batch.width, batch.width2, batch.heads, head * group, group, position, row, end - row, batch.reach
        )
        attend_panels(queries, keys, scale, batch.value_width, first, last, softcap, slot, work)
    else:
        query = q + 4 * head * group * batch.width
        cache = keys.table, keys.page, keys.a, keys.b, keys.heads, head, keys.width_a, keys.width_b
        call_at(batch.decode, (query, group, *cache, first, last, batch.options, slot, work))


@jit
def _finish(batch, line, b, head, block, slots):
    """Join the parts of a block of queries and write its results."""
    start, new, _, _ = _sequence(batch, b)
    group, width, rows = batch.heads // batch.key_heads, batch.value_width, line.rows
    step = 4 * rows * (width + 2)
    for r in range(min(rows, new * group - block * rows)):
        row = block * rows + r
        query_head = head * group + row % group
        sink = floats(batch.sinks, batch.heads)[query_head] if batch.sinks else NOTHING
        out = batch.out + 4 * ((start + row // group) * batch.heads + query_head) * width
        peaks = slots + 4 * (rows * width + r)
        merge_row(slots + 4 * r * width, step, peaks, peaks + 4 * rows, step, line.splits, width, sink, out)


@jit
def _work(params):
    """Do jobs until none is left."""
    batch = _batch(params)
    heads, width = batch.key_heads, batch.value_width
    whole = _line(batch, batch.sequences)
    needed = decode_scratch(batch.heads // heads, batch.width, width)
    if whole.rows == ROWS:
        needed = max(needed, panel_scratch(_keys(batch, 0, 0), batch.width + batch.width2, width))
    needed = needed // 16 * 16 + 16
    memory = np.empty(needed + whole.rows * (width + 2) + 16, np.float32)
    space = (np.int64(memory.ctypes.data) + 63) // 64 * 64
    b = 0
    while True:
        job = fetch_add(batch.counters, 1)
        if job >= whole.job:
            break
        while _line(batch, b + 1).job <= job:
            b += 1
        line = _line(batch, b)
        part, number = (job - line.job) % line.splits, (job - line.job) // line.splits
        head, block = number // line.blocks, line.blocks - 1 - number % line.blocks
        step = 4 * line.rows * (width + 2)
        slots = space + 4 * needed if line.splits == 1 else batch.partials + 4 * line.partial + number * line.splits * step
        _job(batch, line, b, head, block, part, slots + part * step, space)
        # the counter after the first, one for each block of queries: its parts that are done
        if line.splits == 1 or fetch_add(batch.counters + 8 * (1 + line.job + number), 1) == line.splits - 1:
            _finish(batch, line, b, head, block, slots)
    # a last use, or it would be freed once its address was taken
    memory[0] = 0


@lru_cache
def _work_address():
    return address_of(_work, 1)


@lru_cache
def addresses(dtype: torch.dtype) -> tuple[int, int, int]:
    """Where the compiled parts lie that serve a cache of this dtype: gathering, decoding, and the loop over jobs."""
    like = element_of(dtype)
    return gatherer_address(like), decoder_address(like), _work_address()


@jit
def _prepare(params, scale, softcap, threads):
    """Make what the threads share and write its addresses into the batch.

    Give the arrays themselves: the caller must use them once more when all is done, or Numba frees them before.
    """
    plan, jobs, partial = _plan(_batch(params), threads)
    counters, sums = np.zeros(jobs + 1, np.int64), np.empty(partial + 2, np.float32)
    sums[0], sums[1] = scale, softcap
    p = int64s(params, 26)
    p[22], p[23], p[24], p[25] = sums.ctypes.data, plan.ctypes.data, counters.ctypes.data, sums.ctypes.data + 8
    return plan, counters, sums


@jit
def run_serial(worker, params, scale, softcap):
    """Attend as the `Batch` at address `params` says."""
    plan, counters, sums = _prepare(params, scale, softcap, 1)
    call_at(worker, (params,))
    return plan.size + counters.size + sums.size


@jit_parallel
def run_parallel(worker, params, scale, softcap, threads):
    """Attend as the `Batch` at address `params` says, with all threads."""
    plan, counters, sums = _prepare(params, scale, softcap, threads)
    for _ in prange(threads):
        call_at(worker, (params,))
    return plan.size + counters.size + sums.size
