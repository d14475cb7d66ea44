"""Properties and limits of the GPU that kernels run on.

A wrapper calls `ready` on its first tensor, allocates its results with torch and launches. With TRITON_INTERPRET=1 set before
the first import, plain Triton kernels run on CPU tensors, one program after the other: slow, with the results of a GPU.
"""

from collections.abc import Callable
from functools import cache

import torch
import triton
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.fake_gpu import AMPERE, HOPPER, SHARED_KB, Capability, fake_capability
from auraflux.ops.gpu.as_gpu import as_another_gpu

INTERPRETED: bool = triton.knobs.runtime.interpret
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = AMPERE  # the first whose tensor cores take bfloat16
SIGNED_MAXIMUM: Capability = (8, 6)  # the first with max.xorsign.abs
FP8_PRODUCTS: Capability = (8, 9)  # the first whose tensor cores take e4m3
CLUSTERS = HOPPER  # the first with TMA, clusters and programmatic dependent launch
INTERPRETED_MULTIPROCESSORS = 4  # few, so that wrappers launch few large programs
# of GPUs that are not there: A100, RTX 3090, RTX 4090, H200, B200, RTX 5090
ASSUMED_MULTIPROCESSORS = {AMPERE: 108, (8, 6): 82, (8, 9): 128, HOPPER: 132, (10, 0): 148, (12, 0): 170}

as_another_gpu()


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


def not_gluon(device: torch.device) -> str | None:
    """Return why Gluon kernels of cp.async and mma.sync do not run on a device; None where they do."""
    return _lacks(device, lambda gpu: gpu >= OLDEST, "needs an NVIDIA GPU")


def not_signed_maximum(device: torch.device) -> str | None:
    """Return why kernels that take maxima by max.xorsign.abs do not run on a device; None where they do."""
    return _lacks(device, lambda gpu: gpu >= SIGNED_MAXIMUM, "needs compute capability 8.6")


def not_fp8(device: torch.device) -> str | None:
    """Return why tensor cores do not multiply e4m3 on a device; None where they do."""
    return _lacks(device, lambda gpu: gpu >= FP8_PRODUCTS, "needs compute capability 8.9")


def not_tma(device: torch.device) -> str | None:
    """Return why kernels that copy by TMA do not run on a device; None where they do."""
    return _lacks(device, lambda gpu: gpu >= CLUSTERS, "needs TMA")


def not_clusters(device: torch.device) -> str | None:
    """Return why programs of a cluster do not run on a device; None where they do."""
    return _lacks(device, lambda gpu: gpu >= CLUSTERS, "needs clusters")


def not_wgmma(device: torch.device) -> str | None:
    """Return why kernels that multiply by wgmma, which only Hopper has, do not run on a device; None where they do."""
    return _lacks(device, lambda gpu: gpu[0] == HOPPER[0], "needs wgmma")


def _lacks(device: torch.device, has: Callable[[Capability], bool], reason: str) -> str | None:
    if gpu := fake_capability():
        return None if has(gpu) else reason
    if INTERPRETED:
        return "Triton's interpreter does not run Gluon"
    return None if device.type == "cuda" and has(capability(device)) else reason


def launches_early(device: torch.device) -> bool:
    """Return whether a kernel may begin before the previous one ends: programmatic dependent launch."""
    gpu = fake_capability() or (capability(device) if device.type == "cuda" else OLDEST)
    return gpu >= CLUSTERS


def shared_nbytes(device: torch.device) -> int:
    """Return the shared memory of one program, at most."""
    return _shared_nbytes(device, fake_capability())


@cache
def _shared_nbytes(device: torch.device, fake: Capability | None) -> int:
    gpu = fake or (capability(device) if device.type == "cuda" else HOPPER)
    if gpu in SHARED_KB:
        return SHARED_KB[gpu] << 10
    found: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin")  # noqa: B009
    return found


def multiprocessor_nbytes(device: torch.device) -> int:
    """Return the shared memory of all programs of a multiprocessor, each of which takes a kilobyte more than it allocates."""
    return shared_nbytes(device) + 1024


def multiprocessors(device: torch.device) -> int:
    gpu = fake_capability()
    return _multiprocessors(device) if gpu is None else ASSUMED_MULTIPROCESSORS[gpu]


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
