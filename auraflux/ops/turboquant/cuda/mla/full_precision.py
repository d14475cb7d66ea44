"""Full-precision latents (sink and recent tokens) of MLA on CUDA: their pages, and storing them.

Latents are stored rotated, in the space of the codes; their RoPE keys are always uncompressed and stored with the codes.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.pages import place_of
from auraflux.ops.turboquant.pages import LatentCodes


class FullPrecisionLatents(NamedTuple):
    """Pages of latents of sink tokens and of the recent window; an absent one aliases the other."""

    sink_rows: Tensor
    sink_table: Tensor
    sink_width: int
    sink_pool: int
    recent_rows: Tensor
    recent_table: Tensor
    recent_width: int
    recent_pool: int


class FullPrecisionRows(NamedTuple):
    """Uncompressed rows of MLA pages: RoPE keys, and full-precision latents, if any."""

    rope: Tensor
    latents: FullPrecisionLatents | None


class FullPrecisionLatentShape(NamedTuple):
    """Full-precision sink tokens, recent window, and tokens per page of each; no sink and no window without any."""

    sink_tokens: int
    recent_window: int
    sink_page: int
    page: int


NO_FULL_PRECISION = FullPrecisionLatentShape(0, 0, 1, 1)


def full_precision_latents(pages: LatentCodes) -> FullPrecisionLatents | None:
    stored = pages.full_precision
    if stored is None or (one := stored.head or stored.recent) is None:
        return None
    head, recent = stored.head or one, stored.recent or one
    heads = head.rows, head.table, head.table.shape[1], head.pool[0]
    return FullPrecisionLatents(*heads, recent.rows, recent.table, recent.table.shape[1], recent.pool[0])


def full_precision_latent_shape(pages: LatentCodes) -> FullPrecisionLatentShape:
    stored = pages.full_precision
    if stored is None:
        return NO_FULL_PRECISION
    head, recent = (1 if each is None else each.pool[1] for each in (stored.head, stored.recent))
    return FullPrecisionLatentShape(stored.sink_tokens, stored.recent_window, head, recent)


@triton.jit
def store_latent(x, full, sequence, position, D: tl.constexpr, P: tl.constexpr, FULL: tl.constexpr):
    """Store a rotated latent [1, P] in the recent window, and among the sink tokens if it is one."""
    d = tl.arange(0, P)[None, :]
    if FULL.recent_window:
        page, slot = place_of(full.recent_table, sequence, position, full.recent_width, full.recent_pool, FULL.page)
        at = full.recent_rows + (page * FULL.page + slot) * D + d
        tl.store(at, x.to(full.recent_rows.dtype.element_ty), mask=(d < D) & (page >= 0))
    if FULL.sink_tokens:  # noqa: SIM102
        if position < FULL.sink_tokens:
            page, slot = place_of(full.sink_table, sequence, position, full.sink_width, full.sink_pool, FULL.sink_page)
            at = full.sink_rows + (page * FULL.sink_page + slot) * D + d
            tl.store(at, x.to(full.sink_rows.dtype.element_ty), mask=(d < D) & (page >= 0))


@triton.jit
def place_full_precision(full, sequence, position, wanted, FIRST: tl.constexpr, FULL: tl.constexpr):
    """Locate positions among sink tokens or, unless FIRST, recent tokens; return base, rows, and mask."""
    if FIRST:
        page, slot = place_of(full.sink_table, sequence, position, full.sink_width, full.sink_pool, FULL.sink_page)
        row, base = page * FULL.sink_page + slot, full.sink_rows
    else:
        page, slot = place_of(full.recent_table, sequence, position, full.recent_width, full.recent_pool, FULL.page)
        row, base = page * FULL.page + slot, full.recent_rows
    return base, row, wanted & (page >= 0)
