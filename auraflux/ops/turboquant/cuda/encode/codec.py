"""Triton kernels that rotate, encode and decode rows, one or a few per program."""

from typing import NamedTuple

import triton
import triton.language as tl

from auraflux.ops.gpu.blocks.pages import place_of, position_of
from auraflux.ops.gpu.blocks.softmax import merged_row
from auraflux.ops.turboquant.cuda.encode.hadamard import (
    CHUNK,
    codes_of,
    hadamard,
    half_of_pair,
    level_at,
    nearest,
    store_half,
    store_half_units,
    store_words,
)
from auraflux.ops.turboquant.cuda.mla.full_precision import FullPrecisionLatentShape, store_latent


class LatentShape(NamedTuple):
    """Compile-time shape of quantized latents: widths with padding, bits, dense rotation, page, batch, full precision."""

    width: int
    padded: int
    rope: int
    rope_padded: int
    bits: int
    matrix: bool
    page: int
    sequences: int
    full: FullPrecisionLatentShape


@triton.jit
def rotated_by_matrix(x, there, factor, matrix, d, D: tl.constexpr):
    """Multiply rows at x [R, 1], first by `factor` [R, 1] and rounded to float32, by a matrix; sums in float64."""
    acc = tl.zeros([x.shape[0], d.shape[1]], tl.float64)
    for i in range(0, D, CHUNK):
        k = i + tl.arange(0, CHUNK)
        part = tl.load(x + k[None, :], mask=there & (k < D)[None, :], other=0.0).to(tl.float64)
        part = (part * factor).to(tl.float32).to(tl.float64)
        weights = tl.load(matrix + k[:, None] * D + d, mask=(k < D)[:, None] & (d < D), other=0.0).to(tl.float64)
        acc += tl.sum(part[:, :, None] * weights[None, :, :], 1)
    return acc.to(tl.float32)


@triton.jit
def rotate_rows(x, rotation, out, factor, D: tl.constexpr, P: tl.constexpr, MATRIX: tl.constexpr, INVERSE: tl.constexpr):
    """Rotate a row and multiply it by `factor`; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, P)[None, :]
    if MATRIX:
        one = tl.full([1, 1], 1.0, tl.float64)
        y = rotated_by_matrix(x + row * D + tl.zeros([1, 1], tl.int64), one > 0, one, rotation, d, D)
    else:
        y = tl.load(x + row * D + d).to(tl.float32)
        signs = tl.load(rotation + d)
        y = hadamard(y, D) * signs if INVERSE else hadamard(y * signs, D)
    tl.store(out + row * D + d, (y * factor).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def encoded(x, there, rotation, levels, D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr, MATRIX: tl.constexpr):
    """Encode the vectors at x [R, 1]: codes [R, P] and norms [R]."""
    d = tl.arange(0, P)[None, :]
    wide = tl.load(x + d, mask=there & (d < D), other=0.0).to(tl.float64)
    if not MATRIX:
        found, norm = encoded_values(wide, rotation, levels, D, BITS)
    else:
        length = tl.sqrt(tl.sum(wide * wide, 1, keep_dims=True))
        y = rotated_by_matrix(x, there, tl.where(length == 0, 0.0, 1.0 / length), rotation, d, D)
        found, level = nearest(y, levels, BITS)
        found, norm = tl.where(d < D, found, 0), norm_of(length, tl.where(d < D, level, 0.0))
    return found, norm


@triton.jit
def encoded_values(wide, signs, levels, D: tl.constexpr, BITS: tl.constexpr):
    """Encode vectors [R, D], given in float64, where D is a power of two: codes [R, D] and norms [R]."""
    found, norm, _ = encoded_and_rotated(wide, signs, levels, D, BITS)
    return found, norm


@triton.jit
def encoded_and_rotated(wide, signs, levels, D: tl.constexpr, BITS: tl.constexpr):
    """Encode vectors like `encoded_values`, and also return the rotated vectors before quantization: float32 [R, D]."""
    length = tl.sqrt(tl.sum(wide * wide, 1, keep_dims=True))
    inverse = tl.where(length == 0, 0.0, 1.0 / length)
    y = hadamard((wide * inverse).to(tl.float32) * tl.load(signs + tl.arange(0, D)[None, :]), D)
    found, level = nearest(y, levels, BITS)
    return found, norm_of(length, level), y * length.to(tl.float32)


@triton.jit
def norm_of(length, level):
    """Return the norm [R] that scales levels [R, D] to `length` [R, 1]."""
    level = level.to(tl.float64)
    rounded = tl.sqrt(tl.sum(level * level, 1, keep_dims=True))
    # all levels of a row may be 0 in an explicit codebook
    return tl.reshape(tl.where(rounded == 0, length * 0, length / rounded).to(tl.float32), [level.shape[0]])


@triton.jit
def encode_rows(
    x, rotation, levels, out, norms, rows, D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr, MATRIX: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Encode R rows; grid (rows / R,)."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = row < rows
    found, norm = encoded(x + row[:, None] * D, there[:, None], rotation, levels, D, P, BITS, MATRIX)
    store_words(out, row, there, found, BITS, P, (D * BITS + 31) // 32)
    tl.store(norms + row, norm, mask=there)


@triton.jit
def decode_rows(
    codes, norms, rotation, book, out, D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr, MATRIX: tl.constexpr
):  # fmt: skip
    """Decode a row; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, P)[None, :]
    WORDS: tl.constexpr = (D * BITS + 31) // 32
    if MATRIX:
        acc = tl.zeros([1, P], tl.float64)
        for i in range(0, D, CHUNK):
            k = i + tl.arange(0, CHUNK)
            part = level_at(codes, row, k, k < D, book, BITS, WORDS).to(tl.float64)
            there = (k < D)[:, None] & (d < D)
            acc += tl.sum(part[:, None] * tl.load(rotation + k[:, None] * D + d, mask=there, other=0.0).to(tl.float64), 0)[
                None, :
            ]
        y = acc.to(tl.float32)
    else:
        rows = row + tl.zeros([1], tl.int64)
        y = hadamard(tl.load(book + codes_of(codes, rows, rows >= 0, BITS, P, WORDS)), D) * tl.load(rotation + d)
    tl.store(out + row * D + d, y * tl.load(norms + row), mask=d < D)


