"""Page tables, lengths and starts as kernels take them, of whatever kind the pages are: addresses, once they are safe."""

from typing import Any

import numpy as np
from torch import Tensor

from auraflux.errors import InputError
from auraflux.kinds import told_once
from auraflux.ops.attention.pages import spans
from auraflux.ops.simd.jit import arguments, int32s, int64s, jit, question

EVERYTHING = 1 << 40  # positions; further back than any sequence is long


@jit
def _survey(table_at, width, lengths_at, starts_at, sequences, tokens, page, count, reach):
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


@question(noted=0)
def survey(args, job, jobs):
    """Ask `_survey`."""
    table, width, lengths, starts, sequences, tokens, page, count, reach = arguments(args, 9)
    int64s(args + 72, 1)[0] = _survey(table, width, lengths, starts, sequences, tokens, page, count, reach)


def count_pairs(pages: Any, starts: Tensor, tokens: int, reach: int | None) -> int:
    """Count the pairs of a query and a key, once it is sure that no kernel will leave the pages, of whatever kind."""
    size, table, width, lengths, sequences, count = _places(pages)
    found = survey.ask(
        table, width, lengths, starts.data_ptr(), sequences, tokens, size, count, EVERYTHING if reach is None else reach
    )
    if found < 0:
        spans(pages, starts, tokens, reach)
        raise InputError("the page table, lengths and starts do not fit each other.")
    return found


def index_of(pages: Any, starts: Tensor) -> tuple[int, int, int, int, int, int]:
    """Rows in a page, addresses of the table, its width, addresses of lengths and starts, how many sequences."""
    size, table, width, lengths, sequences, _ = _places(pages)
    return size, table, width, lengths, starts.data_ptr(), sequences


@told_once
def _places(pages: Any) -> tuple[int, int, int, int, int, int]:
    """Rows in a page, address of the table, its width, address of lengths, how many sequences, how many pages."""
    (count, size), (sequences, width) = pages.pool, pages.table.shape
    return size, pages.table.data_ptr(), width, pages.lengths.data_ptr(), sequences, count


@jit
def place_of(token, lengths_at, starts_at, sequences):
    """The sequence of a new token, and its position there."""
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
def page_row(token, page, table, table_width, lengths_at, starts_at, sequences):
    """Page and slot of a new token."""
    b, position = place_of(token, lengths_at, starts_at, sequences)
    return np.int64(int32s(table + 4 * b * table_width, table_width)[position // page]), position % page
