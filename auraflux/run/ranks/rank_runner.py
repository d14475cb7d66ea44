"""`RankRunner`: a runner of which others have a part, and what they must agree on before a step is recorded."""

from typing import Any

import torch

from auraflux.cache import Cache
from auraflux.run.ranks.group import Group
from auraflux.run.ranks.members import Part
from auraflux.run.ranks.mesh import Mesh
from auraflux.run.runner import Runner

THROUGH_MEMORY = "ranks give each other rows within a step, through main memory"
REASON_NBYTES = 200


class RankRunner(Runner):
    """Runs what is here of a model. Ranks of a stage take every step together, be it run, recorded or replayed.

    They all count the same steps, so that each knows by itself when one is recorded; whether that went well they tell each
    other, since a step whose calls of NCCL were captured by some and not by others would never end.
    """

    alone = False

    def __init__(self, model: Any, cache: Cache, exact: bool, group: Group, mesh: Mesh):
        super().__init__(model, cache, exact)
        self.group, self.mesh = group, mesh

    @property
    def unrecorded(self) -> str | None:
        """Why its steps cannot be recorded; None where they can."""
        return None if self.mesh.width == 1 or self.group.captured else THROUGH_MEMORY

    def agreed(self, spoiled: str | None) -> str | None:
        """Why a step was not recorded by all who take part in it; None where it was. `spoiled` is the reason here."""
        mine = (spoiled or "").encode()[:REASON_NBYTES].ljust(REASON_NBYTES, b"\0")
        peers = Part(self.group, self.mesh.peers(self.group.rank))
        told = peers.exchange(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        reasons = (bytes(each.numpy()).rstrip(b"\0").decode(errors="ignore") for each in told)
        return next((reason for reason in reasons if reason), None)
