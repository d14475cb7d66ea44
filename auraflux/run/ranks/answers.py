"""What a rank that follows answers when rank 0 asks or tells it something between two steps."""

from collections.abc import Callable
from typing import Any

from auraflux.run.ranks.group import Group
from auraflux.run.ranks.mesh import Mesh
from auraflux.weights.placement import Placement


class Answers:
    """What a rank answers to rank 0.

    read_nbytes  tells how much of experts was read here
    placement    of the experts that ranks of its stage divide
    """

    def __init__(self, group: Group, mesh: Mesh, read_nbytes: Callable[[], int], placement: Placement):
        self._group, self._mesh, self._read_nbytes, self._placement = group, mesh, read_nbytes, placement

    def give(self, told: dict[str, Any], refused: str | None) -> None:
        """Answer rank 0; `refused` says why steps of decoding are not replayed here, if they are not."""
        if "read" in told:
            self._group.say({"nbytes": self._read_nbytes(), "refused": refused}, 0)
        elif "owners" in told:
            try:
                self._placement.take(told["owners"])
            except Exception as err:
                self._group.say({"failed": str(err)}, 0)
                raise
            self._group.say({}, 0)
        elif self._group.rank in self._mesh.heads:
            # ranks of a stage have counted the same
            self._group.say({"uses": self._placement.uses()}, 0)
