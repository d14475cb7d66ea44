"""The result of one benchmark case: a time, or the reason why there is none."""

from dataclasses import dataclass, field

from auraflux.bench.timing import Timing


@dataclass(frozen=True)
class PeerResult:
    """A peer's time, or a note why there is none; `error` is its relative RMS from our reference."""

    name: str
    contract: str
    timing: Timing | None = None
    error: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class Result:
    """One case: state is "timed", "wrong", "declined", "no kernel", "no memory" or "failed", and the note says why.

    nbytes, flops  that a call must move and do
    launches       kernels and copies that a call launches on a GPU
    copies         of the arguments that were rotated through
    """

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
    launches: float | None = None
    copies: int | None = None
