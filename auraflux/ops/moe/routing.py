"""How a model chooses experts for a token: the settings that `route` obeys."""

import math
from dataclasses import dataclass

from auraflux.errors import InputError
from auraflux.kinds import check_fields, shown

SCORINGS = ("softmax", "sigmoid", "chosen", "sqrtsoftplus")


@dataclass(frozen=True)
class Routing:
    """The rule of a router.

    k            experts per token
    scoring      what a logit becomes: "softmax" over all experts; "sigmoid", each for itself; "chosen", softmax over
                 the chosen; "sqrtsoftplus", the square root of log(1 + exp(logit)), each for itself
    renormalize  divide the weights of a token by their sum (those of "chosen" sum to 1 either way)
    groups       the experts lie in this many equal groups, side by side ("sigmoid" only)
    kept_groups  only experts of this many best groups may be chosen
    scale        multiplies the weights at last
    """

    k: int
    scoring: str
    renormalize: bool
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.scoring not in SCORINGS:
            raise InputError(f"there is no scoring {shown(self.scoring)}. Those there are: {', '.join(SCORINGS)}.")
        if self.k < 1:
            raise InputError(f"k is {self.k}; a token needs at least one expert.")
        if self.groups < 1 or not 1 <= self.kept_groups <= self.groups:
            raise InputError(f"{self.kept_groups} of {self.groups} groups cannot be kept; from 1 to all of them can.")
        if self.groups > 1 and self.scoring != "sigmoid":
            raise InputError(
                f"{self.groups} groups with {self.scoring!r} scoring; only 'sigmoid' scores are compared by group."
            )
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise InputError(f"scale is {self.scale}; a positive, finite one is needed.")
