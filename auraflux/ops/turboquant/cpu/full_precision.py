"""The full-precision part of a quantized KV cache: sink tokens and recent window, their pages and their dtypes."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops.attention.cpu.dtypes import FLOAT, LANES, NUMBERS, WIDENS_HALVES, number_of, widen_row
from auraflux.ops.attention.cpu.page_index import survey
from auraflux.ops.attention.pages import KVPages, spans
from auraflux.ops.simd.jit import arguments, int32s, int64s, jit, query
from auraflux.ops.simd.softmax import ZERO, fill
from auraflux.ops.simd.vectors import F32, I16, I32, at, kernel, load, splat, store, vector
from auraflux.ops.turboquant.full_precision import RowPages
from auraflux.ops.turboquant.pages import CodePages, LatentCodes
from auraflux.validation import cached_on_instance


class FullPrecision(NamedTuple):
    """Pages of the sink tokens, or of the recent window.

    positions  how many tokens; 0 for none
    k, v       addresses of the pools, and `table` of the page table; latents have one pool, which is both
    page       tokens in a page
    element    the number of the dtype
    """

    positions: int
    k: int
    v: int
    table: int
    table_width: int
    page: int
    element: int


NO_ROWS = FullPrecision(0, 0, 0, 0, 0, 1, FLOAT)


@cached_on_instance
def full_precision_of(pages: CodePages | LatentCodes) -> tuple[FullPrecision, FullPrecision]:
    """Return the sink tokens and the recent window."""
    stored = pages.full_precision
    if stored is None:
        return NO_ROWS, NO_ROWS
    return _pages_of(stored.sink_tokens, stored.head), _pages_of(stored.recent_window, stored.recent)


def _pages_of(count: int, pages: KVPages | RowPages | None) -> FullPrecision:
    if pages is None:
        return NO_ROWS
    k, v = (pages.rows, pages.rows) if isinstance(pages, RowPages) else (pages.k, pages.v)
    addresses = k.data_ptr(), v.data_ptr(), pages.table.data_ptr()
    return FullPrecision(count, *addresses, pages.table.shape[1], pages.pool[1], number_of(k.dtype))


def check_full_precision(pages: CodePages | LatentCodes, starts: Tensor, tokens: int, reach: int) -> None:
    """Refuse tables that lead outside the pages.

    reach  how many positions of the recent window before its first new token a sequence touches
    """
    if pages.full_precision is None:
        return
    sequences, lengths = len(pages.lengths), pages.lengths.data_ptr()
    if (head := pages.full_precision.head) is not None:
        wrong = _survey_first.ask(head.table.data_ptr(), head.table.shape[1], lengths, starts.data_ptr(), sequences, *head.pool)
        if wrong >= 0:
            b, i = divmod(wrong, head.table.shape[1])
            named = f"page {i} of the first positions of sequence {b} is {int(head.table[b, i])}"
            raise InputError(f"{named} in the table; the pool has {head.pool[0]} pages.")
    if (recent := pages.full_precision.recent) is not None:
        count, page = recent.pool
        index = recent.table.data_ptr(), recent.table.shape[1], lengths, starts.data_ptr()
        if survey.ask(*index, sequences, tokens, page, count, reach) < 0:
            moved: Any = replace(recent, lengths=pages.lengths)
            spans(moved, starts, tokens, reach)
            raise InputError("the page table of recent positions, lengths and starts do not fit each other.")


@jit
def _first_outside(table_at, width, lengths_at, starts_at, sequences, count, page):
    """Return the number of a table entry that leads outside the pages, or -1."""
    lengths, starts, table = (
        int32s(lengths_at, sequences),
        int32s(starts_at, sequences + 1),
        int32s(table_at, sequences * width),
    )
    for b in range(sequences):
        if starts[b + 1] > starts[b]:
            for i in range(min((lengths[b] + page - 1) // page, width)):
                if table[b * width + i] < 0 or table[b * width + i] >= count:
                    return b * width + i
    return -1


@query(dry_run_answer=-1)
def _survey_first(args, job, jobs):
    """Run `_first_outside` for Python."""
    table, width, lengths, starts, sequences, count, page = arguments(args, 7)
    int64s(args + 56, 1)[0] = _first_outside(table, width, lengths, starts, sequences, count, page)


@jit
def size_of(element):
    """Return the bytes of a number."""
    return 4 if element == FLOAT else 2


@jit
def widen_rows(source, element, width, count, target, stride):
    """Copy contiguous rows to float32 with a stride of `stride` floats and pad each with zeros."""
    for i in range(count):
        here = target + 4 * i * stride
        widen_row((element, source + i * width * size_of(element), width, here))
        fill(here + 4 * width, stride - width, ZERO)


@jit
def row_address(pages, side, b, position, heads, head, width):
    """Return the address of the row of a position's key or (side 1) value."""
    number = np.int64(int32s(pages.table + 4 * b * pages.table_width, pages.table_width)[position // pages.page])
    place = (number * heads + head) * pages.page + position % pages.page
    return (pages.v if side else pages.k) + place * width * size_of(pages.element)


@jit
def store_row(pages, side, b, position, heads, head, source, width):
    """Write a row of float32, a key or (side 1) a value, to its position's place."""
    _narrow_row((pages.element, source, width, row_address(pages, side, b, position, heads, head, width)))


@kernel(0)
def _narrow_row(b, number, source, width, target):
    """Round `width` floats to the dtype that `number` stands for, halves to even."""
    whole = b.sdiv(width, at(LANES))
    for dtype, mine in NUMBERS.items():
        if dtype is torch.float16 and not WIDENS_HALVES:
            continue
        size = dtype.itemsize
        with b.if_then(b.icmp_signed("==", number, at(mine))):
            with cgutils.for_range(b, whole) as loop:
                x = load(b, source, b.mul(loop.index, at(4 * LANES)), vector(F32, LANES))
                store(b, _narrow(b, dtype, x), target, b.mul(loop.index, at(size * LANES)))
            with cgutils.for_range_slice(b, b.mul(whole, at(LANES)), width, at(1)) as (index, _):
                x = load(b, source, b.mul(index, at(4)), vector(F32, 1))
                store(b, _narrow(b, dtype, x), target, b.mul(index, at(size)))


def _narrow(b, dtype, x):
    """Round a vector of float32 to another dtype."""
    if dtype is torch.float32:
        return x
    if dtype is torch.float16:
        return b.fptrunc(x, vector(ir.HalfType(), x.type.count))
    wide = vector(I32, x.type.count)
    bits = b.bitcast(x, wide)
    odd = b.and_(b.lshr(bits, splat(wide, 16)), splat(wide, 1))
    rounded = b.lshr(b.add(b.add(bits, splat(wide, 0x7FFF)), odd), splat(wide, 16))
    rounded = b.select(b.fcmp_unordered("uno", x, x), splat(wide, 0x7FC0), rounded)
    return b.trunc(rounded, vector(I16, x.type.count))
