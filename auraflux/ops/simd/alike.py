"""Which calls of an op are alike: arguments of the same types, dtypes, shapes and strides, and equal numbers.

They differ in addresses, which are told beside. Of an argument that holds tensors, as a weight or pages, both are found once.
"""

from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import count
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

PLAIN = {NoneType, bool, int, float, str, torch.dtype}
NAME = "auraflux.ops.simd.alike"  # under which an argument keeps what is known of it

Key = tuple[Any, ...]


class Unlike(Exception):
    """A call that no plan can be made for."""


class Known(NamedTuple):
    """What is known of an argument that holds tensors.

    owner      its id: a copy has what is known of the first
    structure  a number for all that are like it but for addresses
    addresses  of its tensors; extents  their bytes
    """

    owner: int
    structure: int
    addresses: tuple[int, ...]
    extents: tuple[int, ...]


MOST_STRUCTURES = 4096  # that are kept
_structures: dict[Key, int] = {}
_numbers = count()


def describe(values: Any, key: list[Any], addresses: list[int]) -> None:
    """Add to a key what calls must have in common, and to a list the addresses in which they differ."""
    for value in values:
        kind = type(value)
        if kind is Tensor:
            if not value.is_cpu:
                raise Unlike
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
                known = value.__dict__[NAME]
                if known.owner != id(value):
                    known = _learn(value)
            except (KeyError, AttributeError):
                known = _learn(value)
            key.append(known.structure)
            addresses += known.addresses


def _learn(value: Any) -> Known:
    """Look at an argument that holds others, once."""
    key: list[Any] = [type(value)]
    addresses: list[int] = []
    sizes: list[int] = []
    if isinstance(value, Enum):
        key.append(value.name)
    elif is_dataclass(value):
        held = [getattr(value, field.name) for field in fields(value)]
        describe(held, key, addresses)
        sizes = extents(held)
    else:
        raise Unlike
    # some of its parts may have a tensor in common
    each = dict(zip(addresses, sizes, strict=True))
    key += [addresses.index(address) for address in addresses]
    known = value.__dict__[NAME] = Known(id(value), _number(tuple(key)), tuple(each), tuple(each.values()))
    return known


def _number(structure: Key) -> int:
    """A number for all arguments of a structure. One that was forgotten gets another: older arguments keep theirs."""
    if len(_structures) >= MOST_STRUCTURES and structure not in _structures:
        _structures.clear()
    return _structures.setdefault(structure, next(_numbers))


def extents(values: Any) -> list[int]:
    """Bytes from each address that `describe` gives to the end of what is there."""
    found: list[int] = []
    for value in values:
        if type(value) is Tensor:
            last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
            found.append((last + 1) * value.element_size() if value.numel() else 0)
        elif type(value) in (tuple, list):
            found += extents(value)
        elif type(value) not in PLAIN:
            found += value.__dict__[NAME].extents
    return found


def holders(values: Any) -> list[Any]:
    """Arguments that hold tensors."""
    found: list[Any] = []
    for value in values:
        if type(value) in (tuple, list):
            found += holders(value)
        elif type(value) is not Tensor and type(value) not in PLAIN and value.__dict__[NAME].addresses:
            found.append(value)
    return found
