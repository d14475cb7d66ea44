"""Structures that kernels take as one argument: packed codes with their levels, calibration, full-precision pages, shapes."""

from typing import Any, NamedTuple

from torch import Tensor

from auraflux.ops.gpu.sizes import power_of_two
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.calibration import Calibration
from auraflux.ops.turboquant.pages import CodePages


class CodeTensors(NamedTuple):
    """Quantized vectors of a page pool.

    codes   packed int32 words
    norms   float32, one per vector
    levels  a codebook to decode, `Levels` or `BucketTable` to encode
    """

    codes: Tensor
    norms: Tensor
    levels: Any = None


class CodeShape(NamedTuple):
    """Page shape that kernels are compiled for.

    heads, width          key heads, channels of a head
    key_bits, value_bits  quantization bits
    page                  tokens per page
    pairs                 codes of values are stored in pairs of tokens (`Arrangement.PAIRS`)
    sequences             batch size, rounded up to a power of two
    """

    heads: int
    width: int
    key_bits: int
    value_bits: int
    page: int
    pairs: bool
    sequences: int


class CalibrationTensors(NamedTuple):
    """Key calibration on the device: per-channel scale and mean, see `Calibration`."""

    scale: Tensor
    inverse: Tensor
    along: Tensor
    across: Tensor
    table: Tensor


class FullPrecisionPages(NamedTuple):
    """Full-precision pages of the sink tokens and of the recent window.

    Where one of the two is absent, its size in `FullPrecisionShape` is 0 and its tensors alias the other's.
    """

    sink_k: Tensor
    sink_v: Tensor
    sink_table: Tensor
    sink_pool: int
    recent_k: Tensor
    recent_v: Tensor
    recent_table: Tensor
    recent_width: int
    recent_pool: int


class FullPrecisionShape(NamedTuple):
    """Full-precision sink tokens, recent window, and tokens per page of the window; all 0 where everything is quantized."""

    sink_tokens: int
    recent_window: int
    page: int


def calibration_tensors(pages: CodePages) -> CalibrationTensors | None:
    found: Calibration | None = pages.calibration
    return None if found is None else CalibrationTensors(found.scale, found.inverse, found.along, found.across, found.table)


def full_precision_pages(pages: CodePages) -> FullPrecisionPages | None:
    stored = pages.full_precision
    if stored is None or (one := stored.head or stored.recent) is None:
        return None
    head, recent = stored.head or one, stored.recent or one
    recents = recent.k, recent.v, recent.table, recent.table.shape[1], recent.pool[0]
    return FullPrecisionPages(head.k, head.v, head.table, head.pool[0], *recents)


def full_precision_shape(pages: CodePages) -> FullPrecisionShape:
    stored = pages.full_precision
    if stored is None:
        return FullPrecisionShape(0, 0, 0)
    return FullPrecisionShape(stored.sink_tokens, stored.recent_window, 0 if stored.recent is None else stored.recent.pool[1])


def shape_of(pages: CodePages) -> CodeShape:
    """Return the shape of pages of keys and values."""
    bits, pairs = (pages.key_bits, pages.value_bits), pages.arrangement is Arrangement.PAIRS
    return CodeShape(pages.heads, pages.width, *bits, pages.pool[1], pairs, power_of_two(pages.table.shape[0]))


def keys_of(pages: CodePages, levels: Any = None) -> CodeTensors:
    return CodeTensors(pages.key_codes, pages.key_norms, levels)


def values_of(pages: CodePages, levels: Any = None) -> CodeTensors:
    return CodeTensors(pages.value_codes, pages.value_norms, levels)
