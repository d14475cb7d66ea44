"""How attention on codes is divided: an item is one key head of one sequence, some rows of queries, a run of parts.

A part is `block` positions from a multiple of `block` on. It is summed up from nothing and joined to the parts before it, at
once where an item has them all, else by whoever finishes a row: the order of a row's sums does not depend on who makes them.
"""

from typing import NamedTuple

import numpy as np

from auraflux.ops.attention.cpu.decode_tiles import fetch_add
from auraflux.ops.attention.cpu.page_index import EVERYTHING
from auraflux.ops.simd.jit import arguments, floats, int32s, jit
from auraflux.ops.simd.softmax import NOTHING, ZERO, fill
from auraflux.ops.turboquant.cpu.centres import Centres
from auraflux.ops.turboquant.cpu.kept_rows import Kept, size_of
from auraflux.ops.turboquant.cpu.levels import CHUNK

PLAIN = 0  # as bits: rows are as they are


class Side(NamedTuple):
    """Keys or values.

    codes, norms  addresses; of plain rows the first alone
    book          address of the levels; of plain rows the number of their dtype
    bits          of a code, or PLAIN
    """

    codes: int
    norms: int
    book: int
    bits: int


class Step(NamedTuple):
    """A call: addresses, sizes, and two floats that arrive as bits.

    q               rotated and scaled, rows of `padded(width)` floats
    page            tokens in a page
    reach           how far back a query sees
    softcap         0 for none
    threshold       values with a smaller share of the weights need not be read
    block           positions of a part
    parts, runs     slots for parts that each row has; items that share the parts of a row
    joined          whether an item joins its parts in the first slot: there is one run
    rows            most rows of queries that an item has
    taken           address of the number of items that are taken
    o, m, totals    sums, highest scores and sums of weights, `slots` for each row
    space, scratch  what jobs work in, and how many bytes each
    unrotated        the queries scaled only, laid out like q, where keys have centres
    along, across, centres  of the keys of all heads, see `Centres`
    plain           how many items read some positions as they are, of a block of queries: none, one, or one for each key head;
                    the slot after those of parts is theirs
    first, newest   codes are read from position `first` on, and of those `newest` and more before a query
    key_scores, transpose_keys, transposed_scores, add_values  addresses of loops, see `attend_int8_tiles.Loops`
    attend_kept     address of the kernel that reads what is kept as it is
    """

    q: int
    heads: int
    width: int
    page: int
    table: int
    table_width: int
    lengths: int
    starts: int
    sequences: int
    key_heads: int
    key_codes: int
    key_norms: int
    key_book: int
    key_bits: int
    value_codes: int
    value_norms: int
    value_book: int
    value_bits: int
    reach: int
    softcap: float
    threshold: float
    block: int
    parts: int
    runs: int
    joined: int
    rows: int
    taken: int
    o: int
    m: int
    totals: int
    slots: int
    space: int
    scratch: int
    unrotated: int
    along: int
    across: int
    centres: int
    plain: int
    first: int
    newest: int
    key_scores: int
    transpose_keys: int
    transposed_scores: int
    add_values: int
    attend_kept: int


class Cache(NamedTuple):
    """One sequence's part of a head: its row of the page table, rows in a page, heads, which head, and the width."""

    table: int
    page: int
    heads: int
    head: int
    width: int


class Rows(NamedTuple):
    """Queries of one sequence and key head: row r is head r % group of the token at `position` + r // group.

    q          address of the first token's first head, rows of `room` floats, `heads` of them a token
    unrotated   the same, not rotated, where keys have centres
    position   of the first new token, or how far before it a query may be thought to stand
    row, size  the first of the rows meant, and how many
    reach      how far back from there a query sees
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
    """A piece of work: its rows see positions [first, last).

    out        address of the sum of the first token's first head, the next head's `out_step` bytes on
    m, totals  addresses of its highest score and its sum of weights, the next head's `step` bytes on
    """

    rows: Rows
    cache: Cache
    centres: Centres
    first: int
    last: int
    out: int
    out_step: int
    m: int
    totals: int
    step: int


FIELDS, KEPT = len(Step._fields), len(Kept._fields)
KEPT_AT = 8 * FIELDS


@jit
def opened(args):
    """A kernel's arguments."""
    return Step(*arguments(args, FIELDS))


@jit
def kept_pages(args):
    """Where the first positions are kept, and the newest: what comes after a step."""
    return Kept(*arguments(args + KEPT_AT, KEPT)), Kept(*arguments(args + KEPT_AT + 8 * KEPT, KEPT))


@jit
def padded(width):
    return (width + CHUNK - 1) // CHUNK * CHUNK


@jit
def sides(step):
    keys = Side(step.key_codes, step.key_norms, step.key_book, step.key_bits)
    return keys, Side(step.value_codes, step.value_norms, step.value_book, step.value_bits)


@jit
def plain_sides(kept):
    return Side(kept.k, 0, kept.element, PLAIN), Side(kept.v, 0, kept.element, PLAIN)


