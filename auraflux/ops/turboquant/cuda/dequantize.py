"""Prompts on CUDA: what the codes stand for is written out once, and many tokens attend to that.

A tile of a prompt's queries would decode every key anew; from MANY new tokens on, decoding them once and reading 16 bits is
cheaper. Keys and values are rotated back as they are written, by a product with the rotation as a matrix: queries and results,
of which there are several to a key, then need not be rotated.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.attention.pages import KVPages
from auraflux.ops.hopper.flash import EVERYTHING, Near
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.pages import index_of
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.turboquant.calibration import BLOCK
from auraflux.ops.turboquant.cuda.arguments import calibrated_of, kept_of, keys_of, plain_of, shape_of, values_of
from auraflux.ops.turboquant.cuda.hadamard import book_for, codes_of, pairs_as_rows
from auraflux.ops.turboquant.pages import CodePages
from auraflux.ops.turboquant.reference_codec import rotate

MANY, MANY_INTERPRETED = 128, 16  # new tokens of a sequence, on the average
MOST_NBYTES = 1 << 30  # that are written out
ELEMENTS = 1 << 13  # of a program's rows
CENTRED = tl.constexpr(BLOCK)


@triton.jit
def _decoded(store, origin, row, there, unit, BITS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PAIRS: tl.constexpr):
    """Give the levels [N, P] of coded rows of one page and head, and what they are multiplied by."""
    WORDS: tl.constexpr = (D * BITS + 31) // 32
    levels = tl.load(store.levels + codes_of(store.codes + origin * WORDS, row, there, BITS, P, WORDS))
    if PAIRS:
        levels = pairs_as_rows(levels, row.shape[0], D)
    return levels, tl.load(store.norms + origin + row, mask=there, other=0.0) * unit


@triton.jit
def _as_kept(rows, at, there, D: tl.constexpr, P: tl.constexpr):
    """Load rows `at` [N] that are kept as they are, zeros where there is none."""
    d = tl.arange(0, P)[None, :]
    return tl.load(rows + at[:, None] * D + d, mask=there[:, None] & (d < D), other=0.0).to(tl.float32)


@triton.jit
def _write_rows(
    levels, length, calibrated, head, position, centred, back, out, to, row, there, D: tl.constexpr, P: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rotate rows [N, P] back and write them, some columns at a time; keys with the scale they left out, and the centre where
    they are `centred` [N], which is None for nowhere."""
    k, column = tl.arange(0, P)[:, None], tl.arange(0, COLUMNS)[None, :]
    for first in tl.static_range(0, D, COLUMNS):
        d = first + column
        matrix = tl.load(back + k * D + d, mask=(k < D) & (d < D), other=0.0)
        x = tl.dot(levels, matrix, input_precision="ieee") * length[:, None]
        if calibrated is not None:
            at = head * D + d
            x *= tl.load(calibrated.scale + at, mask=d < D, other=0.0)
            if centred is not None:
                block, here = (
                    calibrated.table + (position // CENTRED).to(tl.int64)[:, None] * (2 * D) + d,
                    centred[:, None] & (d < D),
                )
                x += tl.load(block, mask=here, other=0.0) * tl.load(calibrated.along + at, mask=d < D, other=0.0)
                x += tl.load(block + D, mask=here, other=0.0) * tl.load(calibrated.across + at, mask=d < D, other=0.0)
        tl.store(out + (to + row[:, None]) * D + d, x, mask=there[:, None] & (d < D))


@triton.jit
def write_pages(
    keys, values, calibrated, plain, back, index, k_out, v_out, unit, root, window, SHAPE: tl.constexpr, KEPT: tl.constexpr,
    P: tl.constexpr, COLUMNS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write out N rows of one entry of the table, if a new token sees any of the page; grid (entries, 2 HEADS, PAGE / N).

    root  what rows that are kept as they are are multiplied by
    """
    D: tl.constexpr = SHAPE.width
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
    # the first positions' pages, where these are kept as they are
    begins = tl.full([N], 0, tl.int64)
    at_head = position < KEPT.first
    if KEPT.first:
        head_page = tl.load(plain.head_table + sequence)
        at_head &= (head_page >= 0) & (head_page < plain.head_pool)
        begins = (head_page.to(tl.int64) * SHAPE.heads + head) * KEPT.first + position
    if tl.program_id(1) % 2 == 0:
        levels, norm = _decoded(keys, origin, row, there, unit, SHAPE.key_bits, D, P, False)
        if KEPT.first:  # noqa: SIM102
            if first < KEPT.first:
                kept = _as_kept(plain.head_k, begins, at_head, D, P)
                levels = tl.where(at_head[:, None], kept.to(levels.dtype), levels)
                norm = tl.where(at_head, root, norm)
        _write_rows(levels, norm, calibrated, head, position, there & ~at_head, back, k_out, to, row, there, D, P, COLUMNS)
    else:
        levels, norm = _decoded(values, origin, row, there, unit, SHAPE.value_bits, D, P, SHAPE.pairs)
        if KEPT.first:  # noqa: SIM102
            if first < KEPT.first:
                kept = _as_kept(plain.head_v, begins, at_head, D, P)
                levels = tl.where(at_head[:, None], kept.to(levels.dtype), levels)
                norm = tl.where(at_head, root, norm)
        _write_rows(levels, norm, None, head, position, None, back, v_out, to, row, there, D, P, COLUMNS)


@triton.jit(do_not_specialize_on_alignment=["entries", "columns"])
def write_near(
    calibrated, plain, back, index, k_out, v_out, root, entries, columns, SHAPE: tl.constexpr, KEPT: tl.constexpr,
    P: tl.constexpr, COLUMNS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write out N of the newest rows, which are kept as they are; grid (sequences * columns, 2 HEADS, PAGE / N).

    entries, columns  pages of the output before these, and pages of each sequence; see `Near`
    """
    D: tl.constexpr = SHAPE.width
    entry, head = tl.program_id(0), tl.program_id(1) // 2
    sequence = entry // columns
    length, new = tl.load(index.lengths + sequence), tl.load(index.starts + sequence + 1) - tl.load(index.starts + sequence)
    oldest = tl.maximum(length - new - KEPT.newest + 1, 0)
    row = tl.program_id(2) * N + tl.arange(0, N)
    first = (oldest // SHAPE.page + entry % columns) * SHAPE.page
    if (new <= 0) | (first >= length):
        return
    position = first + row
    there = (row < SHAPE.page) & (position >= oldest) & (position < tl.minimum(length, plain.width * KEPT.page))
    page = tl.load(plain.table + sequence.to(tl.int64) * plain.width + position // KEPT.page, mask=there, other=-1)
    there &= (page >= 0) & (page < plain.pool)
    at = (page.to(tl.int64) * SHAPE.heads + head) * KEPT.page + position % KEPT.page
    to = ((entries + entry).to(tl.int64) * SHAPE.heads + head) * SHAPE.page
    kind: tl.constexpr = back.dtype.element_ty
    norm = tl.full([N], 1.0, tl.float32) * root
    # rows that nobody sees are written, too: attention takes another way where it finds what is no number
    whole = row < SHAPE.page
    if tl.program_id(1) % 2 == 0:
        levels = _as_kept(plain.k, at, there, D, P).to(kind)
        _write_rows(levels, norm, calibrated, head, position, None, back, k_out, to, row, whole, D, P, COLUMNS)
    else:
        levels = _as_kept(plain.v, at, there, D, P).to(kind)
        _write_rows(levels, norm, None, head, position, None, back, v_out, to, row, whole, D, P, COLUMNS)


@cache
def _back(width: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Give the inverse rotation as a matrix [from, to] times sqrt(D): of a Walsh-Hadamard transform, ones and minus ones."""
    return (rotate.reference(torch.eye(width, device=device), seed, True) * width**0.5).to(dtype)


def near_columns(pages: CodePages, tokens: int) -> int:
    """Pages of a sequence that may hold the newest positions of so many tokens; none where they are coded like others."""
    newest = 0 if pages.plain is None else pages.plain.newest
    return cdiv(tokens + newest, pages.pool[1]) + 1 if newest else 0


def written(
    pages: CodePages, starts: Tensor, window: int | None, tokens: int, dtype: torch.dtype
) -> tuple[KVPages, Near | None]:
    """Keys and values in plain numbers, as pages in the order of the table; then those that are kept as they are."""
    (sequences, table_width), page, width = pages.table.shape, pages.pool[1], pages.width
    device, padded, wide = pages.table.device, max(32, power_of_two(width)), dtype is torch.float32
    columns, entries = near_columns(pages, tokens), sequences * table_width
    # a multiple of 16, so that batches share a build
    shape = cdiv(entries + sequences * columns, 16) * 16, pages.heads, page, width
    k, v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    books = (pages.key_bits, pages.key_book), (pages.value_bits, pages.value_book)
    k_book, v_book = (book_for(bits, width, not wide, device, book) for bits, book in books)
    rows = max(16, min(64, power_of_two(page), ELEMENTS // padded))
    back, index = _back(width, pages.seed, torch.float32 if wide else torch.float16, device), index_of(pages, starts)
    calibrated, plain = calibrated_of(pages), plain_of(pages)
    sizes = {
        "SHAPE": shape_of(pages),
        "KEPT": kept_of(pages),
        "P": padded,
        "COLUMNS": min(padded, max(16, 2 * ELEMENTS // padded)),
        "N": rows,
        "num_warps": 4,
    }
    root = width**-0.5
    launch(write_pages, (entries, 2 * pages.heads, cdiv(page, rows)))(
        *(keys_of(pages, k_book), values_of(pages, v_book), calibrated, plain, back, index, k, v),
        *(root if wide else 1 / width, root, EVERYTHING if window is None else window),
        **sizes,
    )
    if columns:
        launch(write_near, (sequences * columns, 2 * pages.heads, cdiv(page, rows)))(
            calibrated, plain, back, index, k, v, root, entries, columns, **sizes
        )
    in_order = KVPages(k, v, _in_order(sequences, table_width, columns, device), pages.lengths)
    return in_order, Near(kept_of(pages).newest, table_width) if columns else None


@cache
def _in_order(sequences: int, far: int, near: int, device: torch.device) -> Tensor:
    """A table of pages that lie one after the other, with `near` more of each sequence behind them all.

    It stays where it is: recorded steps read it. Its rows are multiples of 16, so that batches share a build.
    """
    count = sequences * far
    first = torch.arange(count, dtype=torch.int32, device=device).view(sequences, far)
    more = torch.arange(count, count + sequences * near, dtype=torch.int32, device=device).view(sequences, near)
    nothing = first.new_zeros(sequences, -(far + near) % 16)
    return torch.cat((first, more, nothing), 1)
