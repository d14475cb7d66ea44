"""What kernels on codes take together: the codes of a pool with what they stand for, and the shape of its pages."""

from typing import Any, NamedTuple

from torch import Tensor

from auraflux.ops.hopper.sizes import power_of_two
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.calibration import Calibration
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


class Calibrated(NamedTuple):
    """What the codes of keys leave out, see `Calibration`."""

    scale: Tensor
    inverse: Tensor
    along: Tensor
    across: Tensor
    table: Tensor


class Plain(NamedTuple):
    """Rows that are kept as they are, see `PlainPages`: the first positions' pages, and those of recent ones.

    Where one of the two is not kept, `KeptShape` says so, and its tensors are the other's.
    """

    head_k: Tensor
    head_v: Tensor
    head_table: Tensor
    head_pool: int
    k: Tensor
    v: Tensor
    table: Tensor
    width: int
    pool: int


class KeptShape(NamedTuple):
    """How many first and newest positions are kept as they are, and tokens of a page of those; all 0 where none are."""

    first: int
    newest: int
    page: int


def calibrated_of(pages: CodePages) -> Calibrated | None:
    found: Calibration | None = pages.calibration
    return None if found is None else Calibrated(found.scale, found.inverse, found.along, found.across, found.table)


def plain_of(pages: CodePages) -> Plain | None:
    plain = pages.plain
    if plain is None or (one := plain.head or plain.recent) is None:
        return None
    head, recent = plain.head or one, plain.recent or one
    recents = recent.k, recent.v, recent.table, recent.table.shape[1], recent.pool[0]
    return Plain(head.k, head.v, head.table, head.pool[0], *recents)


def kept_of(pages: CodePages) -> KeptShape:
    plain = pages.plain
    if plain is None:
        return KeptShape(0, 0, 0)
    return KeptShape(plain.first, plain.newest, 0 if plain.recent is None else plain.recent.pool[1])


def shape_of(pages: CodePages) -> CodeShape:
    """Give the shape of pages of keys and values."""
    bits, pairs = (pages.key_bits, pages.value_bits), pages.arrangement is Arrangement.PAIRS
    return CodeShape(pages.heads, pages.width, *bits, pages.pool[1], pairs, power_of_two(pages.table.shape[0]))


def keys_of(pages: CodePages, levels: Any = None) -> Coded:
    return Coded(pages.key_codes, pages.key_norms, levels)


def values_of(pages: CodePages, levels: Any = None) -> Coded:
    return Coded(pages.value_codes, pages.value_norms, levels)
