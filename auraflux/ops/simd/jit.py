"""JIT compilation of CPU kernels with Numba: `@Kernel` for launches, `@jit` for the functions they call.

A kernel is `body(args, job, jobs)`: the thread pool (threads.py) runs it as `jobs` jobs. Its arguments are 64-bit words, mostly
addresses (`tensor.data_ptr()`) and sizes, because unboxing an array costs microseconds and an integer a fraction of one.
Inside, `floats(address, n)` and its siblings view memory as an array. They check no bounds: shapes, dtypes and contiguity are
checked before a launch. Compiled code is cached on disk (compile/cache_folder.py).
"""

import ctypes
import math
import struct
import threading
import weakref
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from torch import Tensor

from auraflux.ops._recording import recorder
from auraflux.ops.simd.compile.cache_folder import CACHE_FOLDER as CACHE_FOLDER
from auraflux.ops.simd.compile.cache_folder import is_stored, our_cache
from auraflux.ops.simd.compile.compiler import FAST, OPTIONS, KernelCompiler
from auraflux.ops.simd.compile.compiler import jit_with as jit_with
from auraflux.ops.simd.threads import LINE, launch, thread_pool
from auraflux.ops.simd.threads import several_jobs as several_jobs
from auraflux.ops.simd.threads import threads as threads

jit = jit_with(*FAST)
strict = jit_with("contract")  # sums are not reordered


@intrinsic
def call_kernel(typingctx, function, args):
    """Call a kernel at an address as a single job; `args` is a tuple of integers, nested tuples are flattened."""

    def codegen(context, builder, signature, values):
        word, given = ir.IntType(64), cgutils.unpack_tuple(builder, values[1])
        opened = [
            number
            for kind, value in zip(args.types, given, strict=True)
            for number in (cgutils.unpack_tuple(builder, value) if isinstance(kind, types.BaseTuple) else [value])
        ]
        room = cgutils.alloca_once(builder, word, size=len(opened))
        for i, number in enumerate(opened):
            builder.store(number, builder.gep(room, [ir.Constant(word, i)]))
        kind = ir.FunctionType(ir.VoidType(), [word, word, word])
        target = builder.inttoptr(values[0], kind.as_pointer())
        builder.call(target, [builder.ptrtoint(room, word), ir.Constant(word, 0), ir.Constant(word, 1)])
        return context.get_dummy_value()

    return types.void(function, args), codegen


def address_of(values: array) -> int:
    """Return the address of integers that a kernel will read; a recording retains them."""
    if recorder and (recording := recorder.recording) is not None:
        recording.retain(values)
    return values.buffer_info()[0]


class DryRun(NamedTuple):
    """Kernels that one thread calls while none of them runs, in order and without repeats."""

    thread: int
    kernels: dict["Kernel", None]


dry_run: DryRun | None = None  # set while compile/ahead.py collects kernels


JOB = types.void(types.int64, types.int64, types.int64)


class Kernel:
    """A compiled function that a launch runs as several jobs on the thread pool.

    Numba takes ten seconds to compile a `prange` loop around a large body, and one second without it. So bodies are compiled
    as serial code, `body(args, job, jobs)`, and one small function launches them all.
    """

    def __init__(self, body: Callable[..., None]):
        self.__doc__ = body.__doc__
        self.__name__ = body.__name__
        self.body = body
        self._address: int | None = None
        self._pack: Callable[..., bytes] | None = None

    @property
    def address(self) -> int:
        """Address of the machine code; 0 in a dry run."""
        if dry_run is not None and dry_run.thread == threading.get_ident():
            dry_run.kernels[self] = None
            return 0
        return self._address or self.compile()

    def compile(self) -> int:
        """Compile the kernel, or load it from the JIT cache, and return its address."""
        if self._address is None:
            with our_cache():
                # an attribute, because the machine code lives as long as this object
                self._compiled: Any = numba.cfunc(JOB, cache=True, pipeline_class=KernelCompiler, fastmath=FAST, **OPTIONS)(
                    self.body
                )
            self._address = self._compiled.address
        assert self._address is not None
        return self._address

    def is_cached(self) -> bool:
        """Return whether the kernel is compiled, prebuilt or in the JIT cache."""
        return self._address is not None or is_stored(self.body, JOB)

    def __call__(self, jobs: int, *args: int | float) -> None:
        """Launch `jobs` jobs; a single job runs on this thread. Arguments are ints, or floats where the body takes a `real`."""
        if dry_run is not None and dry_run.thread == threading.get_ident():
            dry_run.kernels[self] = None
            return
        if self._pack is None:
            self._pack = struct.Struct("".join("d" if type(value) is float else "q" for value in args)).pack
        packed = array("q", self._pack(*args))
        launch(thread_pool.shared, self._address or self.compile(), packed.buffer_info()[0], jobs)
        if recorder and (recording := recorder.recording) is not None:
            assert self._address is not None
            recording.add(self._address, packed, jobs)


class Query(Kernel):
    """A kernel that returns an integer to Python, which it stores after its last argument.

    dry_run_answer  the result in a dry run
    """

    def __init__(self, body: Callable[..., None], dry_run_answer: int):
        super().__init__(body)
        self.dry_run_answer = dry_run_answer

    def ask(self, *args: int) -> int:
        """Run the query on this thread and return its answer."""
        if dry_run is not None and dry_run.thread == threading.get_ident():
            dry_run.kernels[self] = None
            return self.dry_run_answer
        packed = array("q", (*args, 0))
        launch(thread_pool.shared, self._address or self.compile(), packed.buffer_info()[0], 1)
        if recorder and (recording := recorder.recording) is not None:
            assert self._address is not None
            recording.add_query(self._address, packed)
        return packed[-1]


