"""Compiling Python to machine code with Numba, the way every `cpu` module here does it.

Kernels take addresses (`tensor.data_ptr()`) and sizes, because an array argument costs microseconds to unbox and an address a
fraction of one. Inside, `floats(address, n)` and its siblings make an array over the memory. Nothing checks bounds in there:
shapes, dtypes and contiguity are checked before a kernel runs.

`@jit` compiles a function, `@Kernel` one that all threads run together. Compiled code is kept on disk (kernel_cache.py), in a
folder named after a digest of the CPU ops' sources: Numba itself looks only at the file of the function it compiles, and would
run stale code after a change in a module that function was built from.
"""

import hashlib
import os
import platform
import struct
import threading
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import config as _config
from numba.extending import intrinsic
from numba.np.ufunc import parallel
from torch import Tensor

from auraflux.kernel_cache import kept_in, open_folder
from auraflux.ops._recording import recorder

# its names are made when it is imported, out of sight of type checkers
config: Any = _config
LINE = 64  # bytes of a cache line


def cpu_sources() -> list[Path]:
    """The modules that compiled code may be made of: all ops but what runs on a GPU or makes inputs."""
    ops = Path(__file__).parent.parent
    found = (path for path in ops.rglob("*.py") if not {"cuda", "hopper"} & {*path.relative_to(ops).parts[:-1], path.stem})
    return sorted(path for path in found if not path.stem.endswith(("cases", "_inputs")))


def _sources_digest() -> str:
    digest = hashlib.sha256(f"{numba.__version__} {platform.machine()} {os.environ.get('AURAFLUX_ISA', '')}".encode())
    for path in cpu_sources():
        source = path.read_bytes()
        digest.update(f"{path} {len(source)}".encode() + source)
    return digest.hexdigest()[:16]


CACHE_FOLDER = open_folder(_sources_digest())


def nothing_compiled() -> bool:
    """Whether the next kernels will have to be compiled: none of these sources is in the cache yet."""
    return not CACHE_FOLDER or next(Path(CACHE_FOLDER).rglob("*.nbc"), None) is None


def _choose_threads() -> None:
    # numba's own order prefers tbb; omp wakes its threads in 3 microseconds, workqueue in 35 (two Neoverse-N1 cores)
    if "NUMBA_THREADING_LAYER" not in os.environ:
        config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


_choose_threads()


# contraction and reassociation let loops vectorise; NaN and infinity keep their meaning
FAST = {"contract", "reassoc", "nsz"}


