"""A step of decoding as a list of kernel launches, made again without any Python between them.

A small model's token is hundreds of kernels of a few microseconds each, and the Python around them takes as long as they do.
Yet from token to token everything but the content of some buffers stays the same. So one step is run under a `Recording`: it
notes every launch with its arguments and keeps the memory they point to. Replayed, the launches read the new lengths, page
tables and tokens from where the first ones lay.

What happens outside of kernels would not be replayed. Torch operations are therefore watched: views and empty tensors are
harmless, a few are translated to launches, and anything else spoils the recording, with a reason.
"""

import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock, get_ident
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from auraflux.errors import BackendError
from auraflux.ops._recording import recorder
from auraflux.ops.simd.compiler import KernelCompiler
from auraflux.ops.simd.folder import our_cache
from auraflux.ops.simd.jit import (
    LINE,
    Kernel,
    arguments,
    floats,
    int64s,
    octets,
    real,
)
from auraflux.ops.simd.threads import crew, launch_jobs, threads

FIELDS = 3  # of a launch: address of the code, address of its arguments, jobs
SCRATCH_NBYTES = 1 << 22

# new memory whose content a launch writes, or that stays as it is: `lift_fresh` is how torch.tensor ends
NEW = {"empty", "empty_like", "empty_strided", "new_empty", "lift_fresh"}
VIEWS = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "slice", "select", "unsqueeze", "squeeze", "expand", "detach"),
    *("alias", "as_strided", "split", "split_with_sizes", "unbind", "transpose", "t", "permute"),
}
ZEROS = {"zeros", "zeros_like", "new_zeros", "zero_"}
# what torch's dispatcher is not asked for: other reads go through it
READS = "tolist", "numpy"


@Kernel
def _fill_zero(args, job, jobs):
    target, nbytes = arguments(args, 2)
    out = octets(target, nbytes)
    for i in range(nbytes):
        out[i] = np.uint8(0)


@Kernel
def _add(args, job, jobs):
    target, source, rows, width = arguments(args, 4)
    more = floats(source, width)
    for row in range(rows):
        out = floats(target + 4 * row * width, width)
        for i in range(width):
            out[i] += more[i]


@Kernel
def _copy_rows(args, job, jobs):
    source, stride, target, rows, width = arguments(args, 5)
    for row in range(rows):
        x, out = floats(source + 4 * row * stride, width), floats(target + 4 * row * width, width)
        for i in range(width):
            out[i] = x[i]


@Kernel
def _scale(args, job, jobs):
    source, factor, target, count = arguments(args, 4)
    x, out = floats(source, count), floats(target, count)
    for i in range(count):
        out[i] = x[i] * real(factor)


