"""Numba compiler pipelines: a kernel and all functions it calls become one LLVM module that is optimised once.

By default Numba optimises, compiles and wraps every function separately, then links its code into each caller and optimises it
again, which dominates the compile time of a kernel made of eighty functions. Here an `InlinedFunction` stays unoptimised IR
until a kernel links it.
"""

import itertools
import os
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import binding as llvm
from numba.core import compiler, typed_passes, types, untyped_passes
from numba.core.bytecode import FunctionIdentity
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import CPUDispatcher

from auraflux.ops.simd.compile.numba_shortcuts import shortcuts

# passes for constructs that kernels do not use: closures, `with`, array expressions
UNUSED = {untyped_passes.InlineClosureLikes, untyped_passes.WithLifting, typed_passes.NopythonRewrites}


def _number_functions() -> None:
    """Number this process's functions from a random number on.

    Numba counts from 1, and the number is all that tells variants of a function apart. Machine code of two processes could
    then define a name twice, and LLVM may resolve both to the first.
    """
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(48))


_number_functions()
os.register_at_fork(after_in_child=_number_functions)


class _UnoptimizedLibrary(JITCodeLibrary):
    """Unoptimised IR of a function, for kernels to link."""

    def add_llvm_module(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout
        self._final_module.link_in(module)

    def finalize(self) -> None:
        # several libraries may define the same function; inlined copies are dropped
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == llvm.Linkage.external:
                function.linkage = "linkonce_odr"
        self._shared_module = self._final_module
        self._finalized = True


class _KernelLibrary(JITCodeLibrary):
    """IR of a kernel and of all functions it calls."""

    def add_llvm_module(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout
        self._final_module.link_in(module)

    def finalize(self) -> None:
        self._linking_libraries = _with_linked(self._linking_libraries)
        super().finalize()

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


def _with_linked(libraries: list[Any]) -> list[Any]:
    """Return the libraries and, recursively, those they link, without repeats."""
    found: dict[Any, None] = {}
    waiting = list(libraries)
    while waiting:
        library = waiting.pop()
        if library not in found:
            found[library] = None
            if isinstance(library, _UnoptimizedLibrary):
                waiting += library._linking_libraries
    return list(found)


class _Compiler(compiler.CompilerBase):
    library: type[JITCodeLibrary]

    def compile_extra(self, func: Any) -> Any:
        with shortcuts():
            return super().compile_extra(func)

    def define_pipelines(self) -> list[Any]:
        state = self.state
        state.library = self.library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        pipeline = compiler.DefaultPassBuilder.define_nopython_pipeline(state)
        pipeline.passes = [each for each in pipeline.passes if each[0] not in UNUSED]
        return [pipeline]


class InlinedFunctionCompiler(_Compiler):
    """Compile a function to unoptimised IR."""

    library = _UnoptimizedLibrary

    def define_pipelines(self) -> list[Any]:
        flags = self.state.flags
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        return super().define_pipelines()


class KernelCompiler(_Compiler):
    """Compile a kernel with all functions it calls to machine code."""

    library = _KernelLibrary


class InlinedFunction(CPUDispatcher):
    """A function callable from kernels; called from Python it runs as Python."""

    def __call__(self, *args: Any) -> Any:
        return self.py_func(*args)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        # one overload for all numbers: constants are typed as their general type
        return super().get_call_template([types.unliteral(each) for each in args], kws)

    def _reduce_states(self) -> dict[str, Any]:
        # used only for the cache key of kernels that call it: Numba's own differs between processes. The sources are part of
        # the cache folder's name
        cells = tuple(cell.cell_contents for cell in self.py_func.__closure__ or ())
        return {"name": f"{self.py_func.__module__}.{self.py_func.__qualname__}", "cells": cells}

    @classmethod
    def _rebuild(cls, name: str, cells: tuple[Any, ...]) -> Any:
        raise TypeError(f"{name} is a function of compiled kernels and cannot be loaded")

    def add_overload(self, result: Any) -> None:
        # there is no code to run; the object only identifies the overload
        made = result._replace(entry_point=object())
        self.targetctx.insert_user_function(made.entry_point, made.fndesc, [made.library])
        self.overloads[tuple(made.signature.args)] = made


# contraction and reassociation let loops vectorise; NaN and infinity stay defined
FAST = {"contract", "reassoc", "nsz"}
OPTIONS: dict[str, Any] = {"error_model": "numpy"}


def jit_with(*flags: str) -> Callable[..., Any]:
    """Make a `jit` with other fast-math flags, at least one: without any, Numba uses those of the first caller."""
    return partial(
        InlinedFunction,
        targetoptions={**OPTIONS, "nopython": True, "fastmath": {*flags}},
        pipeline_class=InlinedFunctionCompiler,
    )
