"""Memoised steps of Numba's compiler, which repeats much work for every kernel; the generated code is the same.

For every `a + b` Numba tries all overloads of addition, those of arrays and strings included, once in type inference and again
in lowering: the resolved overload is cached. After every pass it computes variable lifetimes, which only the last pass reads:
the others skip it. To learn the size of a type it has LLVM parse a module: the size is cached.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite.ir.types import Type
from numba.core import ir, transforms, types
from numba.core.postproc import PostProcessor, VariableLifetime
from numba.core.targetconfig import ConfigStack

_Function: Any = types.Function
_resolve_uncached = _Function.get_call_type
_known: dict[Any, tuple[Any, Any]] = {}  # signature and implementation of each resolved call


def _flags() -> Any:
    """Return the compiler flags in force."""
    top = ConfigStack.top_or_none()
    return None if top is None else tuple((name, str(value)) for name, value in top._values.items())


def _resolve(function: Any, context: Any, args: Any, kws: Any) -> Any:
    """Resolve the overload of a call, from the cache if possible."""
    key = function, tuple(args), tuple(kws.items()), _flags()
    if (found := _known.get(key)) is not None:
        # a function with other flags may have replaced the entry
        function._impl_keys[found[0].args] = found[1]
        return found[0]
    signature = _resolve_uncached(function, context, args, kws)
    if signature is not None and signature.return_type.is_precise():
        _known[key] = signature, function._impl_keys[signature.args]
    return signature


_run_all = PostProcessor.run


def _process_ir(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """Canonicalise the IR between passes; only the last pass and generators need variable lifetimes."""
    if emit_dels or self.func_ir.is_generator:
        _run_all(self, emit_dels, extend_lifetimes)
        return
    self.func_ir.blocks = transforms.canonicalize_cfg(self.func_ir.blocks)
    self.func_ir.variable_lifetime = VariableLifetime(self.func_ir.blocks)
    self.func_ir.generator_info = None


def _variables(self: Any, value: Any) -> list[Any]:
    """Return the variables in a value, an instruction or a collection of them."""
    found: list[Any] = []
    _find(value, found)
    return found


def _find(value: Any, found: list[Any]) -> None:
    kind = type(value)
    if kind is ir.Var:
        found.append(value)
    elif kind is dict:
        for each in value.values():
            _find(each, found)
    elif kind is list or kind is tuple:
        for each in value:
            _find(each, found)
    elif kind is not ir.Loc and kind is not str and isinstance(value, ir.Inst):
        found.extend(value.list_vars())


_uncached_size = Type.get_abi_size
_sizes: dict[str, int] = {}


def _size(self: Any, target_data: Any, context: Any = None) -> int:
    """Return the size of a type in bytes; there is one target."""
    if context is not None:
        return _uncached_size(self, target_data, context)
    name = str(self)
    if name not in _sizes:
        _sizes[name] = _uncached_size(self, target_data)
    return _sizes[name]


_REPLACEMENTS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (_Function, "get_call_type", _resolve),
    (PostProcessor, "run", _process_ir),
    (ir.Inst, "_rec_list_vars", _variables),
    (Type, "get_abi_size", _size),
)


@contextmanager
def shortcuts() -> Iterator[None]:
    """Install the memoised steps inside the block; Numba compiles one function at a time."""
    before = [getattr(place, name) for place, name, _ in _REPLACEMENTS]
    try:
        for place, name, short in _REPLACEMENTS:
            setattr(place, name, short)
        yield
    finally:
        for (place, name, _), long in zip(_REPLACEMENTS, before, strict=True):
            setattr(place, name, long)
