"""Look-up tables that map a coordinate to its code in one step, for the Hopper kernel that encodes prefill tokens.

A coordinate z of a rotated direction, without the transform's factor, falls into a bucket of equal width, so narrow that none
holds two midpoints between levels. Let t in [1, 2) be the place of z among the buckets. The bits of t times 2 ** lift, plus the
word of the bucket, hold the code in the upper byte: the comparison with the midpoint is a carry into it. Where z is too close
to the midpoint for float32 to decide, the two bytes below are zero.

Up to FEW_BITS t = z * scale + offset, and buckets extend so far that hardly any z is beyond them; for those that are, the upper
half of the byte is not zero, since t has another exponent. For more bits z * scale + offset is clamped to [0, 1], and t is one
more.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.turboquant.codebook import boundaries, codebook
from auraflux.ops.turboquant.rotation import rotation

ONE = 0x3F800000  # bit pattern of 1.0
UNITS = 1 << 23  # float32 steps of t in [1, 2)
CLEAR = 64  # least distance between midpoints and bucket edges, in units
TRIES = 200_000
WIDTH = 0.29  # of buckets up to FEW_BITS, where coordinates have standard deviation 1
FEW_BITS = 4  # each lane holds one word of the table, and 8 level magnitudes or codes fill the bytes of two words
SQUARES = 8  # offset of squares in a row, after their byte planes


class Search(NamedTuple):
    """Resolution of the bucket search at a bit width.

    buckets  number of buckets, a power of two
    lift     log2 of the factor of units
    margin   units on both sides of a midpoint within which float32 cannot decide
    """

    buckets: int
    lift: int
    margin: int


SEARCH = {2: Search(32, 6, 2), 4: Search(32, 6, 2), 8: Search(512, 6, 2)}


class BucketTable(NamedTuple):
    """Bucket table of a codebook.

    words  int32: a word per bucket; squared levels by code, float32; midpoints in the scale of z and one more, float32. Up to
           FEW_BITS these are rows of 32, and the squares follow three byte planes of themselves, two words each
    """

    words: Tensor
    scale: float
    offset: float


def step(bits: int) -> float:
    """Return the unit of integer squared levels, so that each fits into 24 bits and the sum of a row into 32."""
    return 2.0 ** -{2: 29}.get(bits, 28)


@cache
def bucket_table_for(bits: int, width: int, device: torch.device) -> BucketTable:
    midpoints, search = scaled_midpoints(bits, width), SEARCH[bits]
    if bits <= FEW_BITS:
        scale, offset, place, bucket = _wide_buckets(midpoints.astype(np.float64), search.buckets)
        half = UNITS // (2 * search.buckets)
        start = (np.arange(search.buckets) * 2 - 1) * half
    else:
        scale, offset, place, bucket = _buckets(midpoints.astype(np.float64), search.buckets)
        # a bucket without a midpoint starts well above zero, so that it is never uncertain
        half = UNITS // (2 * (search.buckets - 1))
        start = (np.arange(search.buckets) * 2 - 1) * half - half // 2
    below = np.searchsorted(bucket, np.arange(search.buckets))
    start[bucket] = np.rint(place).astype(np.int64) - search.margin
    top = below.copy()
    top[bucket] += 1
    words = (top << 24) - (start + ONE << search.lift)
    squares = (codebook(bits, width).double() ** 2).float().numpy().view(np.uint32)
    parts = [words, squares, np.append(midpoints, np.float32(np.inf)).view(np.uint32)]
    if bits <= FEW_BITS:
        parts[1] = np.concatenate([_planes(bits, width), np.zeros(SQUARES - 6, np.int64), squares])
        parts = [np.pad(part, (0, 32 - len(part))) for part in parts]
    found = np.concatenate(parts).astype(np.uint32).view(np.int32)
    return BucketTable(torch.from_numpy(found).to(device), scale, offset)


def scaled_midpoints(bits: int, width: int) -> np.ndarray:
    """Return for each midpoint the largest float32 that, divided by sqrt(D), does not exceed it."""
    midpoints, factor = boundaries(bits, width).numpy(), np.float32(width**-0.5)
    z = (midpoints / np.float64(factor)).astype(np.float32)
    for _ in range(8):
        z = np.where(z * factor > midpoints, np.nextafter(z, np.float32(-np.inf)), z)
    for _ in range(8):
        above = np.nextafter(z, np.float32(np.inf))
        z = np.where(above * factor <= midpoints, above, z)
    return z


def _wide_buckets(midpoints: np.ndarray, count: int) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Place buckets of WIDTH around zero; return scale, offset, midpoints in units, their buckets."""
    scale, offset = float(np.float32(1 / (WIDTH * count))), 1.5
    place = (midpoints * scale + offset - 1) * UNITS
    # the kernel rounds t * count to nearest
    bucket = np.floor(place / UNITS * count + 0.5).astype(np.int64)
    edges = (np.stack([bucket, bucket + 1]) - 0.5) / count * UNITS
    if np.abs(edges - place).min() <= CLEAR or np.unique(bucket).size < bucket.size:
        raise ValueError(f"{len(midpoints)} midpoints do not fit into {count} buckets of {WIDTH}")
    return scale, offset, place, bucket


def _buckets(midpoints: np.ndarray, count: int) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Search buckets with at most one midpoint, none near an edge; return scale, offset, midpoints in units, their buckets."""
    random, span = np.random.default_rng(0), float(midpoints[-1] - midpoints[0])
    for _ in range(TRIES):
        wide = span / (count - 2 - 2 * random.random())
        low = float(midpoints[0]) - wide * (0.5 + random.random())
        scale, offset = float(np.float32(1 / (wide * count))), float(np.float32(-low / (wide * count)))
        place = (midpoints * scale + offset) * UNITS
        # the kernel rounds t * (count - 1) to nearest
        bucket = np.floor(place / UNITS * (count - 1) + 0.5).astype(np.int64)
        edges = (np.stack([bucket, bucket + 1]) - 0.5) / (count - 1) * UNITS
        inside = place[0] > 0 and place[-1] < UNITS
        if inside and np.abs(edges - place).min() > CLEAR and np.unique(bucket).size == bucket.size:
            return scale, offset, place, bucket
    raise ValueError(f"{len(midpoints)} midpoints do not fit into {count} buckets")


def _planes(bits: int, width: int) -> np.ndarray:
    """Return integer squares as three planes of eight bytes, lowest first: by magnitude for 4 bits, by code for fewer."""
    squares = np.zeros(8, np.int64)
    half = codebook(bits, width).double().numpy()[8 if bits == FEW_BITS else 0 :]
    squares[: len(half)] = np.rint(half**2 / step(bits))
    octets = np.stack([squares >> 8 * plane & 255 for plane in range(3)]).astype(np.uint8)
    return octets.reshape(-1).view(np.uint32).astype(np.int64)


@cache
def sign_words(width: int, seed: int, device: torch.device) -> Tensor:
    """Return the signs of the rotation as XOR masks of two bfloat16, int32 [D / 2]."""
    signs = rotation(width, seed).signs
    assert signs is not None
    negative = (signs < 0).numpy().reshape(-1, 2)
    words = negative[:, 0] * 0x8000 + negative[:, 1] * 0x80000000
    return torch.from_numpy(words.astype(np.uint32).view(np.int32)).to(device)