@jit
def count_items(step, b):
    """How many items a sequence makes, of codes and in all."""
    new = _new_tokens(step, b)[1]
    blocks = (new * (step.heads // step.key_heads) + step.rows - 1) // step.rows
    coded = blocks * step.key_heads * step.runs
    return coded, coded + blocks * step.plain


@jit
def take(step, b, before):
    """Take the next item, of sequence b or a later one: its sequence, how many items those before have, and its number there.

    A sequence past the last says that there is none.
    """
    number = fetch_add(step.taken, 1)
    while b < step.sequences:
        count = count_items(step, b)[1]
        if number < before + count:
            break
        b, before = b + 1, before + count
    return b, before, number - before


@jit
def place_and_run(step, b, number):
    """The rows and the run of an item of codes: first runs come first, the last may be short."""
    places = count_items(step, b)[0] // step.runs
    return number % places, number // places


@jit
def parts_of(step, b, run):
    """The first and the last part of a run, the last excluded, of those that a sequence's new tokens may see."""
    length, new = _new_tokens(step, b)
    origin = max(step.first, length - new - step.reach) // step.block
    count = max((length - 1) // step.block + 1 - origin, 0)
    return origin + run * count // step.runs, origin + (run + 1) * count // step.runs


@jit
def item_at(step, b, place, part):
    """A part of a sequence's codes. Its queries do as if they stood `newest` positions before their own."""
    table = step.table + 4 * b * step.table_width, step.page
    ends = max(step.first, part * step.block), (part + 1) * step.block
    slot = 0 if step.joined else part
    return _item(step, b, place, slot, table, step.newest, step.reach - step.newest, ends)


@jit
def clear_slots(step, b, place, first, last):
    """Leave nothing in the slots of some parts."""
    for slot in range(first, last):
        item = item_at(step, b, place, 0)
        width, offset = item.cache.width, 4 * slot
        for r in range(item.rows.size):
            here = place_of(item.rows, r)
            floats(item.m + here * item.step + offset, 1)[0] = NOTHING
            floats(item.totals + here * item.step + offset, 1)[0] = ZERO
            fill(item.out + here * item.out_step + offset * width, width, ZERO)


@jit
def begin_run(step, b, place, run):
    """Leave nothing where no part of this run will be left."""
    begin, stop = parts_of(step, b, run)
    if step.joined:
        clear_slots(step, b, place, 0, 1)
        return
    if run == 0:
        clear_slots(step, b, place, 0, min(begin, step.parts))
    if run == step.runs - 1:
        clear_slots(step, b, place, stop, step.parts)


@jit
def plain_items(step, b, place, oldest, newest):
    """What the rows of one place read as it is, of the first positions and of the newest."""
    table = oldest.table + 4 * b * oldest.table_width, oldest.page
    first = _item(step, b, place, step.parts, table, 0, step.reach, (0, step.first))
    table = newest.table + 4 * b * newest.table_width, newest.page
    ends = step.first, EVERYTHING if step.newest else 0
    return first, _item(step, b, place, step.parts, table, 0, min(step.reach, step.newest - 1), ends)


@jit
def _new_tokens(step, b):
    """A sequence's length, and how many of its tokens are new."""
    starts = int32s(step.starts, step.sequences + 1)
    return np.int64(int32s(step.lengths, step.sequences)[b]), np.int64(starts[b + 1]) - starts[b]


@jit
def _item(step, b, place, slot, table, back, reach, ends):
    """The rows of one place, which are a key head and a block of queries.

    back, reach  they see so far back from so many positions before their own
    ends         of the positions meant, the last excluded
    """
    (length, new), group, room = _new_tokens(step, b), step.heads // step.key_heads, padded(step.width)
    position, head, row = length - new - back, place % step.key_heads, place // step.key_heads * step.rows
    size = min(step.rows, new * group - row)
    # from the first position that the first row sees to the last row's own
    first = max(max(0, position + row // group - reach), ends[0])
    last = min(position + (row + size - 1) // group + 1, ends[1])
    query = np.int64(int32s(step.starts, step.sequences)[b]) * step.heads + head * group
    slot, nbytes = query * step.slots + slot, 4 * query * room
    rows = Rows(step.q + nbytes, step.unrotated + nbytes, room, step.heads, group, position, row, size, reach)
    cache = Cache(*table, step.key_heads, head, step.width)
    centres = Centres(step.along + 4 * head * step.width, step.across + 4 * head * step.width, step.centres)
    sums = step.o + 4 * slot * step.width, 4 * step.slots * step.width
    return Item(rows, cache, centres, first, last, *sums, step.m + 4 * slot, step.totals + 4 * slot, 4 * step.slots)


@jit
def place_of(rows, r):
    """Which head a row is, counted from the first token's first."""
    return (rows.row + r) // rows.group * rows.heads + (rows.row + r) % rows.group


@jit
def run_of(cache, position, last):
    """The row of the pool that holds a position, and how many up to `last` lie side by side from there on."""
    number, slot = position // cache.page, position % cache.page
    page = np.int64(int32s(cache.table, number + 1)[number])
    return (page * cache.heads + cache.head) * cache.page + slot, min(cache.page - slot, last - position)


@jit
def row_nbytes(cache, side):
    if side.bits == PLAIN:
        return cache.width * size_of(side.book)
    return (cache.width * side.bits + 31) // 32 * 4
