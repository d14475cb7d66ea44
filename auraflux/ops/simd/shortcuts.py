"""What Numba finds out again and again while it compiles a kernel, found out once.

For every `a + b` it goes through all ways to add, those of arrays and strings among them, until one takes the types; again
when it writes the code. After every pass it works out how long each variable lives, which only the last pass reads. To learn
the size of a type it has LLVM read a module. Here answers are kept, and what nobody reads is left out: the code is the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite.ir.types import Type
from numba.core import ir, transforms, types
from numba.core.postproc import PostProcessor, VariableLifetime
from numba.core.targetconfig import ConfigStack

_Function: Any = types.Function
_ask = _Function.get_call_type
_known: dict[Any, tuple[Any, Any]] = {}  # the signature a call was found to have, and what implements it


def _flags() -> Any:
    """How functions that are compiled on the way are to be compiled."""
    top = ConfigStack.top_or_none()
    return None if top is None else tuple((name, str(value)) for name, value in top._values.items())


def _resolve(function: Any, context: Any, args: Any, kws: Any) -> Any:
    """Which implementation serves a call."""
    key = function, tuple(args), tuple(kws.items()), _flags()
    if (found := _known.get(key)) is not None:
        # functions of other flags may have asked since then
        function._impl_keys[found[0].args] = found[1]
        return found[0]
    signature = _ask(function, context, args, kws)
    if signature is not None and signature.return_type.is_precise():
        _known[key] = signature, function._impl_keys[signature.args]
    return signature


_process = PostProcessor.run


def _process_ir(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """Tidy up between passes; how long variables live is asked for only by the last one, and by generators."""
    if emit_dels or self.func_ir.is_generator:
        _process(self, emit_dels, extend_lifetimes)
        return
    self.func_ir.blocks = transforms.canonicalize_cfg(self.func_ir.blocks)
    self.func_ir.variable_lifetime = VariableLifetime(self.func_ir.blocks)
    self.func_ir.generator_info = None


def _variables(self: Any, value: Any) -> list[Any]:
    """The variables in a value, an instruction or a collection of them."""
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


_measure = Type.get_abi_size
_sizes: dict[str, int] = {}


def _size(self: Any, target_data: Any, context: Any = None) -> int:
    """Bytes of a type; there is one target."""
    if context is not None:
        return _measure(self, target_data, context)
    name = str(self)
    if name not in _sizes:
        _sizes[name] = _measure(self, target_data)
    return _sizes[name]


_SHORT: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (_Function, "get_call_type", _resolve),
    (PostProcessor, "run", _process_ir),
    (ir.Inst, "_rec_list_vars", _variables),
    (Type, "get_abi_size", _size),
)


@contextmanager
def shortcuts() -> Iterator[None]:
    """Inside, Numba takes them; it compiles one function at a time, so nobody else asks meanwhile."""
    before = [getattr(place, name) for place, name, _ in _SHORT]
    try:
        for place, name, short in _SHORT:
            setattr(place, name, short)
        yield
    finally:
        for (place, name, _), long in zip(_SHORT, before, strict=True):
            setattr(place, name, long)