def query(dry_run_answer: int) -> Callable[[Callable[..., None]], Query]:
    """Make a kernel a query: it returns an integer to Python, and `dry_run_answer` in a dry run."""
    return partial(Query, dry_run_answer=dry_run_answer)


def error_flag(address: int) -> int:
    """Return the error flag that a kernel sets: an int64 that is 0 unless the kernel found bad input."""
    if recorder and (recording := recorder.recording) is not None and not recording.checks_error_flag(address):
        return 0
    return ctypes.c_int64.from_address(address).value


@intrinsic(prefer_literal=True)
def arguments(typingctx, args, count):
    """Load the `count` words of a kernel's arguments as a tuple of integers."""

    def codegen(context, builder, signature, values):
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        found = [builder.load(builder.gep(pointer, [ir.Constant(ir.IntType(64), i)])) for i in range(count.literal_value)]
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.int64, count.literal_value)(args, count), codegen


@intrinsic
def real(typingctx, bits):
    """Reinterpret an argument word as a float64 and round it to float32."""

    def codegen(context, builder, signature, values):
        return builder.fptrunc(builder.bitcast(values[0], ir.DoubleType()), ir.FloatType())

    return types.float32(types.int64), codegen


@jit
def share(count, job, jobs):
    """Return the slice of range(count) that belongs to this job."""
    return range(job * count // jobs, (job + 1) * count // jobs)


def _view(dtype: types.Type) -> Callable[..., Any]:
    """Return an intrinsic that views `n` elements of a type at an address as an array."""
    kind = types.Array(dtype, 1, "C")

    @intrinsic
    def view(typingctx, address, n):
        def codegen(context, builder, signature, args):
            pointer = context.get_data_type(dtype).as_pointer()
            nbytes = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(dtype)))
            array = make_array(kind)(context, builder)
            given = [context.cast(builder, *each, types.intp) for each in zip(args, signature.args, strict=True)]
            data = builder.inttoptr(given[0], pointer)
            populate_array(array, data=data, shape=[given[1]], strides=[nbytes], itemsize=nbytes, meminfo=None)
            return array._getvalue()

        return kind(address, n), codegen

    return view


floats, int32s, int64s = _view(types.float32), _view(types.int32), _view(types.int64)
uint32s = _view(types.uint32)
halves = _view(types.uint16)  # bit patterns of bf16 or f16
octets = _view(types.uint8)
doubles = _view(types.float64)


class Scratch(threading.local):
    """Scratch memory of one thread, aligned to cache lines; Python writes to it through `view`."""

    nbytes = address = 0
    view = memoryview(bytearray())

    def grow(self, nbytes: int) -> None:
        """Reallocate to at least `nbytes`, with a quarter in reserve."""
        self.nbytes = nbytes + nbytes // 4
        buffer = torch.empty(self.nbytes + LINE, dtype=torch.uint8)
        ahead = -buffer.data_ptr() % LINE
        self.address, self.view = buffer.data_ptr() + ahead, buffer.numpy().data[ahead:]


scratch = Scratch()


def workspace(nbytes: int) -> int:
    """Return the address of this thread's scratch memory, at least `nbytes` aligned to cache lines; valid until the next call.

    Kernels take it as an argument: an array allocated in jitted code is freed after the last use of its name, even while its
    address is in use.
    """
    if recorder and (recording := recorder.recording) is not None:
        return recording.workspace(nbytes)
    if nbytes > scratch.nbytes:
        scratch.grow(nbytes)
    return scratch.address


REUSED_FROM = 1 << 20  # bytes of a tensor from which on its memory is reused
MOST_FREE_NBYTES = 1 << 28


class ReusedMemory:
    """Memory of large tensors that are gone, for the next ones.

    The C library returns large blocks to the system, which then maps and zeroes each page again: 2 us for 4 KB on virtual
    machines, more than a prefill kernel takes to compute what it writes there.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        # a tensor may be freed by garbage collection inside `take`
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> np.ndarray:
        """Return uninitialized bytes; when the last tensor that uses them is gone, they are free again."""
        with self._lock:
            # not much larger ones, which others may need
            fitting = [each for each in self._free if nbytes <= each.nbytes <= 2 * nbytes]
            memory = min(fitting, key=lambda each: each.nbytes, default=None)
            if memory is None:
                memory = torch.empty(nbytes, dtype=torch.uint8).numpy()
            else:
                self._free = [each for each in self._free if each is not memory]
        lent = memory[:nbytes]
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent

    def _give_back(self, memory: np.ndarray) -> None:
        with self._lock:
            self._free.append(memory)
            while sum(each.nbytes for each in self._free) > MOST_FREE_NBYTES:
                self._free.pop(0)


reused_memory = ReusedMemory()


def empty(*shape: int) -> Tensor:
    """Return an uninitialized float32 tensor; a large one in memory that another one has left."""
    nbytes = 4 * math.prod(shape)
    # recordings, dry runs and tests observe or replace torch.empty
    if nbytes < REUSED_FROM or recorder or dry_run is not None or torch.are_deterministic_algorithms_enabled():
        return torch.empty(*shape)
    return torch.from_numpy(reused_memory.take(nbytes)).view(torch.float32).view(*shape)


def as_float(x: Tensor) -> Tensor:
    """Convert to float32, in which the CPU kernels compute; a float32 tensor is returned unchanged."""
    return x if x.dtype is torch.float32 else x.float()


def like(out: Tensor, x: Tensor) -> Tensor:
    """Convert a float32 result to the dtype of `x`."""
    return out if out.dtype is x.dtype else out.to(x.dtype)
