"""Replies of a follower to requests of rank 0 between two steps."""

from collections.abc import Callable
from typing import Any

from auraflux.distributed.comm.group import Group
from auraflux.distributed.comm.mesh import Mesh
from auraflux.weights.parallel.expert_placement import Placement


class FollowerReplies:
    """Replies of one follower.

    read_nbytes  returns the bytes of experts that this rank has read
    placement    of experts on the ranks of its stage
    """

    def __init__(self, group: Group, mesh: Mesh, read_nbytes: Callable[[], int], placement: Placement):
        self._group, self._mesh, self._read_nbytes, self._placement = group, mesh, read_nbytes, placement

    def reply(self, message: dict[str, Any], refused: str | None) -> None:
        """Reply to rank 0; `refused` is the reason why decode steps are not replayed here, if any."""
        if "read" in message:
            self._group.send_message({"nbytes": self._read_nbytes(), "refused": refused}, 0)
        elif "owners" in message:
            try:
                self._placement.apply(message["owners"])
            except Exception as err:
                self._group.send_message({"failed": str(err)}, 0)
                raise
            self._group.send_message({}, 0)
        elif self._group.rank in self._mesh.first_ranks:
            # all ranks of a stage have equal counts
            self._group.send_message({"uses": self._placement.uses()}, 0)
