"""Route tables of the CUDA kernels that encode new tokens and attend to codes: the first route that does not refuse runs.

Decode attention is bound by memory bandwidth. Dedicated Hopper kernels serve values stored in pairs and latents of 4 and 8
bits; portable Triton kernels serve everything else. Prefill dequantizes keys and values once and runs `attention` on them. Few
new tokens get RoPE and encoding in one launch; prefill applies RoPE first, and Hopper encodes 16 tokens per warp.

Inside `invariant` prefill uses the kernels of decode, one token at a time, so that results are batch-invariant.
"""

from typing import Any

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_exact, is_invariant
from auraflux.ops.attention.cuda import attention, split_latent
from auraflux.ops.attention.cuda.mla_rope_append import MOST_FUSED
from auraflux.ops.gpu.device import interpreted, launches_early, not_gluon, not_wgmma
from auraflux.ops.norm.cuda import rms_norm
from auraflux.ops.rope.cuda import norm_rope, rope
from auraflux.ops.routes import Route, Routes
from auraflux.ops.turboquant.arrangement import Arrangement, fills_words
from auraflux.ops.turboquant.cuda.arguments import calibration_tensors
from auraflux.ops.turboquant.cuda.call import Append, Attend, AttendLatent, RopeAppend, RopeAppendAttend, RopeAppendLatent
from auraflux.ops.turboquant.cuda.decode import launch as decode_launch
from auraflux.ops.turboquant.cuda.encode import codec_launch as encode_codec_launch
from auraflux.ops.turboquant.cuda.encode import full_precision as encode_full_precision
from auraflux.ops.turboquant.cuda.encode import prefill as encode_prefill
from auraflux.ops.turboquant.cuda.encode import rope_append as encode_rope_append
from auraflux.ops.turboquant.cuda.encode.hadamard import levels_for
from auraflux.ops.turboquant.cuda.encode.new_token import NewToken
from auraflux.ops.turboquant.cuda.mla import head_columns as mla_head_columns
from auraflux.ops.turboquant.cuda.mla import head_rows as mla_head_rows
from auraflux.ops.turboquant.cuda.mla import mma as mla_mma
from auraflux.ops.turboquant.cuda.mla import rope_append as mla_rope_append
from auraflux.ops.turboquant.cuda.prefill import dequantize as prefill_dequantize
from auraflux.ops.turboquant.cuda.prefill import flash_codes_launch as prefill_flash_codes_launch
from auraflux.ops.turboquant.pages import CodePages

BF16, F16 = torch.bfloat16, torch.float16
ALIGNED = 16  # bytes, for vectorized copies

NOT_PAIRS = "values are not stored in pairs"
UNALIGNED = "an address is not a multiple of 16 bytes"
SOME = "the call has new tokens"
EXPLICIT_CODEBOOK = "the codebook is explicit; the route serves the default one"


def _never(call: Any) -> None:
    return None


def _unaligned(*tensors: Tensor) -> bool:
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return addresses % ALIGNED != 0


def _no_power(width: int) -> str | None:
    return f"width {width} is no power of two, so the rotation is a dense matrix" if width & (width - 1) else None


def _has_explicit_codebook(pages: CodePages) -> bool:
    return pages.key_book is not None or pages.value_book is not None


def _refuses_no_queries(call: Attend | AttendLatent) -> str | None:
    return SOME if call.q.numel() else None


def _refuses_attend(call: Attend) -> str | None:
    pages = call.pages
    if pages.arrangement is not Arrangement.PAIRS:
        return NOT_PAIRS
    tokens = call.q.shape[0]
    if tokens > decode_launch.MOST_TOKENS * pages.lengths.shape[0] and not is_invariant():
        return f"{tokens} new tokens; the route serves up to {decode_launch.MOST_TOKENS} per sequence"
    if call.q.dtype is torch.float32 and is_exact():
        return "exact float32 products are requested"
    if not fills_words(pages.key_bits, pages.width) or not fills_words(pages.value_bits, pages.width):
        return f"two tokens of {pages.key_bits} or {pages.value_bits} bits, {pages.width} wide, do not fill 32-bit words"
    if pages.key_bits == pages.value_bits and pages.key_book is not pages.value_book:
        return f"keys and values of {pages.key_bits} bits have different codebooks; the kernel holds one table for both"
    if (
        pages.full_precision is not None
        and pages.full_precision.sink_tokens + pages.full_precision.recent_window > decode_launch.MOST_FULL_PRECISION
    ):
        positions = pages.full_precision.sink_tokens + pages.full_precision.recent_window
        return f"{positions} tokens are in full precision; the route serves up to {decode_launch.MOST_FULL_PRECISION}"
    if reason := not_gluon(call.q.device):
        return reason
    return None if decode_launch.fits(pages) else "its table of levels and a stage of codes do not fit into shared memory"


