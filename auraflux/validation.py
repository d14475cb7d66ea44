"""Argument checks for ops: types are checked against the signature, values only where a kernel could not take them.

Calls are classified by the types of their arguments and of the items of their lists. A combination of types that passed once is
cached together with the positions that must be checked on every call: tensors, integers, and instances that hold tensors.
Reading an attribute of a tensor costs 0.1 us, so only the dtype is read; the memory layout is looked at only when a call fails.
"""

import inspect
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from auraflux.errors import InputError

WORDS = {Tensor: "a tensor", float: "a number", int: "an integer", bool: "True or False", NoneType: "None"}
SHOWN = 80  # characters of a value in an error

LISTS = (tuple, list)
LEAST, MOST = -(1 << 63), (1 << 63) - 1  # the range of integers that kernels and torch accept

Key = tuple[Any, ...]

_dtype = attrgetter("dtype")
_REAL = {each for each in vars(torch).values() if isinstance(each, torch.dtype) and not each.is_complex}


Plain = Callable[[tuple[Any, ...]], bool]
Owner = TypeVar("Owner")
Result = TypeVar("Result")


class _Cached(NamedTuple):
    """A result and the instance that it describes. Not by its id: a later instance may lie at the same address."""

    owner: weakref.ref[Any]
    result: Any

    def __reduce__(self) -> tuple[Any, ...]:
        # deep copies and unpickled instances have none
        return type(None), ()


def cached_on_instance(function: Callable[[Owner], Result]) -> Callable[[Owner], Result]:
    """Cache the result of a function of an immutable instance on that instance."""
    name = f"{function.__module__}.{function.__name__}"

    def cached(owner: Owner) -> Result:
        # a shallow copy carries the original's cached result, which describes other memory
        known = owner.__dict__.get(name)
        if known is None or known.owner() is not owner:
            known = owner.__dict__[name] = _Cached(weakref.ref(owner), function(owner))
        return known.result

    return cached


def _plain(values: tuple[Any, ...]) -> Plain:
    """Return a check for values of these types: tensors are real, instances have memory, integers fit 64 bits."""
    kinds: list[tuple[int, type]] = [(at, type(value)) for at, value in enumerate(values)]
    tensors = _picker([at for at, kind in kinds if issubclass(kind, Tensor)])
    numbers = tuple(at for at, kind in kinds if issubclass(kind, int) and kind is not bool)
    holders = tuple(at for at, kind in kinds if kind in _holders)

    def plain(values: tuple[Any, ...]) -> bool:
        for at in numbers:
            if not LEAST <= values[at] <= MOST:
                return False
        for at in holders:
            if values[at].is_meta:
                return False
        return all_real(map(dtype, tensors(values)))

    dtype, all_real = _dtype, _REAL.issuperset
    return plain


