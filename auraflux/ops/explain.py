"""Which kernel each case takes, asked of the tables: on a CPU, and on an H200 without one."""

from collections.abc import Iterator
from contextlib import contextmanager

from auraflux.ops._cases import Args, Case, all_cases, in_row_order
from auraflux.ops._dispatch import Op, all_ops, exact
from auraflux.ops.assumed import assume_gpu
from auraflux.ops.routes import Verdict, routes_of, verdict_of
from auraflux.ops.unfilled import Unfilled

BACKENDS = ("cuda", "cpu")


@contextmanager
def asking(backend: str) -> Iterator[None]:
    """Ask the tables of a backend inside the block, those of CUDA as if there were an H200."""
    if backend == "cuda":
        with assume_gpu():
            yield
    else:
        yield


def explained(case: Case, backend: str = "cuda") -> Verdict | None:
    """What the table of a case's op says of it; None where the op has no table, or nothing to do."""
    with Unfilled():
        return _explained(case, case.args(), backend)


def _explained(case: Case, arguments: Args, backend: str) -> Verdict | None:
    with asking(backend), exact(case.exact):
        return verdict_of(case.op, backend, in_row_order(arguments) if backend == "cuda" else arguments)


def chosen_ops(backend: str = "cuda") -> list[Op]:
    """Ops whose kernel has a choice."""
    return [op for op in all_ops() if routes_of(op, backend) is not None]


def taken(verdict: Verdict) -> Iterator[str]:
    """The names of all routes that a call takes."""
    if verdict.taken is not None:
        yield verdict.taken
    for inner in verdict.then:
        yield from taken(inner)


def cases_of(op: Op) -> list[Case]:
    return [case for case in all_cases() if case.op is op]


def all_verdicts(backends: tuple[str, ...] = BACKENDS) -> dict[str, dict[Case, Verdict]]:
    """What backends' tables say of every case whose arguments are quickly made: not of slow ones and the benchmark's."""
    verdicts: dict[str, dict[Case, Verdict]] = {backend: {} for backend in backends}
    for case in all_cases():
        asked = [backend for backend in backends if routes_of(case.op, backend) is not None]
        if not asked or case.slow or case.bench:
            continue
        # made once: that takes most of the time
        with Unfilled():
            arguments = case.args()
            found = {backend: _explained(case, arguments, backend) for backend in asked}
        for backend, verdict in found.items():
            if verdict is not None:
                verdicts[backend][case] = verdict
    return verdicts
