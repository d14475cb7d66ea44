"""Time every op's benchmark cases on CPU, with other libraries and the machine's measured peak read bandwidth.

A kernel is timed only when it is right; a wrong one is reported and not timed.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from auraflux.bench.arguments import Rotation, bytes_moved, copies_to_rotate, storage_nbytes
from auraflux.bench.parity import first_line, judge
from auraflux.bench.peers import PEERS, Peer
from auraflux.bench.result import PeerResult, Result
from auraflux.bench.timing import Contender, Timing, race
from auraflux.errors import InputError
from auraflux.machine import free_nbytes, last_cache_nbytes
from auraflux.ops._cases import Args, Case, all_cases, relative_rms, tensors
from auraflux.ops._dispatch import exact, use_backend

BUDGET_S = 1.0
MEMORY_BOUND_FROM = 0.1  # of the peak read bandwidth; a slower peer is not memory-bound, so one copy of its operands will do


def bench_cases(ops: Sequence[str] = (), case: str | None = None) -> list[Case]:
    """Return the cases to time on CPU: all marked ones, those of the named ops, or those whose name matches."""
    return chosen([c for c in all_cases() if c.bench], ops, case)


def chosen(cases: Sequence[Case], ops: Sequence[str] = (), case: str | None = None) -> list[Case]:
    """Select cases by op and by name pattern; raise InputError for an unknown name."""
    known = {c.op.name for c in cases}
    for name in ops:
        if name not in known:
            raise InputError(f"no op {name!r} has benchmark cases. Those that have: {', '.join(sorted(known))}.")
    found = [c for c in cases if not ops or c.op.name in ops]
    if case is None:
        return found
    matching = [c for c in found if fnmatchcase(c.name, case)]
    if not matching:
        names = sorted({c.name for c in found})
        raise InputError(f"no benchmark case is named {case!r}. Those there are: {', '.join(names)}.")
    return matching


def run(
    cases: Iterable[Case],
    with_peers: bool,
    peak: float,
    budget_s: float = BUDGET_S,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Check and time the cases one by one; `say` receives progress messages."""
    from auraflux.ops.simd.threads import threads

    torch.set_num_threads(threads())
    for case in cases:
        contract = "exact" if case.exact else "fast"
        say(f"{case.op.name} {case.name}: checking")
        if case.op.kernel("cpu") is None:
            yield Result(case.op.name, case.name, contract, "no kernel", "no cpu kernel")
            continue
        verdict = judge(case, "cpu")
        if verdict.wrong is not None:
            yield Result(case.op.name, case.name, contract, "wrong", verdict.wrong, verdict.error)
        elif verdict.declined is not None:
            yield Result(case.op.name, case.name, contract, "declined", verdict.declined)
        else:
            say(f"{case.op.name} {case.name}: timing")
            peers = PEERS.get(case.op.name, []) if with_peers else []
            yield _time(case, peers, verdict.error, peak, budget_s)


def _time(case: Case, peers: Sequence[Peer], error: float, peak: float, budget_s: float) -> Result:
    args = case.args()
    peers = [peer for peer in peers if peer.serves(case, args)]
    memory = free_nbytes() // (1 + len(peers))
    rotation = Rotation(args, copies_to_rotate(storage_nbytes(args), last_cache_nbytes(), memory))
    expected = case.op.reference(**rotation.fresh())
    with ExitStack() as stack:
        stack.enter_context(use_backend("cpu"))
        stack.enter_context(exact(case.exact))
        nbytes = bytes_moved(case, args, case.op(**rotation.copies[0]))
        rotation.note_changes()
        rotation.restore()
        entries = [Entry(peer).prepare(rotation.fresh(), expected, memory, peak) for peer in peers]
        ours = Contender([partial(case.op, **args) for args in rotation.copies], restore=rotation.restore)
        timings = race([ours, *(entry.contender for entry in entries if entry.contender is not None)], budget_s)
    theirs = iter(timings[1:])
    shown = [entry.result(next(theirs) if entry.contender is not None else None) for entry in entries]
    contract = "exact" if case.exact else "fast"
    flops = case.flops(args) if case.flops is not None else None
    return Result(case.op.name, case.name, contract, "timed", None, error, timings[0], nbytes, flops, shown)


def run_by_threads(
    cases: Iterable[Case],
    counts: Sequence[int],
    budget_s: float = BUDGET_S,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[int, Result]]:
    """Check each case, then time it with each number of threads, alternating; yield the number and the result."""
    from auraflux.ops.simd.threads import set_threads, threads

    def call(count: int, args: Args) -> None:
        set_threads(count)
        case.op(**args)

    before = threads()
    for case in cases:
        say(f"{case.op.name} {case.name}")
        contract, verdict = "exact" if case.exact else "fast", judge(case, "cpu")
        if reason := verdict.wrong or verdict.declined:
            state = "declined" if verdict.wrong is None else "wrong"
            yield before, Result(case.op.name, case.name, contract, state, reason, verdict.error)
            continue
        args = case.args()
        rotation = Rotation(args, copies_to_rotate(storage_nbytes(args), last_cache_nbytes(), free_nbytes()))
        flops = None if case.flops is None else case.flops(args)
        with use_backend("cpu"), exact(case.exact):
            nbytes = bytes_moved(case, args, case.op(**rotation.copies[0]))
            rotation.note_changes()
            rotation.restore()
            calls = [[partial(call, count, each) for each in rotation.copies] for count in counts]
            contenders = [Contender(each, restore=rotation.restore) for each in calls]
            try:
                timings = race(contenders, budget_s)
            finally:
                set_threads(before)
        for count, timing in zip(counts, timings, strict=True):
            yield count, Result(case.op.name, case.name, contract, "timed", None, verdict.error, timing, nbytes, flops)


@dataclass
class Entry:
    """A peer that is being set up: it is timed if `contender` is set, else the note gives the reason."""

    peer: Peer
    contender: Contender | None = None
    error: float | None = None
    note: str | None = None

    def prepare(self, args: Args, expected: Any, memory: int, peak: float) -> "Entry":
        """Set the peer up on enough copies to exceed the cache, and measure the error of its result."""
        if missing := self.peer.missing():
            self.note = f"{' and '.join(missing)} not installed"
            return self
        try:
            contender = self.peer.make(args, 1)
            start = time.perf_counter()
            found = contender.calls[0]()
            contender.call_s = time.perf_counter() - start
            self.error = distance(self.peer.read(found), expected)
            nbytes = self.peer.nbytes(args)
            copies = copies_to_rotate(nbytes, last_cache_nbytes(), memory)
            if copies > 1 and nbytes / contender.call_s > MEMORY_BOUND_FROM * peak:
                contender = self.peer.make(args, copies)
            self.contender = contender
        except Exception as err:
            self.note = first_line(err)
        return self

    def result(self, timing: Timing | None) -> PeerResult:
        return PeerResult(self.peer.name, self.peer.contract, timing, self.error, self.note)


def distance(found: torch.Tensor, expected: Any) -> float | None:
    """Return the relative RMS from the reference's first result; a peer's may have another shape.

    None where the op has no result.
    """
    expected = next((tensor for _, tensor in tensors(expected)), None)
    if expected is None:
        return None
    return relative_rms(found.to(expected.dtype).reshape(expected.shape), expected)
