"""`Adapters`: the adapters (LoRA) of the weights of one input, as ops take them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from auraflux.validation import check_fields


@dataclass(frozen=True, eq=False)
class Adapters:
    """Adapters of the rows of one input and of the weights that multiply it.

    slots  [T]        int32, the adapter of each row; those outside 0 to S - 1 mean none
    a      [S, R, K]  of each weight, of any R each; None where no adapter changes a weight
    b      [S, R, N]  scaled, of each weight, or None
    """

    slots: Tensor
    a: Sequence[Tensor | None]
    b: Sequence[Tensor | None]

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return a and b of the weights that adapters change."""
        return [(a, b) for a, b in zip(self.a, self.b, strict=True) if a is not None and b is not None]

    @property
    def rank(self) -> int:
        """Return the highest rank."""
        return max(a.shape[1] for a, _ in self.pairs)
