"""Prefill on CUDA: dequantize keys and values once, then run uncompressed attention on them.

Every tile of queries would decode all keys again; from MANY new tokens on, decoding once and reading 16 bits is cheaper. The
rotation of keys and values is undone by a matrix product during dequantization: queries and outputs, of which there are several
per key, then need no rotation.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.attention.pages import KVPages
from auraflux.ops.gpu.blocks.flash import NO_WINDOW, RecentKeys
from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.turboquant.calibration import BLOCK
from auraflux.ops.turboquant.cuda.arguments import (
    CodeShape,
    FullPrecisionShape,
    calibration_tensors,
    full_precision_pages,
    full_precision_shape,
    keys_of,
    shape_of,
    values_of,
)
from auraflux.ops.turboquant.cuda.encode.hadamard import book_for, codes_of, pairs_as_rows
from auraflux.ops.turboquant.pages import CodePages
from auraflux.ops.turboquant.reference_codec import rotate

MANY, MANY_INTERPRETED = 128, 16  # new tokens per sequence, on average
MOST_NBYTES = 1 << 30  # of dequantized keys and values
ELEMENTS = 1 << 13  # elements of a program's rows
MEAN_BLOCK = tl.constexpr(BLOCK)


class Config(NamedTuple):
    """Compile-time configuration: page shape, full-precision tokens, padded width, columns per product, rows per program."""

    shape: CodeShape
    full: FullPrecisionShape
    padded: int
    columns: int
    rows: int


@triton.jit
def _decoded(store, origin, row, there, unit, BITS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PAIRS: tl.constexpr):
    """Return the levels [N, P] of rows of one page and head, and their factors."""
    WORDS: tl.constexpr = (D * BITS + 31) // 32
    levels = tl.load(store.levels + codes_of(store.codes + origin * WORDS, row, there, BITS, P, WORDS))
    if PAIRS:
        levels = pairs_as_rows(levels, row.shape[0], D)
    return levels, tl.load(store.norms + origin + row, mask=there, other=0.0) * unit


@triton.jit
def _load_full_precision(rows, at, there, D: tl.constexpr, P: tl.constexpr):
    """Load full-precision rows `at` [N], zeros where masked."""
    d = tl.arange(0, P)[None, :]
    return tl.load(rows + at[:, None] * D + d, mask=there[:, None] & (d < D), other=0.0).to(tl.float32)


@triton.jit
def _store_rows(
    levels, length, calibration, head, position, has_mean, inverse, out, to, row, there, CONFIG: tl.constexpr
):  # fmt: skip
    """Undo the rotation of rows [N, P] and store them, some columns at a time; multiply keys by their scale, and add the mean
    where `has_mean` [N], None for nowhere."""
    D: tl.constexpr = CONFIG.shape.width
    P: tl.constexpr = CONFIG.padded
    COLUMNS: tl.constexpr = CONFIG.columns
    k, column = tl.arange(0, P)[:, None], tl.arange(0, COLUMNS)[None, :]
    for first in tl.static_range(0, D, COLUMNS):
        d = first + column
        matrix = tl.load(inverse + k * D + d, mask=(k < D) & (d < D), other=0.0)
        x = tl.dot(levels, matrix, input_precision="ieee") * length[:, None]
        if calibration is not None:
            at = head * D + d
            x *= tl.load(calibration.scale + at, mask=d < D, other=0.0)
            if has_mean is not None:
                block, here = (
                    calibration.table + (position // MEAN_BLOCK).to(tl.int64)[:, None] * (2 * D) + d,
                    has_mean[:, None] & (d < D),
                )
                x += tl.load(block, mask=here, other=0.0) * tl.load(calibration.along + at, mask=d < D, other=0.0)
                x += tl.load(block + D, mask=here, other=0.0) * tl.load(calibration.across + at, mask=d < D, other=0.0)
        tl.store(out + (to + row[:, None]) * D + d, x, mask=there[:, None] & (d < D))


@triton.jit
def dequantize_pages(
    keys, values, calibration, full, inverse, index, k_out, v_out, unit, root, window, CONFIG: tl.constexpr
):  # fmt: skip
    """Dequantize N rows of one table entry, if a new token attends to the page; grid (entries, 2 HEADS, PAGE / N).

    root  factor of full-precision rows
    """
    SHAPE: tl.constexpr = CONFIG.shape
    FULL: tl.constexpr = CONFIG.full
    D: tl.constexpr = SHAPE.width
    P: tl.constexpr = CONFIG.padded
    N: tl.constexpr = CONFIG.rows
    entry, head = tl.program_id(0), tl.program_id(1) // 2
    sequence, first = entry // index.width, entry % index.width * SHAPE.page
    length, new = tl.load(index.lengths + sequence), tl.load(index.starts + sequence + 1) - tl.load(index.starts + sequence)
    if (new <= 0) | (first >= length) | (first + SHAPE.page + window <= length - new + 1):
        return
    page = tl.load(index.table + entry)
    row = tl.program_id(2) * N + tl.arange(0, N)
    there = (row < SHAPE.page) & (page >= 0) & (page < index.pool)
    origin = (page.to(tl.int64) * SHAPE.heads + head) * SHAPE.page
    to = (entry.to(tl.int64) * SHAPE.heads + head) * SHAPE.page
    position = first + row
    # rows of full-precision sink tokens
    sink_row = tl.full([N], 0, tl.int64)
    is_sink = position < FULL.sink_tokens
    if FULL.sink_tokens:
        sink_page = tl.load(full.sink_table + sequence)
        is_sink &= (sink_page >= 0) & (sink_page < full.sink_pool)
        sink_row = (sink_page.to(tl.int64) * SHAPE.heads + head) * FULL.sink_tokens + position
    if tl.program_id(1) % 2 == 0:
        levels, norm = _decoded(keys, origin, row, there, unit, SHAPE.key_bits, D, P, False)
        if FULL.sink_tokens:  # noqa: SIM102
            if first < FULL.sink_tokens:
                stored = _load_full_precision(full.sink_k, sink_row, is_sink, D, P)
                levels = tl.where(is_sink[:, None], stored.to(levels.dtype), levels)
                norm = tl.where(is_sink, root, norm)
        _store_rows(levels, norm, calibration, head, position, there & ~is_sink, inverse, k_out, to, row, there, CONFIG)
    else:
        levels, norm = _decoded(values, origin, row, there, unit, SHAPE.value_bits, D, P, SHAPE.pairs)
        if FULL.sink_tokens:  # noqa: SIM102
            if first < FULL.sink_tokens:
                stored = _load_full_precision(full.sink_v, sink_row, is_sink, D, P)
                levels = tl.where(is_sink[:, None], stored.to(levels.dtype), levels)
                norm = tl.where(is_sink, root, norm)
        _store_rows(levels, norm, None, head, position, None, inverse, v_out, to, row, there, CONFIG)


@triton.jit(do_not_specialize_on_alignment=["entries", "columns"])
def dequantize_recent(
    calibration, full, inverse, index, k_out, v_out, root, entries, columns, CONFIG: tl.constexpr
):  # fmt: skip
    """Copy N full-precision rows of the recent window to output pages; grid (sequences * columns, 2 HEADS, PAGE / N).

    entries, columns  output pages before these, and pages per sequence; see `RecentKeys`
    """
    SHAPE: tl.constexpr = CONFIG.shape
    FULL: tl.constexpr = CONFIG.full
    D: tl.constexpr = SHAPE.width
    P: tl.constexpr = CONFIG.padded
    N: tl.constexpr = CONFIG.rows
    entry, head = tl.program_id(0), tl.program_id(1) // 2
    sequence = entry // columns
    length, new = tl.load(index.lengths + sequence), tl.load(index.starts + sequence + 1) - tl.load(index.starts + sequence)
    oldest = tl.maximum(length - new - FULL.recent_window + 1, 0)
    row = tl.program_id(2) * N + tl.arange(0, N)
    first = (oldest // SHAPE.page + entry % columns) * SHAPE.page
    if (new <= 0) | (first >= length):
        return
    position = first + row
    there = (row < SHAPE.page) & (position >= oldest) & (position < tl.minimum(length, full.recent_width * FULL.page))
    page = tl.load(full.recent_table + sequence.to(tl.int64) * full.recent_width + position // FULL.page, mask=there, other=-1)
    there &= (page >= 0) & (page < full.recent_pool)
    at = (page.to(tl.int64) * SHAPE.heads + head) * FULL.page + position % FULL.page
    to = ((entries + entry).to(tl.int64) * SHAPE.heads + head) * SHAPE.page
    kind: tl.constexpr = inverse.dtype.element_ty
    norm = tl.full([N], 1.0, tl.float32) * root
    # masked rows are written, too: attention takes a slower path where it finds NaN
    in_page = row < SHAPE.page
    if tl.program_id(1) % 2 == 0:
        levels = _load_full_precision(full.recent_k, at, there, D, P).to(kind)
        _store_rows(levels, norm, calibration, head, position, None, inverse, k_out, to, row, in_page, CONFIG)
    else:
        levels = _load_full_precision(full.recent_v, at, there, D, P).to(kind)
        _store_rows(levels, norm, None, head, position, None, inverse, v_out, to, row, in_page, CONFIG)


@cache
def _inverse_rotation(width: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the inverse rotation as a matrix [from, to] times sqrt(D): entries 1 and -1 for a Walsh-Hadamard transform."""
    return (rotate.reference(torch.eye(width, device=device), seed, True) * width**0.5).to(dtype)


