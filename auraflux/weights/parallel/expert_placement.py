"""Placement of experts on ranks: contiguous at first, then rebalanced by use counts.

Every rank has the same number of experts before and after, so that its memory does not change. Rebalancing swaps pairs of
experts between ranks, as few as needed to run equally many rows: a rank loads the expert it gains into the slot of the one it
gives away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from auraflux.errors import InputError

MIN_GAIN = 0.01  # of a rank's rows in a layer: less is not worth loading an expert


class Layer(Protocol):
    """Experts of one layer on this rank."""

    @property
    def use_counts(self) -> list[int]:
        """Uses of each expert of the layer."""

    def reset_counts(self) -> None:
        """Set all use counts to zero."""

    def replace_experts(self, local: Sequence[int]) -> None:
        """Load the experts that this rank should have in place of those it gives away; change nothing if that raises."""


class Placement:
    """Ranks of all experts, and the layers on this rank.

    rank, size  in expert parallelism
    owners      rank of every expert, by layer name; layers without an entry are placed contiguously
    """

    def __init__(self, rank: int, size: int, owners: Mapping[str, Sequence[int]] | None = None):
        self.rank, self.size = rank, size
        self.owners: dict[str, list[int]] = {name: list(ranks) for name, ranks in (owners or {}).items()}
        self.layers: dict[str, Layer] = {}

    def local_experts(self, name: str, count: int) -> list[int]:
        """Return the experts of a layer that belong on this rank, of `count`."""
        owners = self.owners.setdefault(name, contiguous_placement(count, self.size))
        if len(owners) != count:
            raise InputError(
                f"the use counts of {name} have {len(owners)} experts, but the layer has {count}: give counts of this model."
            )
        return self._local(owners)

    def _local(self, owners: Sequence[int]) -> list[int]:
        return [expert for expert, owner in enumerate(owners) if owner == self.rank]

    def uses(self) -> dict[str, list[int]]:
        """Return the use counts of the experts of each layer on this rank."""
        return {name: layer.use_counts for name, layer in self.layers.items()}

    def reset_counts(self) -> None:
        """Set the use counts of all layers to zero."""
        for layer in self.layers.values():
            layer.reset_counts()

    def apply(self, owners: Mapping[str, Sequence[int]]) -> None:
        """Move experts to a new placement; if a layer raises, `owners` has the new placement of those before it."""
        self.owners |= {name: list(ranks) for name, ranks in owners.items() if name not in self.layers}
        for name, layer in self.layers.items():
            if name in owners:
                layer.replace_experts(self._local(owners[name]))
                self.owners[name] = list(owners[name])
                layer.reset_counts()


@dataclass(frozen=True)
class PlacementResult:
    """Effect of rebalancing.

    rows    counted expert uses by tokens, over all layers
    before  share of a layer's rows on its busiest rank, averaged over layers; at best 1 / ranks
    after   the same with the new placement
    moved   experts that changed ranks
    """

    rows: int
    before: float
    after: float
    moved: int


def contiguous_placement(count: int, size: int) -> list[int]:
    """Return the rank of each expert, with consecutive experts on each rank."""
    return [rank for rank in range(size) for _ in range(rank * count // size, (rank + 1) * count // size)]


def rebalance_layer(uses: Sequence[int], owners: Sequence[int], size: int) -> list[int]:
    """Return the rank of each expert after swaps, until none with the busiest rank makes the layer faster."""
    rows, found = np.asarray(uses, dtype=np.int64), np.asarray(owners)
    min_gain = MIN_GAIN * rows.sum() / size
    for _ in range(len(found)):
        loads = np.bincount(found, rows, size)
        busiest = int(loads.argmax())
        # the least busy rank first
        swaps = (_best_swap(rows, found, busiest, int(other), min_gain) for other in loads.argsort(kind="stable"))
        swap = next((swap for swap in swaps if swap is not None), None)
        if swap is None:
            break
        found[list(swap)] = found[list(swap[::-1])]
    return found.tolist()


def _best_swap(
    rows: NDArray[np.int64], owners: NDArray[np.int64], busiest: int, other: int, min_gain: float
) -> tuple[int, int] | None:
    """Return the experts of two ranks whose swap balances them best; None if no swap gains `min_gain`."""
    mine, theirs = np.flatnonzero(owners == busiest), np.flatnonzero(owners == other)
    gap = rows[mine].sum() - rows[theirs].sum()
    if gap <= min_gain or not len(theirs):
        return None
    left = np.abs(gap - 2 * (rows[mine][:, None] - rows[theirs][None, :]))
    at = np.unravel_index(int(left.argmin()), left.shape)
    return (int(mine[at[0]]), int(theirs[at[1]])) if gap - left[at] > min_gain else None


def rebalance(
    uses: Mapping[str, Sequence[int]], owners: Mapping[str, Sequence[int]], size: int
) -> tuple[dict[str, list[int]], PlacementResult]:
    """Rebalance the experts of all layers by use counts; return the new placement and its effect.

    owners  the current placement; contiguous for layers without an entry
    """
    owners = {name: owners.get(name) or contiguous_placement(len(counts), size) for name, counts in uses.items()}
    found = {name: rebalance_layer(counts, owners[name], size) for name, counts in uses.items()}
    rows = sum(map(sum, uses.values()))
    before, after = (_busiest_share(uses, ranks, size) for ranks in (owners, found))
    moved = sum(a != b for name, ranks in found.items() for a, b in zip(ranks, owners[name], strict=True))
    return found, PlacementResult(rows, before, after, moved)


def _busiest_share(uses: Mapping[str, Sequence[int]], owners: Mapping[str, Sequence[int]], size: int) -> float:
    shares = [np.bincount(owners[name], counts, size).max() / sum(counts) for name, counts in uses.items() if sum(counts)]
    return float(np.mean(shares)) if shares else 1 / size
