"""The gain of a route: the time of a case with and without it."""

from functools import partial
from typing import Any

from torch import Tensor

from auraflux.bench.arguments import cloned
from auraflux.bench.peers.peer import Peer
from auraflux.bench.timing import Contender
from auraflux.errors import InputError
from auraflux.ops._cases import Args, Case, relative_rms, tensors
from auraflux.ops.explain import taken
from auraflux.ops.routes import Explanation, explain_call, without_routes


def without_each(case: Case, args: Args) -> list[Peer]:
    """Return peers of a case that are its own kernels: those it would run without each of its routes."""
    verdict = explain_call(case.op, "cuda", args)
    names = [] if verdict is None else dict.fromkeys(taken(verdict))
    return [peer for name in names if (peer := _without(case, args, name)) is not None]


def _without(case: Case, args: Args, name: str) -> Peer | None:
    """Return the peer; None where no other route serves the case."""
    left_out = frozenset([name])
    instead = explain_call(case.op, "cuda", args, left_out)
    if instead is None or not _whole(instead):
        return None

    def make(args: Args, copies: int) -> Contender:
        usual, other = (_results(_call(case, cloned(args), names)) for names in (frozenset[str](), left_out))
        if len(usual) != len(other) or not all(relative_rms(b, a) <= case.tol for a, b in zip(usual, other, strict=True)):
            # routes above this one take such calls, so it need not refuse them
            raise InputError("it is not for this call")
        return Contender([partial(_call, case, cloned(args), left_out) for _ in range(copies)])

    return Peer(f"without {name}: {instead.path}", make, _first_tensor)


def _whole(verdict: Explanation) -> bool:
    """Return True if a route is taken, and all nested calls have one too."""
    return verdict.taken is not None and all(map(_whole, verdict.then))


def _results(made: tuple[Any, Args]) -> list[Tensor]:
    """Return the floating-point results of a call and its arguments, which it may have written to."""
    return [tensor for _, tensor in tensors(made) if tensor.is_floating_point()]


def _call(case: Case, args: Args, left_out: frozenset[str]) -> tuple[Any, Args]:
    with without_routes(left_out):
        return case.op(**args), args


def _first_tensor(result: tuple[Any, Args]) -> Tensor:
    """Return the first tensor of the result; of an op that only writes into its arguments, the first of these."""
    return next(tensor for _, tensor in tensors(result))
