"""Kinds of arguments: what the signature of an op, or a class that ops take, says of them is so before anything looks at them.

A call is told from others by the types of its arguments, and of what is in its lists. Types that fitted once are kept, so that
all further calls cost a look into a set.
"""

import inspect
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from auraflux.errors import InputError

WORDS = {Tensor: "a tensor", float: "a number", int: "a whole number", bool: "True or False", NoneType: "None"}
SHOWN = 80  # characters of a value in an error

Key = tuple[Any, ...]


class Kinds:
    """What the arguments of one function may be."""

    def __init__(self, function: Callable[..., Any]):
        self.name = function.__name__
        self._function, self._signature = function, inspect.signature(function)
        self._hints: dict[str, Any] | None = None
        annotations = [str(parameter.annotation) for parameter in self._signature.parameters.values()]
        # of which the types of what is in them count too
        self.lists = [at for at, each in enumerate(annotations) if "Sequence" in each or "tuple[" in each]

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
        """What calls of the same kinds have in common, where there are lists or arguments by name."""
        found: Key = tuple(map(type, args))
        for at in self.lists:
            if at < len(args) and (found[at] is tuple or found[at] is list):
                found += tuple(map(type, args[at]))
        for name, value in kwargs.items():
            kind = type(value)
            found += (name, kind) if kind is not tuple and kind is not list else (name, kind, *map(type, value))
        return found

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse arguments that are too many, too few, or of another kind than the signature says."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as err:
            names = ", ".join(self._signature.parameters)
            raise InputError(f"{self.name}: {err}. Its arguments are: {names}.") from err
        if self._hints is None:
            self._hints = get_type_hints(self._function)
        for name, value in bound.arguments.items():
            hint = self._hints.get(name, Any)
            if not _fits(value, hint):
                raise InputError(f"{self.name}: '{name}' is {_shown(value)}; {_words(hint)} is needed.")


_fitting: set[Key] = set()


def check_fields(made: Any) -> None:
    """Refuse an instance of a dataclass whose fields are of other kinds than it says; for its `__post_init__`."""
    found = vars(made)
    key: Key = (type(made), *map(type, found.values()))
    for value in found.values():
        if type(value) is tuple:
            key += tuple(map(type, value))
    if key not in _fitting:
        hints = get_type_hints(type(made))
        for name, value in found.items():
            if not _fits(value, hints[name]):
                raise InputError(f"{type(made).__name__}: '{name}' is {_shown(value)}; {_words(hints[name])} is needed.")
        _fitting.add(key)


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if origin is tuple and get_args(hint)[-1] is not ...:
        wanted = get_args(hint)
        return isinstance(value, tuple | list) and len(value) == len(wanted) and all(map(_fits, value, wanted))
    if origin in (tuple, Sequence):
        return isinstance(value, tuple | list) and all(_fits(each, get_args(hint)[0]) for each in value)
    if hint is Any:
        return True
    if hint in (int, float):
        # True is an int too
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_words(each) for each in inner)
    if origin is not None:
        count = "" if origin is Sequence or ... in inner else f" of {len(inner)}"
        return f"a sequence{count}, each {_words(inner[0])},"
    return WORDS.get(hint) or str(getattr(hint, "__name__", hint))


def _shown(value: Any) -> str:
    if isinstance(value, int | float | str | bool | NoneType):
        line = "".join(each if each.isprintable() else "?" for each in repr(value)[:SHOWN])
        return line if len(line) < SHOWN else f"{line}..."
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"
