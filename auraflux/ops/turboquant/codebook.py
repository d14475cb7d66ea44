"""The levels that rotated coordinates are rounded to: Lloyd-Max codebooks of the normal distribution.

A codebook has least distortion when every level is the mean of its cell and every cell ends midway between two levels. Both
conditions together are a system of equations in the positive levels (the rest is their mirror image), which Newton's method
solves in a few steps from the levels that are best in the limit of many bits: quantiles of N(0, 3).

A coordinate of a rotated unit vector of width D is close to N(0, 1/D), so the levels are those of N(0, 1) over sqrt(D).
"""

import math
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import InputError

BITS = (2, 3, 4, 6, 8)


def check_bits(name: str, bits: int) -> None:
    if bits not in BITS:
        raise InputError(f"'{name}' is {bits}; codebooks exist for {', '.join(map(str, BITS))} bits.")


def index_of_rank(bits: int) -> Tensor:
    """Give the code that stands for each level, levels ascending. This alone decides which code means which level."""
    return torch.arange(1 << bits)


def codebook(bits: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """Give the level of every code, float32 [2 ** bits]. The tensor is kept and shared: do not write to it."""
    return _tables(bits, width, torch.device(device))[0]


def boundaries(bits: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """Give the midpoints between neighbouring levels, ascending, float32 [2 ** bits - 1]. Shared, as the codebook is."""
    return _tables(bits, width, torch.device(device))[1]


def nearest(y: Tensor, bits: int) -> Tensor:
    """Give the code of the level nearest to each coordinate, int64; midway between two, the lower level."""
    _, middles, codes = _tables(bits, y.shape[-1], y.device)
    return codes[torch.bucketize(y, middles)]


@cache
def normal_levels(bits: int) -> np.ndarray:
    """Solve for the Lloyd-Max levels of N(0, 1): float64 [2 ** bits], ascending."""
    check_bits("bits", bits)
    count = 1 << bits
    wide = NormalDist(0, math.sqrt(3))
    half = np.array([wide.inv_cdf((rank + 0.5) / count) for rank in range(count // 2, count)])
    step = half
    while np.abs(step).max() > 1e-10:
        means, slope_below, slope_above = _cell_means(half)
        # a level moves the ends of its own cell and one end of each neighbour's, by half its own move
        jacobian = np.diag(slope_below + slope_above) + np.diag(slope_below[1:], -1) + np.diag(slope_above[:-1], 1)
        step = np.linalg.solve(np.eye(len(half)) - jacobian / 2, means - half)
        half = half + step
    return np.concatenate([-half[::-1], half])


def _cell_means(half: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # means of the cells of positive levels, and their derivatives by the lower and the upper end of the cell
    ends = np.concatenate([[0.0], (half[1:] + half[:-1]) / 2, [np.inf]])
    density = np.exp(-ends * ends / 2) / math.sqrt(2 * math.pi)
    beyond = np.array([math.erfc(end / math.sqrt(2)) / 2 for end in ends])
    mass = beyond[:-1] - beyond[1:]
    means = (density[:-1] - density[1:]) / mass
    below = density[:-1] * (means - ends[:-1]) / mass
    above = np.append(density[1:-1] * (ends[1:-1] - means[:-1]) / mass[:-1], 0.0)
    # zero is an end of the innermost cell by symmetry, whatever the levels
    below[0] = 0.0
    return means, below, above


@cache
def _tables(bits: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    levels = torch.from_numpy(normal_levels(bits) / math.sqrt(width))
    codes = index_of_rank(bits)
    book = torch.empty(1 << bits, dtype=torch.float32)
    book[codes] = levels.float()
    middles = ((levels[1:] + levels[:-1]) / 2).float()
    return book.to(device), middles.to(device), codes.to(device)
