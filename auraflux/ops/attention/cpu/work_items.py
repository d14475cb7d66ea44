"""Attention over a batch as work items that threads take one after the other.

An item is one key head of one sequence, a block of its queries, and a run of parts of its keys. A part is PART positions from a
multiple of PART on. It is summed on its own and merged into the parts before it, so that the order of a row's sums does not
depend on the number of threads. Parts are split into runs only where there would be fewer items than threads; the thread
that ends the last run of a block then merges them. All blocks of a key head come one after the other, while its keys are in the
cache; late queries first, since they see the most keys. Threads take items from a counter: queries see more or fewer keys, so
equal shares would not end together.
"""

from array import array
from typing import NamedTuple

import numpy as np

from auraflux.ops._recording import recorder
from auraflux.ops.attention.cpu.dtypes import fetch_add
from auraflux.ops.attention.cpu.launch_args import flatten, read_args
from auraflux.ops.attention.cpu.row_tiles import PART, close_row, fold_row
from auraflux.ops.simd.jit import LINE, Kernel, address_of, arguments, floats, int32s, int64s, jit, workspace
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill

PRODUCTS_PARALLEL = 1 << 18  # below this, waking the threads costs more than the work
ITEMS_PER_THREAD = 4
ONE = np.float32(1)


class Batch(NamedTuple):
    """The tensors of a call: addresses and sizes.

    q, q2                 queries and, for latent attention, their rotated parts; width2 is 0 otherwise
    a, b                  keys and values, or latents and rotated keys; `element` names their dtype
    page                  tokens in a page
    reach                 how many positions before its own a query sees
    sinks                 0 for none
    peaks, totals         0, or where the largest scores and the sums of weights go; `out` is then not divided by the latter
    softcap               0 for none
    """

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
    element: int
    page: int
    table: int
    table_width: int
    lengths: int
    starts: int
    sequences: int
    reach: int
    sinks: int
    out: int
    peaks: int
    totals: int
    value_width: int
    scale: float
    softcap: float


class Plan(NamedTuple):
    """Split of a batch into work items.

    rows      in a block of queries
    lines     [sequences + 1]  `Line`, the last one with the totals
    counters  items taken; then for each block of queries its parts that are done
    space     a job's scratch memory, `nbytes` of it
    partials  sums of blocks whose parts are split into runs
    """

    rows: int
    lines: int
    counters: int
    space: int
    nbytes: int
    partials: int


class Line(NamedTuple):
    """The plan of a sequence: its first item, blocks of queries per head, runs of parts, floats of partial sums before."""

    item: int
    blocks: int
    runs: int
    partial: int


class Item(NamedTuple):
    """A work item.

    sequence  -1 if there is none
    slots     where the parts of its block of queries go; with one run, where each of them does
    done      address of the count of runs that are done
    """

    sequence: int
    head: int
    block: int
    run: int
    runs: int
    slots: int
    done: int


class Span(NamedTuple):
    """The rows and positions of an item.

    start, position  the sequence's first new token: its row in the stack of all tokens, and where in the sequence it is
    row, end         rows of queries, the last one excluded: row r is token r // group, head r % group
    first, last      positions of keys that any of them sees, the last one excluded
    origin, parts    the sequence's first part, and how many it has
    begin, stop      parts of the item's run, the last one excluded
    """

    start: int
    position: int
    row: int
    end: int
    first: int
    last: int
    origin: int
    parts: int
    begin: int
    stop: int


class AttentionArgs(NamedTuple):
    """The launch arguments that all attention kernels begin with."""

    batch: Batch
    plan: Plan


LINE_FIELDS = len(Line._fields)


@Kernel
def _clear(args, job, jobs):
    address, count = arguments(args, 2)
    numbers = int64s(address, count)
    for i in range(count):
        numbers[i] = 0


@jit
def _parts(length, new, reach):
    """Return a sequence's first part that is seen, and how many there are."""
    origin = max(0, length - new - reach) // PART
    return origin, (length - 1) // PART + 1 - origin


