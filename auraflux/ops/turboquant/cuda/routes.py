"""Which kernel codes new tokens and attends to codes on CUDA: of each table the first that does not refuse.

Decoding is bound by reading codes. Hopper has kernels of its own for values that lie in pairs and for latents of 4 and 8 bits;
plain Triton reads everything else. For a prompt, keys and values are dequantized once, and `attention` reads those. New tokens
that are few are rotated by position and coded in one launch; a prompt's are rotated first, and on Hopper coded 16 at a time.

Inside `invariant` a prompt's tokens are coded and attended from as few are, each alone.
"""

from typing import Any

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_exact, is_invariant
from auraflux.ops.attention.cuda import attention, split_latent
from auraflux.ops.attention.cuda.mla_rope_append import MOST_FUSED
from auraflux.ops.hopper.device import interpreted, not_hopper
from auraflux.ops.norm.cuda import rms_norm
from auraflux.ops.rope.cuda import norm_rope, rope
from auraflux.ops.routes import Route, Routes
from auraflux.ops.turboquant.arrangement import Arrangement, fills_words
from auraflux.ops.turboquant.cuda import (
    attend_launch,
    codec_launch,
    dequantize,
    encode_prefill,
    flash_codes_launch,
    keep,
    mla_columns,
    mla_rope_append,
    mla_rows,
    rope_append,
)
from auraflux.ops.turboquant.cuda.call import Append, Attend, AttendLatent, RopeAppend, RopeAppendLatent
from auraflux.ops.turboquant.pages import CodePages

BF16, F16 = torch.bfloat16, torch.float16
ALIGNED = 16  # bytes, as wide copies need it

NOT_PAIRS = "values do not lie in pairs"
UNALIGNED = "an address is not a multiple of 16 bytes"
SOME = "there are new tokens"
GIVEN = "levels are given; it is for the usual ones"


def _never(call: Any) -> None:
    return None


def _unaligned(*tensors: Tensor) -> bool:
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return addresses % ALIGNED != 0


def _no_power(width: int) -> str | None:
    return f"width {width} is no power of two: a matrix rotates" if width & (width - 1) else None


def _given(pages: CodePages) -> bool:
    return pages.key_book is not None or pages.value_book is not None


def _refuses_no_queries(call: Attend | AttendLatent) -> str | None:
    return SOME if call.q.numel() else None


def _refuses_attend(call: Attend) -> str | None:
    pages = call.pages
    if pages.arrangement is not Arrangement.PAIRS:
        return NOT_PAIRS
    tokens = call.q.shape[0]
    if tokens > attend_launch.MOST_TOKENS * pages.lengths.shape[0] and not is_invariant():
        return f"{tokens} new tokens; it is for up to {attend_launch.MOST_TOKENS} of a sequence"
    if call.q.dtype is torch.float32 and is_exact():
        return "exact products of float32 are wanted"
    if not fills_words(pages.key_bits, pages.width) or not fills_words(pages.value_bits, pages.width):
        return f"two tokens of {pages.key_bits} or {pages.value_bits} bits, {pages.width} wide, do not fill words"
    if pages.key_bits == pages.value_bits and pages.key_book is not pages.value_book:
        return f"keys and values of {pages.key_bits} bits have other levels; one table of it serves both"
    if pages.plain is not None and pages.plain.first + pages.plain.newest > attend_launch.MOST_PLAIN:
        kept = pages.plain.first + pages.plain.newest
        return f"{kept} positions are kept as they are; it is for up to {attend_launch.MOST_PLAIN}"
    return not_hopper(call.q.device)


def _refuses_dequantized(call: Attend) -> str | None:
    pages, tokens = call.pages, call.q.shape[0]
    if pages.calibration is not None or pages.plain is not None:
        return None
    many = dequantize.MANY_INTERPRETED if interpreted() else dequantize.MANY
    if tokens < many * pages.lengths.shape[0]:
        return f"{tokens} new tokens; it is for {many} of a sequence and more"
    _, heads, page, _ = pages.key_codes.shape
    nbytes = 2 * pages.table.numel() * heads * page * pages.width * call.q.element_size()
    return f"{nbytes >> 20} MiB would be written out" if nbytes > dequantize.MOST_NBYTES else None


