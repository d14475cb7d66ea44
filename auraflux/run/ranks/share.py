"""What a rank has of a model all of whose layers every rank has: some experts, some pages, or some heads and columns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from auraflux.cache.calibration import ModelVectors
from auraflux.cache.deal import ALONE, Deal
from auraflux.run.ranks.group import Group
from auraflux.run.ranks.parallel import CONTEXT, EXPERTS, TENSOR
from auraflux.weights.balanced import Balance
from auraflux.weights.divided import Division
from auraflux.weights.slices import WHOLE, Slices


@dataclass(frozen=True)
class Share:
    """A rank's.

    division  the experts of every layer; None for all
    deal      the pages of every sequence
    slices    the heads and columns of every layer
    """

    division: Division | None
    deal: Deal
    slices: Slices

    def sliced(self, shapes: list[Any]) -> list[Any]:
        """The shapes of what layers keep here."""
        return shapes if self.slices.whole else [shape.sliced(self.slices.heads) for shape in shapes]

    def vectors(self, found: ModelVectors | None) -> ModelVectors | None:
        """What is known of the keys that are here."""
        return found if found is None or self.slices.whole else found.sliced(self.slices.heads)


def share_of(mode: str, rank: int, size: int, group: Callable[[], Group], balanced: bool = False) -> Share:
    """What a rank has in a mode.

    group     as it is now: one that comes back is another
    balanced  experts are dealt out as they are chosen
    """

    def add_up(mine: Tensor) -> Tensor:
        return group().add_up(mine)

    balance = Balance(rank, size, group) if balanced else None
    return Share(
        Division(rank, size, add_up, balance) if mode == EXPERTS else None,
        Deal(rank, size, lambda mine: group().exchange(mine)) if mode == CONTEXT else ALONE,
        Slices(rank, size, add_up) if mode == TENSOR else WHOLE,
    )
