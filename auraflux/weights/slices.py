"""A rank's part of every matrix, where ranks of one host have some heads and some columns of each layer.

What reads the stream is split by rows, what writes to it by columns: each rank attends with its own heads, runs its own
columns of an MLP, and gives a row that lacks what the others have. These are added in the order of the ranks, so that a result
can be had again, once after attention and once after the MLP. Groups of quantized inputs are never cut.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from auraflux.errors import SettingsError
from auraflux.quant import QTensor
from auraflux.quant.packing import CHUNK
from auraflux.weights.stored import Stored

TILES = (64, 32, 16, 8, 4, 2, 1)  # columns that stay together where no group says how many
NARROW = 16  # a narrower tile would slow kernels down by more than an even split brings


@dataclass(frozen=True)
class Slices:
    """Which heads and columns a rank has.

    join  adds up what all ranks have found: [T, H] -> [T, H]
    """

    rank: int
    size: int
    join: Callable[[Tensor], Tensor]

    @property
    def whole(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether what is added once is added here."""
        return self.rank == 0

    def heads(self, count: int) -> range:
        """Which of so many heads of keys this rank has."""
        if count < self.size:
            raise SettingsError(
                f"{count} heads of keys cannot be split among {self.size} ranks. Give --parallel tensor={count} or fewer, "
                "or another way."
            )
        return self._share(count)

    def columns(self, count: int, group: int, what: str) -> range:
        """Which of so many columns this rank has, in whole groups; one rank may have a group more than another."""
        if count // group < self.size or count % group:
            raise SettingsError(
                f"{what} has {count} columns in groups of {group}, which cannot be split among {self.size} ranks without "
                "cutting one. Give fewer ranks, or another way."
            )
        return span(self._share(count // group), group)

    def group(self, found: Stored, rounded: int | None) -> int:
        """How many columns of a matrix belong together.

        rounded  the groups in which it is rounded on the way, if it is
        """
        width = found.shape[-1]
        if isinstance(found, QTensor) or (rounded is not None and width % rounded == 0):
            return group_of(found, rounded)
        fit = [tile for tile in TILES if width % tile == 0 and width // tile >= self.size]
        return next((tile for tile in fit if tile >= NARROW and self.even(width, tile)), fit[0] if fit else 1)

    def even(self, count: int, group: int) -> bool:
        """Whether all ranks would have as many groups of so many columns."""
        return count % (group * self.size) == 0

    def _share(self, count: int) -> range:
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)


WHOLE = Slices(0, 1, lambda mine: mine)


def span(share: range, each: int) -> range:
    """The rows or columns of some heads or groups that have so many."""
    return range(share.start * each, share.stop * each)


def group_of(found: Stored, rounded: int | None) -> int:
    """How many columns of a matrix share a scale; 1 where there are none."""
    if isinstance(found, QTensor):
        return max(found.group, CHUNK)
    return rounded if rounded is not None and found.shape[-1] % rounded == 0 else 1


def cut(found: Stored, rows: range | None, columns: range | None) -> Stored:
    """Some rows and columns of a matrix whose rows are in order; of a mapped one, nothing else is read."""
    if rows is not None and len(rows) < found.shape[-2]:
        found = found.between(rows) if isinstance(found, QTensor) else found[rows.start : rows.stop]
    if columns is None or len(columns) == found.shape[-1]:
        return found
    if isinstance(found, QTensor):
        return found.columns(columns)
    taken = found[:, columns.start : columns.stop]
    # what stands in for a matrix that is missing takes no memory
    return taken.contiguous() if any(found.stride()) else taken
