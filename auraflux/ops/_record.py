"""A step of decoding as a list of kernel launches, made again without any Python between them.

A small model's token is hundreds of kernels of a few microseconds each, and the Python around them takes as long as they do.
Yet from token to token everything but the content of some buffers stays the same. So one step is run under a `Recording`: it
notes every launch with its arguments and keeps the memory they point to. Replayed, the launches read the new lengths, page
tables and tokens from where the first ones lay.

What happens outside of kernels would not be replayed. Torch operations are therefore watched: views and empty tensors are
harmless, a few are translated to launches, and anything else spoils the recording, with a reason.
"""

import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from auraflux.ops import _dispatch
from auraflux.ops._jit import LINE, Kernel, _call, _launch_threads, _our_cache, arguments, floats, int64s, octets, recorder

FIELDS = 3  # of a launch: address of the code, address of its arguments, jobs
SCRATCH_NBYTES = 1 << 22

EMPTY = {"empty", "empty_like", "empty_strided", "new_empty"}
VIEWS = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "slice", "select", "unsqueeze", "squeeze", "expand", "detach"),
    *("alias", "as_strided", "split", "split_with_sizes", "unbind", "transpose", "t", "permute", "lift_fresh"),
}
ZEROS = {"zeros", "zeros_like", "new_zeros", "zero_"}
READS = {Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__bool__, Tensor.__index__}


@Kernel
def _fill_zero(args, job, jobs):
    target, nbytes = arguments(args, 2)
    out = octets(target, nbytes)
    for i in range(nbytes):
        out[i] = np.uint8(0)


@Kernel
def _add(args, job, jobs):
    target, source, count = arguments(args, 3)
    out, more = floats(target, count), floats(source, count)
    for i in range(count):
        out[i] += more[i]


with _our_cache():

    @numba.njit(nogil=True, cache=True)
    def _replay(table_at, count):
        table = int64s(table_at, count * FIELDS)
        for n in range(count):
            code, args, jobs = table[FIELDS * n], table[FIELDS * n + 1], table[FIELDS * n + 2]
            if jobs == 1:
                _call(code, args, 0, 1)
            else:
                _launch_threads(code, args, jobs)


class Recording:
    """The launches of one run, and all memory they use.

    spoiled  why it cannot be replayed; None if it can
    """

    def __init__(self) -> None:
        self.spoiled: str | None = None
        self._launches = array("q")
        self._kept: list[Any] = []
        self._scratch: Tensor | None = None
        self._paused = False

    def add(self, code: int, args: array, jobs: int) -> None:
        """Note a launch."""
        self._launches.extend((code, args.buffer_info()[0], jobs))
        self._kept.append(args)

    def keep(self, memory: Any) -> None:
        """Hold on to memory that a launch points to."""
        self._kept.append(memory)

    def spoil(self, reason: str) -> None:
        if self.spoiled is None and not self._paused:
            self.spoiled = reason

    def workspace(self, nbytes: int) -> int:
        """Scratch memory for the launches of one op, as `_jit.workspace` gives it; it stays where it is."""
        if self._scratch is None or self._scratch.numel() < nbytes + LINE:
            self._scratch = torch.empty(max(SCRATCH_NBYTES, 2 * nbytes) + LINE, dtype=torch.uint8)
            self._kept.append(self._scratch)
        address = self._scratch.data_ptr()
        return address + -address % LINE

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look away: what is done inside leaves nothing behind."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def watch(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        """See to what torch has done."""
        if self._paused or name in VIEWS:
            return
        if name in EMPTY:
            self._kept.append(out)
        elif name in ZEROS and out.is_contiguous():
            self._kept.append(out)
            self._launch(_fill_zero, out.data_ptr(), out.nbytes)
        elif name == "add_" and _alike(*args[:2]):
            self._kept.append(args[1])
            self._launch(_add, args[0].data_ptr(), args[1].data_ptr(), args[0].numel())
        else:
            self.spoil(f"torch's {name} runs between the kernels")

    def _launch(self, kernel: Kernel, *args: int) -> None:
        code = kernel.address
        assert code is not None
        self.add(code, array("q", args), 1)

    def replay(self) -> None:
        """Make all launches again."""
        _replay(self._launches.buffer_info()[0], len(self._launches) // FIELDS)


def _alike(x: Any, y: Any) -> bool:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype == y.dtype == torch.float32):
        return False
    return x.numel() == y.numel() and x.is_contiguous() and y.is_contiguous()


class _Operations(TorchDispatchMode):
    def __init__(self, recording: Recording):
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.recording.watch(func.overloadpacket.__name__, args, out)
        return out


class _Reading(TorchFunctionMode):
    """Values that Python reads decide something, and would not be read again."""

    def __init__(self, recording: Recording):
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.recording.spoil(f"Python reads a value with {func.__name__}")
        return func(*args, **(kwargs or {}))


@contextmanager
def record() -> Iterator[Recording]:
    """Note the launches of the block, which runs as usual. One at a time, and only this thread's."""
    recording = Recording()
    recorder.recording, _dispatch.watched[threading.get_ident()] = recording, recording
    try:
        with _Operations(recording), _Reading(recording):
            yield recording
    finally:
        recorder.recording = None
        del _dispatch.watched[threading.get_ident()]
