"""How attention on codes is divided: an item is one key head of one sequence, some rows of queries, one part of the positions.

Every item leaves its unnormalised sum, highest score and sum of weights; `finish_rows` joins the parts and rotates them back.
"""

from functools import lru_cache

import numpy as np

from auraflux.ops._jit import Kernel, arguments, floats, int32s, real, share
from auraflux.ops.attention._softmax import NOTHING, merge_row
from auraflux.ops.turboquant._codec import turn_row
from auraflux.ops.turboquant._exact import ROWS, Cache, Rows, Side, attend_exact, padded
from auraflux.ops.turboquant._fast import attend_fast


@lru_cache
def build_queries(width: int) -> Kernel:
    room = (width + 31) // 32 * 32

    @Kernel
    def queries(args, job, jobs):
        """Rotate and scale rows of queries, filled up with zeros to whole chunks."""
        q, rows, table, scale, out, space, scratch = arguments(args, 7)
        for row in share(rows, job, jobs):
            turn_row(width, 0, q + 4 * row * width, table, out + 4 * row * room, space + job * scratch)
            turned, factor = floats(out + 4 * row * room, room), real(scale)
            for d in range(width):
                turned[d] *= factor
            for d in range(width, room):
                turned[d] = np.float32(0)

    return queries


@lru_cache
def build_attend(fast: int) -> Kernel:
    """Compile the loop over items; where it is fast, sequences with one query take rounded levels, queries and weights."""

    @Kernel
    def attend_items(args, job, jobs):
        (
            q, heads, width, page, table, table_width, lengths, starts, sequences,
            key_heads, key_codes, key_norms, key_book, key_bits, value_codes, value_norms, value_book, value_bits,
            reach, softcap, block, parts, o, m, totals, slots, space, scratch,
        ) = arguments(args, 28)  # fmt: skip
        group, room, item = heads // key_heads, padded(width), 0
        keys, values = Side(key_codes, key_norms, key_book, key_bits), Side(value_codes, value_norms, value_book, value_bits)
        for b in range(sequences):
            token = np.int64(int32s(starts, sequences + 1)[b])
            new, length = np.int64(int32s(starts, sequences + 1)[b + 1]) - token, np.int64(int32s(lengths, sequences)[b])
            oldest = max(0, length - new - reach)
            # parts are of `block` positions each, or share what is seen
            origin, step = (0, block) if block else (oldest, (length - oldest + parts - 1) // parts)
            for number in range((new * group + ROWS - 1) // ROWS * key_heads * parts):
                item += 1
                if item % jobs != job:
                    continue
                part, head, row = number % parts, number // parts % key_heads, number // parts // key_heads * ROWS
                count = min(ROWS, new * group - row)
                position = length - new
                # from the first position that the first row sees to the last row's own
                first = max(max(oldest, position + row // group - reach), origin + part * step)
                last = min(position + (row + count - 1) // group + 1, origin + (part + 1) * step)
                place = token * heads + head * group
                rows = Rows(q + 4 * place * room, room, heads, group, position, row, count, reach)
                cache = Cache(table + 4 * b * table_width, page, key_heads, head, width)
                slot = place * slots + part
                ends = (m + 4 * slot, totals + 4 * slot)
                out, out_step, work = o + 4 * slot * width, 4 * slots * width, space + job * scratch
                if fast and new == 1:
                    attend_fast(rows, cache, keys, values, real(softcap), first, last, out, out_step, ends, 4 * slots, work)
                else:
                    attend_exact(rows, cache, keys, values, real(softcap), first, last, out, out_step, ends, 4 * slots, work)

    return attend_items


@lru_cache
def build_finish(width: int) -> Kernel:
    @Kernel
    def finish_rows(args, job, jobs):
        """Join the parts of each row and rotate it back."""
        o, m, totals, rows, heads, parts, sinks, table, out, space, scratch = arguments(args, 11)
        sums = space + job * scratch
        joined = sums + 8 * width
        for row in share(rows, job, jobs):
            sink = floats(sinks, heads)[row % heads] if sinks else NOTHING
            ends = 4 * row * parts
            merge_row(o + ends * width, 4 * width, m + ends, totals + ends, 4, parts, width, sink, joined)
            turn_row(width, 1, joined, table, out + 4 * row * width, sums)

    return finish_rows
