"""A peer: another library's implementation of one op."""

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
    """One library's implementation of an op.

    make      takes the arguments and the number of copies to rotate through, returns the calls to be timed; preparation
              (packing weights, building a graph) is not timed
    read      converts the first copy's result to a tensor, to be compared with the reference
    applies   returns True for a case that it supports
    contract  "fast" if it rounds activations to int8; such a peer is not compared with our exact kernels
    packages  that must be installed
    nbytes    of memory for one copy
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
    """Make a peer from a function that prepares one copy and returns the call on it."""
    return lambda args, copies: Contender([prepare(copy.deepcopy(args)) for _ in range(copies)])