@triton.jit
def place_group(group, index, PAGE: tl.constexpr, R: tl.constexpr, S: tl.constexpr):
    """Locate an aligned group of R positions: token indices, mask of new tokens, positions, pages, mask of writable rows.

    A sequence of n new tokens touches up to n / R + 2 groups, or n if R is 1: sequence b begins at group starts[b] / R + 2 b.
    """
    SPARE: tl.constexpr = 2 if R > 1 else 0
    b = tl.arange(0, S)
    begin = tl.load(index.starts + b, mask=b < index.sequences, other=0) // R + SPARE * b
    sequence = tl.sum(((b < index.sequences) & (begin <= group)).to(tl.int32), 0) - 1
    start, stop = tl.load(index.starts + sequence), tl.load(index.starts + sequence + 1)
    end = tl.load(index.lengths + sequence)
    first = end - stop + start
    position = (first // R + group - start // R - SPARE * sequence) * R + tl.arange(0, R)
    inside = (position >= tl.maximum(first, 0)) & (position < tl.minimum(end, index.width * PAGE))
    page = tl.load(index.table + sequence.to(tl.int64) * index.width + position // PAGE, mask=inside, other=-1).to(tl.int64)
    token = start + position - first
    new = (position >= first) & (position < end)
    return token, new, position, page, inside & (page >= 0) & (page < index.pool)


@triton.jit
def append_coded(
    k, v, keys, values, rotation, index, SHAPE: tl.constexpr, P: tl.constexpr, MATRIX: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Encode the keys or values of one head, R neighbouring tokens, into their pages; grid (groups, HEADS, 2)."""
    D: tl.constexpr = SHAPE.width
    head = tl.program_id(1)
    token, new, position, page, there = place_group(tl.program_id(0), index, SHAPE.page, R, SHAPE.sequences)
    if R == 1:
        # known without the index: the token's load overlaps that of the index
        token = tl.program_id(0) + tl.arange(0, 1)
        new = token >= 0
    source = (token.to(tl.int64) * SHAPE.heads + head)[:, None] * D
    row = (page * SHAPE.heads + head) * SHAPE.page + position % SHAPE.page
    here = new[:, None]
    if tl.program_id(2) == 0:
        codes, norm = encoded(k + source, here, rotation, keys.levels, D, P, SHAPE.key_bits, MATRIX)
        store_words(keys.codes, row, there, codes, SHAPE.key_bits, P, (D * SHAPE.key_bits + 31) // 32)
        tl.store(keys.norms + row, norm, mask=there)
        return
    if SHAPE.pairs and SHAPE.value_bits % 3:
        # loaded early, used at the end
        at, mine, shift = half_of_pair(values.codes, row, SHAPE.value_bits, D)
        old = tl.load(at, mask=there, other=0)
    codes, norm = encoded(v + source, here, rotation, values.levels, D, P, SHAPE.value_bits, MATRIX)
    tl.store(values.norms + row, norm, mask=there)
    if not SHAPE.pairs:
        store_words(values.codes, row, there, codes, SHAPE.value_bits, P, (D * SHAPE.value_bits + 31) // 32)
    elif SHAPE.value_bits % 3 == 0:
        store_half_units(values.codes, row, there, codes, SHAPE.value_bits, D)
    else:
        store_half(at, mine, shift, there, old, codes, SHAPE.value_bits, D)


@triton.jit
def append_coded_latent(latent, k_rope, store, rope, rotation, index, full, SHAPE: tl.constexpr):
    """Encode a token's latent, copy its RoPE key, and store the latent in full precision if `full`; grid (tokens,)."""
    D: tl.constexpr = SHAPE.width
    P: tl.constexpr = SHAPE.padded
    R: tl.constexpr = SHAPE.rope
    PR: tl.constexpr = SHAPE.rope_padded
    BITS: tl.constexpr = SHAPE.bits
    MATRIX: tl.constexpr = SHAPE.matrix
    PAGE: tl.constexpr = SHAPE.page
    FULL: tl.constexpr = SHAPE.full
    token = tl.program_id(0)
    sequence, position = position_of(token, index, SHAPE.sequences)
    page, slot = place_of(index.table, sequence, position, index.width, index.pool, PAGE)
    one = tl.zeros([1], tl.int64)
    row, there, token = page * PAGE + slot + one, page + one >= 0, token.to(tl.int64)
    at = latent + (token + one)[:, None] * D
    found, norm = encoded(at, (one >= 0)[:, None], rotation, store.levels, D, P, BITS, MATRIX)
    store_words(store.codes, row, there, found, BITS, P, (D * BITS + 31) // 32)
    tl.store(store.norms + row, norm, mask=there)
    r = tl.arange(0, PR)
    x = tl.load(k_rope + token * R + r, mask=r < R)
    tl.store(rope + (page * PAGE + slot) * R + r, x.to(rope.dtype.element_ty), mask=(r < R) & (page >= 0))
    if full is not None:
        d = tl.arange(0, P)[None, :]
        if MATRIX:
            one_f64 = tl.full([1, 1], 1.0, tl.float64)
            y = rotated_by_matrix(at, one_f64 > 0, one_f64, rotation, d, D)
        else:
            y = hadamard(tl.load(at + d).to(tl.float32) * tl.load(rotation + d), D)
        store_latent(y, full, sequence, position, D, P, FULL)


@triton.jit
def finish_rows(partials, sinks, signs, out, heads, blocks, D: tl.constexpr, S: tl.constexpr, C: tl.constexpr):
    """Merge the splits of a row and undo the rotation; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    sink = float("-inf") if sinks is None else tl.load(sinks + row % heads)
    acc, _, total = merged_row(partials, row, sink, blocks, d, D, S, C)
    y = hadamard(tl.where(total == 0, 0.0, acc / total)[None, :], D) * tl.load(signs + d)[None, :]
    tl.store(out + row * D + d[None, :], y.to(out.dtype.element_ty))
