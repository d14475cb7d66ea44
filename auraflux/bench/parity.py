"""Parity of a kernel with its reference, checked before it is timed and by `auraflux ops --check`."""

from dataclasses import dataclass
from functools import partial

from auraflux.bench.arguments import moved
from auraflux.errors import BackendError
from auraflux.ops._cases import Case, compare


@dataclass(frozen=True)
class Verdict:
    """The parity of one kernel on one case.

    error     worst relative RMS
    declined  the reason why the kernel does not serve the case
    wrong     the reason why its result is wrong
    """

    error: float = 0.0
    declined: str | None = None
    wrong: str | None = None


def judge(case: Case, backend: str) -> Verdict:
    """Compare a kernel with the reference on one case; an exception of any kind counts as wrong."""
    device = "cuda" if backend == "cuda" else "cpu"
    try:
        found = compare(case, backend, partial(moved, device=device))
    except Exception as err:
        return Verdict(float("inf"), wrong=first_line(err))
    if found.declined is not None:
        return Verdict(declined=found.declined)
    if not found.error <= case.tol:
        return Verdict(found.error, wrong=f"{found.where}: relative RMS {found.error:.3g}, allowed {case.tol:g}")
    return Verdict(found.error)


def first_line(err: Exception) -> str:
    """Describe an exception in one line: its first one, and its last if the first ends with a colon."""
    first, *rest = str(err).strip().splitlines() or ["no message"]
    return f"{type(err).__name__}: {first}" + (f" {rest[-1].strip()}" if rest and first.endswith(":") else "")


def check_device(device: str) -> None:
    """Refuse a device this machine does not have."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise BackendError("torch finds no NVIDIA GPU here. `auraflux doctor` says what is missing; --device cpu works.")
