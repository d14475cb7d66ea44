"""The launch arguments of attention on a quantized KV cache, and the work items that threads take from them.

An item is one key head of one sequence, a block of query rows, and a run of parts. A part is `block` positions from a multiple
of `block` on. Each part is summed on its own and merged into the parts before it: by the item that has them all, or by the
kernel that finishes rows. The order of a row's sums therefore does not depend on the number of threads.
"""

from typing import NamedTuple

import numpy as np

from auraflux.ops.attention.cpu.dtypes import fetch_add
from auraflux.ops.attention.cpu.page_index import NO_WINDOW, PageIndex
from auraflux.ops.simd.jit import floats, int32s, jit
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill
from auraflux.ops.turboquant.cpu.dequantize import CHUNK
from auraflux.ops.turboquant.cpu.full_precision import FullPrecision, size_of
from auraflux.ops.turboquant.cpu.key_calibration import KeyCalibration, KeyMeans

FULL_PRECISION = 0  # as bits: rows are not quantized


class Queries(NamedTuple):
    """The queries of a call, and what they see.

    q          address of rotated and scaled queries, rows of `padded(width)` floats
    unrotated  the same without rotation, where keys are calibrated
    reach      how many positions before its own a query sees
    softcap    0 for none
    threshold  values with a smaller share of the weights may be skipped
    """

    q: int
    unrotated: int
    heads: int
    key_heads: int
    width: int
    reach: int
    softcap: float
    threshold: float


class StoredRows(NamedTuple):
    """The keys or the values.

    codes, norms  addresses; full-precision rows have no norms
    book          address of the codebook; of full-precision rows the number of their dtype
    bits          of a code, or FULL_PRECISION
    """

    codes: int
    norms: int
    book: int
    bits: int


class WorkSplit(NamedTuple):
    """Split of a call into work items.

    block        positions of a part
    parts, runs  output slots for the parts of a row; items that share the parts of a row
    joined       1 where an item merges its parts in the first slot: there is one run
    rows         most query rows of an item
    full_precision_items  items of a block of queries that read sink tokens and recent window: 0, 1, or one per key head
    taken        address of the number of items that threads have taken
    """

    block: int
    parts: int
    runs: int
    joined: int
    rows: int
    full_precision_items: int
    taken: int


class Partials(NamedTuple):
    """Outputs: unnormalised sums, highest scores and sums of weights, `slots` for each row.

    Sink tokens and recent window have the slot after those of parts.
    """

    o: int
    m: int
    totals: int
    slots: int


class Scratch(NamedTuple):
    """Scratch memory: its address, and the bytes of each thread."""

    address: int
    nbytes: int


class Loops(NamedTuple):
    """Addresses of kernels that are compiled on their own; those of `int8.loops` are 0 where attention is in float32."""

    attend_full_precision: int
    key_scores: int = 0
    transpose_keys: int = 0
    transposed_scores: int = 0
    add_values: int = 0


class AttentionArgs(NamedTuple):
    """The launch arguments of one attention call."""

    queries: Queries
    pages: PageIndex
    keys: StoredRows
    values: StoredRows
    calibration: KeyCalibration
    sinks: FullPrecision
    recent: FullPrecision
    split: WorkSplit
    partials: Partials
    scratch: Scratch
    loops: Loops


class Cache(NamedTuple):
    """One sequence's keys and values of one head: its row of the page table, tokens in a page, heads, the head, its width."""

    table: int
    page: int
    heads: int
    head: int
    width: int


class Rows(NamedTuple):
    """Query rows of one sequence and key head: row r is head r % group of the token at `position` + r // group.

    q          address of the first token's first head, rows of `room` floats, `heads` of them a token
    unrotated  the same without rotation, where keys are calibrated
    position   of the first new token; less `recent.positions` for quantized positions, which end before the recent window
    row, size  the first row of the item, and how many it has
    reach      how many positions before `position` a query sees
    """

    q: int
    unrotated: int
    room: int
    heads: int
    group: int
    position: int
    row: int
    size: int
    reach: int


class Item(NamedTuple):
    """A work item: its rows see positions [first, last).

    out        address of the sums of the first token's first head, the next head's `out_step` bytes on
    m, totals  addresses of its highest score and its sum of weights, the next head's `step` bytes on
    """

    rows: Rows
    cache: Cache
    means: KeyMeans
    first: int
    last: int
    out: int
    out_step: int
    m: int
    totals: int
    step: int


@jit
def padded(width):
    """Round a width up to whole chunks."""
    return (width + CHUNK - 1) // CHUNK * CHUNK


