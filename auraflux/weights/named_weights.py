"""`NamedWeights`: the weights of a model by their names, for adapters."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from auraflux.weights.formats.stored import Stored


class NamedWeight(NamedTuple):
    """A weight of a model.

    rows  of the checkpoint's matrix that it holds, in order; None for all
    """

    weight: Stored
    rows: Tensor | None


@dataclass(frozen=True, eq=False)
class NamedWeights:
    """The weights that adapters may change.

    linears  by our names of the modules
    experts  a layer's experts by our name of the mixture
    """

    linears: dict[str, list[NamedWeight]] = field(default_factory=lambda: defaultdict(list))
    experts: dict[str, Any] = field(default_factory=dict)
