"""Sizes of launches, and what is found once for each weight."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

Subject = TypeVar("Subject")
Found = TypeVar("Found")


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own takes forty times as long outside of kernels."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n; 1 at least."""
    return 1 << max(0, n - 1).bit_length()


def once_for_each(find: Callable[[Subject], Found]) -> Callable[[Subject], Found]:
    """Remember what a function finds of weights, which do not change, for as long as they are there."""
    known: WeakKeyDictionary[Any, Found] = WeakKeyDictionary()

    @wraps(find)
    def remembered(subject: Subject) -> Found:
        try:
            return known[subject]
        except KeyError:
            return known.setdefault(subject, find(subject))

    return remembered