with our_cache():

    @numba.njit(nogil=True, cache=True, pipeline_class=KernelCompiler)
    def _replay(shared, table_at, count):
        table = int64s(table_at, count * FIELDS)
        for n in range(count):
            launch_jobs(shared, table[FIELDS * n], table[FIELDS * n + 1], table[FIELDS * n + 2])


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

    def keep_new(self, tensor: Tensor) -> None:
        """The same of memory that was made for the step."""
        self._kept.append(tensor)

    def ask(self, code: int, args: array) -> None:
        """Note a question: it was asked of values that are others when the step is repeated, by whoever changes them."""

    def looks(self, address: int) -> bool:
        """Whether to look for what a kernel found wrong: a step that is repeated has nobody to tell."""
        return False

    def read(self, how: str, tensor: Tensor) -> None:
        """See to values that Python reads: they decide something."""
        self.spoil(f"Python reads a value with {how}")

    def spoil(self, reason: str) -> None:
        if self.spoiled is None and not self._paused:
            self.spoiled = reason

    def workspace(self, nbytes: int) -> int:
        """Scratch memory for the launches of one op, as `jit.workspace` gives it; it stays where it is."""
        if self._scratch is None or self._scratch.numel() < nbytes + LINE:
            with self._looking_away():
                self._scratch = torch.empty(max(SCRATCH_NBYTES, 2 * nbytes) + LINE, dtype=torch.uint8)
            self._kept.append(self._scratch)
        address = self._scratch.data_ptr()
        return address + -address % LINE

    def paused(self) -> AbstractContextManager[None]:
        """Look away: what is done inside leaves nothing behind."""
        return self._looking_away()

    @contextmanager
    def _looking_away(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def watch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """See to what torch has done."""
        if self._paused or name in VIEWS:
            return
        if name in NEW:
            self.keep_new(out)
        elif name in ZEROS and out.is_contiguous():
            self.keep_new(out)
            self._launch(_fill_zero, out.data_ptr(), out.nbytes)
        elif name == "mul" and isinstance(args[1], float) and _alike(args[0], out):
            self.keep_new(out)
            self._launch(_scale, args[0].data_ptr(), _bits(args[1]), out.data_ptr(), out.numel())
        elif name == "add_" and not kwargs and _adds_rows(*args[:2]):
            self._kept.append(args[1])
            rows = args[0].numel() // args[1].numel()
            self._launch(_add, args[0].data_ptr(), args[1].data_ptr(), rows, args[1].numel())
        elif name == "clone" and (stride := _row_stride(args[0])) is not None and out.is_contiguous():
            self.keep_new(out)
            rows = out.numel() // out.shape[-1]
            self._launch(_copy_rows, args[0].data_ptr(), stride, out.data_ptr(), rows, out.shape[-1])
        else:
            self.spoil(f"torch's {name} runs between the kernels")

    def _launch(self, kernel: Kernel, *args: int) -> None:
        code = kernel.address
        assert code is not None
        self.add(code, array("q", args), 1)

    def replay(self) -> None:
        """Make all launches again."""
        _replay(crew.shared, self._launches.buffer_info()[0], len(self._launches) // FIELDS)


def _alike(x: Any, y: Any) -> bool:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype == y.dtype == torch.float32):
        return False
    return x.numel() == y.numel() and x.is_contiguous() and y.is_contiguous()


def _adds_rows(x: Any, y: Any) -> bool:
    """Whether y is added to every row of x, or to all of it."""
    return _alike(x, y) or (
        isinstance(y, Tensor) and y.dim() == 1 and x.numel() > 0 and _alike(x.flatten(0, -2)[0], y) and x.is_contiguous()
    )


def _row_stride(x: Tensor) -> int | None:
    """Floats from one row to the next, if there is one distance for all."""
    if x.dtype is not torch.float32 or x.dim() < 2 or x.stride(-1) != 1 or x.numel() == 0:
        return None
    strides = [x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2) if x.shape[i] > 1]
    return x.stride(-2) if all(strides) else None


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # else torch imports its compiler, for a second and a half, only to keep it away from here
        return False

    def __init__(self, recording: Recording):
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.recording.watch(func.overloadpacket.__name__, args, kwargs or {}, out)
        return out


class _Reading:
    """Values that Python reads decide something, and would not be read again.

    The methods are replaced while any thread records: a mode of torch for all that is done with a tensor would take a third of
    the time of a recording.
    """

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                for name in READS:
                    setattr(Tensor, name, self._watched(name))

    def __exit__(self, *failure: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for name in READS:
                    delattr(Tensor, name)

    def _watched(self, name: str) -> Callable[..., Any]:
        # inherited, so that it is there again when the other is gone
        read = getattr(Tensor, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if (recording := recorder.recording) is not None:
                recording.read(name, args[0])
            return read(*args, **kwargs)

        return watched


_reading = _Reading()


@contextmanager
def watched(recording: Recording) -> Iterator[None]:
    """Have this thread's launches inside the block noted, and see to what torch does there."""
    recorder[get_ident()] = recording
    try:
        with _Operations(recording), _reading:
            yield
    finally:
        del recorder[get_ident()]


@contextmanager
def record() -> Iterator[Recording]:
    """Note the launches of the block, which runs as usual. One at a time, and only this thread's."""
    if recorder.recording is not None:
        raise BackendError("this thread is recording already; launches cannot belong to two recordings.")
    # replays launch on threads that nothing else may have started: a narrow model's step can do without
    threads()
    recording = Recording()
    with watched(recording):
        yield recording


def _bits(value: float) -> int:
    return struct.unpack("q", struct.pack("d", value))[0]
