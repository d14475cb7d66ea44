"""Which kernel each case takes on an H200, asked of the tables without one."""

from collections.abc import Iterator

from auraflux.ops._cases import Case, all_cases, in_row_order
from auraflux.ops._dispatch import Op, all_ops, exact
from auraflux.ops.assumed import assume_gpu
from auraflux.ops.routes import Verdict, routes_of, verdict_of
from auraflux.ops.unfilled import Unfilled


def explained(case: Case) -> Verdict | None:
    """What the table of a case's op says of it; None where the op has no table, or nothing to do."""
    with Unfilled(), assume_gpu(), exact(case.exact):
        return verdict_of(case.op, "cuda", in_row_order(case.args()))


def chosen_ops() -> list[Op]:
    """Ops whose CUDA kernel has a choice."""
    return [op for op in all_ops() if routes_of(op, "cuda") is not None]


def taken(verdict: Verdict) -> Iterator[str]:
    """The names of all routes that a call takes."""
    if verdict.taken is not None:
        yield verdict.taken
    for inner in verdict.then:
        yield from taken(inner)


def cases_of(op: Op) -> list[Case]:
    return [case for case in all_cases() if case.op is op]


def all_verdicts() -> dict[Case, Verdict]:
    """What the tables say of every case whose arguments are quickly made: not of slow ones and those of the benchmark."""
    quick = (case for op in chosen_ops() for case in cases_of(op) if not case.slow and not case.bench)
    found = ((case, explained(case)) for case in quick)
    return {case: verdict for case, verdict in found if verdict is not None}
