"""Rotations and codes of rows on CUDA: what the kernels that code, decode and attend share.

The Walsh-Hadamard transform pairs neighbours and moves the lowest bit of the index to the top, so that after as many rounds as
there are bits every element is back in its place. Sums are made in the order of the reference: codes agree to the bit.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.turboquant.codebook import codebook
from auraflux.ops.turboquant.rotation import rotation

CHUNK = tl.constexpr(16)  # coordinates at a time, where a matrix turns


@lru_cache
def turn_for(width: int, seed: int, inverse: bool, device: torch.device) -> tuple[Tensor, bool]:
    """Give signs [D], or the matrix [from, to] in float32, and whether it is a matrix."""
    turn = rotation(width, seed, device)
    if turn.signs is not None:
        return turn.signs, False
    assert turn.matrix is not None
    return (turn.matrix if inverse else turn.matrix.T).contiguous(), True


@lru_cache
def book_for(bits: int, width: int, narrow: bool, device: torch.device) -> Tensor:
    """Give the levels; for products in 16 bits in float16, times sqrt(D) to stay clear of its smallest numbers."""
    book = codebook(bits, width, device)
    return (book * width**0.5).half() if narrow else book


@triton.jit
def hadamard(x, D: tl.constexpr):
    """Multiply rows [R, D] by the Walsh-Hadamard matrix over sqrt(D)."""
    R: tl.constexpr = x.shape[0]
    SCALE: tl.constexpr = D**-0.5
    for i in tl.static_range(10):
        if 1 << i < D:
            a, b = tl.split(tl.reshape(x, [R, D // 2, 2]))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 2, 1]), [R, D])
    return x * SCALE


@triton.jit
def words_of(codes, BITS: tl.constexpr, P: tl.constexpr, PIECE: tl.constexpr):
    """Pack codes [R, P] into every SPAN-th word from PIECE on: [R, P / GROUP], where GROUP codes fill SPAN words."""
    SPAN: tl.constexpr = 3 if BITS % 3 == 0 else 1
    GROUP: tl.constexpr = 32 * SPAN // BITS
    R: tl.constexpr = codes.shape[0]
    shift = (tl.arange(0, GROUP) * BITS - 32 * PIECE)[None, None, :]
    codes = tl.reshape(codes, [R, P // GROUP, GROUP]).to(tl.uint32)
    up = codes << tl.minimum(tl.maximum(shift, 0), 31).to(tl.uint32)
    down = codes >> tl.minimum(tl.maximum(-shift, 0), 31).to(tl.uint32)
    return tl.sum(tl.where(shift >= 32, 0, tl.where(shift >= 0, up, down)), 2).to(tl.int32, bitcast=True)


@triton.jit
def store_words(out, row, there, codes, BITS: tl.constexpr, P: tl.constexpr, WORDS: tl.constexpr):
    """Store codes [1, P] as the packed row `row`."""
    SPAN: tl.constexpr = 3 if BITS % 3 == 0 else 1
    g = tl.arange(0, P * BITS // (32 * SPAN))[None, :] * SPAN
    for i in tl.static_range(SPAN):
        tl.store(out + row * WORDS + g + i, words_of(codes, BITS, P, i), mask=there & (g + i < WORDS))


@triton.jit
def codes_of(base, row, there, BITS: tl.constexpr, P: tl.constexpr, WORDS: tl.constexpr):
    """Load packed rows as codes [rows, P], 0 past their end and where there is none."""
    SPAN: tl.constexpr = 3 if BITS % 3 == 0 else 1
    GROUP: tl.constexpr = 32 * SPAN // BITS
    N: tl.constexpr = row.shape[0]
    MASK: tl.constexpr = (1 << BITS) - 1
    g = tl.arange(0, P // GROUP)[None, :] * SPAN
    at = base + row[:, None] * WORDS + g
    bit = (tl.arange(0, GROUP) * BITS)[None, None, :]
    if SPAN == 1:
        words = tl.load(at, mask=there[:, None] & (g < WORDS), other=0)
        codes = (words[:, :, None] >> bit) & MASK
    else:
        a = tl.load(at, mask=there[:, None] & (g < WORDS), other=0).to(tl.uint32, bitcast=True)[:, :, None]
        b = tl.load(at + 1, mask=there[:, None] & (g + 1 < WORDS), other=0).to(tl.uint32, bitcast=True)[:, :, None]
        c = tl.load(at + 2, mask=there[:, None] & (g + 2 < WORDS), other=0).to(tl.uint32, bitcast=True)[:, :, None]
        low = tl.where(bit < 32, a, tl.where(bit < 64, b, c)) >> (bit % 32).to(tl.uint32)
        # a code that ends in the next word; the others are whole without it
        rest = tl.where(bit < 32, b, c) << ((32 - bit % 32) % 32).to(tl.uint32)
        codes = (tl.where(bit % 32 > 32 - BITS, low | rest, low) & MASK).to(tl.int32)
    return tl.reshape(codes, [N, P])


@triton.jit
def level_at(base, row, d, there, book, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Look up the levels of coordinates `d` of one packed row, one by one."""
    bit = d * BITS
    low = tl.load(base + row * WORDS + bit // 32, mask=there, other=0).to(tl.uint32, bitcast=True) >> (bit % 32).to(tl.uint32)
    over = there & (bit % 32 + BITS > 32)
    rest = tl.load(base + row * WORDS + bit // 32 + 1, mask=over, other=0).to(tl.uint32, bitcast=True)
    code = low | tl.where(over, rest << ((32 - bit % 32) % 32).to(tl.uint32), 0)
    return tl.load(book + (code & ((1 << BITS) - 1)).to(tl.int32))


@triton.jit
def nearest(y, middles, BITS: tl.constexpr):
    """Count the midpoints below each coordinate: its rank among the levels."""
    rank = tl.zeros(y.shape, tl.int32)
    for i in tl.static_range(BITS):
        step = 1 << (BITS - 1 - i)
        middle = tl.load(middles + rank + (step - 1))
        rank += tl.where(middle >= y, 0, step)
    return rank