@Kernel
def _divide(args, job, jobs_here):
    """Plan the sequences with `fewest` to `most` new tokens; `slot` floats hold the sums of a block of queries."""
    lines_at, starts_at, lengths_at, sequences, reach, group, key_heads, rows, fewest, most, slot, jobs = arguments(args, 12)
    lines = int64s(lines_at, (sequences + 1) * LINE_FIELDS)
    starts, lengths = int32s(starts_at, sequences + 1), int32s(lengths_at, sequences)
    work = items = partial = 0
    for b in range(sequences):
        new, length = np.int64(starts[b + 1]) - starts[b], np.int64(lengths[b])
        if fewest <= new <= most:
            work += min(length, new + reach) * new * group * key_heads
    share = work // (ITEMS_PER_THREAD * jobs) + 1
    for b in range(sequences):
        new, length = np.int64(starts[b + 1]) - starts[b], np.int64(lengths[b])
        blocks, runs = 0, 1
        if fewest <= new <= most:
            blocks, keys = (new * group + rows - 1) // rows, min(length, new + reach)
            parts = _parts(length, new, reach)[1]
            if jobs > 1:
                runs = max(1, min(min(rows, new * group) * keys // share + 1, parts))
        here = LINE_FIELDS * b
        lines[here], lines[here + 1], lines[here + 2], lines[here + 3] = items, blocks, runs, partial
        items += blocks * key_heads * runs
        if runs > 1:
            partial += blocks * key_heads * parts * slot
    here = LINE_FIELDS * sequences
    lines[here], lines[here + 3] = items, partial


def run(
    kernel: Kernel, jobs: int, batch: Batch, rows: int, fewest: int, most: int, scratch: int, *more: tuple[int, ...]
) -> None:
    """Attend for those sequences that have `fewest` to `most` new tokens.

    rows     in a block of queries
    scratch  floats that the kernel works in
    more     structures of this kernel, after batch and plan
    """
    slot = rows * (batch.value_width + 2)
    lines = array("q", bytes(8 * LINE_FIELDS * (batch.sequences + 1)))
    # unless `_divide` says otherwise: it does not run where kernels are only noted
    lines[-4] = 1
    lines_at, group = address_of(lines), batch.heads // batch.key_heads
    index = batch.starts, batch.lengths, batch.sequences, batch.reach
    _divide(1, lines_at, *index, group, batch.key_heads, rows, fewest, most, slot, jobs)
    items, partial = lines[-4], lines[-1]
    if recorder.recording is not None:
        # later lengths give other plans; twice the runs that are aimed at, and two for each block, is more than any has
        blocks = batch.key_heads * (batch.sequences + most * group // rows)
        items = 2 * ITEMS_PER_THREAD * jobs + 2 * blocks
        partial = blocks * -(-batch.table_width * batch.page // PART) * slot
    if items:
        counters = array("q", bytes(8 * (items + 1)))
        _clear(1, address_of(counters), items + 1)
        nbytes = -(-4 * (scratch + slot + 2 * rows) // LINE) * LINE
        space = workspace(jobs * nbytes + 4 * partial)
        plan = Plan(rows, lines_at, address_of(counters), space, nbytes, space + jobs * nbytes)
        kernel(jobs, *flatten((batch, plan, *more)))


@jit
def opened(args):
    """Read the batch and the plan of a kernel."""
    found = read_args(AttentionArgs, args)
    return found.batch, found.plan


@jit
def _line(plan, b):
    p = int64s(plan.lines + 8 * LINE_FIELDS * b, LINE_FIELDS)
    return Line(p[0], p[1], p[2], p[3])


@jit
def take(batch, plan, job, b):
    """Take the next item, which is of sequence b or a later one."""
    item = fetch_add(plan.counters, 1)
    if item >= _line(plan, batch.sequences).item:
        return Item(-1, 0, 0, 0, 0, 0, 0)
    while _line(plan, b + 1).item <= item:
        b += 1
    line = _line(plan, b)
    run, number = (item - line.item) % line.runs, (item - line.item) // line.runs
    head, block = number // line.blocks, line.blocks - 1 - number % line.blocks
    step = 4 * plan.rows * (batch.value_width + 2)
    slots = plan.partials + 4 * line.partial
    if line.runs == 1:
        slots = plan.space + (job + 1) * plan.nbytes - step - 8 * plan.rows
    else:
        starts, lengths = int32s(batch.starts, batch.sequences + 1), int32s(batch.lengths, batch.sequences)
        slots += number * step * _parts(np.int64(lengths[b]), np.int64(starts[b + 1]) - starts[b], batch.reach)[1]
    return Item(b, head, block, run, line.runs, slots, plan.counters + 8 * (1 + line.item + number))


@jit
def span(batch, plan, item):
    starts, lengths = int32s(batch.starts, batch.sequences + 1), int32s(batch.lengths, batch.sequences)
    start, length, group = np.int64(starts[item.sequence]), np.int64(lengths[item.sequence]), batch.heads // batch.key_heads
    new = starts[item.sequence + 1] - start
    position, row = length - new, item.block * plan.rows
    end = min(new * group, row + plan.rows)
    # from the first position that the block's first row sees to the last row's own
    first, last = max(0, position + row // group - batch.reach), position + (end - 1) // group + 1
    origin, parts = _parts(length, new, batch.reach)
    begin, stop = origin + item.run * parts // item.runs, origin + (item.run + 1) * parts // item.runs
    return Span(start, position, row, end, first, last, origin, parts, begin, stop)


@jit
def ends_of(where, part):
    """Return the positions of a part that an item covers, the last one excluded."""
    return max(where.first, part * PART), min(where.last, (part + 1) * PART)


@jit
def slot_of(batch, plan, item, where, part):
    """Return where a part's results go: sums [rows, value_width], then the maxima, then the sums of weights."""
    return item.slots + (0 if item.runs == 1 else 4 * (part - where.origin) * plan.rows * (batch.value_width + 2))


@jit
def _place(batch, item, where, r):
    """Return which of all heads of all tokens a row is."""
    group = batch.heads // batch.key_heads
    row = where.row + r
    return (where.start + row // group) * batch.heads + item.head * group + row % group


@jit
def _state(batch, plan, job, r):
    """Return the address of a row's largest score and sum of weights."""
    return plan.space + (job + 1) * plan.nbytes - 8 * plan.rows + 8 * r


@jit
def open_rows(batch, plan, item, where, job):
    """Clear an item's rows, where one run has all parts."""
    if item.runs == 1:
        _clear_rows(batch, plan, item, where, job)


@jit
def _clear_rows(batch, plan, item, where, job):
    for r in range(where.end - where.row):
        fill(batch.out + 4 * _place(batch, item, where, r) * batch.value_width, batch.value_width, ZERO)
        state = floats(_state(batch, plan, job, r), 2)
        state[0], state[1] = NOTHING, ZERO


@jit
def _join(batch, plan, item, where, job, slot):
    """Merge a part's sums into those before it."""
    width, rows = batch.value_width, plan.rows
    tops, shares = floats(slot + 4 * rows * width, rows), floats(slot + 4 * rows * (width + 1), rows)
    for r in range(where.end - where.row):
        if shares[r] != ZERO:
            out, state = batch.out + 4 * _place(batch, item, where, r) * width, _state(batch, plan, job, r)
            fold_row((slot + 4 * r * width, ONE, tops[r], shares[r], width, out, state, state + 4))


@jit
def end_part(batch, plan, item, where, job, slot):
    """Merge the sums at a part's slot at once, where one run has all parts."""
    if item.runs == 1:
        _join(batch, plan, item, where, job, slot)


@jit
def skip_part(batch, plan, item, where, part):
    """Mark a part of which nothing is seen."""
    if item.runs > 1:
        slot = slot_of(batch, plan, item, where, part)
        fill(slot + 4 * plan.rows * (batch.value_width + 1), plan.rows, ZERO)


@jit
def finish(batch, plan, item, where, job):
    """Merge the parts of a block of queries and write its results, if this was the last run of them."""
    if item.runs > 1:
        if fetch_add(item.done, 1) < item.runs - 1:
            return
        _clear_rows(batch, plan, item, where, job)
        for part in range(where.origin, where.origin + where.parts):
            _join(batch, plan, item, where, job, slot_of(batch, plan, item, where, part))
    group, width = batch.heads // batch.key_heads, batch.value_width
    for r in range(where.end - where.row):
        place, state = _place(batch, item, where, r), _state(batch, plan, job, r)
        sink = floats(batch.sinks, batch.heads)[item.head * group + (where.row + r) % group] if batch.sinks else NOTHING
        close_row((batch.out + 4 * place * width, width, state, state + 4, sink, np.int64(batch.peaks == 0)))
        if batch.peaks:
            found = floats(state, 2)
            floats(batch.peaks + 4 * place, 1)[0], floats(batch.totals + 4 * place, 1)[0] = found[0], found[1]
