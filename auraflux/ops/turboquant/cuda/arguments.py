"""What kernels on codes take together: the codes of a pool with what they stand for, and the shape of its pages."""

from typing import Any, NamedTuple

from torch import Tensor

from auraflux.ops.hopper.sizes import power_of_two
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.pages import CodePages


class Coded(NamedTuple):
    """The coded vectors of a pool.

    codes   packed words
    norms   float32, one for each vector
    levels  what codes stand for: a codebook to read them, `Levels` or `Places` to find them
    """

    codes: Tensor
    norms: Tensor
    levels: Any = None


class CodeShape(NamedTuple):
    """What kernels are compiled for: pages of `page` tokens, with heads of some width in codes of some bits.

    pairs      values lie in pairs of tokens
    sequences  the power of two that holds them
    """

    heads: int
    width: int
    key_bits: int
    value_bits: int
    page: int
    pairs: bool
    sequences: int


def shape_of(pages: CodePages) -> CodeShape:
    """Give the shape of pages of keys and values."""
    bits, pairs = (pages.key_bits, pages.value_bits), pages.arrangement is Arrangement.PAIRS
    return CodeShape(pages.heads, pages.width, *bits, pages.pool[1], pairs, power_of_two(pages.table.shape[0]))


def keys_of(pages: CodePages, levels: Any = None) -> Coded:
    return Coded(pages.key_codes, pages.key_norms, levels)


def values_of(pages: CodePages, levels: Any = None) -> Coded:
    return Coded(pages.value_codes, pages.value_norms, levels)