def _picker(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that picks the values at these positions."""
    first = places[0] if places else 0
    # itemgetter of a single position would return the value, not a tuple
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(first, first + len(places)))


class Kinds:
    """The argument types that one function accepts."""

    def __init__(self, function: Callable[..., Any]):
        self.name = function.__name__
        self.fitting: dict[Key, Plain] = {}
        self._function, self._signature = function, inspect.signature(function)
        self._hints: dict[str, Any] | None = None
        annotations = [str(parameter.annotation) for parameter in self._signature.parameters.values()]
        # positions of lists, whose item types count too
        self.lists = [at for at, each in enumerate(annotations) if "Sequence" in each or "tuple[" in each]

    def spread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Key]:
        """Return all values to check and the key of their types, for calls with lists or keyword arguments."""
        values = (*args, *kwargs.values())
        key: Key = (*map(type, values), *kwargs)
        for at in self.lists:
            if at < len(args) and isinstance(args[at], LISTS):
                values += tuple(args[at])
                key += (len(args[at]), *map(type, args[at]))
        for value in kwargs.values():
            if isinstance(value, LISTS):
                values += tuple(value)
                key += (len(value), *map(type, value))
        return values, key

    def refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse tensors and numbers that no kernel accepts; called when the quick check or the call failed."""
        first = None
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            for each in value if isinstance(value, LISTS) else (value,):
                _refuse(self.name, name, each)
                if isinstance(each, Tensor) or type(each) in _holders:
                    first = each if first is None else first
                    # all of them may be meta tensors, as when kernels are planned
                    if each.is_meta != first.is_meta:
                        there, here = _device(each), _device(first)
                        raise InputError(f"'{name}' is on {there}, the first argument on {here}. Move one of them.")

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse missing or surplus arguments, and arguments of another type than the signature says."""
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
                raise InputError(f"{self.name}: '{name}' is {shown(value)}; {_words(hint)} is needed.")

    def accept(self, key: Key, values: tuple[Any, ...]) -> Plain:
        """Remember the types of a checked call; return the check that every such call still needs."""
        return self.fitting.setdefault(key, _plain(values))


_fitting: dict[Key, Plain] = {}
_holders: set[type] = set()


def check_fields(made: Any) -> None:
    """Refuse a dataclass instance whose fields have other types than declared; called from its `__post_init__`.

    Sets `is_meta`: whether one of its tensors is a meta tensor. No op mixes such an instance with tensors that have memory.
    """
    fields = vars(made)
    values = tuple(fields.values())
    key: Key = (type(made), *map(type, values))
    for value in fields.values():
        if isinstance(value, LISTS):
            values += tuple(value)
            key += (len(value), *map(type, value))
    plain = _fitting.get(key)
    if plain is None:
        hints = get_type_hints(type(made))
        for name, value in fields.items():
            if not _fits(value, hints[name]):
                raise InputError(f"{type(made).__name__}: '{name}' is {shown(value)}; {_words(hints[name])} is needed.")
        _holders.add(type(made))
        plain = _fitting[key] = _plain(values)
    is_meta = False
    if not plain(values) or any(isinstance(each, Tensor) and not _has_memory(each) for each in values):
        for name, value in fields.items():
            for each in value if isinstance(value, LISTS) else (value,):
                _refuse(type(made).__name__, name, each)
                is_meta = is_meta or ((isinstance(each, Tensor) or type(each) in _holders) and each.is_meta)
    # the dataclass may be frozen
    fields["is_meta"] = is_meta


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta


def _refuse(owner: str, name: str, value: Any) -> None:
    """Refuse a sparse or complex tensor, and an integer of more than 64 bits."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            layout = str(value.layout).removeprefix("torch.")
            raise InputError(f"{owner}: '{name}' is a tensor of layout {layout}; a dense one is needed.")
        if value.dtype not in _REAL:
            dtype = str(value.dtype).removeprefix("torch.")
            raise InputError(f"{owner}: '{name}' has dtype {dtype}; real numbers are needed.")
    elif isinstance(value, int) and not LEAST <= value <= MOST:
        raise InputError(f"{owner}: '{name}' is an integer of {value.bit_length()} bits; 63 and a sign is the most.")


def _device(value: Any) -> str:
    return "meta" if value.is_meta else str(getattr(value, "device", "another device"))


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if origin is tuple and get_args(hint)[-1] is not ...:
        wanted = get_args(hint)
        return isinstance(value, LISTS) and len(value) == len(wanted) and all(map(_fits, value, wanted))
    if origin in (tuple, list, Sequence):
        return isinstance(value, LISTS) and all(_fits(each, get_args(hint)[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, get_args(hint)[1]) for each in value.values())
    if hint is Any:
        return True
    if isinstance(hint, TypeVar):
        return any(_fits(value, each) for each in hint.__constraints__)
    if hint in (int, float):
        # True is an int too
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if isinstance(hint, TypeVar):
        return " or ".join(_words(each) for each in hint.__constraints__)
    if origin in (Union, UnionType):
        return " or ".join(_words(each) for each in inner)
    if origin is dict:
        return f"a dict of {_words(inner[1])}"
    if origin is not None:
        count = "" if origin is Sequence or ... in inner else f" of {len(inner)}"
        return f"a sequence{count}, each {_words(inner[0])},"
    return WORDS.get(hint) or str(getattr(hint, "__name__", hint))


def shown(value: Any) -> str:
    """Return a value as error messages show it: shortened, on one line."""
    if isinstance(value, int) and not LEAST <= value <= MOST:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, int | float | str | bool | NoneType):
        line = "".join(each if each.isprintable() else "?" for each in repr(value)[:SHOWN])
        return line if len(line) < SHOWN else f"{line}..."
    if isinstance(value, LISTS):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"
