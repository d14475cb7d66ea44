"""Tensor parallelism: the heads and columns of every matrix on one rank.

Matrices that read the residual stream are split by rows, those that write to it by columns: each rank runs its own attention
heads and MLP columns, and an all-reduce sums the partial results once after attention and once after the MLP, in rank order so
that results are reproducible. Quantization groups are never split.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from auraflux.errors import SettingsError
from auraflux.quant import QTensor
from auraflux.quant.packing import CHUNK
from auraflux.weights.convert.quantize_large import fitting_group
from auraflux.weights.formats.stored import Stored

TILES = (64, 32, 16, 8, 4, 2, 1)  # columns per tile of unquantized matrices
MIN_TILE = 16  # narrower tiles slow kernels down by more than an even split gains


@dataclass(frozen=True)
class Slices:
    """Heads and columns of one rank.

    all_reduce  sums over ranks: [T, H] -> [T, H]
    """

    rank: int
    size: int
    all_reduce: Callable[[Tensor], Tensor]

    @property
    def unsliced(self) -> bool:
        """True if this rank has every matrix in full."""
        return self.size == 1

    @property
    def first(self) -> bool:
        """True if biases, which are added once, belong to this rank."""
        return self.rank == 0

    def heads(self, count: int) -> range:
        """Return the KV heads of this rank, of `count`."""
        if count < self.size:
            raise SettingsError(
                f"{count} KV heads cannot be split over {self.size} ranks. Give --parallel tensor={count} or fewer, "
                "or another parallel mode."
            )
        return self._share(count)

    def columns(self, count: int, group: int, what: str) -> range:
        """Return the columns of this rank, of `count`, in full groups; a rank may have one group more than another."""
        if count // group < self.size or count % group:
            raise SettingsError(
                f"{what} has {count} columns in groups of {group}, which cannot be split over {self.size} ranks without "
                "splitting a group. Give fewer ranks, or another parallel mode."
            )
        return span(self._share(count // group), group)

    def group(self, found: Stored, rounded: int | None) -> int:
        """Return the number of columns that must not be split.

        rounded  group size in which the matrix is quantized while it is loaded, or None
        """
        width = found.shape[-1]
        if isinstance(found, QTensor) or (rounded is not None and fitting_group(width, rounded)):
            return group_of(found, rounded)
        fit = [tile for tile in TILES if width % tile == 0 and width // tile >= self.size]
        return next((tile for tile in fit if tile >= MIN_TILE and self.even(width, tile)), fit[0] if fit else 1)

    def even(self, count: int, group: int) -> bool:
        """Return whether all ranks would have the same number of groups."""
        return count % (group * self.size) == 0

    def _share(self, count: int) -> range:
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)


UNSLICED = Slices(0, 1, lambda mine: mine)


def span(share: range, each: int) -> range:
    """Return the rows or columns of some heads or groups that have `each` of them."""
    return range(share.start * each, share.stop * each)


def group_of(found: Stored, rounded: int | None) -> int:
    """Return the number of columns that share a scale; 1 without scales."""
    if isinstance(found, QTensor):
        return max(found.group, CHUNK)
    return 1 if rounded is None else fitting_group(found.shape[-1], rounded) or 1


def cut(found: Stored, rows: range | None, columns: range | None) -> Stored:
    """Return some rows and columns of a matrix that is not interleaved; of a mapped one, only these are read."""
    if rows is not None and len(rows) < found.shape[-2]:
        found = found.row_range(rows) if isinstance(found, QTensor) else found[rows.start : rows.stop]
    if columns is None or len(columns) == found.shape[-1]:
        return found
    if isinstance(found, QTensor):
        return found.columns(columns)
    taken = found[:, columns.start : columns.stop]
    # the placeholder of a missing matrix has stride 0 and takes no memory
    return taken.contiguous() if any(found.stride()) else taken