def _refuses_dequantized(call: Attend) -> str | None:
    pages, tokens = call.pages, call.q.shape[0]
    if pages.calibration is not None or pages.full_precision is not None:
        return None
    many = prefill_dequantize.MANY_INTERPRETED if interpreted() else prefill_dequantize.MANY
    if tokens < many * pages.lengths.shape[0]:
        return f"{tokens} new tokens; the route serves {many} or more per sequence"
    _, heads, page, _ = pages.key_codes.shape
    nbytes = 2 * pages.table.numel() * heads * page * pages.width * call.q.element_size()
    return f"dequantized keys and values would take {nbytes >> 20} MiB" if nbytes > prefill_dequantize.MOST_NBYTES else None


def _dequantized(call: Attend) -> Tensor:
    q, pages, starts, scale, window, sinks, softcap = call
    pages_16, recent = prefill_dequantize.dequantized(pages, starts, window, len(q), q.dtype)
    return attention(q, pages_16, starts, scale, window, sinks, softcap, recent=recent)


def _not_latents(call: AttendLatent) -> str | None:
    """Return why tokens and quantized latents do not fit the decode kernels."""
    pages, keys, tokens = call.pages, call.pages.rope, call.q.shape[0]
    if call.sinks is not None:
        return "attention sinks"
    if tokens > mla_head_columns.MOST_TOKENS * pages.lengths.shape[0] and not is_invariant():
        return f"{tokens} new tokens; the route serves up to {mla_head_columns.MOST_TOKENS} per sequence"
    if pages.bits not in mla_head_columns.BITS:
        return f"{pages.bits} bits; the route serves 4 and 8"
    _, page, width = keys.shape
    if pages.width != mla_head_columns.LATENT or width != mla_head_columns.ROPE:
        return f"latents of {pages.width}, RoPE keys of {width}; served: {mla_head_columns.LATENT} and {mla_head_columns.ROPE}"
    if call.q.dtype not in (BF16, F16) or call.q_rope.dtype is not BF16 or keys.dtype is not BF16:
        return "queries are not in 16 bits, or RoPE queries or keys are not in bf16"
    if page % mla_head_columns.TILE:
        return f"pages of {page} tokens are no multiple of the tile of {mla_head_columns.TILE}"
    return UNALIGNED if _unaligned(call.q, call.q_rope, pages.codes, keys) else None


def _refuses_rows(call: AttendLatent) -> str | None:
    return _not_latents(call) or not_wgmma(call.q.device)


def _refuses_latents_mma(call: AttendLatent) -> str | None:
    if call.pages.bits != mla_mma.BITS or call.pages.full_precision is not None:
        return f"{call.pages.bits} bits, or full-precision latents; the route serves {mla_mma.BITS} bits without"
    return _not_latents(call) or not_gluon(call.q.device)


def _refuses_columns(call: AttendLatent) -> str | None:
    heads = call.q.shape[1]
    if heads > mla_head_columns.MOST_COLUMNS:
        return f"{heads} heads; the route serves up to {mla_head_columns.MOST_COLUMNS}"
    return _refuses_rows(call)


def _refuses_no_tokens(call: Append) -> str | None:
    return SOME if call.k.numel() else None


