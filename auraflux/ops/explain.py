"""Explanations of the kernel that each case runs on, from the route tables: for this CPU, and for an H200 without one."""

from collections.abc import Iterator
from contextlib import contextmanager

from auraflux.ops._cases import Args, Case, all_cases, in_row_layout
from auraflux.ops._dispatch import Op, all_ops, exact
from auraflux.ops.fake_gpu import use_fake_gpu
from auraflux.ops.fake_tensor import FakeTensors
from auraflux.ops.routes import Explanation, explain_call, routes_of

BACKENDS = ("cuda", "cpu")


@contextmanager
def fake_device(backend: str) -> Iterator[None]:
    """Pretend inside the block that an H200 is present if the backend is CUDA."""
    if backend == "cuda":
        with use_fake_gpu():
            yield
    else:
        yield


def explain_case(case: Case, backend: str = "cuda") -> Explanation | None:
    """Explain the route of a case; return None where its op has no route table, or nothing to do."""
    with FakeTensors():
        return _explain(case, case.args(), backend)


def _explain(case: Case, arguments: Args, backend: str) -> Explanation | None:
    with fake_device(backend), exact(case.exact):
        return explain_call(case.op, backend, in_row_layout(arguments) if backend == "cuda" else arguments)


def routed_ops(backend: str = "cuda") -> list[Op]:
    """Return the ops that have a route table."""
    return [op for op in all_ops() if routes_of(op, backend) is not None]


def taken(verdict: Explanation) -> Iterator[str]:
    """Yield the names of all routes that a call takes."""
    if verdict.taken is not None:
        yield verdict.taken
    for inner in verdict.then:
        yield from taken(inner)


def cases_of(op: Op) -> list[Case]:
    return [case for case in all_cases() if case.op is op]


def explain_all_cases(backends: tuple[str, ...] = BACKENDS) -> dict[str, dict[Case, Explanation]]:
    """Explain the routes of all cases with small arguments, by backend: slow and benchmark cases are skipped."""
    verdicts: dict[str, dict[Case, Explanation]] = {backend: {} for backend in backends}
    for case in all_cases():
        routed = [backend for backend in backends if routes_of(case.op, backend) is not None]
        if not routed or case.slow or case.bench:
            continue
        # shared by the backends: making arguments takes most of the time
        with FakeTensors():
            arguments = case.args()
            found = {backend: _explain(case, arguments, backend) for backend in routed}
        for backend, verdict in found.items():
            if verdict is not None:
                verdicts[backend][case] = verdict
    return verdicts
