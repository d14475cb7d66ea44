"""What the Triton kernels of all families share.

A wrapper calls `ready` on its first tensor, allocates its results with torch and launches. With TRITON_INTERPRET=1 set before
the first import, plain Triton kernels run on CPU tensors, one program after the other: slow, and as right as on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops._launch import quicken

Subject = TypeVar("Subject")
Found = TypeVar("Found")

INTERPRETED: bool = triton.knobs.runtime.interpret
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (8, 0)  # compute capability: the first whose matrix units take bfloat16
INTERPRETED_MULTIPROCESSORS = 4  # few, as wrappers then make few large programs


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own takes forty times as long outside of kernels."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n; 1 at least."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class Build:
    """One specialisation of a kernel, compiled for Hopper by a test that needs no GPU. Kernels that have one launch quickly.

    kernel     a function under @triton.jit or @gluon.jit
    types      those of the arguments that are not constants, in order: "*bf16 *fp32 i32:16 fp32"; i32:16 is a multiple of 16,
               and pointers always are
    constants  by name: the constexpr arguments, None for pointers that are left out, 1 for strides that are
    hot        part of decoding a token or of prefill: it may not spill registers
    options    of the launch: num_warps, num_stages, maxnreg
    """

    kernel: Any
    types: str
    constants: dict[str, Any] = field(default_factory=dict)
    hot: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        quicken(self.kernel)

    @property
    def name(self) -> str:
        constants = " ".join(f"{key}={value}" for key, value in self.constants.items())
        return f"{self.kernel.__name__} {self.types} {constants}".strip()


def once_for_each(find: Callable[[Subject], Found]) -> Callable[[Subject], Found]:
    """Remember what a function finds of weights, which do not change, for as long as they are there."""
    known: WeakKeyDictionary[Any, Found] = WeakKeyDictionary()

    @wraps(find)
    def remembered(subject: Subject) -> Found:
        try:
            return known[subject]
        except KeyError:
            return known.setdefault(subject, find(subject))

    return remembered


def ready(x: Tensor) -> None:
    """Decline what no kernel serves: a GPU that is too old, a tensor that is not on one."""
    if INTERPRETED:
        return
    if not x.is_cuda:
        raise Declined(f"the first argument is on {x.device}")
    if capability(x.device) < OLDEST:
        major, minor = capability(x.device)
        raise Declined(f"compute capability {major}.{minor}; {OLDEST[0]}.{OLDEST[1]} or newer is needed")


@cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in float32; far out it is 0 or 1, never NaN."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))
