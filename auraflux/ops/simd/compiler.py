"""How Numba compiles here: a kernel and all it calls become one module, which is optimised and compiled once.

By default Numba optimises, compiles and wraps every function by itself, then links its code into each caller and optimises it
there again; of a kernel made of eighty functions that is most of the time. Here a `Part` stays as it was written until a
kernel takes it in.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import binding as llvm
from numba.core import compiler, typed_passes, types, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import CPUDispatcher

from auraflux.ops.simd.shortcuts import shortcuts

# what they rewrite does not occur in kernels: closures, `with`, expressions of whole arrays
UNUSED = {untyped_passes.InlineClosureLikes, untyped_passes.WithLifting, typed_passes.NopythonRewrites}


class _PartLibrary(JITCodeLibrary):
    """A function's code as it was written, for kernels to take in."""

    def add_llvm_module(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout
        self._final_module.link_in(module)

    def finalize(self) -> None:
        # several parts may bring the same function; where it is inlined, none stays
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == llvm.Linkage.external:
                function.linkage = "linkonce_odr"
        self._shared_module = self._final_module
        self._finalized = True


class _KernelLibrary(JITCodeLibrary):
    """A kernel's code and that of all its parts."""

    def add_llvm_module(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout
        self._final_module.link_in(module)

    def finalize(self) -> None:
        self._linking_libraries = _all_of(self._linking_libraries)
        super().finalize()

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


def _all_of(libraries: list[Any]) -> list[Any]:
    """The libraries and those of parts among them, each once."""
    found: dict[Any, None] = {}
    waiting = list(libraries)
    while waiting:
        library = waiting.pop()
        if library not in found:
            found[library] = None
            if isinstance(library, _PartLibrary):
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


class PartCompiler(_Compiler):
    """Compile as far as the code that kernels take in."""

    library = _PartLibrary

    def define_pipelines(self) -> list[Any]:
        flags = self.state.flags
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        return super().define_pipelines()


class KernelCompiler(_Compiler):
    """Compile a kernel with all its parts."""

    library = _KernelLibrary


class Part(CPUDispatcher):
    """A function that compiled code calls; called from Python it is the Python function."""

    def __call__(self, *args: Any) -> Any:
        return self.py_func(*args)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        # one version for all numbers, also where callers give constants
        return super().get_call_template([types.unliteral(each) for each in args], kws)

    def _reduce_states(self) -> dict[str, Any]:
        # only for the name a kernel that holds it is kept under; Numba's own differs between processes. Sources are in the
        # name of the cache's folder
        cells = tuple(cell.cell_contents for cell in self.py_func.__closure__ or ())
        return {"name": f"{self.py_func.__module__}.{self.py_func.__qualname__}", "cells": cells}

    @classmethod
    def _rebuild(cls, name: str, cells: tuple[Any, ...]) -> Any:
        raise TypeError(f"{name} is part of compiled code, and cannot be loaded")

    def add_overload(self, result: Any) -> None:
        # nothing to run, but callers are told apart by it
        made = result._replace(entry_point=object())
        self.targetctx.insert_user_function(made.entry_point, made.fndesc, [made.library])
        self.overloads[tuple(made.signature.args)] = made


# contraction and reassociation let loops vectorise; NaN and infinity keep their meaning
FAST = {"contract", "reassoc", "nsz"}
OPTIONS: dict[str, Any] = {"error_model": "numpy"}


def jit_with(*flags: str) -> Callable[..., Any]:
    """Make a `jit` with other fast-math flags. At least one: without any, Numba takes those of the first caller."""
    return partial(Part, targetoptions={**OPTIONS, "nopython": True, "fastmath": {*flags}}, pipeline_class=PartCompiler)