@jit
def count_items(args, b):
    """Count the items of a sequence that read codes, and all its items."""
    new = _new_tokens(args.pages, b)[1]
    blocks = (new * (args.queries.heads // args.queries.key_heads) + args.split.rows - 1) // args.split.rows
    quantized = blocks * args.queries.key_heads * args.split.runs
    return quantized, quantized + blocks * args.split.full_precision_items


@jit
def take(args, b, before):
    """Take the next item, of sequence b or a later one.

    before   items of the sequences before b
    returns  the item's sequence (past the last one if there is no item), items of those before it, its number in the sequence
    """
    number = fetch_add(args.split.taken, 1)
    while b < args.pages.sequences:
        count = count_items(args, b)[1]
        if number < before + count:
            break
        b, before = b + 1, before + count
    return b, before, number - before


@jit
def place_and_run(args, b, number):
    """Return the place (key head and block of queries) and the run of an item: first runs come first, the last may be short."""
    places = count_items(args, b)[0] // args.split.runs
    return number % places, number // places


@jit
def parts_of(args, b, run):
    """Return the first and the last part of a run, the last excluded, of those that a sequence's new tokens may see."""
    length, new = _new_tokens(args.pages, b)
    origin = max(args.sinks.positions, length - new - args.queries.reach) // args.split.block
    count = max((length - 1) // args.split.block + 1 - origin, 0)
    return origin + run * count // args.split.runs, origin + (run + 1) * count // args.split.runs


@jit
def item_at(args, b, place, part):
    """Return the item of a part's codes; its queries stand `recent.positions` before their own position."""
    table = args.pages.table + 4 * b * args.pages.table_width, args.pages.page
    ends = max(args.sinks.positions, part * args.split.block), (part + 1) * args.split.block
    slot, back = 0 if args.split.joined else part, args.recent.positions
    return _item(args, b, place, slot, table, back, args.queries.reach - back, ends)


@jit
def full_precision_items(args, b, place):
    """Return the items of one place for the sink tokens and for the recent window."""
    sinks, recent, reach = args.sinks, args.recent, args.queries.reach
    table = sinks.table + 4 * b * sinks.table_width, sinks.page
    first = _item(args, b, place, args.split.parts, table, 0, reach, (0, sinks.positions))
    table = recent.table + 4 * b * recent.table_width, recent.page
    ends = sinks.positions, NO_WINDOW if recent.positions else 0
    return first, _item(args, b, place, args.split.parts, table, 0, min(reach, recent.positions - 1), ends)


@jit
def full_precision_rows(pages):
    """Return the keys and the values of sink tokens or recent window."""
    return (
        StoredRows(pages.k, 0, pages.element, FULL_PRECISION),
        StoredRows(pages.v, 0, pages.element, FULL_PRECISION),
    )


@jit
def clear_slots(args, b, place, first, last):
    """Write empty partial results to the slots of some parts."""
    for slot in range(first, last):
        item = item_at(args, b, place, 0)
        width, offset = item.cache.width, 4 * slot
        for r in range(item.rows.size):
            here = place_of(item.rows, r)
            floats(item.m + here * item.step + offset, 1)[0] = NOTHING
            floats(item.totals + here * item.step + offset, 1)[0] = ZERO
            fill(item.out + here * item.out_step + offset * width, width, ZERO)


@jit
def begin_run(args, b, place, run):
    """Clear the slots that no part of this run will write."""
    begin, stop = parts_of(args, b, run)
    if args.split.joined:
        clear_slots(args, b, place, 0, 1)
        return
    if run == 0:
        clear_slots(args, b, place, 0, min(begin, args.split.parts))
    if run == args.split.runs - 1:
        clear_slots(args, b, place, stop, args.split.parts)


@jit
def _new_tokens(index, b):
    """Return a sequence's length, and how many of its tokens are new."""
    starts = int32s(index.starts, index.sequences + 1)
    return np.int64(int32s(index.lengths, index.sequences)[b]), np.int64(starts[b + 1]) - starts[b]


@jit
def _item(args, b, place, slot, table, back, reach, ends):
    """Return the item of one place.

    back, reach  its queries see `reach` positions back from `back` positions before their own
    ends         the positions of the item, the last excluded
    """
    queries, split, out = args.queries, args.split, args.partials
    heads, width = queries.heads, queries.width
    (length, new), group, room = _new_tokens(args.pages, b), heads // queries.key_heads, padded(width)
    position, head, row = length - new - back, place % queries.key_heads, place // queries.key_heads * split.rows
    size = min(split.rows, new * group - row)
    # from the first position that the first row sees to the last row's own
    first = max(max(0, position + row // group - reach), ends[0])
    last = min(position + (row + size - 1) // group + 1, ends[1])
    query = np.int64(int32s(args.pages.starts, args.pages.sequences)[b]) * heads + head * group
    slot, nbytes = query * out.slots + slot, 4 * query * room
    rows = Rows(queries.q + nbytes, queries.unrotated + nbytes, room, heads, group, position, row, size, reach)
    cache = Cache(*table, queries.key_heads, head, width)
    along, across = args.calibration.along, args.calibration.across
    means = KeyMeans(along + 4 * head * width, across + 4 * head * width, args.calibration.table)
    sums = out.o + 4 * slot * width, 4 * out.slots * width
    return Item(rows, cache, means, first, last, *sums, out.m + 4 * slot, out.totals + 4 * slot, 4 * out.slots)


@jit
def place_of(rows, r):
    """Return which head a row is, counted from the first token's first."""
    return (rows.row + r) // rows.group * rows.heads + (rows.row + r) % rows.group


@jit
def run_of(cache, position, last):
    """Return the pool row that holds a position, and how many positions up to `last` are contiguous from there on."""
    number, slot = position // cache.page, position % cache.page
    page = np.int64(int32s(cache.table, number + 1)[number])
    return (page * cache.heads + cache.head) * cache.page + slot, min(cache.page - slot, last - position)


@jit
def row_nbytes(cache, stored):
    """Return the bytes of a stored row."""
    if stored.bits == FULL_PRECISION:
        return cache.width * size_of(stored.book)
    return (cache.width * stored.bits + 31) // 32 * 4
