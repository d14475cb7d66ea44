"""Latents that are kept as they are beside codes on CUDA: where they lie, and storing them.

Latents are kept rotated, as codes stand for them; their rotated keys are those beside the codes.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.hopper.pages import place_of
from auraflux.ops.turboquant.pages import LatentCodes


class KeptLatents(NamedTuple):
    """Pages of the first positions' latents, and of recent ones. Where one of the two is not kept, they are the other's."""

    head: Tensor
    head_table: Tensor
    head_width: int
    head_pool: int
    rows: Tensor
    table: Tensor
    width: int
    pool: int


class Beside(NamedTuple):
    """What lies beside the codes of latents: rotated keys, and latents that are kept as they are, if any."""

    rope: Tensor
    kept: KeptLatents | None


class KeptShape(NamedTuple):
    """How many first and newest positions are kept as they are, and tokens of a page of each; all 0 where none are."""

    first: int
    newest: int
    head_page: int
    page: int


NOTHING_KEPT = KeptShape(0, 0, 1, 1)


def kept_latents(pages: LatentCodes) -> KeptLatents | None:
    plain = pages.plain
    if plain is None or (one := plain.head or plain.recent) is None:
        return None
    head, recent = plain.head or one, plain.recent or one
    heads = head.rows, head.table, head.table.shape[1], head.pool[0]
    return KeptLatents(*heads, recent.rows, recent.table, recent.table.shape[1], recent.pool[0])


def kept_shape(pages: LatentCodes) -> KeptShape:
    plain = pages.plain
    if plain is None:
        return NOTHING_KEPT
    head, recent = (1 if each is None else each.pool[1] for each in (plain.head, plain.recent))
    return KeptShape(plain.first, plain.newest, head, recent)


@triton.jit
def store_latent(x, kept, sequence, position, D: tl.constexpr, P: tl.constexpr, KEPT: tl.constexpr):
    """Keep a rotated latent [1, P] among the newest, and among the first if it is one of them."""
    d = tl.arange(0, P)[None, :]
    if KEPT.newest:
        page, slot = place_of(kept.table, sequence, position, kept.width, kept.pool, KEPT.page)
        at = kept.rows + (page * KEPT.page + slot) * D + d
        tl.store(at, x.to(kept.rows.dtype.element_ty), mask=(d < D) & (page >= 0))
    if KEPT.first:  # noqa: SIM102
        if position < KEPT.first:
            page, slot = place_of(kept.head_table, sequence, position, kept.head_width, kept.head_pool, KEPT.head_page)
            at = kept.head + (page * KEPT.head_page + slot) * D + d
            tl.store(at, x.to(kept.head.dtype.element_ty), mask=(d < D) & (page >= 0))


@triton.jit
def place_kept(kept, sequence, position, wanted, FIRST: tl.constexpr, KEPT: tl.constexpr):
    """Find the rows of positions among the first ones or, unless FIRST, the newest: base, rows, and which of them are there."""
    if FIRST:
        page, slot = place_of(kept.head_table, sequence, position, kept.head_width, kept.head_pool, KEPT.head_page)
        row, base = page * KEPT.head_page + slot, kept.head
    else:
        page, slot = place_of(kept.table, sequence, position, kept.width, kept.pool, KEPT.page)
        row, base = page * KEPT.page + slot, kept.rows
    return base, row, wanted & (page >= 0)
