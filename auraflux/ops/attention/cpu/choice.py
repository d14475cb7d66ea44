"""Choosing positions on a CPU: all scores of some tokens first, a block of positions at a time, then the best of each token.

A score is the same few loops whoever computes it, so a choice depends on the token and its text alone.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.attention.cpu.decode_tiles import number_of, widen_row
from auraflux.ops.attention.cpu.page_index import count_pairs, index_of, place_of
from auraflux.ops.attention.pages import RowPages
from auraflux.ops.attention.reference_choice import Chosen
from auraflux.ops.simd.jit import Kernel, arguments, as_float, floats, int32s, int64s, jit, share, threads, workspace

BLOCK = 64  # positions that a job scores at a time
MOST_SCORES = 1 << 22  # that are in memory at a time
PRODUCTS_PARALLEL = 1 << 16  # below this, waking the threads costs more than the work
DIGITS = 256
LARGEST, SIGN = 2**31 - 1, 2**31
INFINITY = 0x7F800000  # its bits
ZERO = np.float32(0)


def score_nbytes(heads: int, width: int) -> int:
    """What one job needs: queries turned over, sums of heads, a key in whole chunks of codes."""
    return -(-4 * (heads * width + heads + width + 32) // 64) * 64


@jit
def transpose_queries(q_at, heads, width, target):
    """Lay a token's queries out by coordinates: [H, D] -> [D, H]."""
    q, out = floats(q_at, heads * width), floats(target, heads * width)
    for h in range(heads):
        for d in range(width):
            out[d * heads + h] = q[h * width + d]


@jit
def score_key(key_at, turned, weights_at, heads, width, sums_at):
    """The weighted sum of what is positive of the heads' products with a key."""
    key, sums, weights = floats(key_at, width), floats(sums_at, heads), floats(weights_at, heads)
    for h in range(heads):
        sums[h] = ZERO
    # four coordinates at a time, so that sums are loaded and stored a fourth as often
    whole = width // 4 * 4
    for d in range(0, whole, 4):
        a, b = floats(turned + 4 * d * heads, heads), floats(turned + 4 * (d + 1) * heads, heads)
        c, e = floats(turned + 4 * (d + 2) * heads, heads), floats(turned + 4 * (d + 3) * heads, heads)
        for h in range(heads):
            sums[h] += a[h] * key[d] + b[h] * key[d + 1] + c[h] * key[d + 2] + e[h] * key[d + 3]
    for d in range(whole, width):
        a = floats(turned + 4 * d * heads, heads)
        for h in range(heads):
            sums[h] += a[h] * key[d]
    total = ZERO
    for h in range(heads):
        total += weights[h] * (ZERO if sums[h] <= ZERO else sums[h])
    return total


@jit
def row_of(table, page, position):
    """The row of a position in the pool, counted over all pages."""
    number = position // page
    return np.int64(int32s(table, number + 1)[number]) * page + position % page


@Kernel
def _score_rows(args, job, jobs):
    (
        q, weights, heads, width, pool, element, row_nbytes,
        page, table, table_width, lengths, starts, sequences,
        first, count, capacity, out, space, scratch,
    ) = arguments(args, 19)  # fmt: skip
    turned = space + job * scratch
    sums, key = turned + 4 * heads * width, turned + 4 * heads * (width + 1)
    blocks, laid = (capacity + BLOCK - 1) // BLOCK, -1
    for item in range(job, count * blocks, jobs):
        token, begin = first + item // blocks, item % blocks * BLOCK
        b, own = place_of(token, lengths, starts, sequences)
        if begin > own:
            continue
        if token != laid:
            transpose_queries(q + 4 * token * heads * width, heads, width, turned)
            laid = token
        scores = floats(out + 4 * (token - first) * capacity, capacity)
        for position in range(begin, min(begin + BLOCK, own + 1)):
            row = row_of(table + 4 * b * table_width, page, position)
            widen_row((element, pool + row * row_nbytes, width, key))
            scores[position] = score_key(key, turned, weights + 4 * token * heads, heads, width, sums)


