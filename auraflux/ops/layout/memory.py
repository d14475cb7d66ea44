"""Memory of loaded weights in large pages: the system clears them several times faster than small ones."""

import ctypes
import mmap
from functools import cache

import torch

LARGE_PAGE_NBYTES = 2 << 20
HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate uninitialised memory, in large pages where they fit."""
    made = torch.empty(*shape, dtype=dtype)
    first = -(-made.data_ptr() // LARGE_PAGE_NBYTES) * LARGE_PAGE_NBYTES
    nbytes = (made.data_ptr() + made.nbytes - first) // LARGE_PAGE_NBYTES * LARGE_PAGE_NBYTES
    if nbytes > 0 and HUGEPAGE is not None:
        # advice that the system may ignore
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), HUGEPAGE)
    return made
