"""Tables that find codes by one look-up each, for the kernel that codes many tokens.

Of a direction rotated without its factor, a coordinate z falls into a bucket of equal width, so narrow that none holds two
midpoints between levels. Let t be a number between 1 and 2 that says where z lies among the buckets. The bits of t times
2 ** lift, plus the word of the bucket, have the code in the upper byte: the comparison with the midpoint is a carry into it.
Where z is so close to the midpoint that float32 cannot tell, the two bytes below are zero.

For FEW bits t = z * scale + offset, and buckets reach so far out that hardly any z is beyond them; of those that are, the upper
half of the byte is not zero, since t has another exponent. For more bits z * scale + offset is held between 0 and 1, and t is
one more.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.turboquant.codebook import boundaries, codebook
from auraflux.ops.turboquant.rotation import rotation

ONE = 0x3F800000  # the bits of 1.0
UNITS = 1 << 23  # of t between 1 and 2
CLEAR = 64  # units between midpoints and the edges of buckets
TRIES = 200_000
WIDTH = 0.29  # of buckets for FEW bits, where coordinates have a spread of 1
FEW = 4  # bits; a lane has a word of their table, and 8 sizes of level or codes fill the bytes of two words
SQUARES = 8  # where squares begin in a row, behind their planes


class Search(NamedTuple):
    """How finely codes of some bits are searched for.

    buckets  a power of two
    lift     log2 of what units are multiplied by
    doubt    units on both sides of a midpoint within which float32 cannot tell
    """

    buckets: int
    lift: int
    doubt: int


SEARCH = {2: Search(32, 6, 2), 4: Search(32, 6, 2), 8: Search(512, 6, 2)}


class Places(NamedTuple):
    """The table of a codebook.

    words  int32: a word for each bucket; the squares of levels, float32, by code; the midpoints as they are for z, float32, and
           one more. For FEW bits these are rows of 32, and a row between holds three planes of bytes of the squares, two words
           each, before the squares
    """

    words: Tensor
    scale: float
    offset: float


def step(bits: int) -> float:
    """What squares of levels are counted in, so that each fits into 24 bits and the sum of a row into 32."""
    return 2.0 ** -{2: 29}.get(bits, 28)


@cache
def places_for(bits: int, width: int, device: torch.device) -> Places:
    middles, search = scaled_middles(bits, width), SEARCH[bits]
    if bits <= FEW:
        scale, offset, place, bucket = _wide_buckets(middles.astype(np.float64), search.buckets)
        half = UNITS // (2 * search.buckets)
        start = (np.arange(search.buckets) * 2 - 1) * half
    else:
        scale, offset, place, bucket = _buckets(middles.astype(np.float64), search.buckets)
        # a bucket without a midpoint begins well above zero, so that it is never in doubt
        half = UNITS // (2 * (search.buckets - 1))
        start = (np.arange(search.buckets) * 2 - 1) * half - half // 2
    below = np.searchsorted(bucket, np.arange(search.buckets))
    start[bucket] = np.rint(place).astype(np.int64) - search.doubt
    top = below.copy()
    top[bucket] += 1
    words = (top << 24) - (start + ONE << search.lift)
    squares = (codebook(bits, width).double() ** 2).float().numpy().view(np.uint32)
    parts = [words, squares, np.append(middles, np.float32(np.inf)).view(np.uint32)]
    if bits <= FEW:
        parts[1] = np.concatenate([_planes(bits, width), np.zeros(SQUARES - 6, np.int64), squares])
        parts = [np.pad(part, (0, 32 - len(part))) for part in parts]
    found = np.concatenate(parts).astype(np.uint32).view(np.int32)
    return Places(torch.from_numpy(found).to(device), scale, offset)


def scaled_middles(bits: int, width: int) -> np.ndarray:
    """Give for each midpoint the largest float32 that, over sqrt(D), is not above it."""
    middles, factor = boundaries(bits, width).numpy(), np.float32(width**-0.5)
    z = (middles / np.float64(factor)).astype(np.float32)
    for _ in range(8):
        z = np.where(z * factor > middles, np.nextafter(z, np.float32(-np.inf)), z)
    for _ in range(8):
        above = np.nextafter(z, np.float32(np.inf))
        z = np.where(above * factor <= middles, above, z)
    return z


def _wide_buckets(middles: np.ndarray, count: int) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Lay buckets of WIDTH around zero: scale, offset, the midpoints in units, their buckets."""
    scale, offset = float(np.float32(1 / (WIDTH * count))), 1.5
    place = (middles * scale + offset - 1) * UNITS
    # t * count is rounded to the nearest
    bucket = np.floor(place / UNITS * count + 0.5).astype(np.int64)
    edges = (np.stack([bucket, bucket + 1]) - 0.5) / count * UNITS
    if np.abs(edges - place).min() <= CLEAR or np.unique(bucket).size < bucket.size:
        raise ValueError(f"{len(middles)} midpoints do not fit into {count} buckets of {WIDTH}")
    return scale, offset, place, bucket


def _buckets(middles: np.ndarray, count: int) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Choose buckets with one midpoint at most, none near an edge: scale, offset, the midpoints in units, their buckets."""
    random, span = np.random.default_rng(0), float(middles[-1] - middles[0])
    for _ in range(TRIES):
        wide = span / (count - 2 - 2 * random.random())
        low = float(middles[0]) - wide * (0.5 + random.random())
        scale, offset = float(np.float32(1 / (wide * count))), float(np.float32(-low / (wide * count)))
        place = (middles * scale + offset) * UNITS
        # t * (count - 1) is rounded to the nearest
        bucket = np.floor(place / UNITS * (count - 1) + 0.5).astype(np.int64)
        edges = (np.stack([bucket, bucket + 1]) - 0.5) / (count - 1) * UNITS
        inside = place[0] > 0 and place[-1] < UNITS
        if inside and np.abs(edges - place).min() > CLEAR and np.unique(bucket).size == bucket.size:
            return scale, offset, place, bucket
    raise ValueError(f"{len(middles)} midpoints do not fit into {count} buckets")


def _planes(bits: int, width: int) -> np.ndarray:
    """Give squares in steps as three planes of eight bytes, the lowest first: by size for 4 bits, by code for fewer."""
    squares = np.zeros(8, np.int64)
    half = codebook(bits, width).double().numpy()[8 if bits == FEW else 0 :]
    squares[: len(half)] = np.rint(half**2 / step(bits))
    octets = np.stack([squares >> 8 * plane & 255 for plane in range(3)]).astype(np.uint8)
    return octets.reshape(-1).view(np.uint32).astype(np.int64)


@cache
def sign_words(width: int, seed: int, device: torch.device) -> Tensor:
    """Give the signs of the rotation as they flip words of two bfloat16, int32 [D / 2]."""
    signs = rotation(width, seed).signs
    assert signs is not None
    negative = (signs < 0).numpy().reshape(-1, 2)
    words = negative[:, 0] * 0x8000 + negative[:, 1] * 0x80000000
    return torch.from_numpy(words.astype(np.uint32).view(np.int32)).to(device)
