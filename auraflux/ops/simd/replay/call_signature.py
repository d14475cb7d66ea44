"""The signature of an op call: types, dtypes, shapes and strides of its arguments, and the values of its numbers.

Calls of one signature differ only in addresses, which are listed separately. Signature and addresses of an argument that holds
tensors, such as a weight or pages, are computed once and stored on it.
"""

import weakref
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from itertools import count
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

PLAIN = {NoneType, bool, int, float, str, torch.dtype}
NAME = "auraflux.ops.simd.replay.call_signature"  # the attribute under which an argument stores its Contents
MAX_STRUCTURES = 4096

Signature = tuple[Any, ...]


class Uncacheable(Exception):
    """No launch plan can serve the call."""


class Contents(NamedTuple):
    """The tensors inside an argument.

    owner      the argument. A shallow copy inherits the attribute of the original, whose memory may be gone, and may then lie
               where the original lay: an id would not tell them apart
    structure  a number shared by all arguments that differ only in addresses
    addresses  of its tensors; spans  their bytes
    inside     the objects in it that hold tensors
    """

    owner: weakref.ref[Any]
    structure: int
    addresses: tuple[int, ...]
    spans: tuple[int, ...]
    inside: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        # other copies have none
        return type(None), ()


def describe(values: Iterable[Any], key: list[Any], addresses: list[int]) -> None:
    """Append the signature of some arguments to a key, and the addresses of their tensors to a list."""
    for value in values:
        kind = type(value)
        if kind is Tensor:
            if not value.is_cpu:
                raise Uncacheable
            key.append(value.dtype)
            key.append(value.shape)
            if not value.is_contiguous():
                key.append(value.stride())
            addresses.append(value.data_ptr())
        elif kind in PLAIN:
            key.append(kind)
            key.append(value)
        elif kind is tuple or kind is list:
            key += kind, len(value)
            describe(value, key, addresses)
        else:
            try:
                contents = value.__dict__[NAME]
                if contents.owner() is not value:
                    contents = _open(value)
            except (KeyError, AttributeError):
                contents = _open(value)
            key.append(contents.structure)
            addresses += contents.addresses


def _open(value: Any) -> Contents:
    """Find the tensors inside an argument and store them on it."""
    key: list[Any] = [type(value)]
    addresses: list[int] = []
    sizes: list[int] = []
    inside: list[Any] = []
    if isinstance(value, Enum):
        key.append(value.name)
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
        describe(parts, key, addresses)
        sizes, inside = spans(parts), holders(parts)
    else:
        raise Uncacheable
    # two fields may hold one tensor
    each = dict(zip(addresses, sizes, strict=True))
    key += [addresses.index(address) for address in addresses]
    sizes_at = tuple(each), tuple(each.values())
    contents = value.__dict__[NAME] = Contents(weakref.ref(value), _number(tuple(key)), *sizes_at, tuple(inside))
    return contents


_numbers = count()


@lru_cache(MAX_STRUCTURES)
def _number(structure: Signature) -> int:
    """Number a structure. One that was evicted gets a new number, so no two structures share one."""
    return next(_numbers)


def spans(values: Iterable[Any]) -> list[int]:
    """Count the bytes from each address that `describe` lists to the end of its tensor."""
    found: list[int] = []
    for value in values:
        if type(value) is Tensor:
            last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
            found.append((last + 1) * value.element_size() if value.numel() else 0)
        elif type(value) is tuple or type(value) is list:
            found += spans(value)
        elif type(value) not in PLAIN:
            found += value.__dict__[NAME].spans
    return found


def holders(values: Iterable[Any]) -> list[Any]:
    """List the arguments that hold tensors, and the objects inside them that do."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is tuple or kind is list:
            found += holders(value)
        elif kind is not Tensor and kind not in PLAIN and value.__dict__[NAME].addresses:
            found.append(value)
            found += value.__dict__[NAME].inside
    return found
