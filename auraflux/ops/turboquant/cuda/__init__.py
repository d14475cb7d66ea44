"""Quantized KV cache on CUDA; `routes.py` selects the kernels that encode new tokens and attend to codes."""

from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.attention.pages import causal_only
from auraflux.ops.gpu.blocks.softmax import Partials
from auraflux.ops.gpu.device import ready
from auraflux.ops.turboquant.codebook import Codebook, explicit_codebook
from auraflux.ops.turboquant.cuda.call import Append, Attend, AttendLatent, RopeAppend, RopeAppendAttend, RopeAppendLatent
from auraflux.ops.turboquant.cuda.encode.codec_launch import append_latent, decoded, encoded, rotated
from auraflux.ops.turboquant.cuda.prefill.flash_codes_launch import attend_in_blocks, sum_values
from auraflux.ops.turboquant.cuda.routes import (
    APPEND,
    ATTEND,
    ATTEND_LATENT,
    ROPE_APPEND,
    ROPE_APPEND_ATTEND,
    ROPE_APPEND_LATENT,
)
from auraflux.ops.turboquant.pages import CodePages, LatentCodes
from auraflux.ops.turboquant.reference_new_token import AttentionOptions, NormRope

__all__ = [
    "append_codes",
    "append_latent_codes",
    "decode",
    "encode",
    "rope_append_attention",
    "rope_append_codes",
    "rope_append_latent_codes",
    "rotate",
    "turboquant_attention",
    "turboquant_latent_attention",
    "turboquant_partials",
    "turboquant_values",
]

NARROWEST = 32
SMALL, LARGE = 2.0**-4, 2.0**10  # limits of the largest level, times sqrt(D)


def rotate(x: Tensor, seed: int, inverse: bool = False) -> Tensor:
    ready(x)
    return rotated(x, seed, inverse, x.dtype)


def encode(x: Tensor, bits: int, seed: int, levels: Codebook | None = None) -> tuple[Tensor, Tensor]:
    _check(x, x.shape[-1])
    return encoded(x, bits, seed, explicit_codebook(levels, x.shape[-1]))


def decode(codes: Tensor, norms: Tensor, bits: int, width: int, seed: int, levels: Codebook | None = None) -> Tensor:
    _check(codes, width)
    return decoded(codes, norms, bits, width, seed, explicit_codebook(levels, width))


def append_codes(k: Tensor, v: Tensor, pages: CodePages, starts: Tensor) -> None:
    _check(k, k.shape[-1])
    APPEND(Append(k, v, pages, starts))


def rope_append_codes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: CodePages,
    starts: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    mscale: float = 1.0,
    interleaved: bool = False,
) -> Tensor:
    _check(k, k.shape[-1])
    return ROPE_APPEND(RopeAppend(q, k, v, pages, starts, inv_freq, positions, norms, eps, mscale, interleaved))


def rope_append_attention(
    q: Tensor, k: Tensor, v: Tensor, pages: CodePages, starts: Tensor, rotation: NormRope, options: AttentionOptions
) -> Tensor:
    causal_only(options.ends)
    _check(k, k.shape[-1])
    _check_size(pages.width, pages.key_book, pages.value_book)
    append = RopeAppend(q, k, v, pages, starts, *rotation.arguments)
    return ROPE_APPEND_ATTEND(RopeAppendAttend(append, options.scale, options.window, options.sinks, options.softcap))


def append_latent_codes(latent: Tensor, k_rope: Tensor, pages: LatentCodes, starts: Tensor) -> None:
    _check(latent, latent.shape[-1])
    append_latent(latent, k_rope, pages, starts)


def rope_append_latent_codes(
    q: Tensor, kv: Tensor, heads: int, nope: int, pages: LatentCodes, starts: Tensor, norm: Tensor, eps: float,
    inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(q, pages.width)
    rotation = inv_freq, positions, mscale, interleaved
    return ROPE_APPEND_LATENT(RopeAppendLatent(q, kv, heads, nope, pages, starts, norm, eps, rotation))


def turboquant_values(
    weights: Tensor, codes: Tensor, norms: Tensor, bits: int, width: int, threshold: float = 0.0,
    levels: Codebook | None = None,
) -> Tensor:  # fmt: skip
    _check(weights, width)
    return sum_values(weights, codes, norms, bits, width, threshold, explicit_codebook(levels, width))


def turboquant_partials(
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    block: int,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    threshold: float = 0.0,
    ends: Tensor | None = None,
) -> Partials:
    causal_only(ends)
    _check(q, pages.width)
    _check_codes_only(pages)
    _check_size(pages.width, pages.key_book, pages.value_book)
    return attend_in_blocks(q, pages, starts, scale, block, window, sinks, softcap)


def turboquant_attention(
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    threshold: float = 0.0,
    ends: Tensor | None = None,
) -> Tensor:
    causal_only(ends)
    _check(q, pages.width)
    _check_size(pages.width, pages.key_book, pages.value_book)
    return ATTEND(Attend(q, pages, starts, scale, window, sinks, softcap))


def turboquant_latent_attention(
    q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    _check(q_latent, pages.width)
    _check_size(pages.width, pages.book)
    return ATTEND_LATENT(AttendLatent(q_latent, q_rope, pages, starts, scale, sinks))


def _check(first: Tensor, width: int) -> None:
    ready(first)
    if width < NARROWEST:
        raise Declined(f"rows are {width} wide; packed codes need at least {NARROWEST} to fill 32-bit words at every bit width")


def _check_codes_only(pages: CodePages) -> None:
    if pages.calibration is not None or pages.full_precision is not None:
        raise Declined("keys are calibrated, or some tokens are stored in full precision")


def _check_size(width: int, *books: Codebook | None) -> None:
    """Decline levels outside the range of float16: kernels multiply them by sqrt(D)."""
    for book in books:
        if book is not None and not SMALL < book.largest * width**0.5 < LARGE:
            raise Declined(f"the largest level is {book.largest:g}, outside the range of float16")