@jit
def _make_sortable(scores_at, count):
    """Turn floats into whole numbers of the same order; zeros are equal, and not a number is the largest."""
    bits = int32s(scores_at, count)
    for i in range(count):
        value = np.int64(bits[i])
        size = value & LARGEST
        if size > INFINITY:
            value = LARGEST
        elif value < 0:
            value = -size
        bits[i] = np.int32(value)


@jit
def _find_last(keys, count, most, bins):
    """The last of the `most` largest numbers, and how many are larger."""
    prefix, larger = 0, 0
    for shift in (24, 16, 8, 0):
        for digit in range(DIGITS):
            bins[digit] = 0
        for i in range(count):
            value = np.int64(keys[i]) + SIGN
            if value >> (shift + 8) == prefix:
                bins[(value >> shift) & (DIGITS - 1)] += 1
        digit = DIGITS - 1
        while larger + bins[digit] < most:
            larger += bins[digit]
            digit -= 1
        prefix = prefix * DIGITS + digit
    return prefix - SIGN, larger


@Kernel
def _pick(args, job, jobs):
    (
        scores, most, room, page, table, table_width, lengths, starts, sequences,
        first, count, capacity, rows_at, counts_at, space,
    ) = arguments(args, 15)  # fmt: skip
    bins = int64s(space + 8 * DIGITS * job, DIGITS)
    for i in share(count, job, jobs):
        b, own = place_of(first + i, lengths, starts, sequences)
        here, mine, seen = table + 4 * b * table_width, scores + 4 * i * capacity, own + 1
        keys, rows = int32s(mine, seen), int32s(rows_at + 4 * (first + i) * room, room)
        last, equal = np.int64(-SIGN), np.int64(0)
        if seen > most:
            _make_sortable(mine, seen)
            last, larger = _find_last(keys, seen, most, bins)
            equal = most - larger
        taken = 0
        for position in range(seen):
            wanted = seen <= most or keys[position] > last
            if not wanted and keys[position] == last and equal > 0:
                wanted, equal = True, equal - 1
            if wanted:
                rows[taken] = row_of(here, page, position)
                taken += 1
        int32s(counts_at, first + i + 1)[first + i] = taken
        for n in range(taken, room):
            rows[n] = 0


# (jobs, the first of some tokens, how many, positions there is room for, address of their scores, of scratch, its bytes a job)
Scoring = Callable[[int, int, int, int, int, int, int], None]


def choose(q: Tensor, pages: RowPages, starts: Tensor, most: int, score: Scoring) -> Chosen:
    """Score positions by pieces of tokens, and choose; pages may be of any kind."""
    tokens, heads, width = q.shape
    pairs, capacity = count_pairs(pages, starts, tokens, None), pages.table.shape[1] * pages.pool[1]
    room = min(most, capacity)
    found = Chosen(torch.empty(tokens, room, dtype=torch.int32), torch.empty(tokens, dtype=torch.int32))
    jobs, scratch = threads() if pairs * heads * width >= PRODUCTS_PARALLEL else 1, score_nbytes(heads, width)
    piece = max(1, min(tokens, MOST_SCORES // max(1, capacity)))
    scores = torch.empty(piece * capacity)
    for first in range(0, tokens, piece):
        count, space = min(piece, tokens - first), workspace(jobs * max(scratch, 8 * DIGITS))
        score(jobs, first, count, capacity, scores.data_ptr(), space, scratch)
        place = *index_of(pages, starts), first, count, capacity
        _pick(jobs, scores.data_ptr(), most, room, *place, found.rows.data_ptr(), found.lengths.data_ptr(), space)
    return found


def choose_positions(q: Tensor, weights: Tensor, pages: RowPages, starts: Tensor, most: int) -> Chosen:
    wide, shares, keys = as_float(q), as_float(weights), pages.rows
    asked = wide.data_ptr(), shares.data_ptr(), *q.shape[1:]
    stored = keys.data_ptr(), number_of(keys.dtype), keys.shape[2] * keys.element_size(), *index_of(pages, starts)
    return choose(q, pages, starts, most, lambda jobs, *piece: _score_rows(jobs, *asked, *stored, *piece))
