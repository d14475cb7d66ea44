"""Time every op's benchmark cases, beside other libraries and under the machine's read ceiling.

A kernel is timed only when it is right; a wrong one is reported and left out.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numba
import torch

from auraflux.bench.arguments import Rotation, bytes_moved, copies_to_rotate, moved, storage_nbytes
from auraflux.bench.parity import first_line, judge
from auraflux.bench.peers import PEERS, Peer
from auraflux.bench.timing import Contender, Timing, race
from auraflux.errors import InputError
from auraflux.machine import free_nbytes, last_cache_nbytes
from auraflux.ops._cases import Args, Case, all_cases, relative_rms
from auraflux.ops._dispatch import exact, use_backend

BUDGET_S = 1.0
STREAMS_FROM = 0.1  # of the read ceiling; what is slower is not bound by memory, so one copy of its operands will do


@dataclass(frozen=True)
class PeerResult:
    """A peer's time, or why there is none; `error` is its relative RMS from our reference."""

    name: str
    contract: str
    timing: Timing | None = None
    error: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class Result:
    """One case: state is "timed", "wrong", "declined" or "no kernel", and the note says why."""

    op: str
    case: str
    contract: str
    state: str
    note: str | None = None
    error: float | None = None
    timing: Timing | None = None
    nbytes: int | None = None
    flops: int | None = None
    peers: list[PeerResult] = field(default_factory=list)


def bench_cases(ops: Sequence[str] = (), case: str | None = None) -> list[Case]:
    """The cases to time: all that are marked, or those of the named ops, or those of the one name."""
    found = [c for c in all_cases() if c.bench]
    known = {c.op.name for c in found}
    for name in ops:
        if name not in known:
            raise InputError(f"no op {name!r} has benchmark cases. Those that have: {', '.join(sorted(known))}.")
    found = [c for c in found if not ops or c.op.name in ops]
    if case is not None:
        known = {c.name for c in found}
        if case not in known:
            raise InputError(f"no benchmark case is named {case!r}. Those there are: {', '.join(sorted(known))}.")
        found = [c for c in found if c.name == case]
    return found


def run(
    cases: Iterable[Case],
    device: str,
    with_peers: bool,
    ceiling: float,
    budget_s: float = BUDGET_S,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Judge and time the cases one by one; `say` hears what is being done."""
    torch.set_num_threads(numba.get_num_threads())
    for case in cases:
        contract = "exact" if case.exact else "fast"
        say(f"{case.op.name} {case.name}: checking")
        if case.op.kernel(device) is None:
            yield Result(case.op.name, case.name, contract, "no kernel", f"no {device} kernel")
            continue
        verdict = judge(case, device)
        if verdict.wrong is not None:
            yield Result(case.op.name, case.name, contract, "wrong", verdict.wrong, verdict.error)
        elif verdict.declined is not None:
            yield Result(case.op.name, case.name, contract, "declined", verdict.declined)
        else:
            say(f"{case.op.name} {case.name}: timing")
            peers = PEERS.get(case.op.name, []) if with_peers and device == "cpu" else []
            yield _time(case, device, peers, verdict.error, ceiling, budget_s)


def _time(case: Case, device: str, peers: Sequence[Peer], error: float, ceiling: float, budget_s: float) -> Result:
    args = moved(case.args(), device)
    peers = [peer for peer in peers if peer.serves(case, args)]
    memory = free_nbytes() // (1 + len(peers))
    rotation = Rotation(args, copies_to_rotate(storage_nbytes(args), last_cache_nbytes(), memory))
    expected = case.op.reference(**rotation.fresh())
    with ExitStack() as stack:
        stack.enter_context(use_backend(device))
        stack.enter_context(exact(case.exact))
        nbytes = bytes_moved(case, args, case.op(**rotation.copies[0]))
        rotation.note_changes()
        rotation.restore()
        entries = [Entry(peer).prepare(rotation.fresh(), expected, memory, ceiling) for peer in peers]
        ours = Contender([_call(case, args, device) for args in rotation.copies], restore=rotation.restore)
        timings = race([ours, *(entry.contender for entry in entries if entry.contender is not None)], budget_s)
    theirs = iter(timings[1:])
    shown = [entry.result(next(theirs) if entry.contender is not None else None) for entry in entries]
    contract = "exact" if case.exact else "fast"
    flops = case.flops(args) if case.flops is not None else None
    return Result(case.op.name, case.name, contract, "timed", None, error, timings[0], nbytes, flops, shown)


def _call(case: Case, args: Args, device: str) -> Callable[[], Any]:
    call = partial(case.op, **args)
    if device == "cpu":
        return call

    def call_and_wait() -> None:
        call()
        torch.cuda.synchronize()

    return call_and_wait


@dataclass
class Entry:
    """A peer on its way into the race: it takes part when `contender` is set, else the note says why not."""

    peer: Peer
    contender: Contender | None = None
    error: float | None = None
    note: str | None = None

    def prepare(self, args: Args, expected: Any, memory: int, ceiling: float) -> "Entry":
        """Set the peer up on as many copies as it takes to keep it from the cache, and see how far its result is off."""
        if missing := self.peer.missing():
            self.note = f"{' and '.join(missing)} not installed"
            return self
        try:
            contender = self.peer.make(args, 1)
            start = time.perf_counter()
            found = contender.calls[0]()
            contender.call_s = time.perf_counter() - start
            self.error = _distance(self.peer.read(found), expected)
            nbytes = self.peer.nbytes(args)
            copies = copies_to_rotate(nbytes, last_cache_nbytes(), memory)
            if copies > 1 and nbytes / contender.call_s > STREAMS_FROM * ceiling:
                contender = self.peer.make(args, copies)
            self.contender = contender
        except Exception as err:
            self.note = first_line(err)
        return self

    def result(self, timing: Timing | None) -> PeerResult:
        return PeerResult(self.peer.name, self.peer.contract, timing, self.error, self.note)


def _distance(found: torch.Tensor, expected: Any) -> float:
    """Relative RMS from the reference's result, the first one where there are several; a peer may shape it differently."""
    expected = expected[0] if isinstance(expected, tuple) else expected
    return relative_rms(found.to(expected.dtype).reshape(expected.shape), expected)
