"""Inputs for the parity test and the benchmark.

Each family's `cases.py` holds a list `CASES`. A case names an op, makes its arguments and says how far a kernel may be from
the reference. `compare` runs both and compares the results and every argument after the call, so that state updated in
place is held to the same tolerance.
"""

import copy
import importlib
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined, Op, exact, families
from auraflux.quant import QTensor

Args = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Arguments for one call of an op.

    make    returns the arguments by name, in the order of the signature; the random generator is seeded first
    tol     relative RMS error allowed against the reference
    exact   run inside `exact()`; False allows int8 activations on CPU
    bench   part of `auraflux bench ops`
    slow    needs much time or memory: run with the slow tests
    nbytes  minimum memory traffic in bytes; by default the size of all tensors
    flops   floating-point operations; by default not counted
    """

    op: Op
    name: str
    make: Callable[[], Args]
    tol: float = 1e-5
    exact: bool = True
    bench: bool = False
    slow: bool = False
    nbytes: Callable[[Args], int] | None = None
    flops: Callable[[Args], int] | None = None

    @property
    def id(self) -> str:
        return f"{self.op.name}-{self.name}"

    def args(self) -> Args:
        # torch.manual_seed also formats a stack trace, for a GPU that may come later
        seed = zlib.crc32(self.id.encode())
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
        return self.make()


@dataclass(frozen=True)
class Parity:
    """Result of `compare`: the worst relative RMS error and its location, or why the kernel declined."""

    error: float
    where: str
    declined: str | None = None


def all_cases() -> list[Case]:
    found: list[Case] = []
    for family in families():
        folder = Path(__file__).parent / family
        if (folder / "cases.py").exists() or (folder / "cases").is_dir():
            found += importlib.import_module(f"auraflux.ops.{family}.cases").CASES
    return found


def compare(case: Case, backend: str, move: Callable[[Args], Args] = lambda args: args) -> Parity:
    """Run the reference and a backend's kernel on equal arguments; `move` copies them to the kernel's device."""
    kernel = case.op.kernel(backend)
    if kernel is None:
        return Parity(0.0, "", f"no {backend} kernel")
    args = in_row_layout(case.args()) if backend == "cuda" else case.args()
    copied = move(copy.deepcopy(args))
    if case.op.check is not None:
        case.op.check(**args)
    expected = case.op.reference(**args)
    with ExitStack() as stack:
        stack.enter_context(exact(case.exact))
        try:
            found = kernel(**copied)
        except Declined as reason:
            return Parity(0.0, "", str(reason))
    worst, where = 0.0, "the result"
    for path, want, actual in _pairs({"the result": expected, **args}, {"the result": found, **copied}, ""):
        error = relative_rms(actual, want, path)
        if not error <= worst:
            worst, where = error, path
    return Parity(worst, where)


def in_row_layout(value: Any) -> Any:
    """Return the arguments with every weight in row layout, as CUDA kernels expect."""
    if isinstance(value, QTensor):
        return value.rows()
    if isinstance(value, dict):
        return {key: in_row_layout(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(in_row_layout(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{field.name: in_row_layout(getattr(value, field.name)) for field in fields(value) if field.init}
        )
    return value


def relative_rms(found: Tensor, expected: Tensor, what: str = "result") -> float:
    """Return the RMS of the difference over the RMS of `expected`; integers and non-finite values must match exactly."""
    found = found.to(expected.device)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise AssertionError(f"{what}: {list(found.shape)} {found.dtype}, expected {list(expected.shape)} {expected.dtype}")
    if torch.equal(found, expected):
        return 0.0
    if not expected.dtype.is_floating_point:
        return float("inf")
    found, expected = found.double(), expected.double()
    finite = torch.isfinite(expected)
    same = torch.where(torch.isnan(expected), torch.isnan(found), finite | (found == expected))
    if not (same.all() and torch.isfinite(found[finite]).all()):
        return float("inf")
    difference, size = (found[finite] - expected[finite]).norm(), expected[finite].norm()
    return float(difference / size) if size > 0 else float(difference)


def tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor inside arguments or results, with the path to it."""
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from ((f"{key}{path}", t) for path, t in tensors(item))
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from ((f"[{number}]{path}", t) for path, t in tensors(item))
    elif is_dataclass(value):
        for field in fields(value):
            yield from ((f".{field.name}{path}", t) for path, t in tensors(getattr(value, field.name)))


def _pairs(expected: Args, found: Args, prefix: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    wanted, actual = list(tensors(expected)), dict(tensors(found))
    if [path for path, _ in wanted] != list(actual):
        raise AssertionError(f"the kernel returns {list(actual)}, the reference {[path for path, _ in wanted]}")
    for path, tensor in wanted:
        yield path, tensor, actual[path]
