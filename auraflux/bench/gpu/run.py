"""Check each kernel against its reference on the GPU, then time it there with other libraries.

The check uses the device and the shapes that are timed, so a wrong kernel cannot have a time.
"""

import gc
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from auraflux.bench.arguments import bytes_moved, cloned
from auraflux.bench.gpu.graph_timing import Contender, Graph, Record, race, record_long
from auraflux.bench.gpu.peers import PEERS, Peer
from auraflux.bench.ops import bench_cases, chosen, distance
from auraflux.bench.parity import first_line
from auraflux.bench.result import PeerResult, Result
from auraflux.errors import BackendError
from auraflux.ops._cases import Args, Case, in_row_layout, relative_rms, tensors
from auraflux.ops._dispatch import Declined, exact, use_backend
from auraflux.ops.gpu_cases import CASES

BUDGET_S = 0.2
ROTATED_NBYTES = 256 << 20  # several times the L2 cache
ROTATE_FROM_NBYTES = 1 << 20  # smaller arguments stay in cache in real use too
MAX_COPIES = 256

PeersOf = Callable[[Case, Args], list[Peer]]  # the contenders of a case's kernel


def gpu_cases(ops: Sequence[str] = (), case: str | None = None) -> list[Case]:
    """Return the cases to time on a GPU: the large shapes; for ops that have none, those that are timed on CPU."""
    if set(ops) <= {c.op.name for c in CASES}:
        return chosen(CASES, ops, case)
    large = {c.op.name for c in CASES}
    return chosen([*CASES, *(c for c in bench_cases() if c.op.name not in large)], ops, case)


def no_peers(case: Case, args: Args) -> list[Peer]:
    """Time our kernel alone."""
    return []


def libraries(case: Case, args: Args) -> list[Peer]:
    """Return the other libraries that can run a case."""
    return [peer for peer in PEERS.get(case.op.name, []) if peer.serves(case, args)]


def copies_needed(nbytes: int, free_nbytes: int) -> int:
    """Return the number of copies of arguments that exceed the cache, when a call moves `nbytes` of each."""
    if nbytes < ROTATE_FROM_NBYTES:
        return 1
    return max(1, min(math.ceil(ROTATED_NBYTES / nbytes), MAX_COPIES, free_nbytes // 4 // nbytes))


def run(
    cases: Iterable[Case],
    peers_of: PeersOf,
    budget_s: float = BUDGET_S,
    say: Callable[[str], None] = lambda text: None,
    record: Record = Graph,
    device: str = "cuda",
) -> Iterator[Result]:
    """Check and time the cases one by one; `say` receives progress messages."""
    # objects loaded so far stay; each case's memory is freed before the next
    gc.freeze()
    for case in cases:
        try:
            result = Bench(case, peers_of, budget_s, record, say, device).result()
        except torch.OutOfMemoryError as err:
            result = Result(case.op.name, case.name, _contract(case), "no memory", first_line(err))
        yield result
        gc.collect()
        _check_alive(case)


def _check_alive(case: Case) -> None:
    """Free memory, and stop where a kernel has corrupted the CUDA context: all later cases would fail too."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as err:
        raise BackendError(f"the GPU cannot be used any more after {case.op.name} {case.name}: {first_line(err)}") from err


def _contract(case: Case) -> str:
    return "exact" if case.exact else "fast"


@dataclass
class Bench:
    """The benchmark of one case."""

    case: Case
    peers_of: PeersOf
    budget_s: float
    record: Record
    say: Callable[[str], None]
    device: str

    def result(self) -> Result:
        case = self.case
        kernel = case.op.kernel("cuda")
        if kernel is None:
            return self._untimed("no kernel", "no cuda kernel")
        self.say(f"{case.op.name} {case.name}: checking")
        try:
            args, expected, found, error, where = self._hold(kernel)
        except Declined as reason:
            return self._untimed("declined", str(reason))
        except torch.OutOfMemoryError:
            raise
        except Exception as err:
            return self._untimed("wrong", first_line(err), math.inf)
        if not error <= case.tol:
            return self._untimed("wrong", f"{where}: relative RMS {error:.3g}, allowed {case.tol:g}", error)
        self.say(f"{case.op.name} {case.name}: timing")
        return self._time(args, expected, bytes_moved(case, args, found), error)

    def _untimed(self, state: str, note: str, error: float | None = None) -> Result:
        return Result(self.case.op.name, self.case.name, _contract(self.case), state, note, error)

    def _hold(self, kernel: Callable[..., Any]) -> tuple[Args, Any, Any, float, str]:
        """Run reference and kernel on equal arguments; return those, both results, the worst error and where it is."""
        case = self.case
        with torch.device(self.device):
            args = in_row_layout(case.args())
        if case.op.check is not None:
            case.op.check(**args)
        theirs, mine = cloned(args), cloned(args)
        # the ops inside a reference may have kernels
        with use_backend("reference"):
            expected = case.op.reference(**theirs)
        with exact(case.exact), poisoned():
            found = kernel(**mine)
        had = dict(tensors({"the result": found, **mine}))
        worst, where = 0.0, "the result"
        for path, want in tensors({"the result": expected, **theirs}):
            error = relative_rms(had[path], want, path)
            if not error <= worst:
                worst, where = error, path
        return args, expected, found, worst, where

    def _time(self, args: Args, expected: Any, nbytes: int, error: float) -> Result:
        case = self.case
        copies = copies_needed(nbytes, free_nbytes())
        with exact(case.exact), use_backend("cuda"):
            calls = [partial(case.op, **cloned(args)) for _ in range(copies)]
            try:
                ours = Contender(record_long(calls, self.record))
            except torch.OutOfMemoryError:
                raise
            except Exception as err:
                return self._untimed("failed", f"cannot be recorded: {first_line(err)}", error)
            entries = [self._enter(peer, args, expected) for peer in self.peers_of(case, args)]
            timings = race([ours, *(entry for _, entry in entries if entry is not None)], self.budget_s)
        times = iter(timings[1:])
        shown = [
            PeerResult(peer.name, peer.contract, None if entry is None else next(times), peer.error, peer.note)
            for peer, entry in entries
        ]
        flops = case.flops(args) if case.flops is not None else None
        names = case.op.name, case.name, _contract(case)
        return Result(*names, "timed", None, error, timings[0], nbytes, flops, shown, ours.launches, copies)

    def _enter(self, peer: Peer, args: Args, expected: Any) -> tuple[PeerResult, Contender | None]:
        """Set a peer up and measure the error of its result; a note gives the reason if it is not timed."""
        note, error, entered = None, None, None
        if missing := peer.missing():
            note = f"{' and '.join(missing)} not installed"
        else:
            self.say(f"{self.case.op.name} {self.case.name}: {peer.name}")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made = peer.make(args, copies_needed(peer.nbytes(args), free_nbytes()))
                    error = distance(peer.read(made.calls[0]()), expected)
                    entered = Contender(record_long(made.calls, self.record))
            except Exception as err:
                note = first_line(err)
        return PeerResult(peer.name, peer.contract, None, error, note), entered


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill `torch.empty` with NaN, so that unwritten results are noticed."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def free_nbytes() -> int:
    if not torch.cuda.is_available():
        return ROTATED_NBYTES
    free, _ = torch.cuda.mem_get_info()
    # memory that torch has cached is free too
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
