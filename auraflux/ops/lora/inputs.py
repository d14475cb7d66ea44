"""`LinearInput`: the input of linear layers, with the norm that is applied first, if any."""

from dataclasses import dataclass

import torch
from torch import Tensor

from auraflux.validation import check_fields


@dataclass(frozen=True, eq=False)
class LinearInput:
    """Rows that weights multiply: x, or the norm over x + delta.

    x      [T, K]
    delta  [T, K]  added to x before the norm, or None
    norm   [K]     its weight; None for no norm
    """

    x: Tensor
    delta: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def is_cpu(self) -> bool:
        return self.x.is_cpu
