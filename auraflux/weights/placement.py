"""Which rank has which experts of every layer: by number at first, and by how often each is chosen once that is known.

Every rank has as many as it has by number, so that memory stays divided as it was. Experts change hands in pairs, as few as
make ranks run equally many rows: who gains one reads it, and it takes the place of the one that was given for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from auraflux.errors import InputError

ENOUGH = 0.01  # of a rank's rows in a layer: a smaller difference is not worth a read


class Layer(Protocol):
    """A rank's experts of one layer."""

    @property
    def counted(self) -> list[int]:
        """How often each expert of the layer was chosen."""

    def begin_count(self) -> None:
        """Count from none again."""

    def take(self, share: Sequence[int]) -> None:
        """Have these experts, instead of those that are here; all of it or, if that raises, nothing."""


class Placement:
    """Ranks that have the experts of layers, and the layers that are here.

    rank, size  of those that divide a layer
    owners      of every expert, by the layer's name; layers that it has not are divided by number
    """

    def __init__(self, rank: int, size: int, owners: Mapping[str, Sequence[int]] | None = None):
        self.rank, self.size = rank, size
        self.owners: dict[str, list[int]] = {name: list(ranks) for name, ranks in (owners or {}).items()}
        self.layers: dict[str, Layer] = {}

    def share(self, name: str, count: int) -> list[int]:
        """The experts of a layer that are to be here, of so many."""
        owners = self.owners.setdefault(name, by_number(count, self.size))
        if len(owners) != count:
            raise InputError(
                f"the uses of {len(owners)} experts are known of {name}, which has {count}: give those of this model."
            )
        return self._mine(owners)

    def _mine(self, owners: Sequence[int]) -> list[int]:
        return [expert for expert, owner in enumerate(owners) if owner == self.rank]

    def uses(self) -> dict[str, list[int]]:
        """How often the experts of the layers here were chosen, by the layers' names."""
        return {name: layer.counted for name, layer in self.layers.items()}

    def begin_count(self) -> None:
        """Count uses from none again."""
        for layer in self.layers.values():
            layer.begin_count()

    def take(self, owners: Mapping[str, Sequence[int]]) -> None:
        """Divide layers so from now on; where one cannot be, those before it are, and `owners` says which."""
        self.owners |= {name: list(ranks) for name, ranks in owners.items() if name not in self.layers}
        for name, layer in self.layers.items():
            if name in owners:
                layer.take(self._mine(owners[name]))
                self.owners[name] = list(owners[name])
                layer.begin_count()


@dataclass(frozen=True)
class Dealt:
    """What a deal brought.

    rows    that were counted: experts chosen by tokens, of all layers
    before  the part of a layer's rows that its busiest rank ran, on the average of layers; 1 / ranks is the least
    after   that it would have run as experts are now
    moved   experts that another rank has now
    """

    rows: int
    before: float
    after: float
    moved: int


def by_number(count: int, size: int) -> list[int]:
    """The ranks of so many experts, consecutive ones to each."""
    return [rank for rank in range(size) for _ in range(rank * count // size, (rank + 1) * count // size)]


def deal_out(uses: Sequence[int], owners: Sequence[int], size: int) -> list[int]:
    """Ranks that have experts, changed in pairs until none that the busiest could give away makes its layer faster."""
    rows, found = np.asarray(uses, dtype=np.int64), np.asarray(owners)
    enough = ENOUGH * rows.sum() / size
    for _ in range(len(found)):
        loads = np.bincount(found, rows, size)
        busiest = int(loads.argmax())
        # who has least to do first
        pairs = (_pair(rows, found, busiest, int(other), enough) for other in loads.argsort(kind="stable"))
        pair = next((pair for pair in pairs if pair is not None), None)
        if pair is None:
            break
        found[list(pair)] = found[list(pair[::-1])]
    return found.tolist()


def _pair(
    rows: NDArray[np.int64], owners: NDArray[np.int64], busiest: int, other: int, enough: float
) -> tuple[int, int] | None:
    """An expert of the busiest rank and one of another whose exchange brings both closest; None where none does by enough."""
    mine, theirs = np.flatnonzero(owners == busiest), np.flatnonzero(owners == other)
    gap = rows[mine].sum() - rows[theirs].sum()
    if gap <= enough or not len(theirs):
        return None
    left = np.abs(gap - 2 * (rows[mine][:, None] - rows[theirs][None, :]))
    at = np.unravel_index(int(left.argmin()), left.shape)
    return (int(mine[at[0]]), int(theirs[at[1]])) if gap - left[at] > enough else None


def deal_all(
    uses: Mapping[str, Sequence[int]], owners: Mapping[str, Sequence[int]], size: int
) -> tuple[dict[str, list[int]], Dealt]:
    """Deal the experts of all layers out by how often they were chosen: who has them then, and what that brings.

    owners  as they are; by number where none are named
    """
    owners = {name: owners.get(name) or by_number(len(counts), size) for name, counts in uses.items()}
    found = {name: deal_out(counts, owners[name], size) for name, counts in uses.items()}
    rows = sum(map(sum, uses.values()))
    before, after = (_busiest(uses, ranks, size) for ranks in (owners, found))
    moved = sum(a != b for name, ranks in found.items() for a, b in zip(ranks, owners[name], strict=True))
    return found, Dealt(rows, before, after, moved)


def _busiest(uses: Mapping[str, Sequence[int]], owners: Mapping[str, Sequence[int]], size: int) -> float:
    parts = [np.bincount(owners[name], counts, size).max() / sum(counts) for name, counts in uses.items() if sum(counts)]
    return float(np.mean(parts)) if parts else 1 / size
