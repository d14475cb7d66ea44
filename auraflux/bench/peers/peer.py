"""What a peer is: another library's way of doing the work of one op."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from auraflux.bench.arguments import storage_nbytes
from auraflux.bench.timing import Contender
from auraflux.ops._cases import Args, Case


def _everything(case: Case, args: Args) -> bool:
    return True


@dataclass(frozen=True)
class Peer:
    """One library's way of doing an op.

    make      takes the arguments and how many copies of them to rotate through, gives the calls to be timed; what it
              prepares (packing weights, building a graph) is not
    read      gives the first copy's result as a tensor, to be held to the reference
    applies   whether it can do this case
    contract  "fast" when it rounds activations to int8; such a peer is not shown beside our exact kernels
    packages  what must be installed
    nbytes    memory one copy takes
    """

    name: str
    make: Callable[[Args, int], Contender]
    read: Callable[[Any], Tensor] = lambda result: result
    applies: Callable[[Case, Args], bool] = _everything
    contract: str = "exact"
    packages: tuple[str, ...] = ("torch",)
    nbytes: Callable[[Args], int] = storage_nbytes

    def missing(self) -> list[str]:
        return [name for name in self.packages if find_spec(name) is None]

    def serves(self, case: Case, args: Args) -> bool:
        return (self.contract == "exact" or not case.exact) and self.applies(case, args)


def each(prepare: Callable[[Args], Callable[[], Any]]) -> Callable[[Args, int], Contender]:
    """Make a peer from a function that prepares one copy and gives the call on it."""
    return lambda args, copies: Contender([prepare(copy.deepcopy(args)) for _ in range(copies)])
