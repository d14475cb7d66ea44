"""Recorded decode steps: a list of kernel launches that is replayed without Python, the CPU's counterpart of a CUDA graph.

A decode step of a small model is hundreds of kernels of a few microseconds each, and the Python around them takes as long. From
step to step only the contents of some buffers change. So one step runs under a `Recording`, which stores every launch with its
arguments and retains the memory they point to. A replay repeats the launches: they read the new lengths, page tables and tokens
from the same addresses.

Work outside of kernels would not be replayed. A torch dispatch mode therefore watches every operation: views and empty tensors
need nothing, a few operations are translated to launches, and any other makes the recording rejected, with a reason.
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
from auraflux.ops.simd.compile.cache_folder import our_cache
from auraflux.ops.simd.compile.compiler import KernelCompiler
from auraflux.ops.simd.jit import (
    LINE,
    Kernel,
    arguments,
    floats,
    halves,
    int64s,
    octets,
    real,
)
from auraflux.ops.simd.math import float_of_bits
from auraflux.ops.simd.threads import launch_jobs, thread_pool, threads

FIELDS = 3  # words per launch: address of the code, address of its arguments, jobs
SCRATCH_NBYTES = 1 << 22

# new memory that a launch fills, or that is constant: torch.tensor ends with `lift_fresh`
NEW = {"empty", "empty_like", "empty_strided", "new_empty", "lift_fresh"}
VIEWS = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "slice", "select", "unsqueeze", "squeeze", "expand", "detach"),
    *("alias", "as_strided", "split", "split_with_sizes", "unbind", "transpose", "t", "permute"),
}
ZEROS = {"zeros", "zeros_like", "new_zeros", "zero_"}
# reads of values that bypass torch's dispatcher
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
def _widen(args, job, jobs):
    """Convert bfloat16 to float32."""
    source, target, count = arguments(args, 3)
    x, out = halves(source, count), floats(target, count)
    for i in range(count):
        out[i] = float_of_bits(np.uint32(x[i]) << np.uint32(16))


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
    """Launches of one run, and all memory they use.

    rejected  why the run cannot be replayed; None if it can
    """

    def __init__(self) -> None:
        self.rejected: str | None = None
        self._launches = array("q")
        self._retained: list[Any] = []
        self._scratch: Tensor | None = None
        self._paused = False

    def add(self, code: int, args: array, jobs: int) -> None:
        """Record a kernel launch."""
        self._launches.extend((code, args.buffer_info()[0], jobs))
        self._retained.append(args)

    def retain(self, memory: Any) -> None:
        """Retain memory that a launch points to."""
        self._retained.append(memory)

    def retain_new(self, tensor: Tensor) -> None:
        """Retain a tensor that was allocated during the run."""
        self._retained.append(tensor)

    def add_query(self, code: int, args: array) -> None:
        """Ignore a query: the caller of a replay is responsible for the values it depends on."""

    def checks_error_flag(self, address: int) -> bool:
        """Return whether to check the error flag of a kernel: no, because a replay could not raise."""
        return False

    def read(self, how: str, tensor: Tensor) -> None:
        """Reject the recording: a value that Python reads may decide what it does."""
        self.reject(f"Python reads a value with {how}")

    def reject(self, reason: str) -> None:
        """Declare the run not replayable; the first reason is stored."""
        if self.rejected is None and not self._paused:
            self.rejected = reason

    def workspace(self, nbytes: int) -> int:
        """Return scratch memory for the launches of one op, as `jit.workspace` does, at a fixed address."""
        if self._scratch is None or self._scratch.numel() < nbytes + LINE:
            with self._suspended():
                self._scratch = torch.empty(max(SCRATCH_NBYTES, 2 * nbytes) + LINE, dtype=torch.uint8)
            self._retained.append(self._scratch)
        address = self._scratch.data_ptr()
        return address + -address % LINE

    def paused(self) -> AbstractContextManager[None]:
        """Suspend recording inside the block."""
        return self._suspended()

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def watch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record a torch operation as a launch, ignore it, or reject the recording."""
        if self._paused or name in VIEWS:
            return
        if name in NEW:
            self.retain_new(out)
        elif name in ZEROS and out.is_contiguous():
            self.retain_new(out)
            self._launch(_fill_zero, out.data_ptr(), out.nbytes)
        elif name == "mul" and isinstance(args[1], float) and _same_layout(args[0], out):
            self.retain_new(out)
            self._launch(_scale, args[0].data_ptr(), _bits(args[1]), out.data_ptr(), out.numel())
        elif name == "_to_copy" and _widens(args[0], out):
            self.retain_new(out)
            self._launch(_widen, args[0].data_ptr(), out.data_ptr(), out.numel())
        elif name == "add_" and not kwargs and _adds_rows(*args[:2]):
            self._retained.append(args[1])
            rows = args[0].numel() // args[1].numel()
            self._launch(_add, args[0].data_ptr(), args[1].data_ptr(), rows, args[1].numel())
        elif name == "clone" and (stride := _row_stride(args[0])) is not None and out.is_contiguous():
            self.retain_new(out)
            rows = out.numel() // out.shape[-1]
            self._launch(_copy_rows, args[0].data_ptr(), stride, out.data_ptr(), rows, out.shape[-1])
        else:
            self.reject(f"torch's {name} runs between the kernels")

    def _launch(self, kernel: Kernel, *args: int) -> None:
        code = kernel.address
        assert code is not None
        self.add(code, array("q", args), 1)

    def replay(self) -> None:
        """Repeat all launches."""
        _replay(thread_pool.shared, self._launches.buffer_info()[0], len(self._launches) // FIELDS)


def _same_layout(x: Any, y: Any) -> bool:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype == y.dtype == torch.float32):
        return False
    return x.numel() == y.numel() and x.is_contiguous() and y.is_contiguous()


