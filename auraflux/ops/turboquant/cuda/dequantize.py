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
from auraflux.ops.hopper.flash import EVERYTHING
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.pages import index_of
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.turboquant.cuda.arguments import keys_of, shape_of, values_of
from auraflux.ops.turboquant.cuda.hadamard import book_for, codes_of, pairs_as_rows
from auraflux.ops.turboquant.pages import CodePages
from auraflux.ops.turboquant.reference_codec import rotate

MANY, MANY_INTERPRETED = 128, 16  # new tokens of a sequence, on the average
MOST_NBYTES = 1 << 30  # that are written out
ELEMENTS = 1 << 13  # of a program's rows


@triton.jit
def _write_rows(
    store, back, out, unit, origin, to, row, there, BITS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Write rows of one page and head, some columns at a time."""
    WORDS: tl.constexpr = (D * BITS + 31) // 32
    N: tl.constexpr = row.shape[0]
    levels = tl.load(store.levels + codes_of(store.codes + origin * WORDS, row, there, BITS, P, WORDS))
    if PAIRS:
        levels = pairs_as_rows(levels, N, D)
    length = tl.load(store.norms + origin + row, mask=there, other=0.0) * unit
    k, column = tl.arange(0, P)[:, None], tl.arange(0, COLUMNS)[None, :]
    for first in tl.static_range(0, D, COLUMNS):
        d = first + column
        matrix = tl.load(back + k * D + d, mask=(k < D) & (d < D), other=0.0)
        x = tl.dot(levels, matrix, input_precision="ieee") * length[:, None]
        tl.store(out + (to + row[:, None]) * D + d, x, mask=there[:, None] & (d < D))


@triton.jit
def write_pages(
    keys, values, back, index, k_out, v_out, unit, window, SHAPE: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Write out N rows of one entry of the table, if a new token sees any of the page; grid (entries, 2 HEADS, PAGE / N)."""
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
    if tl.program_id(1) % 2 == 0:
        _write_rows(keys, back, k_out, unit, origin, to, row, there, SHAPE.key_bits, SHAPE.width, P, COLUMNS, False)
    else:
        _write_rows(values, back, v_out, unit, origin, to, row, there, SHAPE.value_bits, SHAPE.width, P, COLUMNS, SHAPE.pairs)


@cache
def _back(width: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Give the inverse rotation as a matrix [from, to] times sqrt(D): of a Walsh-Hadamard transform, ones and minus ones."""
    return (rotate.reference(torch.eye(width, device=device), seed, True) * width**0.5).to(dtype)


def written(pages: CodePages, starts: Tensor, window: int | None, dtype: torch.dtype) -> KVPages:
    """Keys and values in plain numbers, as pages in the order of the table."""
    (sequences, table_width), page, width = pages.table.shape, pages.pool[1], pages.width
    device, padded, wide = pages.table.device, max(32, power_of_two(width)), dtype is torch.float32
    k, v = (torch.empty(sequences * table_width, pages.heads, page, width, dtype=dtype, device=device) for _ in range(2))
    k_book, v_book = (book_for(bits, width, not wide, device) for bits in (pages.key_bits, pages.value_bits))
    rows = max(16, min(64, power_of_two(page), ELEMENTS // padded))
    launch(write_pages, (sequences * table_width, 2 * pages.heads, cdiv(page, rows)))(
        keys_of(pages, k_book),
        values_of(pages, v_book),
        _back(width, pages.seed, torch.float32 if wide else torch.float16, device),
        index_of(pages, starts),
        *(k, v, width**-0.5 if wide else 1 / width, EVERYTHING if window is None else window),
        SHAPE=shape_of(pages),
        P=padded,
        COLUMNS=min(padded, max(16, 2 * ELEMENTS // padded)),
        N=rows,
        num_warps=4,
    )
    return KVPages(k, v, _in_order(sequences, table_width, device), pages.lengths)


@cache
def _in_order(sequences: int, table_width: int, device: torch.device) -> Tensor:
    """A table of pages that lie one after the other. It stays where it is: recorded steps read it."""
    return torch.arange(sequences * table_width, dtype=torch.int32, device=device).view(sequences, table_width)
