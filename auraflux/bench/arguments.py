"""Copies of an op's arguments: rotated through while timing, so that weights come from memory and not from the cache."""

import copy
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from auraflux.ops._cases import Args, Case, tensors

ROTATE_FROM_NBYTES = 1 << 20  # what is smaller stays in cache in real use too
LARGEST_ROTATION_NBYTES = 2 << 30
MOST_COPIES = 64


def moved(value: Any, device: str) -> Any:
    """The same arguments on another device."""
    return _each_tensor(value, lambda tensor: tensor.to(device))


def cloned(value: Any) -> Any:
    """Equal arguments elsewhere in memory. What an object has noted about its own memory is not copied."""
    return _each_tensor(value, Tensor.clone)


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _each_tensor(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_each_tensor(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _each_tensor(getattr(value, f.name), change) for f in fields(value) if f.init})
    return value


def storage_nbytes(value: Any) -> int:
    """Bytes of all tensors inside, each piece of memory once."""
    found = {tensor.data_ptr(): tensor.nbytes for _, tensor in tensors(value)}
    return sum(found.values())


def bytes_moved(case: Case, args: Args, result: Any) -> int:
    """The bytes a call must move: what the case says, or every argument and result once."""
    return case.nbytes(args) if case.nbytes is not None else storage_nbytes({"args": args, "result": result})


def copies_to_rotate(nbytes: int, cache_nbytes: int, free_nbytes: int) -> int:
    """How many copies of so many bytes hide the cache: four times its size, within the memory there is."""
    if nbytes < ROTATE_FROM_NBYTES:
        return 1
    most = min(LARGEST_ROTATION_NBYTES, free_nbytes // 4) // nbytes
    return max(1, min(math.ceil(4 * cache_nbytes / nbytes), most, MOST_COPIES))


class Rotation:
    """Equal arguments in several places of memory, given out in turn.

    Calls may change them (state, caches); `restore` puts the first values back, so that a state that is decayed over and over
    does not sink into subnormal numbers, which would be timed instead.
    """

    def __init__(self, args: Args, copies: int):
        self._first = copy.deepcopy(args)
        self.copies = [copy.deepcopy(args) for _ in range(copies)]
        self._changed: list[str] = []

    def fresh(self) -> Args:
        """One more copy, for somebody else."""
        return copy.deepcopy(self._first)

    def note_changes(self) -> None:
        """Find which tensors a call on the first copy has changed."""
        before = dict(tensors(self._first))
        self._changed = [path for path, now in tensors(self.copies[0]) if not same_bits(now, before[path])]

    def restore(self) -> None:
        if self._changed:
            before = dict(tensors(self._first))
            for args in self.copies:
                now = dict(tensors(args))
                for path in self._changed:
                    now[path].copy_(before[path])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() else torch.equal(a, b)