def _our_cache() -> AbstractContextManager[None]:
    return kept_in(CACHE_FOLDER)


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that other compiled code or Python calls."""
    with _our_cache():
        return numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)(function)


@intrinsic
def _call(typingctx, function, args, job, jobs):
    """Call the machine code at an address."""

    def codegen(context, builder, signature, values):
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word, word, word])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


with _our_cache():

    @numba.njit(nogil=True, cache=True)
    def _launch_here(function, args, jobs):
        for job in range(jobs):
            _call(function, args, job, jobs)

    @numba.njit(nogil=True, cache=True, parallel=True)
    def _launch_threads(function, args, jobs):
        for job in numba.prange(jobs):
            _call(function, args, job, jobs)


def held(values: array) -> int:
    """Address of numbers that a kernel will read; they must stay as long as a recording does."""
    if recorder and (recording := recorder.recording) is not None:
        recording.keep(values)
    return values.buffer_info()[0]


class Kernel:
    """Compiled code that runs as a number of jobs, on all threads or on the calling one.

    Numba takes ten seconds to compile a `prange` loop around a large body, and one without it. So bodies are compiled plain,
    as `body(args, job, jobs)`, and one small parallel loop launches them all.
    """

    def __init__(self, body: Callable[..., None]):
        self.__doc__ = body.__doc__
        self.__name__ = body.__name__
        self._body = body
        self._address: int | None = None
        self._pack: Callable[..., bytes] | None = None

    @property
    def address(self) -> int | None:
        if self._address is None:
            with _our_cache():
                compiled: Any = numba.cfunc("void(int64, int64, int64)", cache=True, error_model="numpy", fastmath=FAST)(
                    self._body
                )
            # kept, because the machine code lives as long as this object
            self._compiled = compiled
            self._address = compiled.address
        return self._address

    def __call__(self, jobs: int, *args: int | float) -> None:
        """Run `jobs` jobs; one stays on this thread. Arguments are ints, or Python floats where the body takes a `real`."""
        if self._pack is None:
            self._pack = struct.Struct("".join("d" if type(value) is float else "q" for value in args)).pack
        packed = array("q", self._pack(*args))
        launch = _launch_here if jobs == 1 else _launch_threads
        launch(self._address or self.address, packed.buffer_info()[0], jobs)
        if recorder and (recording := recorder.recording) is not None:
            assert self._address is not None
            recording.add(self._address, packed, jobs)


def _bits(value: float) -> int:
    return struct.unpack("q", struct.pack("d", value))[0]


_count_threads: Callable[[], int] | None = None


def threads() -> int:
    """How many jobs keep every thread busy."""
    global _count_threads
    if _count_threads is None:
        # starts them; what it asks then answers in 0.2 microseconds, it itself in 1.6
        numba.get_num_threads()
        _count_threads = getattr(parallel, "_get_num_threads", numba.get_num_threads)
    return _count_threads()


@intrinsic(prefer_literal=True)
def arguments(typingctx, args, count):
    """Open a kernel's arguments: a tuple of `count` integers."""

    def codegen(context, builder, signature, values):
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        found = [builder.load(builder.gep(pointer, [ir.Constant(ir.IntType(64), i)])) for i in range(count.literal_value)]
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.int64, count.literal_value)(args, count), codegen


@intrinsic
def real(typingctx, bits):
    """A float argument, as float32."""

    def codegen(context, builder, signature, values):
        return builder.fptrunc(builder.bitcast(values[0], ir.DoubleType()), ir.FloatType())

    return types.float32(types.int64), codegen


@numba.njit(inline="always")
def share(count, job, jobs):
    """The part of range(count) that falls to this job."""
    return range(job * count // jobs, (job + 1) * count // jobs)


@intrinsic
def _pointer(typingctx, address, like):
    """Turn an integer address into a pointer to elements of `like`'s type."""
    kind = types.CPointer(like.dtype)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(kind))

    return kind(address, like), codegen


@numba.njit(inline="always")
def floats(address, n):
    return numba.carray(_pointer(address, np.float32), (n,))


@numba.njit(inline="always")
def int32s(address, n):
    return numba.carray(_pointer(address, np.int32), (n,))


@numba.njit(inline="always")
def int64s(address, n):
    return numba.carray(_pointer(address, np.int64), (n,))


@numba.njit(inline="always")
def halves(address, n):
    """16-bit patterns: bf16 or f16."""
    return numba.carray(_pointer(address, np.uint16), (n,))


@numba.njit(inline="always")
def octets(address, n):
    return numba.carray(_pointer(address, np.uint8), (n,))


_thread = threading.local()


def workspace(nbytes: int) -> int:
    """Address of this thread's scratch memory, at least `nbytes` of it, aligned to cache lines; valid until the next call.

    Kernels take it as an argument: an array made inside jitted code is freed after its last use by name, which an address
    does not count as.
    """
    if recorder and (recording := recorder.recording) is not None:
        return recording.workspace(nbytes)
    buffer = getattr(_thread, "buffer", None)
    if buffer is None or buffer.numel() < nbytes + LINE:
        buffer = _thread.buffer = torch.empty(nbytes + nbytes // 4 + LINE, dtype=torch.uint8)
    address = buffer.data_ptr()
    return address + -address % LINE


def as_float(x: Tensor) -> Tensor:
    """float32 as it is, anything narrower widened: kernels here compute on float32."""
    return x if x.dtype is torch.float32 else x.float()


def like(out: Tensor, x: Tensor) -> Tensor:
    """Give a float32 result the dtype of `x`."""
    return out if out.dtype is x.dtype else out.to(x.dtype)
