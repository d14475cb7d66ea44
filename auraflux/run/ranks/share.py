"""What a rank has of a model all of whose layers every rank has: some experts, some pages, or some heads and columns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from auraflux.cache.calibration import ModelVectors
from auraflux.cache.deal import ALONE, Deal
from auraflux.run.ranks.members import Members
from auraflux.run.ranks.mesh import Mesh
from auraflux.run.ranks.parallel import CONTEXT, EXPERTS, TENSOR
from auraflux.weights.balanced import Balance
from auraflux.weights.divided import Division
from auraflux.weights.placement import Placement
from auraflux.weights.slices import WHOLE, Slices


@dataclass(frozen=True)
class Share:
    """What a rank has of the model.

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


def share_of(
    mesh: Mesh, rank: int, peers: Callable[[], Members], balanced: bool = False, placement: Placement | None = None
) -> Share:
    """What a rank has of its layers.

    peers      the ranks of its stage, as they are now: those that come back are others
    balanced   experts are dealt out as they are chosen
    placement  of experts; by number where there is none
    """

    def add_up(mine: Tensor) -> Tensor:
        return peers().add_up(mine)

    here = mesh.place(rank), mesh.width
    balance = Balance(*here, peers) if balanced else None
    return Share(
        Division(placement or Placement(*here), add_up, balance) if EXPERTS in mesh.modes else None,
        Deal(*here, lambda mine: peers().exchange(mine)) if CONTEXT in mesh.modes else ALONE,
        Slices(*here, add_up) if TENSOR in mesh.modes else WHOLE,
    )
