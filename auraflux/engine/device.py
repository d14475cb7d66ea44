"""Device selection, activation dtype, host-device copies and the out-of-memory error."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import BackendError, DeviceMemoryError, InputError, SettingsError
from auraflux.ops._dispatch import all_ops

CHUNK = {"cpu": 512, "cuda": 8192}  # tokens of a prefill step
INVARIANT_CHUNK = 1024  # of a batch-invariant GPU, where attention writes partial results for every token


def chunk_for(device: torch.device, invariant: bool) -> int:
    """Return the default number of tokens of a prefill step."""
    return INVARIANT_CHUNK if invariant and device.type == "cuda" else CHUNK[device.type]


def find_device(name: str) -> torch.device:
    """Return the device of a name; "auto" selects a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as err:
        raise InputError(f"there is no device {name!r}; use auto, cpu or cuda.") from err
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"models do not run on {name!r}; use auto, cpu or cuda.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError("device 'cuda' was requested, but torch finds no NVIDIA GPU.")
    return device


def activation_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of activations on a device."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def check_fp8(device: torch.device) -> None:
    """Refuse a device that does not multiply in FP8."""
    if device.type != "cuda":
        raise SettingsError(f"FP8 prefill needs an NVIDIA GPU of compute capability 8.9 or newer; the model runs on {device}.")
    from auraflux.ops.gpu.device import capability, not_fp8

    if not_fp8(device):
        major, minor = capability(device)
        raise SettingsError(f"FP8 prefill needs a GPU of compute capability 8.9 or newer; this one has {major}.{minor}.")


def free_device_nbytes(device: torch.device) -> int:
    """Return the free memory of a GPU."""
    return torch.cuda.mem_get_info(device)[0]


def preload_kernels(device: torch.device) -> Thread | None:
    """Import a GPU's kernels in a background thread; the first prompt would otherwise wait for the imports."""
    if device.type != "cuda":
        return None
    thread = Thread(target=_import_kernels, name="auraflux-kernels", daemon=True)
    thread.start()
    return thread


def _import_kernels() -> None:
    # an import that fails is reported where the kernel is needed
    with suppress(Exception):
        for op in all_ops():
            op.kernel("cuda")
        from triton.runtime.cache import triton_key

        # the JIT cache key hashes all of Triton's files
        triton_key()


def to_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return values as a tensor on a device, int64 unless a dtype is given; the copy does not synchronize."""
    # torch.tensor takes as long for a prompt's tokens as a GPU takes for a layer; numpy does not
    host = torch.from_numpy(np.array(values, np.int64)) if dtype is None else torch.tensor(values, dtype=dtype)
    # copies of 64 KB or more from pageable memory wait for all earlier work on the GPU
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


class HostCopy:
    """An asynchronous copy of integers to the host; the device can get more work before the copy is waited for."""

    def __init__(self, integers: Tensor):
        self._integers, self._copied = integers, None
        if integers.device.type == "cuda":
            self._integers = torch.empty(integers.shape, dtype=integers.dtype, pin_memory=True)
            self._integers.copy_(integers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[int]:
        """Return the integers once copied; work that was queued later is not waited for."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._integers.tolist()


@contextmanager
def device_memory() -> Iterator[None]:
    """Replace a GPU out-of-memory error inside the block by one that names the remedies."""
    try:
        yield
    except torch.OutOfMemoryError as err:
        # other processes, or a retry of another size, can use the memory that torch caches
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        raise DeviceMemoryError(
            f"the GPU has no memory left: {free / 1e9:.1f} of its {total / 1e9:.1f} GB are free, and more was needed. Give "
            "less --context, more compression (--kv k4v4), fewer bits (--quantize 4), or --expert-memory for a packed mixture."
        ) from err
