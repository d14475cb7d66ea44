"""`Routing`: a model's router settings, as `route` applies them."""

import math
from dataclasses import dataclass

from auraflux.errors import InputError
from auraflux.validation import check_fields, shown

SCORINGS = ("softmax", "sigmoid", "chosen", "sqrtsoftplus")


@dataclass(frozen=True)
class Routing:
    """Router settings.

    k            experts per token
    scoring      score of a logit: "softmax" over all experts; "sigmoid" per expert; "chosen", softmax over the selected
                 experts; "sqrtsoftplus", sqrt(log(1 + exp(logit))) per expert
    renormalize  divide a token's weights by their sum ("chosen" weights always sum to 1)
    groups       number of equal groups of consecutive experts ("sigmoid" and "softmax" only)
    topk_groups  number of best groups that experts are selected from: by their two best scores, with softmax by their best
    scale        factor of the final weights
    """

    k: int
    scoring: str
    renormalize: bool
    groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.scoring not in SCORINGS:
            raise InputError(f"unknown scoring {shown(self.scoring)}. Supported: {', '.join(SCORINGS)}.")
        if self.k < 1:
            raise InputError(f"k is {self.k}; a token needs at least one expert.")
        if self.groups < 1 or not 1 <= self.topk_groups <= self.groups:
            raise InputError(f"{self.topk_groups} of {self.groups} groups cannot be selected; 1 to {self.groups} can.")
        if self.groups > 1 and self.scoring not in ("sigmoid", "softmax"):
            raise InputError(
                f"{self.groups} groups with {self.scoring!r} scoring; only 'sigmoid' and 'softmax' scoring support groups."
            )
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise InputError(f"scale is {self.scale}; it must be positive and finite.")
