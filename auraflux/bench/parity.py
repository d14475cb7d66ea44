"""Whether a kernel is right: asked before it is timed, and by `auraflux ops --check`."""

from dataclasses import dataclass
from functools import partial

from auraflux.bench.arguments import moved
from auraflux.errors import BackendError
from auraflux.ops._cases import Case, compare


@dataclass(frozen=True)
class Verdict:
    """What one case showed of one kernel.

    error     worst relative RMS
    declined  why the kernel would not serve the case
    wrong     what is wrong with its result
    """

    error: float = 0.0
    declined: str | None = None
    wrong: str | None = None


def judge(case: Case, backend: str) -> Verdict:
    """Hold a kernel to the reference on one case. A kernel that fails is wrong, whatever it raises."""
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
    """An exception in one line: its first, and the last where the first only announces it."""
    first, *rest = str(err).strip().splitlines() or ["no message"]
    return f"{type(err).__name__}: {first}" + (f" {rest[-1].strip()}" if rest and first.endswith(":") else "")


def check_device(device: str) -> None:
    """Refuse a device this machine does not have."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise BackendError("torch finds no NVIDIA GPU here. `auraflux doctor` says what is missing; --device cpu works.")
