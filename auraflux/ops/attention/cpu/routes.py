"""Which kernels attend on a CPU: the first way below that does not refuse.

A sequence with one new token reads its keys straight from the cache (`decode.py`); one with more gathers them into panels,
which all its queries then meet (`prefill.py`). What the tokens of a call belong to is known only to the kernels: where there
may be both kinds of sequences, both kernels are launched, each for its own.

For the two halves of `kv_b_proj` a table of their own: few tokens read codes, more multiply unpacked rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.ops.attention.cpu import mla_products
from auraflux.ops.attention.cpu.decode import decode_kernel, decode_scratch
from auraflux.ops.attention.cpu.decode_tiles import LANES
from auraflux.ops.attention.cpu.mla_products import HeadProducts, misplaced
from auraflux.ops.attention.cpu.prefill import ROWS, attend_panels, panel_scratch
from auraflux.ops.attention.cpu.prefill_tiles import PANEL
from auraflux.ops.routes import Route, Routes
from auraflux.ops.simd.jit import Kernel
from auraflux.quant import QTensor


class Attend(NamedTuple):
    """What the choice depends on.

    tokens  new ones, of all sequences
    group   query heads that share a key
    widths  of keys and values
    cache   their dtype
    window  positions that a query sees, or None for all
    """

    tokens: int
    group: int
    widths: tuple[int, int]
    cache: torch.dtype
    window: int | None


class Launch(NamedTuple):
    """A kernel for the sequences with so many new tokens; it takes `rows` queries of a key head at a time."""

    kernel: Kernel
    rows: int
    fewest: int
    most: int
    scratch: int


def panels(tokens: int, widths: tuple[int, int], joined: bool, fewest: int = 1) -> Launch:
    """Keys gathered into panels; `joined`: keys and values are two parts of one vector."""
    return Launch(attend_panels, ROWS, fewest, tokens, panel_scratch(*widths, int(joined)))


def _single(call: Attend) -> Launch:
    return Launch(decode_kernel(call.cache), call.group, 1, 1, decode_scratch(call.group, *call.widths))


def _refuses_nothing_seen(call: Attend) -> str | None:
    return None if call.window == 0 else "there are keys to be seen"


def _refuses_both(call: Attend) -> str | None:
    """Why a sequence's single new token does not read keys from the cache."""
    if min(call.widths) < LANES:
        return f"keys of {call.widths[0]} and values of {call.widths[1]}; it is for {LANES} and more"
    return None if call.group < PANEL else f"{call.group} heads share a key; it is for fewer than {PANEL}"


def _refuses_decode(call: Attend) -> str | None:
    return f"{call.tokens} new tokens; it is for one" if call.tokens > 1 else _refuses_both(call)


def _never(call: Attend) -> None:
    return None


def _refuses_codes(call: HeadProducts) -> str | None:
    if not isinstance(call.weight, QTensor):
        return "the weight is dense"
    if call.x.shape[0] > mla_products.FEW:
        return f"{call.x.shape[0]} tokens; it is for up to {mla_products.FEW}"
    return misplaced(call.weight)


def _refuses_unpacked(call: HeadProducts) -> str | None:
    return misplaced(call.weight) if isinstance(call.weight, QTensor) else None


ATTENTION: Routes[Attend, list[Launch]] = Routes(
    Route("no key is seen", _refuses_nothing_seen, lambda call: []),
    Route("decode", _refuses_decode, lambda call: [_single(call)]),
    Route("decode and panels", _refuses_both, lambda call: [_single(call), panels(call.tokens, call.widths, False, fewest=2)]),
    Route("panels", _never, lambda call: [panels(call.tokens, call.widths, False)]),
)
HEAD_PRODUCTS: Routes[HeadProducts, Tensor] = Routes(
    Route("codes", _refuses_codes, mla_products.multiply_codes),
    Route("unpacked rows, then BLAS", _refuses_unpacked, mla_products.multiply_rows),
)
ROUTES: dict[str, Routes[Any, Any]] = {
    "attention": ATTENTION,
    "attention_partials": ATTENTION,
    "latent_query": HEAD_PRODUCTS,
    "latent_output": HEAD_PRODUCTS,
}
