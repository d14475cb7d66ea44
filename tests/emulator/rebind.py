"""A kernel's Python functions with another language in place of Gluon.

No source is parsed, and nothing in the package changes.
"""

from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction, JITFunction

from auraflux.ops.gpu.blocks.dependent_launch import launches_early

LANGUAGES = (gl, tl)
FLOATS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}  # as types name themselves


def rebound(kernel: Any, language: Any, **stand_ins: Any) -> Callable[..., Any]:
    """Return the function of a kernel, and of all that it calls, as Python.

    kernel     as imported, under @gluon.jit or @triton.jit
    language   replaces `gl` and `tl` in it
    stand_ins  replacements by name in all of these functions, in any module: for what numpy cannot do
    """
    return _rebound(kernel, language, stand_ins, {})


def _rebound(kernel: Any, language: Any, stand_ins: dict[str, Any], made: dict[int, FunctionType]) -> FunctionType:
    function = kernel.fn
    if id(function) not in made:
        names: dict[str, Any] = {"__builtins__": __builtins__}
        copy = FunctionType(function.__code__, names, function.__name__, None, function.__closure__)
        copy.__defaults__ = tuple(meaning(each, language) for each in function.__defaults__ or ()) or None
        # before the names are resolved: functions may be mutually recursive
        made[id(function)] = copy
        for name in set(_names(function.__code__)):
            if name in stand_ins:
                names[name] = stand_ins[name]
            elif name in function.__globals__:
                value = function.__globals__[name]
                called = isinstance(value, (JITFunction, InterpretedFunction))
                names[name] = _rebound(value, language, stand_ins, made) if called else meaning(value, language)
    return made[id(function)]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def meaning(value: Any, language: Any) -> Any:
    """Return a module's constant in another language: itself, or that language's type of the same name.

    Functions of constants are called unchanged, as the compiler does.
    """
    if value is launches_early:
        return lambda: True
    if any(value is each for each in LANGUAGES):
        return language
    if isinstance(value, tl.constexpr):
        return meaning(value.value, language)
    if isinstance(value, ConstexprFunction):
        return lambda *args, **named: meaning(value.fn(*args, **named), language)
    if isinstance(value, tl.dtype):
        return getattr(language, FLOATS.get(value.name, value.name))
    if type(value) in (tuple, list):
        return type(value)(meaning(each, language) for each in value)
    return value
