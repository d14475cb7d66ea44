"""`Mesh`: where ranks stand. Stages come one after the other, ranks of a stage side by side; each row from a stage to the next
goes to the rank at the same place there, so that nobody has to hand it on to others.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """Ranks by number: those of the first stage, then those of the second.

    stages  have consecutive layers each
    width   ranks of a stage
    modes   by which these divide its layers
    """

    stages: int
    width: int
    modes: tuple[str, ...]

    @property
    def size(self) -> int:
        return self.stages * self.width

    @property
    def whole(self) -> bool:
        """Whether every rank has all layers."""
        return self.stages == 1

    @property
    def heads(self) -> range:
        """The first rank of every stage."""
        return range(0, self.size, self.width)

    def stage(self, rank: int) -> int:
        return rank // self.width

    def place(self, rank: int) -> int:
        """A rank's number in its stage."""
        return rank % self.width

    def peers(self, rank: int) -> range:
        """The ranks of its stage."""
        first = rank - self.place(rank)
        return range(first, first + self.width)

    def before(self, rank: int) -> int | None:
        """Who has the layers before; None for the first stage."""
        return rank - self.width if rank >= self.width else None

    def after(self, rank: int) -> int | None:
        """Who has the layers after; None for the last stage."""
        return rank + self.width if rank + self.width < self.size else None
