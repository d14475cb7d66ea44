"""What a route is worth: the time of a case without it, beside that with it."""

from functools import partial
from typing import Any

from torch import Tensor

from auraflux.bench.arguments import cloned
from auraflux.bench.peers.peer import Peer
from auraflux.bench.timing import Contender
from auraflux.ops._cases import Args, Case, tensors
from auraflux.ops.explain import taken
from auraflux.ops.routes import leaving_out, verdict_of


def without_each(case: Case, args: Args) -> list[Peer]:
    """Peers of a case that are its own kernels: what it would take without each of the routes that it takes."""
    verdict = verdict_of(case.op, "cuda", args)
    names = [] if verdict is None else dict.fromkeys(taken(verdict))
    return [peer for name in names if (peer := _without(case, args, name)) is not None]


def _without(case: Case, args: Args, name: str) -> Peer | None:
    """None where nothing else serves the case."""
    left_out = frozenset([name])
    instead = verdict_of(case.op, "cuda", args, left_out)
    if instead is None or instead.taken is None:
        return None

    def make(args: Args, copies: int) -> Contender:
        return Contender([partial(_call, case, cloned(args), left_out) for _ in range(copies)])

    return Peer(f"without {name}: {instead.path}", make, _first_tensor)


def _call(case: Case, args: Args, left_out: frozenset[str]) -> tuple[Any, Args]:
    with leaving_out(left_out):
        return case.op(**args), args


def _first_tensor(result: tuple[Any, Args]) -> Tensor:
    """The first tensor of the result; of an op that only writes into its arguments, the first of these."""
    return next(tensor for _, tensor in tensors(result))
