"""Codes of rows on CUDA, made and stored: the launches of what `codec`, `rope_append` and `encode_prefill` do."""

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.attention.cuda import split_latent
from auraflux.ops.attention.cuda.mla_rope_append import fits_turned
from auraflux.ops.hopper.device import INTERPRETED, capability, ready
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.norm.cuda import rms_norm
from auraflux.ops.rope.cuda import norm_rope, rope
from auraflux.ops.turboquant.arrangement import HOPPER, Arrangement, fills_words
from auraflux.ops.turboquant.codebook import codebook
from auraflux.ops.turboquant.cuda.codec import append_coded, append_coded_latent, decode_rows, encode_rows, rotate_rows
from auraflux.ops.turboquant.cuda.encode_prefill import append_at_once, appends
from auraflux.ops.turboquant.cuda.hadamard import levels_for, turn_for
from auraflux.ops.turboquant.cuda.mla_rope_append import encode_turned_latent
from auraflux.ops.turboquant.cuda.rope_append import turn_and_append
from auraflux.ops.turboquant.pages import CodePages, LatentCodes, row_words

NARROWEST = 32
ROWS_TOGETHER = 16  # encoded by one program where there are many
MANY_PROGRAMS = 2 if INTERPRETED else 64
MOST_TURNED = 64  # tokens that are turned and coded in one launch


def rotate(x: Tensor, seed: int, inverse: bool = False) -> Tensor:
    ready(x)
    return rotated(x, seed, inverse, x.dtype)


