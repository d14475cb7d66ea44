"""Sizes of launches, and results cached per weight."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

Subject = TypeVar("Subject")
Found = TypeVar("Found")


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up; Triton's own takes forty times as long outside of kernels."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the least power of two that is not below n, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def cached_per_weight(find: Callable[[Subject], Found]) -> Callable[[Subject], Found]:
    """Cache what a function computes from a weight, for the weight's lifetime."""
    known: WeakKeyDictionary[Any, Found] = WeakKeyDictionary()

    @wraps(find)
    def remembered(subject: Subject) -> Found:
        try:
            return known[subject]
        except KeyError:
            return known.setdefault(subject, find(subject))

    return remembered
