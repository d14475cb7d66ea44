"""Quantization levels of rotated coordinates: Lloyd-Max codebooks of the normal distribution.

A codebook has minimal distortion when every level is the mean of its cell and every cell ends midway between two levels. Both
conditions together are a system of equations in the positive levels (the rest is their mirror image), which Newton's method
solves in a few steps from the optimum in the limit of many bits: quantiles of N(0, 3).

A coordinate of a rotated unit vector of width D is close to N(0, 1/D), so the levels are those of N(0, 1) over sqrt(D). An
explicit `Codebook` replaces them.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape
from auraflux.validation import check_fields

BITS = (2, 3, 4, 6, 8)


def check_bits(name: str, bits: int) -> None:
    if bits not in BITS:
        raise InputError(f"'{name}' is {bits}; codebooks exist for {', '.join(map(str, BITS))} bits.")


def index_of_rank(bits: int) -> Tensor:
    """Return the code of each level, levels ascending: the only definition of that order."""
    return torch.arange(1 << bits)


@dataclass(frozen=True, eq=False)
class Codebook:
    """Explicit codebook in place of the default one; a code is the rank of its level.

    levels  [2 ** bits]  float32, finite, ascending: of a rotated unit vector's coordinates, about 1 / sqrt(D)
    """

    levels: Tensor

    def __post_init__(self) -> None:
        check_fields(self)
        check_dense(levels=self.levels)
        check_dtype("levels", self.levels, torch.float32)
        check_shape("levels", self.levels, None)
        if len(self.levels) not in [1 << bits for bits in BITS]:
            counts = ", ".join(str(1 << bits) for bits in BITS)
            raise InputError(f"a codebook has {len(self.levels)} levels; {counts} are supported.")
        if self.levels.is_meta:
            raise InputError("the levels of a codebook are a meta tensor; values are needed.")
        if not bool(self.levels.isfinite().all()):
            raise InputError("the levels of a codebook must be finite; some are not.")
        if not bool((self.levels.diff() > 0).all()):
            first = int((self.levels.diff() <= 0).nonzero()[0])
            low, high = self.levels[first : first + 2].tolist()
            raise InputError(f"the levels of a codebook must ascend; level {first + 1} is {high:g}, the previous one {low:g}.")

    @property
    def bits(self) -> int:
        return len(self.levels).bit_length() - 1

    @cached_property
    def middles(self) -> Tensor:
        """Midpoints between neighbouring levels, float32 [2 ** bits - 1]."""
        wide = self.levels.double()
        return ((wide[1:] + wide[:-1]) / 2).float()

    @cached_property
    def largest(self) -> float:
        """Largest magnitude of the levels."""
        return float(self.levels.abs().max())

    def check(self, name: str, bits: int, codes: Tensor) -> None:
        """Refuse levels for another number of bits, or on another device than the codes."""
        check_dense(codes=codes, **{name: self.levels})
        if self.bits != bits:
            raise InputError(f"'{name}' has {len(self.levels)} levels; codes of {bits} bits need {1 << bits}.")

    @cached_property
    def _is_default(self) -> dict[int, bool]:
        return {}

    def is_default(self, width: int) -> bool:
        """Return whether these are the default levels of a width."""
        if width not in self._is_default:
            self._is_default[width] = torch.equal(self.levels.cpu(), codebook(self.bits, width))
        return self._is_default[width]


def explicit_codebook(book: Codebook | None, width: int) -> Codebook | None:
    """Return a codebook, or None if it is the default one."""
    return None if book is None or book.is_default(width) else book


def codebook(bits: int, width: int, device: torch.device | str = "cpu", explicit: Codebook | None = None) -> Tensor:
    """Return the level of every code, float32 [2 ** bits]. The tensor is cached and shared: do not write to it."""
    if explicit is not None:
        return explicit.levels.to(device)
    return _tables(bits, width, torch.device(device))[0]


def boundaries(bits: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the midpoints between neighbouring levels, ascending, float32 [2 ** bits - 1]. Cached and shared."""
    return _tables(bits, width, torch.device(device))[1]


def nearest(y: Tensor, bits: int, explicit: Codebook | None = None) -> Tensor:
    """Return the code of the level nearest to each coordinate, int64; the lower one of a tie."""
    if (explicit := explicit_codebook(explicit, y.shape[-1])) is not None:
        return torch.bucketize(y, explicit.middles.to(y.device))
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
        # moving a level moves both ends of its cell, each shared with a neighbour, by half as much
        step = _solve(-slope_below / 2, 1 - (slope_below + slope_above) / 2, -slope_above / 2, means - half)
        half = half + step
    return np.concatenate([-half[::-1], half])


def _solve(below: np.ndarray, diagonal: np.ndarray, above: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Solve a tridiagonal system; starting BLAS's threads for it takes a tenth of a second at import."""
    rows, found = list(zip(below.tolist(), diagonal.tolist(), above.tolist(), values.tolist(), strict=True)), [0.0]
    eliminated: list[tuple[float, float]] = [(0.0, 0.0)]
    for lower, middle, upper, value in rows:
        pivot = middle - lower * eliminated[-1][0]
        eliminated.append((upper / pivot, (value - lower * eliminated[-1][1]) / pivot))
    for factor, value in reversed(eliminated[1:]):
        found.append(value - factor * found[-1])
    return np.array(found[:0:-1])


def _cell_means(half: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # means of the cells of positive levels, and their derivatives by the lower and the upper end of the cell
    ends = np.concatenate([[0.0], (half[1:] + half[:-1]) / 2, [np.inf]])
    density = np.exp(-ends * ends / 2) / math.sqrt(2 * math.pi)
    beyond = np.array([math.erfc(end / math.sqrt(2)) / 2 for end in ends])
    mass = beyond[:-1] - beyond[1:]
    means = (density[:-1] - density[1:]) / mass
    below = density[:-1] * (means - ends[:-1]) / mass
    above = np.append(density[1:-1] * (ends[1:-1] - means[:-1]) / mass[:-1], 0.0)
    # zero is an end of the innermost cell by symmetry
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
