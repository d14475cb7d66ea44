"""The rotation that makes the coordinates of any vector look normal.

Widths that are a power of two: random signs, then the Walsh-Hadamard transform over sqrt(D). Other widths: a random orthogonal
matrix, the QR factor of a Gaussian one. Both follow from a seed that is part of the cache format, through the generator below,
so that a cache does not depend on the version of torch or numpy.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import InputError

NARROWEST, WIDEST = 8, 1024


@dataclass(frozen=True)
class Rotation:
    """Rotation of a width and seed; exactly one of the tensors is present.

    signs   [D]     float32, 1 or -1, before the Walsh-Hadamard transform
    matrix  [D, D]  float32, orthogonal: y = matrix @ x
    """

    width: int
    seed: int
    signs: Tensor | None
    matrix: Tensor | None


def check_rotation(width: int, seed: int) -> None:
    if not NARROWEST <= width <= WIDEST:
        raise InputError(f"vectors of width {width} cannot be quantized; {NARROWEST} to {WIDEST} is needed.")
    if not (isinstance(seed, int) and 0 <= seed < 1 << 63):
        raise InputError(f"'seed' is {seed}; an integer from 0 to 2**63 - 1 is needed.")


@cache
def rotation(width: int, seed: int, device: torch.device | str = "cpu") -> Rotation:
    """Return the rotation of a width and seed. Its tensors are cached and shared: do not write to them."""
    check_rotation(width, seed)
    if width & (width - 1) == 0:
        signs = 1.0 - 2.0 * (random_words(width, seed) >> np.uint64(63)).astype(np.float32)
        return Rotation(width, seed, torch.from_numpy(signs).to(device), None)
    factor, triangle = np.linalg.qr(_normal(width * width, seed).reshape(width, width))
    # QR is unique only up to the signs of the triangle's diagonal
    matrix = (factor * np.sign(np.diag(triangle))).astype(np.float32)
    return Rotation(width, seed, None, torch.from_numpy(matrix).to(device))


def hadamard(x: Tensor) -> Tensor:
    """Multiply rows by the Walsh-Hadamard matrix over sqrt(D): its own inverse. Neighbours are paired first."""
    width, span = x.shape[-1], 1
    while span < width:
        a, b = x.unflatten(-1, (width // (2 * span), 2, span)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        span *= 2
    return x * width**-0.5


def random_words(count: int, seed: int) -> np.ndarray:
    """Draw 64-bit words: the splitmix64 sequence of the seed."""
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _normal(count: int, seed: int) -> np.ndarray:
    # Box-Muller pairs of a length and an angle
    uniform = ((random_words(2 * count, seed) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.sqrt(-2 * np.log(uniform[:count])) * np.cos(2 * np.pi * uniform[count:])
