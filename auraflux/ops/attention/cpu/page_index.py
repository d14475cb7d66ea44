"""Page tables, lengths and starts as kernels take them, once they are checked, and new rows copied into pages."""

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops.attention.cpu.launch_args import read_args
from auraflux.ops.attention.pages import Pages, spans
from auraflux.ops.simd.jit import Kernel, arguments, int32s, int64s, jit, octets, query, share, threads
from auraflux.validation import cached_on_instance

NO_WINDOW = 1 << 40  # positions; further back than any sequence is long
BYTES_PARALLEL = 1 << 18  # below this, waking the threads costs more than the work


class PageIndex(NamedTuple):
    """Location of sequences: tokens per page, addresses of page table, lengths and starts, and the number of sequences."""

    page: int
    table: int
    table_width: int
    lengths: int
    starts: int
    sequences: int


@jit
def _survey(table_at, width, lengths_at, starts_at, sequences, tokens, page, count, reach):
    """Return an upper bound of the pairs of a query and a key, or -1 if an entry leads outside the pages."""
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


@query(dry_run_answer=0)
def survey(args, job, jobs):
    """Run `_survey` for Python."""
    table, width, lengths, starts, sequences, tokens, page, count, reach = arguments(args, 9)
    int64s(args + 72, 1)[0] = _survey(table, width, lengths, starts, sequences, tokens, page, count, reach)


def count_pairs(pages: Any, starts: Tensor, tokens: int, reach: int | None) -> int:
    """Count the pairs of a query and a key; refuse tables, lengths and starts that lead outside the pages."""
    size, table, width, lengths, sequences, count = _places(pages)
    found = survey.ask(
        table, width, lengths, starts.data_ptr(), sequences, tokens, size, count, NO_WINDOW if reach is None else reach
    )
    if found < 0:
        spans(pages, starts, tokens, reach)
        raise InputError("the page table, lengths and starts do not fit each other.")
    return found


def index_of(pages: Any, starts: Tensor) -> PageIndex:
    """Return where the sequences of a call lie, in pages of any kind."""
    size, table, width, lengths, sequences, _ = _places(pages)
    return PageIndex(size, table, width, lengths, starts.data_ptr(), sequences)


@cached_on_instance
def _places(pages: Any) -> tuple[int, int, int, int, int, int]:
    """Return tokens in a page, address and width of the table, address of lengths, the numbers of sequences and of pages."""
    (count, size), (sequences, width) = pages.pool, pages.table.shape
    return size, pages.table.data_ptr(), width, pages.lengths.data_ptr(), sequences, count


@jit
def place_of(token, lengths_at, starts_at, sequences):
    """Return the sequence of a new token, and its position there."""
    starts, lengths = int32s(starts_at, sequences + 1), int32s(lengths_at, sequences)
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= token:
            low = middle
        else:
            high = middle
    return low, np.int64(lengths[low]) - starts[low + 1] + token


@jit
def _page_row(token, index):
    """Return page and slot of a new token."""
    b, position = place_of(token, index.lengths, index.starts, index.sequences)
    table = int32s(index.table + 4 * b * index.table_width, index.table_width)
    return np.int64(table[position // index.page]), position % index.page


class NewRows(NamedTuple):
    """New tokens: addresses of their rows and of the pool, bytes of a row, heads."""

    tokens: int
    source: int
    target: int
    nbytes: int
    heads: int


class AppendArgs(NamedTuple):
    """The launch arguments of an append."""

    new: NewRows
    pages: PageIndex


@Kernel
def _append(args_at, job, jobs):
    """Copy new tokens' rows, one for each head, to their places in the pages."""
    args = read_args(AppendArgs, args_at)
    new, nbytes, heads = args.new, args.new.nbytes, args.new.heads
    for token in share(new.tokens, job, jobs):
        number, slot = _page_row(token, args.pages)
        for head in range(heads):
            row = (number * heads + head) * args.pages.page + slot
            old, rows = octets(new.target + row * nbytes, nbytes), octets(new.source + (token * heads + head) * nbytes, nbytes)
            for i in range(nbytes):
                old[i] = rows[i]


def append_rows(pages: Pages, starts: Tensor, heads: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy new rows to the pools they belong to, in the pools' dtype."""
    tokens, index = pairs[0][0].shape[0], index_of(pages, starts)
    count_pairs(pages, starts, tokens, 0)
    for new, pool in pairs:
        rows = new if new.dtype is pool.dtype else new.to(pool.dtype)
        nbytes = pool.shape[-1] * pool.element_size()
        jobs = threads() if tokens * heads * nbytes >= BYTES_PARALLEL else 1
        _append(jobs, tokens, rows.data_ptr(), pool.data_ptr(), nbytes, heads, *index)
