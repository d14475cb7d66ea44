"""Properties and limits of the GPU that kernels run on.

A wrapper calls `ready` on its first tensor, allocates its results with torch and launches. With TRITON_INTERPRET=1 set before
the first import, plain Triton kernels run on CPU tensors, one program after the other: slow, with the results of a GPU.
"""

from functools import cache

import torch
import triton
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.fake_gpu import AMPERE, HOPPER, fake_capability

INTERPRETED: bool = triton.knobs.runtime.interpret
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = AMPERE  # the first whose tensor cores take bfloat16
NEEDS_HOPPER = "needs Hopper"
SHARED_NBYTES = 227 << 10  # shared memory of one program on Hopper, at most
MULTIPROCESSOR_NBYTES = 228 << 10  # of all programs of a multiprocessor, each with a kilobyte more than it allocates
INTERPRETED_MULTIPROCESSORS = 4  # few, so that wrappers launch few large programs
# of GPUs that are not there: A100, RTX 3090, RTX 4090, H200, B200, RTX 5090
ASSUMED_MULTIPROCESSORS = {AMPERE: 108, (8, 6): 82, (8, 9): 128, HOPPER: 132, (10, 0): 148, (12, 0): 170}
# shared memory of one program at most, in KB; from NVIDIA's table of compute capabilities
SHARED_KB = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99, (12, 1): 99}


def ready(x: Tensor) -> None:
    """Decline what no kernel supports: a GPU that is too old, a tensor that is not on a GPU."""
    if INTERPRETED or fake_capability():
        return
    if not x.is_cuda:
        raise Declined(f"the first argument is on {x.device}")
    if capability(x.device) < OLDEST:
        major, minor = capability(x.device)
        raise Declined(f"compute capability {major}.{minor}; {OLDEST[0]}.{OLDEST[1]} or newer is needed")


@cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def interpreted() -> bool:
    """Return whether Triton's interpreter runs kernels."""
    return INTERPRETED and not fake_capability()


def not_hopper(device: torch.device) -> str | None:
    """Return why Gluon kernels, which are for Hopper, do not run on a device; None where they do."""
    if gpu := fake_capability():
        return None if gpu == HOPPER else NEEDS_HOPPER
    if INTERPRETED:
        return "Triton's interpreter does not run Gluon"
    return None if device.type == "cuda" and capability(device) == HOPPER else NEEDS_HOPPER


def multiprocessors(device: torch.device) -> int:
    gpu = fake_capability()
    return _multiprocessors(device) if gpu is None else ASSUMED_MULTIPROCESSORS[gpu]


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