def recent_columns(pages: CodePages, tokens: int) -> int:
    """Return the pages per sequence that may hold the recent windows of `tokens` new tokens; 0 without a recent window."""
    newest = 0 if pages.full_precision is None else pages.full_precision.recent_window
    return cdiv(tokens + newest, pages.pool[1]) + 1 if newest else 0


def dequantized(
    pages: CodePages, starts: Tensor, window: int | None, tokens: int, dtype: torch.dtype
) -> tuple[KVPages, RecentKeys | None]:
    """Return dequantized pages in the order of the table, followed by pages of the recent window, and its extent."""
    (sequences, table_width), page, width = pages.table.shape, pages.pool[1], pages.width
    device, padded, wide = pages.table.device, max(32, power_of_two(width)), dtype is torch.float32
    columns, entries = recent_columns(pages, tokens), sequences * table_width
    # a multiple of 16, so that batches share a compiled kernel
    shape = cdiv(entries + sequences * columns, 16) * 16, pages.heads, page, width
    k, v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    books = (pages.key_bits, pages.key_book), (pages.value_bits, pages.value_book)
    k_book, v_book = (book_for(bits, width, not wide, device, book) for bits, book in books)
    rows = max(16, min(64, power_of_two(page), ELEMENTS // padded))
    inverse = _inverse_rotation(width, pages.seed, torch.float32 if wide else torch.float16, device)
    index = index_of(pages, starts)
    calibration, full = calibration_tensors(pages), full_precision_pages(pages)
    columns_each = min(padded, max(16, 2 * ELEMENTS // padded))
    config = Config(shape_of(pages), full_precision_shape(pages), padded, columns_each, rows)
    root = width**-0.5
    launch(dequantize_pages, (entries, 2 * pages.heads, cdiv(page, rows)))(
        *(keys_of(pages, k_book), values_of(pages, v_book), calibration, full, inverse, index, k, v),
        *(root if wide else 1 / width, root, NO_WINDOW if window is None else window),
        CONFIG=config,
        num_warps=4,
    )
    if columns:
        launch(dequantize_recent, (sequences * columns, 2 * pages.heads, cdiv(page, rows)))(
            calibration, full, inverse, index, k, v, root, entries, columns, CONFIG=config, num_warps=4
        )
    contiguous = KVPages(k, v, _contiguous_table(sequences, table_width, columns, device), pages.lengths)
    return contiguous, RecentKeys(full_precision_shape(pages).recent_window, table_width) if columns else None


@cache
def _contiguous_table(sequences: int, far: int, near: int, device: torch.device) -> Tensor:
    """Return a table of contiguous pages, with `near` more per sequence after all of them.

    Cached at a fixed address, since CUDA graphs read it. Rows are multiples of 16, so that batches share a compiled kernel.
    """
    count = sequences * far
    first = torch.arange(count, dtype=torch.int32, device=device).view(sequences, far)
    more = torch.arange(count, count + sequences * near, dtype=torch.int32, device=device).view(sequences, near)
    nothing = first.new_zeros(sequences, -(far + near) % 16)
    return torch.cat((first, more, nothing), 1)
