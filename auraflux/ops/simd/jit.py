"""Compiling Python to machine code with Numba, the way every `cpu` module here does it.

Kernels take addresses (`tensor.data_ptr()`) and sizes, because an array argument costs microseconds to unbox and an address a
fraction of one. Inside, `floats(address, n)` and its siblings make an array over the memory. Nothing checks bounds in there:
shapes, dtypes and contiguity are checked before a kernel runs.

`@jit` compiles a function, `@Kernel` one that all threads run together (threads.py). Compiled code is kept on disk (folder.py).
"""

import ctypes
import struct
import threading
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from torch import Tensor

from auraflux.kernel_cache import is_kept
from auraflux.ops._recording import recorder
from auraflux.ops.simd.compiler import FAST, OPTIONS, KernelCompiler
from auraflux.ops.simd.compiler import jit_with as jit_with
from auraflux.ops.simd.folder import CACHE_FOLDER, our_cache
from auraflux.ops.simd.threads import LINE, crew, launch
from auraflux.ops.simd.threads import threads as threads

jit = jit_with(*FAST)
strict = jit_with("contract")  # no sum is reordered


@intrinsic
def call_kernel(typingctx, function, args):
    """Run one job of the kernel at an address, with a tuple of integers as its arguments; tuples in it are opened."""

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


def held(values: array) -> int:
    """Address of numbers that a kernel will read; they must stay as long as a recording does."""
    if recorder and (recording := recorder.recording) is not None:
        recording.keep(values)
    return values.buffer_info()[0]


class Notes(NamedTuple):
    """Kernels that one thread calls, which do not run."""

    thread: int
    found: dict["Kernel", None]


notes: Notes | None = None  # while `ahead` takes them


JOB = types.void(types.int64, types.int64, types.int64)


class Kernel:
    """Compiled code that runs as a number of jobs, on all threads or on the calling one.

    Numba takes ten seconds to compile a `prange` loop around a large body, and one without it. So bodies are compiled plain,
    as `body(args, job, jobs)`, and one small parallel loop launches them all.
    """

    def __init__(self, body: Callable[..., None]):
        self.__doc__ = body.__doc__
        self.__name__ = body.__name__
        self.body = body
        self._address: int | None = None
        self._pack: Callable[..., bytes] | None = None

    @property
    def address(self) -> int:
        """Where its code is; 0 where kernels are only noted."""
        if notes is not None and notes.thread == threading.get_ident():
            notes.found[self] = None
            return 0
        return self._address or self.compile()

    def compile(self) -> int:
        """Compile it, or fetch it from the cache, and give its address."""
        if self._address is None:
            with our_cache():
                # kept, because the machine code lives as long as this object
                self._compiled: Any = numba.cfunc(JOB, cache=True, pipeline_class=KernelCompiler, fastmath=FAST, **OPTIONS)(
                    self.body
                )
            self._address = self._compiled.address
        assert self._address is not None
        return self._address

    def is_kept(self) -> bool:
        """Whether it need not be compiled: it has been, or is in the cache."""
        return self._address is not None or (bool(CACHE_FOLDER) and is_kept(CACHE_FOLDER, self.body, JOB))

    def __call__(self, jobs: int, *args: int | float) -> None:
        """Run `jobs` jobs; one stays on this thread. Arguments are ints, or Python floats where the body takes a `real`."""
        if notes is not None and notes.thread == threading.get_ident():
            notes.found[self] = None
            return
        if self._pack is None:
            self._pack = struct.Struct("".join("d" if type(value) is float else "q" for value in args)).pack
        packed = array("q", self._pack(*args))
        launch(crew.shared, self._address or self.compile(), packed.buffer_info()[0], jobs)
        if recorder and (recording := recorder.recording) is not None:
            assert self._address is not None
            recording.add(self._address, packed, jobs)


class Question(Kernel):
    """A kernel that Python asks for a number: it reads its arguments, and writes the answer behind the last of them.

    noted  what is taken for the answer where kernels are only noted
    """

    def __init__(self, body: Callable[..., None], noted: int):
        super().__init__(body)
        self.noted = noted

    def ask(self, *args: int) -> int:
        """Run it, on this thread."""
        if notes is not None and notes.thread == threading.get_ident():
            notes.found[self] = None
            return self.noted
        packed = array("q", (*args, 0))
        launch(crew.shared, self._address or self.compile(), packed.buffer_info()[0], 1)
        if recorder and (recording := recorder.recording) is not None:
            assert self._address is not None
            recording.ask(self._address, packed)
        return packed[-1]


def question(noted: int) -> Callable[[Callable[..., None]], Question]:
    """Compile a kernel that Python asks for a number; `noted` is taken for it where kernels are only noted."""
    return partial(Question, noted=noted)


def found_wrong(address: int) -> int:
    """What a kernel left in an int64 that is 0 unless it was given something wrong."""
    if recorder and (recording := recorder.recording) is not None and not recording.looks(address):
        return 0
    return ctypes.c_int64.from_address(address).value


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


@jit
def share(count, job, jobs):
    """The part of range(count) that falls to this job."""
    return range(job * count // jobs, (job + 1) * count // jobs)


def _view(dtype: types.Type) -> Callable[..., Any]:
    """Make the function that gives `n` elements of a type at an address as an array."""
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
halves = _view(types.uint16)  # patterns of bf16 or f16
octets = _view(types.uint8)
doubles = _view(types.float64)


class Scratch(threading.local):
    """A thread's scratch memory, aligned to cache lines; `view` is for Python to write to."""

    nbytes = address = 0
    view = memoryview(bytearray())

    def grow(self, nbytes: int) -> None:
        """Have at least so much, and some to spare."""
        self.nbytes = nbytes + nbytes // 4
        buffer = torch.empty(self.nbytes + LINE, dtype=torch.uint8)
        ahead = -buffer.data_ptr() % LINE
        self.address, self.view = buffer.data_ptr() + ahead, buffer.numpy().data[ahead:]


scratch = Scratch()


def workspace(nbytes: int) -> int:
    """Address of this thread's scratch memory, at least `nbytes` of it, aligned to cache lines; valid until the next call.

    Kernels take it as an argument: an array made inside jitted code is freed after its last use by name, which an address
    does not count as.
    """
    if recorder and (recording := recorder.recording) is not None:
        return recording.workspace(nbytes)
    if nbytes > scratch.nbytes:
        scratch.grow(nbytes)
    return scratch.address


def as_float(x: Tensor) -> Tensor:
    """float32 as it is, anything narrower widened: kernels here compute on float32."""
    return x if x.dtype is torch.float32 else x.float()


def like(out: Tensor, x: Tensor) -> Tensor:
    """Give a float32 result the dtype of `x`."""
    return out if out.dtype is x.dtype else out.to(x.dtype)
