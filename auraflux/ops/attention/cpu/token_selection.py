"""Sparse token selection (DSA): score all positions for some tokens, block by block, then take the best of each token.

All scores come from the same loops, so a selection depends on the token and its sequence alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.attention.cpu.dtypes import number_of, widen_row
from auraflux.ops.attention.cpu.launch_args import flatten, read_args
from auraflux.ops.attention.cpu.page_index import PageIndex, count_pairs, index_of, place_of
from auraflux.ops.attention.pages import RowPages
from auraflux.ops.attention.reference_token_selection import TokenSelection
from auraflux.ops.simd.jit import Kernel, as_float, floats, int32s, int64s, jit, share, threads, workspace

BLOCK = 64  # positions that a job scores at a time
MOST_SCORES = 1 << 22  # that are in memory at a time
PRODUCTS_PARALLEL = 1 << 16  # below this, waking the threads costs more than the work
DIGITS = 256
LARGEST, SIGN = 2**31 - 1, 2**31
INFINITY = 0x7F800000  # its bits
ZERO = np.float32(0)


def score_nbytes(heads: int, width: int) -> int:
    """Return the scratch bytes of a thread: transposed queries, sums of heads, a key in whole chunks of codes."""
    return -(-4 * (heads * width + heads + width + 32) // 64) * 64


@jit
def transpose_queries(q_at, heads, width, target):
    """Transpose a token's queries: [H, D] -> [D, H]."""
    q, out = floats(q_at, heads * width), floats(target, heads * width)
    for h in range(heads):
        for d in range(width):
            out[d * heads + h] = q[h * width + d]


@jit
def score_key(key_at, transposed, weights_at, heads, width, sums_at):
    """Return the weighted sum over heads of the positive products with a key."""
    key, sums, weights = floats(key_at, width), floats(sums_at, heads), floats(weights_at, heads)
    for h in range(heads):
        sums[h] = ZERO
    # four coordinates at a time, so that sums are loaded and stored a fourth as often
    whole = width // 4 * 4
    for d in range(0, whole, 4):
        a, b = floats(transposed + 4 * d * heads, heads), floats(transposed + 4 * (d + 1) * heads, heads)
        c, e = floats(transposed + 4 * (d + 2) * heads, heads), floats(transposed + 4 * (d + 3) * heads, heads)
        for h in range(heads):
            sums[h] += a[h] * key[d] + b[h] * key[d + 1] + c[h] * key[d + 2] + e[h] * key[d + 3]
    for d in range(whole, width):
        a = floats(transposed + 4 * d * heads, heads)
        for h in range(heads):
            sums[h] += a[h] * key[d]
    total = ZERO
    for h in range(heads):
        total += weights[h] * (ZERO if sums[h] <= ZERO else sums[h])
    return total


@jit
def row_of(table, page, position):
    """Return the row of a position in the pool, counted over all pages."""
    number = position // page
    return np.int64(int32s(table, number + 1)[number]) * page + position % page


class IndexerQueries(NamedTuple):
    """Queries [T, H, D] of the indexer and the weights [T, H] of its heads: addresses and sizes."""

    q: int
    weights: int
    heads: int
    width: int


class IndexerKeys(NamedTuple):
    """Keys of the indexer: address of the pool, the number of its dtype, bytes of a row."""

    pool: int
    element: int
    row_nbytes: int


class ScoredTokens(NamedTuple):
    """Tokens that are scored together.

    first, size    the first token, and how many
    capacity       scores of a token
    scores         address
    space, nbytes  address of scratch memory, and its bytes per thread
    """

    first: int
    size: int
    capacity: int
    scores: int
    space: int
    nbytes: int


class ScoreArgs(NamedTuple):
    """The launch arguments of scoring keys."""

    queries: IndexerQueries
    keys: IndexerKeys
    pages: PageIndex
    tokens: ScoredTokens


