"""Rotate, encode and decode on CUDA, a row to a program."""

import triton
import triton.language as tl

from auraflux.ops.attention._flash import merged_row
from auraflux.ops.attention._rows import place_token
from auraflux.ops.turboquant._turn import CHUNK, codes_of, hadamard, level_at, nearest, store_words


@triton.jit
def turned_by_matrix(x, factor, matrix, d, D: tl.constexpr):
    """Multiply one row, each element first by `factor` and rounded to float32, by a matrix; sums in float64, rounded once."""
    acc = tl.zeros([1, d.shape[1]], tl.float64)
    for i in range(0, D, CHUNK):
        k = i + tl.arange(0, CHUNK)
        part = (tl.load(x + k, mask=k < D, other=0.0).to(tl.float64) * factor).to(tl.float32).to(tl.float64)
        there = (k < D)[:, None] & (d < D)
        weights = tl.load(matrix + k[:, None] * D + d, mask=there, other=0.0).to(tl.float64)
        acc += tl.sum(part[:, None] * weights, 0)[None, :]
    return acc.to(tl.float32)


@triton.jit
def rotate_rows(x, turn, out, factor, D: tl.constexpr, P: tl.constexpr, MATRIX: tl.constexpr, INVERSE: tl.constexpr):
    """Turn a row and multiply it by `factor`; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, P)[None, :]
    if MATRIX:
        y = turned_by_matrix(x + row * D, 1.0, turn, d, D)
    else:
        y = tl.load(x + row * D + d).to(tl.float32)
        signs = tl.load(turn + d)
        y = hadamard(y, D) * signs if INVERSE else hadamard(y * signs, D)
    tl.store(out + row * D + d, (y * factor).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def encode_row(
    x, turn, book, middles, codes, norms, row, there, D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    MATRIX: tl.constexpr,
):  # fmt: skip
    """Encode the vector at x and store it as row `row`."""
    d = tl.arange(0, P)[None, :]
    wide = tl.load(x + d, mask=d < D, other=0.0).to(tl.float64)
    length = tl.sqrt(tl.sum(wide * wide, 1))
    factor = tl.where(length == 0, 0.0, 1.0 / length)
    if MATRIX:
        y = turned_by_matrix(x, tl.sum(factor, 0), turn, d, D)
    else:
        y = hadamard((wide * factor[:, None]).to(tl.float32) * tl.load(turn + d), D)
    ranks = tl.where(d < D, nearest(y, middles, BITS), 0)
    levels = tl.load(book + ranks, mask=d < D, other=0.0).to(tl.float64)
    norm = (length / tl.sqrt(tl.sum(levels * levels, 1))).to(tl.float32)
    WORDS: tl.constexpr = (D * BITS + 31) // 32
    store_words(codes, row, there, ranks, BITS, P, WORDS)
    tl.store(norms + row + tl.zeros([1], tl.int64), norm, mask=there)


@triton.jit
def encode_rows(
    x, turn, book, middles, codes, norms, D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr, MATRIX: tl.constexpr
):  # fmt: skip
    """Encode a row; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    encode_row(x + row * D, turn, book, middles, codes, norms, row, row >= 0, D, P, BITS, MATRIX)


@triton.jit
def decode_rows(
    codes, norms, turn, book, out, D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr, MATRIX: tl.constexpr
):  # fmt: skip
    """Give the vector of a coded row; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, P)[None, :]
    WORDS: tl.constexpr = (D * BITS + 31) // 32
    if MATRIX:
        acc = tl.zeros([1, P], tl.float64)
        for i in range(0, D, CHUNK):
            k = i + tl.arange(0, CHUNK)
            part = level_at(codes, row, k, k < D, book, BITS, WORDS).to(tl.float64)
            there = (k < D)[:, None] & (d < D)
            acc += tl.sum(part[:, None] * tl.load(turn + k[:, None] * D + d, mask=there, other=0.0).to(tl.float64), 0)[None, :]
        y = acc.to(tl.float32)
    else:
        rows = row + tl.zeros([1], tl.int64)
        y = hadamard(tl.load(book + codes_of(codes, rows, rows >= 0, BITS, P, WORDS)), D) * tl.load(turn + d)
    tl.store(out + row * D + d, y * tl.load(norms + row), mask=d < D)


@triton.jit
def append_coded(
    k,
    v,
    k_codes,
    k_norms,
    k_book,
    k_middles,
    v_codes,
    v_norms,
    v_book,
    v_middles,
    turn,
    table,
    lengths,
    starts,
    sequences,
    table_width,
    pool,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    MATRIX: tl.constexpr,
    PAGE: tl.constexpr,
    S: tl.constexpr,
):
    """Encode a token's key or value of one head into its page; grid (tokens, HEADS, 2)."""
    token, head = tl.program_id(0), tl.program_id(1)
    page, slot = place_token(token, table, lengths, starts, sequences, table_width, pool, PAGE, S)
    source, target, there = (token.to(tl.int64) * HEADS + head) * D, (page * HEADS + head) * PAGE + slot, page >= 0
    if tl.program_id(2) == 0:
        encode_row(k + source, turn, k_book, k_middles, k_codes, k_norms, target, there, D, P, KEY_BITS, MATRIX)
    else:
        encode_row(v + source, turn, v_book, v_middles, v_codes, v_norms, target, there, D, P, VALUE_BITS, MATRIX)


@triton.jit
def append_coded_latent(
    latent,
    k_rope,
    codes,
    norms,
    book,
    middles,
    rope,
    turn,
    table,
    lengths,
    starts,
    sequences,
    table_width,
    pool,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    PR: tl.constexpr,
    BITS: tl.constexpr,
    MATRIX: tl.constexpr,
    PAGE: tl.constexpr,
    S: tl.constexpr,
):
    """Encode a token's latent into its page and copy its rotated key; grid (tokens,)."""
    token = tl.program_id(0)
    page, slot = place_token(token, table, lengths, starts, sequences, table_width, pool, PAGE, S)
    target, token = page * PAGE + slot, token.to(tl.int64)
    encode_row(latent + token * D, turn, book, middles, codes, norms, target, page >= 0, D, P, BITS, MATRIX)
    r = tl.arange(0, PR)
    x = tl.load(k_rope + token * R + r, mask=r < R)
    tl.store(rope + target * R + r, x.to(rope.dtype.element_ty), mask=(r < R) & (page >= 0))


@triton.jit
def finish_rows(o, m, l, sinks, signs, out, heads, blocks, D: tl.constexpr, S: tl.constexpr, C: tl.constexpr):  # noqa: E741
    """Merge the parts of a row and turn it back; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    sink = float("-inf") if sinks is None else tl.load(sinks + row % heads)
    acc, _, total = merged_row(o, m, l, row, sink, blocks, d, D, S, C)
    y = hadamard(tl.where(total == 0, 0.0, acc / total)[None, :], D) * tl.load(signs + d)[None, :]
    tl.store(out + row * D + d[None, :], y.to(out.dtype.element_ty))
