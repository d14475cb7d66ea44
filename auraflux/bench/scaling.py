"""Speed of CPU kernels with several numbers of threads."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from auraflux.bench.arguments import Rotation, bytes_moved, copies_to_rotate, storage_nbytes
from auraflux.bench.ops import BUDGET_S
from auraflux.bench.parity import judge
from auraflux.bench.result import Result
from auraflux.bench.timing import Contender, race
from auraflux.machine import free_nbytes, last_cache_nbytes
from auraflux.ops._cases import Case
from auraflux.ops._dispatch import exact, use_backend
from auraflux.ops.simd.threads import set_threads, threads


def run_scaling(
    cases: Iterable[Case],
    counts: Sequence[int],
    budget_s: float = BUDGET_S,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[int, Result]]:
    """Check each case, then time it with each number of threads, alternating; yield the number and the result."""
    before = threads()
    for case in cases:
        say(f"{case.op.name} {case.name}")
        contract, verdict = "exact" if case.exact else "fast", judge(case, "cpu")
        if reason := verdict.wrong or verdict.declined:
            state = "declined" if verdict.wrong is None else "wrong"
            yield before, Result(case.op.name, case.name, contract, state, reason, verdict.error)
            continue
        args = case.args()
        copies = Rotation(args, copies_to_rotate(storage_nbytes(args), last_cache_nbytes(), free_nbytes())).copies
        flops = None if case.flops is None else case.flops(args)
        with use_backend("cpu"), exact(case.exact):
            nbytes = bytes_moved(case, args, case.op(**copies[0]))
            contenders = [Contender([partial(_call, count, case, each) for each in copies]) for count in counts]
            try:
                timings = race(contenders, budget_s)
            finally:
                set_threads(before)
        for count, timing in zip(counts, timings, strict=True):
            yield count, Result(case.op.name, case.name, contract, "timed", None, verdict.error, timing, nbytes, flops)


def _call(count: int, case: Case, args: dict[str, Any]) -> Any:
    set_threads(count)
    return case.op(**args)