def _refuses_encode_prefill(call: Append) -> str | None:
    pages, (tokens, heads, width) = call.pages, call.k.shape
    if tokens * heads < encode_prefill.MANY:
        return f"{tokens * heads} keys; the route serves {encode_prefill.MANY} or more"
    if _has_explicit_codebook(pages):
        return EXPLICIT_CODEBOOK
    if pages.arrangement is not Arrangement.PAIRS:
        return NOT_PAIRS
    if call.k.dtype is not BF16 or call.v.dtype is not BF16:
        return "keys or values are not bf16"
    if width != encode_prefill.WIDTH:
        return f"width {width}; the route serves {encode_prefill.WIDTH}"
    if pages.key_bits not in encode_prefill.KEY_BITS or pages.value_bits not in encode_prefill.VALUE_BITS:
        return (
            f"keys of {pages.key_bits} bits, values of {pages.value_bits}; the route serves keys of 4, 8 and values of 2, 4, 8"
        )
    sequences = pages.lengths.shape[0]
    if not 0 < sequences <= min(encode_prefill.MOST_SEQUENCES, tokens // encode_prefill.TILE):
        most = f"up to {encode_prefill.MOST_SEQUENCES} with at least {encode_prefill.TILE} tokens each"
        return f"{sequences} sequences with {tokens} tokens; the route serves {most}"
    if reason := not_gluon(call.k.device):
        return reason
    return UNALIGNED if _unaligned(call.k, call.v, pages.key_codes, pages.value_codes) else None


def _not_words(pages: CodePages) -> str | None:
    """Return why values of these pages cannot be stored in pairs."""
    if pages.arrangement is Arrangement.PAIRS and not fills_words(pages.value_bits, pages.width):
        return f"values of {pages.value_bits} bits in pairs, {pages.width} wide: two tokens do not fill 32-bit words"
    return None


def _refuses_codec(call: Append) -> str | None:
    return _not_words(call.pages)


def _refuses_rope_append(call: RopeAppend) -> str | None:
    tokens, _, width = call.k.shape
    if not tokens > 0 or (tokens > encode_rope_append.MOST_TOKENS and not is_invariant()):
        return f"{tokens} new tokens; the route serves 1 to {encode_rope_append.MOST_TOKENS}"
    if _has_explicit_codebook(call.pages):
        return EXPLICIT_CODEBOOK
    return _no_power(width) or _not_words(call.pages)


def _refuses_rope_first(call: RopeAppend) -> str | None:
    return _not_words(call.pages)


def _rope_first(call: RopeAppend) -> Tensor:
    rotation = call.inv_freq, call.positions, call.norms, call.eps, call.mscale, call.interleaved
    q, k = norm_rope(call.q, call.k, *rotation)
    APPEND(Append(k, call.v, call.pages, call.starts))
    return q


def _refuses_full_precision(call: Append) -> str | None:
    pages = call.pages
    return "keys are not calibrated, and no tokens are in full precision" if pages.codes_only is pages else None


def _append_full_precision(call: Append) -> None:
    k, v, pages, starts = call
    # decode encodes from float32 as the reference does; prefill stays in 16 bits, which codes of 8 bits hardly notice
    many = k.shape[0] * k.shape[1] >= encode_prefill.MANY and not is_invariant()
    encode_full_precision.append_full_precision(k, v, pages, starts)
    k = encode_full_precision.subtract_means(k, pages, starts, k.dtype if many else torch.float32)
    APPEND(Append(k, v, pages.codes_only, starts))


def _then_append(call: Append) -> list[tuple[Routes[Append, None], Append]]:
    return [(APPEND, call._replace(pages=call.pages.codes_only))]


def _appended(call: RopeAppend) -> list[tuple[Routes[Append, None], Append]]:
    return [(APPEND, Append(call.k, call.v, call.pages, call.starts))]


def _refuses_new_token(call: RopeAppendAttend) -> str | None:
    append = call.append
    reason = decode_launch.refuses_new(append.q, append.pages, call.window) or _refuses_rope_append(append)
    if reason or (reason := _refuses_attend(call.attend(append.q))):
        return reason
    if append.k.dtype != append.q.dtype or append.v.dtype != append.q.dtype:
        return "queries, keys and values are not of one type"
    return None if launches_early(append.q.device) else "the GPU launches kernels one after the other"


def _new_token(call: RopeAppendAttend) -> Tensor:
    q, k, v, pages, _, inv_freq, positions, norms, eps, mscale, interleaved = call.append
    q_norm, k_norm = norms or (None, None)
    key_levels, value_levels = (levels_for(bits, pages.width, q.device) for bits in (pages.key_bits, pages.value_bits))
    rotation = inv_freq, positions, float(mscale), inv_freq.shape[0], q.stride(1)
    calibration = calibration_tensors(pages)
    new = NewToken(k, v, q_norm, k_norm, float(eps), *rotation, key_levels, value_levels, calibration)
    return decode_launch.attend_decode(*call.attend(q), new, interleaved)


def _append_first(call: RopeAppendAttend) -> Tensor:
    return ATTEND(call.attend(ROPE_APPEND(call.append)))


def _then_attend(call: RopeAppendAttend) -> list[Any]:
    return [(ROPE_APPEND, call.append), (ATTEND, call.attend(call.append.q))]


def _refuses_mla_rope_append(call: RopeAppendLatent) -> str | None:
    tokens, width = call.q.shape
    if not tokens > 0 or (tokens > MOST_FUSED and not is_invariant()):
        return f"{tokens} new tokens; the route serves 1 to {MOST_FUSED}"
    if 2 * len(call.rotation[0]) != width // call.heads - call.nope:
        return "RoPE covers only some channels of the keys"
    if call.pages.book is not None:
        return EXPLICIT_CODEBOOK
    return _no_power(call.pages.width)


def _latent_rope_first(call: RopeAppendLatent) -> tuple[Tensor, Tensor]:
    q_nope, q_rope, latent, k_rope = split_latent(call.q, call.kv, call.heads, call.nope)
    latent, k_rope = rms_norm(latent, call.norm, call.eps), rope(k_rope[:, None], *call.rotation)[:, 0]
    encode_codec_launch.append_latent(latent, k_rope, call.pages, call.starts)
    return q_nope, rope(q_rope, *call.rotation)


ATTEND: Routes[Attend, Tensor] = Routes(
    Route("no new tokens", _refuses_no_queries, lambda call: torch.empty_like(call.q), invariant=True),
    Route("attend", _refuses_attend, lambda call: decode_launch.attend_decode(*call), invariant=True),
    Route("dequantized, then attention", _refuses_dequantized, _dequantized),
    Route("flash_codes", _never, lambda call: prefill_flash_codes_launch.attend(*call)),
)
ATTEND_LATENT: Routes[AttendLatent, Tensor] = Routes(
    Route("no new tokens", _refuses_no_queries, lambda call: torch.empty_like(call.q), invariant=True),
    Route("mla_columns", _refuses_columns, lambda call: mla_head_columns.attend_code_columns(*call[:-1]), invariant=True),
    Route("mla_rows", _refuses_rows, lambda call: mla_head_rows.attend_code_rows(*call[:-1]), invariant=True),
    Route("latents_mma", _refuses_latents_mma, lambda call: mla_mma.attend_latent_codes(*call[:-1])),
    Route("flash_codes", _never, lambda call: prefill_flash_codes_launch.attend_latent(*call)),
)
APPEND: Routes[Append, None] = Routes(
    Route("no new tokens", _refuses_no_tokens, lambda call: None, invariant=True),
    Route("full precision, then append", _refuses_full_precision, _append_full_precision, _then_append, invariant=True),
    Route("encode_prefill", _refuses_encode_prefill, lambda call: encode_prefill.append_prefill(*call)),
    Route("codec", _refuses_codec, lambda call: encode_codec_launch.append(*call), invariant=True),
)
ROPE_APPEND: Routes[RopeAppend, Tensor] = Routes(
    Route("rope_append", _refuses_rope_append, lambda call: encode_rope_append.append(*call), invariant=True),
    Route("norm and RoPE first", _refuses_rope_first, _rope_first, _appended, invariant=True),
)
ROPE_APPEND_ATTEND: Routes[RopeAppendAttend, Tensor] = Routes(
    Route("new token in attention", _refuses_new_token, _new_token),
    Route("append, then attend", _never, _append_first, _then_attend, invariant=True),
)
ROPE_APPEND_LATENT: Routes[RopeAppendLatent, tuple[Tensor, Tensor]] = Routes(
    Route("mla_rope_append", _refuses_mla_rope_append, lambda call: mla_rope_append.rope_encode(*call), invariant=True),
    Route("norm and RoPE first, then codec", _never, _latent_rope_first, invariant=True),
)
ROUTES: dict[str, Routes[Any, Any]] = {
    "turboquant_attention": ATTEND,
    "turboquant_latent_attention": ATTEND_LATENT,
    "append_codes": APPEND,
    "rope_append_codes": ROPE_APPEND,
    "rope_append_attention": ROPE_APPEND_ATTEND,
    "rope_append_latent_codes": ROPE_APPEND_LATENT,
}
