"""Prompts on CUDA: what the codes stand for is written out once, and many tokens attend to that.

A tile of a prompt's queries would decode every key anew; from MANY new tokens on, decoding them once and reading 16 bits is
cheaper. Keys and values stay in the rotated space: queries are turned there, and results back.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops._triton import INTERPRETED, power_of_two
from auraflux.ops.attention._flash import EVERYTHING
from auraflux.ops.attention.pages import KVPages
from auraflux.ops.turboquant._turn import codes_of, pairs_as_rows
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.codebook import codebook
from auraflux.ops.turboquant.pages import CodePages

MANY = 16 if INTERPRETED else 128  # new tokens of a sequence, on the average
MOST_NBYTES = 1 << 30  # that are written out


@triton.jit
def _write_rows(codes, norms, book, out, origin, to, row, there, BITS: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
                PAIRS: tl.constexpr):  # fmt: skip
    """Write rows of one page and head."""
    WORDS: tl.constexpr = (D * BITS + 31) // 32
    N: tl.constexpr = row.shape[0]
    levels = tl.load(book + codes_of(codes + origin * WORDS, row, there, BITS, P, WORDS))
    if PAIRS:
        levels = pairs_as_rows(levels, N, D)
    d = tl.arange(0, P)[None, :]
    x = levels * tl.load(norms + origin + row, mask=there, other=0.0)[:, None]
    tl.store(out + (to + row[:, None]) * D + d, x, mask=there[:, None] & (d < D))


@triton.jit
def write_pages(
    k_codes, k_norms, k_book, v_codes, v_norms, v_book, table, lengths, starts, k_out, v_out, window, table_width, pool,
    HEADS: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    PAGE: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Write out N rows of one entry of the table, if a new token sees any of the page; grid (entries, HEADS, PAGE / N)."""
    entry, head = tl.program_id(0), tl.program_id(1)
    sequence, first = entry // table_width, entry % table_width * PAGE
    length, new = tl.load(lengths + sequence), tl.load(starts + sequence + 1) - tl.load(starts + sequence)
    if (new <= 0) | (first >= length) | (first + PAGE + window <= length - new + 1):
        return
    page = tl.load(table + entry)
    row = tl.program_id(2) * N + tl.arange(0, N)
    there = (row < PAGE) & (page >= 0) & (page < pool)
    origin = (page.to(tl.int64) * HEADS + head) * PAGE
    to = (entry.to(tl.int64) * HEADS + head) * PAGE
    _write_rows(k_codes, k_norms, k_book, k_out, origin, to, row, there, KEY_BITS, D, P, False)
    _write_rows(v_codes, v_norms, v_book, v_out, origin, to, row, there, VALUE_BITS, D, P, PAIRS)


def worth_writing(q: Tensor, pages: CodePages) -> bool:
    """Whether there are new tokens enough, and room for what they see."""
    sequences, width = pages.table.shape
    nbytes = 2 * sequences * width * pages.heads * pages.pool[1] * pages.width * q.element_size()
    return q.shape[0] >= MANY * sequences and nbytes <= MOST_NBYTES


def written(pages: CodePages, starts: Tensor, window: int | None, dtype: torch.dtype) -> KVPages:
    """Keys and values in plain numbers, in the rotated space, as pages in the order of the table."""
    (sequences, width), page = pages.table.shape, pages.pool[1]
    device, padded = pages.table.device, max(32, power_of_two(pages.width))
    k, v = (torch.empty(sequences * width, pages.heads, page, pages.width, dtype=dtype, device=device) for _ in range(2))
    books = (codebook(bits, pages.width, device) for bits in (pages.key_bits, pages.value_bits))
    k_book, v_book = books
    rows = min(16, power_of_two(page))
    write_pages[(sequences * width, pages.heads, -(-page // rows))](
        pages.key_codes, pages.key_norms, k_book, pages.value_codes, pages.value_norms, v_book,
        pages.table, pages.lengths, starts, k, v, EVERYTHING if window is None else window, width, pages.pool[0],
        HEADS=pages.heads, KEY_BITS=pages.key_bits, VALUE_BITS=pages.value_bits, D=pages.width, P=padded, PAGE=page, N=rows,
        PAIRS=pages.arrangement is Arrangement.PAIRS, num_warps=4,
    )  # fmt: skip
    table = torch.arange(sequences * width, dtype=torch.int32, device=device).view(sequences, width)
    return KVPages(k, v, table, pages.lengths)
