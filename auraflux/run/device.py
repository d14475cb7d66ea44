"""The device a model runs on: which one, in what dtype, and what a user is told when a GPU's memory ends."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import BackendError, DeviceMemoryError, InputError
from auraflux.ops._dispatch import all_ops

CHUNK = {"cpu": 512, "cuda": 8192}  # tokens of a prompt that go through a model together
ALIKE_CHUNK = 1024  # the same on a GPU whose results do not depend on company: attention leaves shares of every token


def chunk_for(device: torch.device, invariant: bool) -> int:
    """How many tokens of a prompt go through a model together."""
    return ALIKE_CHUNK if invariant and device.type == "cuda" else CHUNK[device.type]


def find_device(name: str) -> torch.device:
    """What a user calls a device; "auto" takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as err:
        raise InputError(f"there is no device {name!r}; auto, cpu and cuda are known.") from err
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"models do not run on {name!r}; auto, cpu and cuda are known.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError("device 'cuda' was asked for, but torch finds no NVIDIA GPU.")
    return device


def activation_dtype(device: torch.device) -> torch.dtype:
    """The dtype of activations on a device."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def free_device_nbytes(device: torch.device) -> int:
    """Memory of a GPU that nobody has taken."""
    return torch.cuda.mem_get_info(device)[0]


def fetch_kernels(device: torch.device) -> Thread | None:
    """Import a GPU's kernels beside whatever comes next: the first prompt would wait for that longer than for its tokens."""
    if device.type != "cuda":
        return None
    thread = Thread(target=_import_kernels, name="auraflux-kernels", daemon=True)
    thread.start()
    return thread


def _import_kernels() -> None:
    # whoever needs what cannot be imported is told
    with suppress(Exception):
        for op in all_ops():
            op.kernel("cuda")
        from triton.runtime.cache import triton_key

        # builds are found by the contents of all of Triton's files
        triton_key()


def sent(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers as a tensor on a device, whole ones unless a dtype is given; what it is at is not waited for."""
    # torch takes as long over a prompt's numbers as a GPU over a layer; numpy does not
    here = torch.from_numpy(np.array(values, np.int64)) if dtype is None else torch.tensor(values, dtype=dtype)
    # a GPU's copy of 64 KB or more from memory that is not pinned waits until all before it is done
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)


class Arriving:
    """Whole numbers on their way from a device, which can be given more work before they are waited for."""

    def __init__(self, numbers: Tensor):
        self._numbers, self._there = numbers, None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def wait(self) -> list[int]:
        """Give them when they are there; what the device was told to do later is not waited for."""
        if self._there is not None:
            self._there.synchronize()
        return self._numbers.tolist()


@contextmanager
def device_memory() -> Iterator[None]:
    """Turn running out of a GPU's memory inside the block into an error that says what can be done."""
    try:
        yield
    except torch.OutOfMemoryError as err:
        # what is held for reuse is of no use to whoever goes on
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        raise DeviceMemoryError(
            f"the GPU has no memory left: {free / 1e9:.1f} of its {total / 1e9:.1f} GB are free, and more was needed. Give "
            "less --context, more compression (--kv k4v4), fewer bits (--quantize 4), or --expert-memory for a packed mixture."
        ) from err
