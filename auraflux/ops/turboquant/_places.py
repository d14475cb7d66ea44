"""Tables that find the code of a coordinate by a look-up and one comparison, for the kernel that codes many tokens.

The kernel compares coordinates before they are divided by sqrt(D): midpoints are moved to where that gives the same codes.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.turboquant.codebook import boundaries, codebook

CLEAR = 2e-3  # of a bucket, between midpoints and edges: float32 places them better than that
TRIES = 100_000


class Places(NamedTuple):
    """How the code of z is found: its bucket is buckets * (z * scale + offset), the part in brackets held between 0 and 1.

    entries  [2 ** (bits + 1), 4]  int32: the midpoint in the bucket, float32, or infinity; the code below it; the squares of
             the levels below and above it, in steps of `step(bits)`
    """

    entries: Tensor
    scale: float
    offset: float
    buckets: float


def step(bits: int) -> float:
    """What squares of levels are counted in, so that the sum of a row fits an int32."""
    return 2.0 ** -{6: 27, 8: 26}.get(bits, 28)


@lru_cache
def places_for(bits: int, width: int, device: torch.device) -> Places:
    middles, count = scaled_middles(bits, width), 2 << bits
    scale, offset, bucket = _buckets(middles, count)
    inside = np.full(count, np.inf, np.float32)
    inside[bucket] = middles
    below = np.searchsorted(bucket, np.arange(count))
    squares = np.rint(codebook(bits, width).numpy().astype(np.float64) ** 2 / step(bits)).astype(np.int32)
    above = np.minimum(below + 1, len(squares) - 1)
    entries = np.stack([inside.view(np.int32), below.astype(np.int32), squares[below], squares[above]], 1)
    # a place of 1 belongs to the last bucket
    return Places(torch.from_numpy(entries).to(device), scale, offset, float(np.float32(count * (1 - 2.0**-20))))


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


def _buckets(middles: np.ndarray, count: int) -> tuple[float, float, np.ndarray]:
    """Choose buckets of equal width with one midpoint at most, none near an edge: scale, offset and the midpoints' buckets."""
    random, span = np.random.default_rng(0), float(middles[-1] - middles[0])
    for _ in range(TRIES):
        wide = span / (count - 2 - 2 * random.random())
        low = float(middles[0]) - wide * (1 + random.random())
        scale, offset = float(np.float32(1 / (wide * count))), float(np.float32(-low / (wide * count)))
        place = (middles.astype(np.float64) * scale + offset) * count
        bucket = np.floor(place).astype(np.int64)
        clear = np.minimum(place - bucket, bucket + 1 - place).min() > CLEAR
        if clear and bucket[0] >= 0 and bucket[-1] < count and np.unique(bucket).size == bucket.size:
            return scale, offset, bucket
    raise ValueError(f"{len(middles)} midpoints do not fit into {count} buckets")
