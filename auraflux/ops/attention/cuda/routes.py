"""Attention kernels on CUDA: the first route below that does not refuse a call.

Plain Triton serves everything. With wgmma, decode reads keys once for all heads that share them, and splits the keys among
programs; prefill runs tiles of queries on the tensor cores. Latent attention is the same with all heads on one key.

Inside `invariant` every token is attended from separately, as in decode.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.attention.cuda import decode, flash_paged, mla_columns, mla_products, mla_products_codes, mla_rows, prefill
from auraflux.ops.attention.cuda.mma import latents as latents_mma
from auraflux.ops.attention.cuda.mma import prefill as prefill_mma
from auraflux.ops.attention.pages import KVPages, LatentPages
from auraflux.ops.gpu.blocks.codes import check_order
from auraflux.ops.gpu.blocks.flash import RecentKeys
from auraflux.ops.gpu.device import interpreted, not_gluon, not_wgmma
from auraflux.ops.hopper.split_kv import TILE
from auraflux.ops.linear.cuda.dequantize import dense_weight
from auraflux.ops.routes import Route, Routes
from auraflux.quant import QTensor

BF16 = torch.bfloat16
HALVES = (torch.bfloat16, torch.float16)
WIDTHS = (64, 128, 256)  # of heads
MOST_POSITIONS = 1 << 31  # of a pool over all key heads, which TMA counts in 32 bits
CODES = ((4, 64, 1, BF16), (8, 64, 1, BF16))

EMPTY = "the call is empty"
UNALIGNED = "an address is not a multiple of 16 bytes"


class Attend(NamedTuple):
    """Arguments of `attention`, and its output.

    recent  None; or a query's recent keys are in other pages of the same pool
    """

    q: Tensor
    pages: KVPages
    starts: Tensor
    scale: float
    window: int | None
    sinks: Tensor | None
    softcap: float | None
    out: Tensor
    recent: RecentKeys | None = None


class AttendLatent(NamedTuple):
    """Arguments of `latent_attention`, and its output."""

    q_latent: Tensor
    q_rope: Tensor
    pages: LatentPages
    starts: Tensor
    scale: float
    out: Tensor
    sinks: Tensor | None = None


class HeadProducts(NamedTuple):
    """Product of tokens [T, H, A] with a slice of each head's rows of a weight: `used` of `rows`, after `skip`.

    query  project into the latent space, [T, H, C]; else back from it, [T, H, used]
    """

    x: Tensor
    weight: Tensor | QTensor
    rows: int
    skip: int
    used: int
    query: bool
    out: Tensor


def _not_in_tiles(call: Attend) -> str | None:
    """Return why keys and values cannot be loaded in tiles of 64 positions."""
    q, pages = call.q, call.pages
    if not call.out.numel():
        return EMPTY
    if q.dtype is not pages.k.dtype or q.dtype not in HALVES:
        return "queries and keys do not share a 16-bit dtype"
    pool, key_heads, page, width = pages.k.shape
    if width not in WIDTHS or pages.v.shape[3] != width:
        return f"heads of {width} and {pages.v.shape[3]}; it is for 64, 128 or 256"
    if page % TILE or pool * key_heads * page >= MOST_POSITIONS:
        return f"{pool} pages of {page} are not multiples of {TILE}-token tiles, or too many"
    return UNALIGNED if (q.data_ptr() | pages.k.data_ptr() | pages.v.data_ptr()) % 16 else None


def _not_by_tma(call: Attend) -> str | None:
    return _not_in_tiles(call) or not_wgmma(call.q.device)


def _refuses_decode(call: Attend) -> str | None:
    tokens, heads, _ = call.q.shape
    sequences, key_heads = len(call.pages.table), call.pages.k.shape[1]
    if call.recent is not None:
        return "recent keys are in other pages"
    if tokens > 2 * sequences and not is_invariant():
        # with more tokens of a sequence the other kernels reuse loaded keys
        return f"{tokens} new tokens of {sequences} sequences; it is for up to two of each"
    if heads // key_heads > decode.MOST_COLUMNS:
        return f"{heads // key_heads} heads share a key; it is for up to {decode.MOST_COLUMNS}"
    return _not_by_tma(call)


def _not_prefill(call: Attend) -> str | None:
    """Return why programs of 128 rows each are not the quickest."""
    (tokens, heads, _), (sequences, table_width) = call.q.shape, call.pages.table.shape
    key_heads, page = call.pages.k.shape[1:3]
    rows = tokens * (heads // key_heads)
    if rows < prefill.ROWS * sequences:
        return f"{rows} rows of queries for {sequences} sequences; it takes {prefill.ROWS} of each at a time"
    if call.scale <= 0:
        return "the scale is not positive"
    if reason := _not_in_tiles(call):
        return reason
    programs, positions = rows // prefill.ROWS * key_heads, table_width * page
    if call.window is not None:
        positions = min(positions, call.window + tokens)
    most = prefill.most_positions(programs)
    return None if positions <= most else f"{programs} programs for {positions} positions: flash_paged splits the keys"


def _refuses_prefill(call: Attend) -> str | None:
    return _not_prefill(call) or not_wgmma(call.q.device)


def _refuses_prefill_mma(call: Attend) -> str | None:
    return _not_prefill(call) or not_gluon(call.q.device)


def _not_latents(call: AttendLatent) -> str | None:
    """Return why tokens and latents do not fit the kernels of few tokens."""
    if not call.out.numel():
        return EMPTY
    if call.sinks is not None:
        return "attention sinks"
    tensors = call.q_latent, call.q_rope, call.pages.latent, call.pages.rope
    if any(x.dtype is not BF16 for x in tensors):
        return "not all in bf16"
    if (call.q_latent.shape[2], call.q_rope.shape[2]) != (mla_rows.LATENT, mla_rows.ROPE):
        return f"latents of {call.q_latent.shape[2]} with keys of {call.q_rope.shape[2]}; it is for 512 with 64"
    if call.pages.pool[1] % TILE:
        return f"pages of {call.pages.pool[1]} are not multiples of {TILE}-token tiles"
    if any(x.data_ptr() % 16 for x in tensors):
        return UNALIGNED
    tokens, heads, _ = call.q_latent.shape
    if heads % mla_rows.HEADS and tokens > 2 * len(call.pages.table) and not is_invariant():
        # with many tokens and few heads the other kernel reuses loaded latents
        return f"{tokens} new tokens with {heads} heads"
    return None


def _refuses_mla_rows(call: AttendLatent) -> str | None:
    return _not_latents(call) or not_wgmma(call.q_latent.device)


def _refuses_mla_columns(call: AttendLatent) -> str | None:
    if call.q_latent.shape[1] > mla_columns.MOST_COLUMNS:
        return f"{call.q_latent.shape[1]} heads; it is for up to {mla_columns.MOST_COLUMNS}"
    return _refuses_mla_rows(call)


def _refuses_latents_mma(call: AttendLatent) -> str | None:
    return _not_latents(call) or not_gluon(call.q_latent.device)


def _refuses_codes(call: HeadProducts) -> str | None:
    """Return why tokens or format do not fit the kernels on codes."""
    x, weight = call.x, call.weight
    if not isinstance(weight, QTensor) or weight.biases is None or weight.format not in CODES:
        return "the weight is not affine 4- or 8-bit in groups of 64 with bf16 scales"
    if not 0 < len(x) <= mla_products_codes.MOST_TOKENS or x.dtype is not BF16:
        return f"{len(x)} tokens; it is for up to {mla_products_codes.MOST_TOKENS} in bf16"
    if (weight.packed.data_ptr() | weight.scales.data_ptr() | weight.biases.data_ptr()) % 16:
        return UNALIGNED
    width = weight.shape[1]
    if call.query:
        if call.used % 16 or not 16 <= call.used <= 256 or width // 64 not in (2, 4, 8):
            return f"{call.used} rows of {width} are not multiples of 16 rows and 2, 4 or 8 groups"
    elif x.data_ptr() % 16 or x.stride(1) % 8 or call.used % 64 or width not in (128, 256, 512):
        return f"{call.used} rows of {width} are not full tiles, or values are not aligned"
    return not_gluon(x.device)


def _refuses_bmm(call: HeadProducts) -> str | None:
    if not call.out.numel():
        return EMPTY
    if interpreted() or call.x.dtype is torch.float32:
        return "float32 stays in Triton: cuBLAS would round it"
    return "the weight has another dtype" if isinstance(call.weight, Tensor) and call.weight.dtype is not call.x.dtype else None


def _never(call: object) -> None:
    return None


def _decode(call: Attend) -> None:
    decode.attend_decode(*call[:-1])


def _prefill(call: Attend) -> None:
    prefill.attend_prefill(*call)


def _prefill_mma(call: Attend) -> None:
    prefill_mma.attend_prefill(*call)


def _flash(call: Attend) -> None:
    q, pages, starts, scale, window, sinks, softcap, out, recent = call
    flash_paged.attend(q, None, (pages.k, pages.v), pages, starts, scale, out, window, sinks, softcap, recent)


def _mla_columns(call: AttendLatent) -> None:
    mla_columns.attend_columns(*call[:-1])


def _mla_rows(call: AttendLatent) -> None:
    mla_rows.attend_rows(*call[:-1])


def _latents_mma(call: AttendLatent) -> None:
    latents_mma.attend_latents(*call[:-1])


def _flash_latent(call: AttendLatent) -> None:
    q_latent, q_rope, pages, starts, scale, out, sinks = call
    flash_paged.attend(q_latent, q_rope, (pages.latent, pages.rope), pages, starts, scale, out, sinks=sinks)


def _codes(call: HeadProducts) -> None:
    assert isinstance(call.weight, QTensor)
    if call.query:
        mla_products_codes.project_queries(call.x, call.weight, call.rows, call.out)
    else:
        mla_products_codes.project_outputs(call.x, call.weight, call.skip, call.out)


def _bmm(call: HeadProducts) -> None:
    x, weight = call.x, call.weight
    if isinstance(weight, QTensor):
        check_order(weight)
        weight = dense_weight(weight, x.dtype)
    part = weight.view(x.shape[1], call.rows, -1)[:, call.skip : call.skip + call.used]
    torch.bmm(x.transpose(0, 1), part if call.query else part.transpose(1, 2), out=call.out.transpose(0, 1))


def _tiles(call: HeadProducts) -> None:
    mla_products.multiply(call.x, call.weight, call.out, call.rows, call.skip, call.used, call.query)


ATTENTION: Routes[Attend, None] = Routes(
    Route("decode", _refuses_decode, _decode, invariant=True),
    Route("prefill", _refuses_prefill, _prefill),
    Route("prefill_mma", _refuses_prefill_mma, _prefill_mma),
    Route("flash_paged", _never, _flash),
)
LATENT: Routes[AttendLatent, None] = Routes(
    Route("mla_columns", _refuses_mla_columns, _mla_columns, invariant=True),
    Route("mla_rows", _refuses_mla_rows, _mla_rows, invariant=True),
    Route("latents_mma", _refuses_latents_mma, _latents_mma),
    Route("flash_paged", _never, _flash_latent),
)
HEAD_PRODUCTS: Routes[HeadProducts, None] = Routes(
    Route("mla_products_codes", _refuses_codes, _codes),
    Route("cuBLAS for each head", _refuses_bmm, _bmm),
    Route("mla_products", _never, _tiles, invariant=True),
)
ROUTES = {
    "attention": ATTENTION,
    "latent_attention": LATENT,
    "latent_query": HEAD_PRODUCTS,
    "latent_output": HEAD_PRODUCTS,
}
