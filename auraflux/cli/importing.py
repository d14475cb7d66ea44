"""Importing torch and numba, which have half a million objects."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Inside, garbage is not looked for: that is a fifth of the time. What is there in the end is never looked through."""
    if "torch" in sys.modules or not gc.isenabled():
        # what is there may be more than modules
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
