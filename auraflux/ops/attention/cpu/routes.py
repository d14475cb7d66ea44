"""The kernels that attend on a CPU: the first way below that does not refuse.

A sequence with one new token reads its keys straight from the cache (`decode`); one with more gathers them into blocks,
which all its queries then share (`prefill`), with the same sums. What the tokens of a call belong to is known only to
the kernels: where there may be both kinds of sequences, both kernels are launched, each for its own. Latents go through panels
of queries (`mla_panels`), however many there are.

For the two halves of `kv_b_proj` a table of their own: rows of codes, or of a dense weight.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.ops.attention.cpu import mla_products
from auraflux.ops.attention.cpu.decode import decode_kernel, decode_scratch
from auraflux.ops.attention.cpu.dtypes import LANES
from auraflux.ops.attention.cpu.mla_panels import ROWS, attend_panels, panel_scratch
from auraflux.ops.attention.cpu.mla_products import HeadProducts, misplaced
from auraflux.ops.attention.cpu.prefill import attend_rows, prefill_scratch
from auraflux.ops.routes import Route, Routes
from auraflux.ops.simd.jit import Kernel
from auraflux.quant import QTensor

MANY_HEADS = 32  # that share a key repay gathering it


class Attend(NamedTuple):
    """Arguments that decide the route.

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
    """A kernel for the sequences with a range of new tokens; it processes `rows` queries of a key head at a time."""

    kernel: Kernel
    rows: int
    fewest: int
    most: int
    scratch: int


def panels(tokens: int, widths: tuple[int, int], joined: bool) -> Launch:
    """Return the launch for latents, gathered into panels; `joined`: RoPE keys are the other part of the same vector."""
    return Launch(attend_panels, ROWS, 1, tokens, panel_scratch(*widths, int(joined)))


def _many(call: Attend, fewest: int) -> Launch:
    return Launch(attend_rows, ROWS, fewest, call.tokens, prefill_scratch(*call.widths))


def _single(call: Attend) -> Launch:
    return Launch(decode_kernel(call.cache), call.group, 1, 1, decode_scratch(call.group, *call.widths))


def _refuses_nothing_seen(call: Attend) -> str | None:
    return None if call.window == 0 else "there are keys to be seen"


def _refuses_both(call: Attend) -> str | None:
    """Return why a sequence's single new token does not read keys from the cache, or None."""
    if min(call.widths) < LANES:
        return f"keys of {call.widths[0]} and values of {call.widths[1]}; it is for {LANES} and more"
    if call.widths[0] % 4:
        return f"keys of {call.widths[0]}; it is for multiples of 4"
    return None if call.group < MANY_HEADS else f"{call.group} heads share a key; it is for fewer than {MANY_HEADS}"


def _refuses_decode(call: Attend) -> str | None:
    return f"{call.tokens} new tokens; it is for one" if call.tokens > 1 else _refuses_both(call)


def _never(call: Attend) -> None:
    return None


def _refuses_codes(call: HeadProducts) -> str | None:
    if not isinstance(call.weight, QTensor):
        return "the weight is dense"
    return misplaced(call.weight)


def _refuses_dense(call: HeadProducts) -> str | None:
    return misplaced(call.weight) if isinstance(call.weight, QTensor) else None


ATTENTION: Routes[Attend, list[Launch]] = Routes(
    Route("no key is seen", _refuses_nothing_seen, lambda call: []),
    Route("decode", _refuses_decode, lambda call: [_single(call)]),
    Route("decode and rows", _refuses_both, lambda call: [_single(call), _many(call, 2)]),
    Route("rows", _never, lambda call: [_many(call, 1)]),
)
HEAD_PRODUCTS: Routes[HeadProducts, Tensor] = Routes(
    Route("codes", _refuses_codes, mla_products.multiply_codes),
    Route("dense rows", _refuses_dense, mla_products.multiply_dense),
)
ROUTES: dict[str, Routes[Any, Any]] = {
    "attention": ATTENTION,
    "attention_partials": ATTENTION,
    "latent_query": HEAD_PRODUCTS,
    "latent_output": HEAD_PRODUCTS,
}
