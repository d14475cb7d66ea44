"""`Mesh`: pipeline stages by ranks of a stage.

A rank sends its hidden states to the rank with the same position in the next stage, so that no stage has to broadcast them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """Ranks, numbered stage by stage.

    stages  of the pipeline, each with consecutive layers
    width   ranks of a stage
    modes   parallelism within a stage
    """

    stages: int
    width: int
    modes: tuple[str, ...]

    @property
    def size(self) -> int:
        """World size."""
        return self.stages * self.width

    @property
    def single_stage(self) -> bool:
        """True if every rank has all layers."""
        return self.stages == 1

    @property
    def first_ranks(self) -> range:
        """First rank of every stage."""
        return range(0, self.size, self.width)

    def stage(self, rank: int) -> int:
        """Return the stage of a rank."""
        return rank // self.width

    def rank_in_stage(self, rank: int) -> int:
        """Return the position of a rank in its stage."""
        return rank % self.width

    def peers(self, rank: int) -> range:
        """Return the ranks of the stage of a rank."""
        first = rank - self.rank_in_stage(rank)
        return range(first, first + self.width)

    def previous_rank(self, rank: int) -> int | None:
        """Return the rank that sends to this one; None in the first stage."""
        return rank - self.width if rank >= self.width else None

    def next_rank(self, rank: int) -> int | None:
        """Return the rank that receives from this one; None in the last stage."""
        return rank + self.width if rank + self.width < self.size else None