@Kernel
def _score_rows(args_at, job, jobs):
    """Score keys for some tokens."""
    args = read_args(ScoreArgs, args_at)
    queries, keys, index, tokens = args.queries, args.keys, args.pages, args.tokens
    heads, width, transposed = queries.heads, queries.width, tokens.space + job * tokens.nbytes
    sums, key = transposed + 4 * heads * width, transposed + 4 * heads * (width + 1)
    blocks, laid = (tokens.capacity + BLOCK - 1) // BLOCK, -1
    for item in range(job, tokens.size * blocks, jobs):
        token, begin = tokens.first + item // blocks, item % blocks * BLOCK
        b, own = place_of(token, index.lengths, index.starts, index.sequences)
        if begin > own:
            continue
        if token != laid:
            transpose_queries(queries.q + 4 * token * heads * width, heads, width, transposed)
            laid = token
        scores = floats(tokens.scores + 4 * (token - tokens.first) * tokens.capacity, tokens.capacity)
        for position in range(begin, min(begin + BLOCK, own + 1)):
            row = row_of(index.table + 4 * b * index.table_width, index.page, position)
            widen_row((keys.element, keys.pool + row * keys.row_nbytes, width, key))
            scores[position] = score_key(key, transposed, queries.weights + 4 * token * heads, heads, width, sums)


@jit
def _make_sortable(scores_at, count):
    """Convert floats to integers of the same order; zeros are equal, and not a number is the largest."""
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
    """Return the last of the `most` largest numbers, and how many are larger."""
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


class Selection(NamedTuple):
    """Output of the token selection: maximum per token, capacity, addresses of rows and of their counts."""

    most: int
    room: int
    rows: int
    counts: int


class SelectArgs(NamedTuple):
    """The launch arguments of selecting positions by their scores."""

    selection: Selection
    pages: PageIndex
    tokens: ScoredTokens


@Kernel
def _select(args_at, job, jobs):
    """Write the rows of the highest scores of each token, in the order of positions."""
    args = read_args(SelectArgs, args_at)
    index, tokens, most, room = args.pages, args.tokens, args.selection.most, args.selection.room
    bins, counts = int64s(tokens.space + 8 * DIGITS * job, DIGITS), args.selection.counts
    for i in share(tokens.size, job, jobs):
        token = tokens.first + i
        b, own = place_of(token, index.lengths, index.starts, index.sequences)
        table, mine, seen = index.table + 4 * b * index.table_width, tokens.scores + 4 * i * tokens.capacity, own + 1
        keys, rows = int32s(mine, seen), int32s(args.selection.rows + 4 * token * room, room)
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
                rows[taken] = row_of(table, index.page, position)
                taken += 1
        int32s(counts, token + 1)[token] = taken
        for n in range(taken, room):
            rows[n] = 0


# writes the scores of some tokens with a number of threads
Scoring = Callable[[int, ScoredTokens], None]


def select(q: Tensor, pages: RowPages, starts: Tensor, most: int, score: Scoring) -> TokenSelection:
    """Score positions for a piece of the tokens at a time, and select; pages may be of any kind."""
    tokens, heads, width = q.shape
    pairs, capacity = count_pairs(pages, starts, tokens, None), pages.table.shape[1] * pages.pool[1]
    room, index = min(most, capacity), index_of(pages, starts)
    found = TokenSelection(torch.empty(tokens, room, dtype=torch.int32), torch.empty(tokens, dtype=torch.int32))
    jobs, nbytes = threads() if pairs * heads * width >= PRODUCTS_PARALLEL else 1, score_nbytes(heads, width)
    piece = max(1, min(tokens, MOST_SCORES // max(1, capacity)))
    scores = torch.empty(piece * capacity)
    selection = Selection(most, room, found.rows.data_ptr(), found.lengths.data_ptr())
    for first in range(0, tokens, piece):
        count, space = min(piece, tokens - first), workspace(jobs * max(nbytes, 8 * DIGITS))
        scored = ScoredTokens(first, count, capacity, scores.data_ptr(), space, nbytes)
        score(jobs, scored)
        _select(jobs, *flatten(SelectArgs(selection, index, scored)))
    return found


def choose_positions(q: Tensor, weights: Tensor, pages: RowPages, starts: Tensor, most: int) -> TokenSelection:
    """Select the `most` best positions of each token."""
    wide, shares, pool = as_float(q), as_float(weights), pages.rows
    queries = IndexerQueries(wide.data_ptr(), shares.data_ptr(), *q.shape[1:])
    keys = IndexerKeys(pool.data_ptr(), number_of(pool.dtype), pool.shape[2] * pool.element_size())
    index = index_of(pages, starts)

    def score(jobs: int, tokens: ScoredTokens) -> None:
        _score_rows(jobs, *flatten(ScoreArgs(queries, keys, index, tokens)))

    return select(q, pages, starts, most, score)