def _widens(x: Tensor, y: Tensor) -> bool:
    return (x.dtype, y.dtype) == (torch.bfloat16, torch.float32) and x.is_contiguous() and y.is_contiguous()


def _adds_rows(x: Any, y: Any) -> bool:
    """Return whether `x.add_(y)` adds y elementwise or to every row of x."""
    return _same_layout(x, y) or (
        isinstance(y, Tensor) and y.dim() == 1 and x.numel() > 0 and _same_layout(x.flatten(0, -2)[0], y) and x.is_contiguous()
    )


def _row_stride(x: Tensor) -> int | None:
    """Return the stride between rows in floats; None if it is not uniform."""
    if x.dtype is not torch.float32 or x.dim() < 2 or x.stride(-1) != 1 or x.numel() == 0:
        return None
    strides = [x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2) if x.shape[i] > 1]
    return x.stride(-2) if all(strides) else None


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # otherwise torch imports its compiler, which takes 1.5 s, only to disable it here
        return False

    def __init__(self, recording: Recording):
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.recording.watch(func.overloadpacket.__name__, args, kwargs or {}, out)
        return out


class _ReadPatches:
    """Patches of the tensor methods that read values without the dispatcher, in place while any thread records.

    A torch function mode for all uses of a tensor would take a third of the time of a recording.
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
        # inherited, so deleting the patch restores it
        read = getattr(Tensor, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if (recording := recorder.recording) is not None:
                recording.read(name, args[0])
            return read(*args, **kwargs)

        return watched


_read_patches = _ReadPatches()


@contextmanager
def watched(recording: Recording) -> Iterator[None]:
    """Record this thread's launches and torch operations inside the block."""
    recorder[get_ident()] = recording
    try:
        with _Operations(recording), _read_patches:
            yield
    finally:
        del recorder[get_ident()]


@contextmanager
def record() -> Iterator[Recording]:
    """Record the launches of this thread while the block runs normally; recordings do not nest."""
    if recorder.recording is not None:
        raise BackendError("This thread is already recording; recordings do not nest.")
    # start the workers: the step of a narrow model may launch single jobs only, and a replay expects the pool
    threads()
    recording = Recording()
    with watched(recording):
        yield recording


def _bits(value: float) -> int:
    return struct.unpack("q", struct.pack("d", value))[0]