def _dequantized(call: Attend) -> Tensor:
    q, pages, starts, scale, window, sinks, softcap = call
    written, near = dequantize.written(pages, starts, window, len(q), q.dtype)
    return attention(q, written, starts, scale, window, sinks, softcap, near)


def _refuses_latent(call: AttendLatent) -> str | None:
    """Why kernels for few tokens over coded latents do not serve a call."""
    pages, keys, tokens = call.pages, call.pages.rope, call.q.shape[0]
    if tokens > mla_columns.MOST_TOKENS * pages.lengths.shape[0] and not is_invariant():
        return f"{tokens} new tokens; it is for up to {mla_columns.MOST_TOKENS} of a sequence"
    if pages.bits not in mla_columns.BITS:
        return f"{pages.bits} bits; it is for 4 and 8"
    _, page, width = keys.shape
    if pages.width != mla_columns.LATENT or width != mla_columns.ROPE:
        return f"latents of {pages.width} and keys of {width}; it is for {mla_columns.LATENT} and {mla_columns.ROPE}"
    if call.q.dtype not in (BF16, F16) or call.q_rope.dtype is not BF16 or keys.dtype is not BF16:
        return "queries are not in 16 bits, or what is rotated by position is not in bf16"
    if page % mla_columns.TILE:
        return f"pages of {page} are not whole tiles of {mla_columns.TILE}"
    return not_hopper(call.q.device) or (UNALIGNED if _unaligned(call.q, call.q_rope, pages.codes, keys) else None)


def _refuses_columns(call: AttendLatent) -> str | None:
    heads = call.q.shape[1]
    if heads > mla_columns.MOST_COLUMNS:
        return f"{heads} heads; it is for up to {mla_columns.MOST_COLUMNS}"
    return _refuses_latent(call)


def _refuses_no_tokens(call: Append) -> str | None:
    return SOME if call.k.numel() else None


