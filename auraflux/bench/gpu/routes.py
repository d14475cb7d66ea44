"""What a route is worth: the time of a case without it, beside that with it."""

from functools import partial
from typing import Any

from torch import Tensor

from auraflux.bench.arguments import cloned
from auraflux.bench.peers.peer import Peer
from auraflux.bench.timing import Contender
from auraflux.errors import InputError
from auraflux.ops._cases import Args, Case, relative_rms, tensors
from auraflux.ops.explain import taken
from auraflux.ops.routes import Verdict, leaving_out, verdict_of


def without_each(case: Case, args: Args) -> list[Peer]:
    """Peers of a case that are its own kernels: what it would take without each of the routes that it takes."""
    verdict = verdict_of(case.op, "cuda", args)
    names = [] if verdict is None else dict.fromkeys(taken(verdict))
    return [peer for name in names if (peer := _without(case, args, name)) is not None]


def _without(case: Case, args: Args, name: str) -> Peer | None:
    """None where nothing else serves the case."""
    left_out = frozenset([name])
    instead = verdict_of(case.op, "cuda", args, left_out)
    if instead is None or not _whole(instead):
        return None

    def make(args: Args, copies: int) -> Contender:
        usual, other = (_results(_call(case, cloned(args), names)) for names in (frozenset[str](), left_out))
        if len(usual) != len(other) or not all(relative_rms(b, a) <= case.tol for a, b in zip(usual, other, strict=True)):
            # the routes above such a one take its calls, so it need not refuse them
            raise InputError("it is not for this call")
        return Contender([partial(_call, case, cloned(args), left_out) for _ in range(copies)])

    return Peer(f"without {name}: {instead.path}", make, _first_tensor)


def _whole(verdict: Verdict) -> bool:
    """Whether some route is taken, and by all that is asked in its turn."""
    return verdict.taken is not None and all(map(_whole, verdict.then))


def _results(made: tuple[Any, Args]) -> list[Tensor]:
    """All that a call gives, and what it was given, which it may have written to."""
    return [tensor for _, tensor in tensors(made) if tensor.is_floating_point()]


def _call(case: Case, args: Args, left_out: frozenset[str]) -> tuple[Any, Args]:
    with leaving_out(left_out):
        return case.op(**args), args


def _first_tensor(result: tuple[Any, Args]) -> Tensor:
    """The first tensor of the result; of an op that only writes into its arguments, the first of these."""
    return next(tensor for _, tensor in tensors(result))