def rotated(x: Tensor, seed: int, inverse: bool, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    out, width = torch.empty(x.shape, dtype=dtype, device=x.device), x.shape[-1]
    turn, matrix = turn_for(width, seed, inverse, x.device)
    if x.numel():
        sizes = {**_row(width), "MATRIX": matrix, "INVERSE": inverse}
        rotate_rows[(x.numel() // width,)](x, turn, out, factor, **sizes)
    return out


def _row(width: int, rows: int = 1) -> dict[str, int]:
    """How rows are laid out: their width, the power of two that holds it and whole groups of codes, and warps."""
    padded = max(32, power_of_two(width)) if width & (width - 1) else width
    return {"D": width, "P": padded, "num_warps": 1 if rows * padded <= 256 else 4}


def encode(x: Tensor, bits: int, seed: int) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    check_width(x, width)
    codes = torch.empty(*x.shape[:-1], row_words(bits, width), dtype=torch.int32, device=x.device)
    norms = torch.empty(x.shape[:-1], device=x.device)
    turn, matrix = turn_for(width, seed, False, x.device)
    if rows := norms.numel():
        together = _together(rows, matrix)
        sizes = {**_row(width, together), "BITS": bits, "MATRIX": matrix, "R": together}
        encode_rows[(cdiv(rows, together),)](x, turn, *levels_for(bits, width, x.device), codes, norms, rows, **sizes)
    return codes, norms


def _together(rows: int, matrix: bool) -> int:
    """How many rows one program encodes: several where that leaves enough programs."""
    return 1 if matrix or rows < ROWS_TOGETHER * MANY_PROGRAMS else ROWS_TOGETHER


def decode(codes: Tensor, norms: Tensor, bits: int, width: int, seed: int) -> Tensor:
    check_width(codes, width)
    out = torch.empty(*norms.shape, width, device=codes.device)
    turn, matrix = turn_for(width, seed, True, codes.device)
    if out.numel():
        book = codebook(bits, width, codes.device)
        decode_rows[(norms.numel(),)](codes, norms, turn, book, out, BITS=bits, MATRIX=matrix, **_row(width))
    return out


def check_width(first: Tensor, width: int) -> None:
    ready(first)
    if width < NARROWEST:
        raise Declined(f"rows of {width}, fewer than the {NARROWEST} codes that fill whole words at every number of bits")


def _check_pairs(pages: CodePages) -> None:
    if pages.arrangement is Arrangement.PAIRS and not fills_words(pages.value_bits, pages.width):
        raise Declined(f"values of {pages.value_bits} bits in pairs, {pages.width} wide: two tokens do not fill words")


def append_codes(k: Tensor, v: Tensor, pages: CodePages, starts: Tensor) -> None:
    tokens, heads, width = k.shape
    check_width(k, width)
    if not tokens:
        return
    _check_pairs(pages)
    if appends(k, v, pages):
        append_at_once(k, v, pages, starts)
        return
    turn, matrix = turn_for(width, pages.seed, False, k.device)
    pairs = pages.arrangement is Arrangement.PAIRS
    # values in pairs are stored token by token: neighbours change bits of the same words
    together = 1 if pairs else _together(tokens * heads, matrix)
    groups = tokens // together + (2 * len(pages.lengths) if together > 1 else 0)
    append_coded[(groups, heads, 2)](
        k,
        v,
        *(pages.key_codes, pages.key_norms, *levels_for(pages.key_bits, width, k.device)),
        *(pages.value_codes, pages.value_norms, *levels_for(pages.value_bits, width, k.device)),
        turn,
        *index_of(pages, starts),
        HEADS=heads,
        KEY_BITS=pages.key_bits,
        VALUE_BITS=pages.value_bits,
        MATRIX=matrix,
        PAIRS=pairs,
        R=together,
        **page_sizes(pages),
        **_row(width, together),
    )


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
    tokens, heads, width = k.shape
    check_width(k, width)
    _check_pairs(pages)
    turn, matrix = turn_for(width, pages.seed, False, k.device)
    if matrix or not 0 < tokens <= MOST_TURNED:
        q, k = norm_rope(q, k, inv_freq, positions, norms, eps, mscale, interleaved)
        append_codes(k, v, pages, starts)
        return q
    out, early = q.new_empty(q.shape), not INTERPRETED and capability(q.device)[0] == HOPPER
    turn_and_append[(2 * heads + q.shape[1], tokens)](
        *(q, k, v, out, *(norms or (None, None)), inv_freq, positions),
        *(inv_freq.shape[0], float(mscale), float(eps), q.stride(1)),
        *(pages.key_codes, pages.key_norms, *levels_for(pages.key_bits, width, k.device)),
        *(pages.value_codes, pages.value_norms, *levels_for(pages.value_bits, width, k.device)),
        turn,
        *index_of(pages, starts),
        Q_HEADS=q.shape[1],
        HEADS=heads,
        D=width,
        KEY_BITS=pages.key_bits,
        VALUE_BITS=pages.value_bits,
        INTERLEAVED=interleaved,
        PAIRS=pages.arrangement is Arrangement.PAIRS,
        EARLY=early,
        num_warps=1,
        launch_pdl=early,
        **page_sizes(pages),
    )
    return out


def append_latent_codes(latent: Tensor, k_rope: Tensor, pages: LatentCodes, starts: Tensor) -> None:
    (tokens, width), rope = latent.shape, k_rope.shape[1]
    check_width(latent, width)
    if not tokens:
        return
    turn, matrix = turn_for(width, pages.seed, False, latent.device)
    append_coded_latent[(tokens,)](
        latent,
        k_rope,
        pages.codes,
        pages.norms,
        *levels_for(pages.bits, width, latent.device),
        pages.rope,
        turn,
        *index_of(pages, starts),
        R=rope,
        PR=power_of_two(rope),
        BITS=pages.bits,
        MATRIX=matrix,
        **page_sizes(pages),
        **_row(width),
    )


def rope_append_latent_codes(
    q: Tensor, kv: Tensor, heads: int, nope: int, pages: LatentCodes, starts: Tensor, norm: Tensor, eps: float,
    inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_width(q, pages.width)
    turning = inv_freq, positions, mscale, interleaved
    if fits_turned(q, heads, nope, inv_freq) and not turn_for(pages.width, pages.seed, False, q.device)[1]:
        return encode_turned_latent(q, kv, heads, nope, pages, starts, norm, eps, turning)
    q_nope, q_rope, latent, k_rope = split_latent(q, kv, heads, nope)
    append_latent_codes(rms_norm(latent, norm, eps), rope(k_rope[:, None], *turning)[:, 0], pages, starts)
    return q_nope, rope(q_rope, *turning)


def index_of(pages: CodePages | LatentCodes, starts: Tensor) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
    return pages.table, pages.lengths, starts, *pages.table.shape, pages.pool[0]


def page_sizes(pages: CodePages | LatentCodes) -> dict[str, int]:
    return {"PAGE": pages.pool[1], "S": power_of_two(pages.table.shape[0])}
