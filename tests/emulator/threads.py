"""Gluon kernels with one element per thread, on numpy: one program of the grid at a time, all its threads at once.

Triton's interpreter does not run Gluon. These are stand-ins for the language (see `rebind.py`); those for memory and inline PTX
are in `ptx.py`.
"""

from typing import Any

import numpy as np

BF16 = "bfloat16"


def widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Values(np.ndarray):
    """Values of the threads; a single one stands for a scalar."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if isinstance(dtype, str):
            return narrow(self).view(Narrow)
        return self.view(dtype) if bitcast else self.astype(dtype)

    def __index__(self) -> int:
        return int(self.flat[0])


class Narrow(Values):
    """bfloat16, by its bits."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return self if isinstance(dtype, str) else widen(np.asarray(self)).astype(dtype).view(Values)


class Language:
    """`gl` for one program."""

    int8, int32, int64, float32, bfloat16 = np.int8, np.int32, np.int64, np.float32, BF16
    constexpr = pointer_type = staticmethod(lambda x: x)
    static_range = staticmethod(range)
    BlockedLayout = staticmethod(lambda *args: None)
    thread_barrier = staticmethod(lambda: None)
    arange = staticmethod(lambda start, end, layout: np.arange(start, end, dtype=np.int32).view(Values))
    minimum = staticmethod(lambda a, b: np.minimum(a, b).view(Values))
    maximum = staticmethod(lambda a, b: np.maximum(a, b).view(Values))
    exp = staticmethod(lambda x: np.exp(x).view(Values))
    fma = staticmethod(lambda a, b, c: (a * b + c).view(Values))

    def __init__(self, *ids: int):
        self.ids = ids

    def program_id(self, axis: int) -> Values:
        return np.full(1, self.ids[axis], np.int32).view(Values)

    def num_programs(self, axis: int) -> Values:
        return np.full(1, 1, np.int32).view(Values)

    @staticmethod
    def where(choice: Any, a: Any, b: Any) -> Any:
        kind = next((x.dtype for x in (a, b) if isinstance(x, np.ndarray)), np.int64)
        return np.where(choice, np.asarray(a, kind), np.asarray(b, kind)).view(Values)