def _refuses_encode_prefill(call: Append) -> str | None:
    pages, (tokens, heads, width) = call.pages, call.k.shape
    if tokens * heads < encode_prefill.MANY:
        return f"{tokens * heads} keys; it is for {encode_prefill.MANY} and more"
    if _given(pages):
        return GIVEN
    if pages.arrangement is not Arrangement.PAIRS:
        return NOT_PAIRS
    if call.k.dtype is not BF16 or call.v.dtype is not BF16:
        return "keys or values are not bf16"
    if width != encode_prefill.WIDTH:
        return f"width {width}; it is for {encode_prefill.WIDTH}"
    if pages.key_bits not in encode_prefill.KEY_BITS or pages.value_bits not in encode_prefill.VALUE_BITS:
        return f"keys of {pages.key_bits} bits, values of {pages.value_bits}; it is for 4 and 8, and 2, 4 and 8"
    sequences = pages.lengths.shape[0]
    if not 0 < sequences <= min(encode_prefill.MOST_SEQUENCES, tokens // encode_prefill.TILE):
        most = f"up to {encode_prefill.MOST_SEQUENCES} with {encode_prefill.TILE} tokens each"
        return f"{sequences} sequences with {tokens} tokens; it is for {most}"
    if reason := not_hopper(call.k.device):
        return reason
    return UNALIGNED if _unaligned(call.k, call.v, pages.key_codes, pages.value_codes) else None


def _not_words(pages: CodePages) -> str | None:
    """Why no kernel stores values in pairs."""
    if pages.arrangement is Arrangement.PAIRS and not fills_words(pages.value_bits, pages.width):
        return f"values of {pages.value_bits} bits in pairs, {pages.width} wide: two tokens do not fill words"
    return None


def _refuses_codec(call: Append) -> str | None:
    return _not_words(call.pages)


def _refuses_rope_append(call: RopeAppend) -> str | None:
    tokens, _, width = call.k.shape
    if not tokens > 0 or (tokens > rope_append.MOST_TOKENS and not is_invariant()):
        return f"{tokens} new tokens; it is for 1 to {rope_append.MOST_TOKENS}"
    if _given(call.pages):
        return GIVEN
    return _no_power(width) or _not_words(call.pages)


def _refuses_rope_first(call: RopeAppend) -> str | None:
    return _not_words(call.pages)


def _rope_first(call: RopeAppend) -> Tensor:
    rotation = call.inv_freq, call.positions, call.norms, call.eps, call.mscale, call.interleaved
    q, k = norm_rope(call.q, call.k, *rotation)
    APPEND(Append(k, call.v, call.pages, call.starts))
    return q


def _refuses_kept(call: Append) -> str | None:
    pages = call.pages
    return "keys leave nothing out, and nothing is kept as it is" if pages.codes_only is pages else None


def _append_kept(call: Append) -> None:
    k, v, pages, starts = call
    # few are coded from float32, as the reference does; a prompt's in 16 bits, which 8 bits hardly notice
    many = k.shape[0] * k.shape[1] >= encode_prefill.MANY and not is_invariant()
    keep.keep(k, v, pages, starts)
    k = keep.without_centres(k, pages, starts, k.dtype if many else torch.float32)
    APPEND(Append(k, v, pages.codes_only, starts))


def _after_kept(call: Append) -> list[tuple[Routes[Append, None], Append]]:
    return [(APPEND, call._replace(pages=call.pages.codes_only))]


def _appended(call: RopeAppend) -> list[tuple[Routes[Append, None], Append]]:
    return [(APPEND, Append(call.k, call.v, call.pages, call.starts))]


def _refuses_mla_rope_append(call: RopeAppendLatent) -> str | None:
    tokens, width = call.q.shape
    if not tokens > 0 or (tokens > MOST_FUSED and not is_invariant()):
        return f"{tokens} new tokens; it is for 1 to {MOST_FUSED}"
    if 2 * len(call.rotation[0]) != width // call.heads - call.nope:
        return "some channels of keys are not rotated by position"
    if call.pages.book is not None:
        return GIVEN
    return _no_power(call.pages.width)


def _latent_rope_first(call: RopeAppendLatent) -> tuple[Tensor, Tensor]:
    q_nope, q_rope, latent, k_rope = split_latent(call.q, call.kv, call.heads, call.nope)
    latent, k_rope = rms_norm(latent, call.norm, call.eps), rope(k_rope[:, None], *call.rotation)[:, 0]
    codec_launch.append_latent(latent, k_rope, call.pages, call.starts)
    return q_nope, rope(q_rope, *call.rotation)


ATTEND: Routes[Attend, Tensor] = Routes(
    Route("no new tokens", _refuses_no_queries, lambda call: torch.empty_like(call.q), alike=True),
    Route("attend", _refuses_attend, lambda call: attend_launch.attend_few(*call), alike=True),
    Route("dequantized, then attention", _refuses_dequantized, _dequantized),
    Route("flash_codes", _never, lambda call: flash_codes_launch.attend(*call)),
)
ATTEND_LATENT: Routes[AttendLatent, Tensor] = Routes(
    Route("no new tokens", _refuses_no_queries, lambda call: torch.empty_like(call.q), alike=True),
    Route("mla_columns", _refuses_columns, lambda call: mla_columns.attend_code_columns(*call), alike=True),
    Route("mla_rows", _refuses_latent, lambda call: mla_rows.attend_code_rows(*call), alike=True),
    Route("flash_codes", _never, lambda call: flash_codes_launch.attend_latent(*call)),
)
APPEND: Routes[Append, None] = Routes(
    Route("no new tokens", _refuses_no_tokens, lambda call: None, alike=True),
    Route("keep, then append", _refuses_kept, _append_kept, _after_kept, alike=True),
    Route("encode_prefill", _refuses_encode_prefill, lambda call: encode_prefill.append_at_once(*call)),
    Route("codec", _refuses_codec, lambda call: codec_launch.append(*call), alike=True),
)
ROPE_APPEND: Routes[RopeAppend, Tensor] = Routes(
    Route("rope_append", _refuses_rope_append, lambda call: rope_append.append(*call), alike=True),
    Route("norm and RoPE first", _refuses_rope_first, _rope_first, _appended, alike=True),
)
ROPE_APPEND_LATENT: Routes[RopeAppendLatent, tuple[Tensor, Tensor]] = Routes(
    Route("mla_rope_append", _refuses_mla_rope_append, lambda call: mla_rope_append.rope_encode(*call), alike=True),
    Route("norm and RoPE first, then codec", _never, _latent_rope_first, alike=True),
)
ROUTES: dict[str, Routes[Any, Any]] = {
    "turboquant_attention": ATTEND,
    "turboquant_latent_attention": ATTEND_LATENT,
    "append_codes": APPEND,
    "rope_append_codes": ROPE_APPEND,
    "rope_append_latent_codes": ROPE_APPEND_LATENT,
}
