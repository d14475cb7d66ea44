"""Walsh-Hadamard transform, quantization levels and packing of codes, shared by the kernels that encode, decode and attend.

Each round of the transform pairs neighbours and moves the lowest index bit to the top, so that after one round per bit every
element is back in its place. Sums follow the order of the reference: codes agree bit for bit.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.turboquant.codebook import Codebook, boundaries, codebook
from auraflux.ops.turboquant.rotation import rotation

CHUNK = tl.constexpr(16)  # channels per iteration of a dense rotation
MOST_BOOKS = 256  # codebooks whose tables are cached


@cache
def rotation_for(width: int, seed: int, inverse: bool, device: torch.device) -> tuple[Tensor, bool]:
    """Return signs [D], or the matrix [from, to] in float32, and whether it is a matrix."""
    found = rotation(width, seed, device)
    if found.signs is not None:
        return found.signs, False
    assert found.matrix is not None
    return (found.matrix if inverse else found.matrix.T).contiguous(), True


@lru_cache(MOST_BOOKS)
def book_for(bits: int, width: int, narrow: bool, device: torch.device, explicit: Codebook | None = None) -> Tensor:
    """Return the levels; if `narrow` as float16 times sqrt(D), to stay clear of subnormal numbers."""
    book = codebook(bits, width, device, explicit)
    return (book * width**0.5).half() if narrow else book


class Levels(NamedTuple):
    """Look-up tables that map a coordinate y to its code and level.

    y falls into bucket (y + offset) * factor of equal width, so narrow that none holds two midpoints between levels.
    codes   [4 * 2 ** bits]  int64; low word: the midpoint inside the bucket, or infinity; high word: the code below it
    levels  [4 * 2 ** bits]  int64; the levels below and above the midpoint, float32 both

    Levels of an explicit codebook may be too close for it: `codes` are then the midpoints, and `levels` all levels, float32.
    """

    codes: Tensor
    levels: Tensor
    offset: float
    factor: float


def levels_for(bits: int, width: int, device: torch.device, explicit: Codebook | None = None) -> Levels:
    if explicit is not None:
        return Levels(explicit.middles.to(device), explicit.levels.to(device), 0.0, 0.0)
    return _usual_levels(bits, width, device)


@cache
def _usual_levels(bits: int, width: int, device: torch.device) -> Levels:
    midpoints, book = boundaries(bits, width).numpy(), codebook(bits, width).numpy()
    count = 4 << bits
    # the outermost buckets are beyond the midpoints
    span = 2 * float(midpoints[-1]) / (count - 2)
    offset, factor = np.float32(midpoints[-1] + span), np.float32(1 / span)
    bucket = ((midpoints + offset) * factor).astype(np.int64)
    assert np.unique(bucket).size == midpoints.size
    inside = np.full(count, np.inf, np.float32)
    inside[bucket] = midpoints
    below = np.searchsorted(bucket, np.arange(count))
    above = np.minimum(below + 1, len(book) - 1)
    codes, levels = (_pack_words(*words) for words in ((inside, below), (book[below], book[above].view(np.int32))))
    return Levels(codes.to(device), levels.to(device), float(offset), float(factor))


def _pack_words(low: np.ndarray, high: np.ndarray) -> Tensor:
    """Pack float32 numbers (low) and integers (high) into 64-bit words."""
    return torch.from_numpy(high.astype(np.int64) << 32 | low.view(np.uint32).astype(np.int64))


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
    return tl.sum(shifted(codes, shift), 2).to(tl.int32, bitcast=True)


@triton.jit
def store_words(out, row, there, codes, BITS: tl.constexpr, P: tl.constexpr, WORDS: tl.constexpr):
    """Store codes [R, P] as the packed rows `row` [R], under the mask `there` [R]."""
    SPAN: tl.constexpr = 3 if BITS % 3 == 0 else 1
    g = tl.arange(0, P * BITS // (32 * SPAN))[None, :] * SPAN
    for i in tl.static_range(SPAN):
        at = out + row[:, None] * WORDS + g + i
        tl.store(at, words_of(codes, BITS, P, i), mask=there[:, None] & (g + i < WORDS))


@triton.jit
def half_of_pair(out, row, BITS: tl.constexpr, D: tl.constexpr):
    """Return the addresses of the words that hold the value `row` and its pair token, the bits of `row`, and their shift."""
    PER: tl.constexpr = D * BITS // 128
    w = tl.arange(0, 8 * PER)
    at = out + (row // 8 * 8 + w // PER) * (4 * PER) + row % 8 // 2 * PER + w % PER
    EVEN: tl.constexpr = 0xFFFFFFFF // ((1 << 2 * BITS) - 1) * ((1 << BITS) - 1)
    shift = (row % 2).to(tl.uint32) * BITS
    return at, (tl.full([8 * PER], EVEN, tl.uint32) << shift).to(tl.int32, bitcast=True), shift


@triton.jit
def store_half(at, mine, shift, there, old, codes, BITS: tl.constexpr, D: tl.constexpr):
    """Replace one token's bits in words that the program of the pair token may be changing too."""
    X: tl.constexpr = 16 // BITS
    place = (2 * BITS * tl.arange(0, X)).to(tl.uint32)[None, :] + shift
    new = tl.sum(tl.reshape(codes, [D // X, X]).to(tl.uint32) << place, 1).to(tl.int32, bitcast=True)
    # an explicit mask: the interpreter reads past one that is broadcast
    tl.atomic_xor(at, (old ^ new) & mine, mask=there & (mine != 0), sem="relaxed")


@triton.jit
def store_half_units(out, row, there, codes, BITS: tl.constexpr, D: tl.constexpr):
    """Replace one token's bits of 3-bit or 6-bit values, whose packing unit is three words."""
    X: tl.constexpr = 48 // BITS
    UNITS: tl.constexpr = D * BITS // 384
    u = tl.arange(0, 8 * UNITS)
    at = out + (row // 8 * 8 + u // UNITS) * (12 * UNITS) + row % 8 // 2 * (3 * UNITS) + u % UNITS * 3
    place = (2 * BITS * tl.arange(0, X))[None, :] + (row % 2).to(tl.int32) * BITS
    codes = tl.reshape(codes, [8 * UNITS, X]).to(tl.uint32)
    for i in tl.static_range(3):
        new = tl.sum(shifted(codes, place - 32 * i), 1).to(tl.int32, bitcast=True)
        mine = tl.sum(shifted(codes * 0 + ((1 << BITS) - 1), place - 32 * i), 1).to(tl.int32, bitcast=True)
        old = tl.load(at + i, mask=there, other=0)
        tl.atomic_xor(at + i, (old ^ new) & mine, mask=there & (mine != 0), sem="relaxed")


@triton.jit
def shifted(codes, shift):
    """Shift unsigned codes left by `shift` bits, or right where it is negative, within a word."""
    up = codes << tl.minimum(tl.maximum(shift, 0), 31).to(tl.uint32)
    down = codes >> tl.minimum(tl.maximum(-shift, 0), 31).to(tl.uint32)
    return tl.where(shift >= 32, 0, tl.where(shift >= 0, up, down))


@triton.jit
def pairs_as_rows(x, N: tl.constexpr, D: tl.constexpr):
    """Reorder elements of N values in pairs, [N, D] in storage order, to token order."""
    grouped = tl.reshape(x, [N // 8, 8, 4, D // 8, 2])  # g c x e
    return tl.reshape(tl.permute(grouped, [0, 2, 4, 1, 3]), [N, D])


@triton.jit
def codes_of(base, row, there, BITS: tl.constexpr, P: tl.constexpr, WORDS: tl.constexpr):
    """Load packed rows as codes [rows, P], 0 past their end and where masked."""
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
        # the high bits of a code that straddles two words
        rest = tl.where(bit < 32, b, c) << ((32 - bit % 32) % 32).to(tl.uint32)
        codes = (tl.where(bit % 32 > 32 - BITS, low | rest, low) & MASK).to(tl.int32)
    return tl.reshape(codes, [N, P])


@triton.jit
def level_at(base, row, d, there, book, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Look up the levels of channels `d` of one packed row."""
    bit = d * BITS
    low = tl.load(base + row * WORDS + bit // 32, mask=there, other=0).to(tl.uint32, bitcast=True) >> (bit % 32).to(tl.uint32)
    over = there & (bit % 32 + BITS > 32)
    rest = tl.load(base + row * WORDS + bit // 32 + 1, mask=over, other=0).to(tl.uint32, bitcast=True)
    code = low | tl.where(over, rest << ((32 - bit % 32) % 32).to(tl.uint32), 0)
    return tl.load(book + (code & ((1 << BITS) - 1)).to(tl.int32))


@triton.jit
def _nearest_by_halves(y, levels, BITS: tl.constexpr):
    """Return codes and levels of any codebook by binary search."""
    code = tl.zeros(y.shape, tl.int32)
    for i in tl.static_range(BITS):
        step = 1 << (BITS - 1 - i)
        code += tl.where(y <= tl.load(levels.codes + code + (step - 1)), 0, step)
    return code, tl.load(levels.levels + code)


@triton.jit
def _nearest_by_bucket(y, levels, BITS: tl.constexpr):
    LAST: tl.constexpr = (4 << BITS) - 1.0
    place = tl.minimum(tl.maximum((y + levels.offset) * levels.factor, 0.0), LAST).to(tl.int32)
    found, ends = tl.load(levels.codes + place), tl.load(levels.levels + place)
    under = found.to(tl.int32).to(tl.float32, bitcast=True) >= y
    code = (found >> 32).to(tl.int32) + tl.where(under, 0, 1)
    level = tl.where(under, ends, ends >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(y == y, code, (1 << BITS) - 1), level


@triton.jit
def nearest(y, levels, BITS: tl.constexpr):
    """Return the code and the level of each coordinate; NaN gets the last code."""
    if levels.codes.dtype.element_ty == tl.float32:
        found, level = _nearest_by_halves(y, levels, BITS)
    else:
        found, level = _nearest_by_bucket(y, levels, BITS)
    return found, level
