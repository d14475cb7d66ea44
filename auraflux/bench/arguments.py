"""Copies of an op's arguments, rotated through while timing, so that weights come from memory and not from the cache."""

import copy
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from auraflux.ops._cases import Args, Case, tensors

ROTATE_FROM_NBYTES = 1 << 20  # smaller arguments stay in cache in real use too
MAX_ROTATION_NBYTES = 2 << 30
MAX_COPIES = 64


def moved(value: Any, device: str) -> Any:
    """Move arguments to another device."""
    return _each_tensor(value, lambda tensor: tensor.to(device))


def cloned(value: Any) -> Any:
    """Copy arguments to other memory; addresses that an object has cached are not copied."""
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
    """Sum the bytes of all tensors inside, each storage once."""
    found = {tensor.data_ptr(): tensor.nbytes for _, tensor in tensors(value)}
    return sum(found.values())


def bytes_moved(case: Case, args: Args, result: Any) -> int:
    """Return the bytes that a call must move: those that the case states, or every argument and result once."""
    return case.nbytes(args) if case.nbytes is not None else storage_nbytes({"args": args, "result": result})


def copies_to_rotate(nbytes: int, cache_nbytes: int, free_nbytes: int) -> int:
    """Return the number of copies that together exceed the cache four times, within free memory."""
    if nbytes < ROTATE_FROM_NBYTES:
        return 1
    most = min(MAX_ROTATION_NBYTES, free_nbytes // 4) // nbytes
    return max(1, min(math.ceil(4 * cache_nbytes / nbytes), most, MAX_COPIES))


class Rotation:
    """Equal arguments at several addresses, used round-robin.

    Calls may change them (state, caches). `restore` resets them, so that a state that decays in every call does not become
    subnormal, which would be slower.
    """

    def __init__(self, args: Args, copies: int):
        self._first = copy.deepcopy(args)
        self.copies = [copy.deepcopy(args) for _ in range(copies)]
        self._changed: list[str] = []

    def fresh(self) -> Args:
        """Return one more copy."""
        return copy.deepcopy(self._first)

    def note_changes(self) -> None:
        """Find the tensors that a call on the first copy has changed."""
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
