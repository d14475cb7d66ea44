"""Compressed windows on CPU: one job computes a complete entry, so that entries are batch-invariant.

Torch's softmax over an axis other than the last is not: its rounding depends on the number of rows.
"""

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops.attention.cpu import append_keys
from auraflux.ops.attention.cpu.dtypes import number_of, widen_row
from auraflux.ops.attention.cpu.page_index import count_pairs, index_of, place_of
from auraflux.ops.attention.pages import RowPages, check_pages, spans
from auraflux.ops.norm.cpu import rms_norm
from auraflux.ops.rope.cpu import rope
from auraflux.ops.simd.jit import (
    Kernel,
    arguments,
    floats,
    int32s,
    int64s,
    jit,
    like,
    octets,
    query,
    share,
    threads,
    workspace,
)
from auraflux.ops.simd.math import exp

PARALLEL_FROM = 1 << 14  # elements; below this, waking the threads costs more than the work
LOWEST = np.float32(-np.inf)
ZERO = np.float32(0)


@jit
def _row_of(table, page, position):
    """Return the row of a position in the pool, counted over all pages."""
    number = position // page
    return np.int64(int32s(table, number + 1)[number]) * page + position % page


@jit
def _inside(table_at, width, page, count, first, last):
    """Return whether the pages of positions [first, last) are in the table and in the pool."""
    if (last + page - 1) // page > width:
        return False
    table, outside = int32s(table_at, width), 0
    for i in range(first // page, (last + page - 1) // page):
        if table[i] < 0 or table[i] >= count:
            outside += 1
    return outside == 0


@query(dry_run_answer=0)
def survey(args, job, jobs):
    """Return 0, or -1 if a window or an entry lies outside its pages."""
    (
        page, table, table_width, lengths_at, starts_at, sequences, pages, entry_page, entry_table, entry_width, entry_pages,
        rate, halves,
    ) = arguments(args, 13)  # fmt: skip
    lengths, starts, answer = int32s(lengths_at, sequences), int32s(starts_at, sequences + 1), 0
    for b in range(sequences):
        length, new = np.int64(lengths[b]), np.int64(starts[b + 1]) - starts[b]
        first, last = (length - new) // rate, length // rate
        if new == 0 or first == last:
            continue
        before = min(first, halves - 1)
        rows = _inside(table + 4 * b * table_width, table_width, page, pages, (first - before) * rate, last * rate)
        if not (rows and _inside(entry_table + 4 * b * entry_width, entry_width, entry_page, entry_pages, first, last)):
            answer = -1
    int64s(args + 104, 1)[0] = answer


@jit
def _closed(token, rate, lengths, starts_at, sequences):
    """Return a token's sequence, the window that it closes or -1, and that window's row among all that the call closes."""
    b, position = place_of(token, lengths, starts_at, sequences)
    if (position + 1) % rate != 0:
        return b, np.int64(-1), np.int64(0)
    # a sequence closes at most one window more than its new tokens fill by themselves
    start, window = np.int64(int32s(starts_at, sequences)[b]), position // rate
    first = (position - (token - start)) // rate
    return b, window, start // rate + b + window - first


@jit
def _raise_highest(gates, bias, highest, width):
    for c in range(width):
        highest[c] = max(highest[c], gates[c] + bias[c])


@jit
def _add_token(values, gates, bias, highest, total, out, width):
    for c in range(width):
        weight = exp(gates[c] + bias[c] - highest[c])
        total[c] += weight
        out[c] += weight * values[c]


@Kernel
def _means(args, job, jobs):
    (
        tokens, pool, element, row_nbytes, page, table, table_width, lengths, starts, sequences,
        bias_at, rate, width, halves, made_at, positions, space, scratch,
    ) = arguments(args, 18)  # fmt: skip
    wide, row_at = halves * width, space + job * scratch
    highest = floats(row_at + 8 * wide, width)
    total = floats(row_at + 8 * wide + 4 * width, width)
    for token in share(tokens, job, jobs):
        b, window, slot = _closed(token, rate, lengths, starts, sequences)
        if window < 0:
            continue
        here, out = table + 4 * b * table_width, floats(made_at + 4 * slot * width, width)
        highest[:], total[:], out[:] = LOWEST, ZERO, ZERO
        int64s(positions, slot + 1)[slot] = window * rate
        # the first half of a row is for the next window
        first = max(window - halves + 1, 0) * rate
        for step in range(2):
            for position in range(first, (window + 1) * rate):
                half = halves - 1 if position >= window * rate else 0
                widen_row((element, pool + _row_of(here, page, position) * row_nbytes, 2 * wide, row_at))
                values = floats(row_at + 4 * half * width, width)
                gates = floats(row_at + 4 * (wide + half * width), width)
                bias = floats(bias_at + 4 * (position % rate * wide + half * width), width)
                if step == 0:
                    _raise_highest(gates, bias, highest, width)
                else:
                    _add_token(values, gates, bias, highest, total, out, width)
        for c in range(width):
            out[c] /= total[c]


@Kernel
def _store(args, job, jobs):
    (
        tokens, source, pool, row_nbytes, page, table, table_width, lengths, starts, sequences, rate,
    ) = arguments(args, 11)  # fmt: skip
    for token in share(tokens, job, jobs):
        b, window, slot = _closed(token, rate, lengths, starts, sequences)
        if window < 0:
            continue
        entry = octets(pool + _row_of(table + 4 * b * table_width, page, window) * row_nbytes, row_nbytes)
        made = octets(source + slot * row_nbytes, row_nbytes)
        for i in range(row_nbytes):
            entry[i] = made[i]


def compress_windows(
    x: Tensor, rows: RowPages, starts: Tensor, entries: RowPages, bias: Tensor, norm: Tensor, eps: float, inv_freq: Tensor,
    interleaved: bool = True,
) -> None:  # fmt: skip
    tokens, (rate, wide), width = len(x), bias.shape, entries.rows.shape[2]
    pool, element, sequences = rows.rows, number_of(rows.rows.dtype), len(starts) - 1
    _check_windows(rows, starts, entries, tokens, rate, wide // width)
    append_keys(x, rows, starts)
    most = tokens // rate + sequences
    made, positions = torch.zeros(most, width), torch.zeros(most, dtype=torch.int64)
    jobs, scratch = threads() if x.numel() >= PARALLEL_FROM else 1, -(-8 * (wide + width) // 64) * 64
    stored = pool.data_ptr(), element, pool.shape[2] * pool.element_size(), *index_of(rows, starts)
    target = made.data_ptr(), positions.data_ptr(), workspace(jobs * scratch), scratch
    _means(jobs, tokens, *stored, bias.data_ptr(), rate, width, wide // width, *target)
    turned = rope(rms_norm(made, norm, eps).unsqueeze(1), inv_freq, positions, 1.0, interleaved)
    out, room = like(turned, entries.rows), entries.rows
    place = entries.pool[1], entries.table.data_ptr(), entries.table.shape[1], rows.lengths.data_ptr(), starts.data_ptr()
    _store(1, tokens, out.data_ptr(), room.data_ptr(), width * room.element_size(), *place, sequences, rate)


def _check_windows(rows: RowPages, starts: Tensor, entries: RowPages, tokens: int, rate: int, halves: int) -> None:
    """Refuse windows and entries outside their pages."""
    count_pairs(rows, starts, tokens, 0)
    written = entries.pool[1], entries.table.data_ptr(), entries.table.shape[1], entries.pool[0]
    if survey.ask(*index_of(rows, starts), rows.pool[0], *written, rate, halves) == 0:
        return
    for b, _, new, _, length in spans(rows, starts, tokens, 0):
        first, last = (length - new) // rate, length // rate
        if first < last:
            check_pages(rows, b, (first - min(first, halves - 1)) * rate, last * rate)
            check_pages(entries, b, first, last)
    raise InputError("the page tables, lengths and starts are inconsistent.")
