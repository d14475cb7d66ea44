"""Codes on CUDA: rows are coded in `_codec_rows`, attended to in `_flash_codes`, and on Hopper, where they lie in pairs, from
few new tokens in `_hopper`.

A pass over the keys reads every value: a threshold only ever allows some to be left out.
"""

from typing import Any

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops._triton import INTERPRETED, cdiv, multiprocessors, power_of_two, ready
from auraflux.ops.attention._flash import EVERYTHING, Parts, launch_merge, parts_like, shape_for
from auraflux.ops.attention.cuda import attention
from auraflux.ops.rope.cuda import norm_rope
from auraflux.ops.turboquant._append_many import append_at_once, appends
from auraflux.ops.turboquant._builds import KERNELS
from auraflux.ops.turboquant._codec_rows import (
    append_coded,
    append_coded_latent,
    decode_rows,
    encode_rows,
    finish_rows,
    rotate_rows,
)
from auraflux.ops.turboquant._few import attend_few, serves
from auraflux.ops.turboquant._flash_codes import attend_codes, sum_coded
from auraflux.ops.turboquant._turn import book_for, levels_for, turn_for
from auraflux.ops.turboquant._turned_rows import turn_and_append
from auraflux.ops.turboquant._written import worth_writing, written
from auraflux.ops.turboquant.arrangement import Arrangement, fills_words
from auraflux.ops.turboquant.codebook import codebook
from auraflux.ops.turboquant.pages import CodePages, LatentCodes, row_words

__all__ = [
    "KERNELS",
    "append_codes",
    "append_latent_codes",
    "decode",
    "encode",
    "rope_append_codes",
    "rotate",
    "turboquant_attention",
    "turboquant_latent_attention",
    "turboquant_partials",
    "turboquant_values",
]

NARROWEST = 32
ROWS_TOGETHER = 16  # encoded by one program where there are many
MANY_PROGRAMS = 2 if INTERPRETED else 64
MOST_TURNED = 64  # tokens that are turned and coded in one launch


def rotate(x: Tensor, seed: int, inverse: bool = False) -> Tensor:
    ready(x)
    return _rotate(x, seed, inverse, x.dtype)


def _rotate(x: Tensor, seed: int, inverse: bool, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
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
    _check(x, width)
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
    _check(codes, width)
    out = torch.empty(*norms.shape, width, device=codes.device)
    turn, matrix = turn_for(width, seed, True, codes.device)
    if out.numel():
        book = codebook(bits, width, codes.device)
        decode_rows[(norms.numel(),)](codes, norms, turn, book, out, BITS=bits, MATRIX=matrix, **_row(width))
    return out


def _check(first: Tensor, width: int) -> None:
    ready(first)
    if width < NARROWEST:
        raise Declined(f"rows of {width}, fewer than the {NARROWEST} codes that fill whole words at every number of bits")


def _check_pairs(pages: CodePages) -> None:
    if pages.arrangement is Arrangement.PAIRS and not fills_words(pages.value_bits, pages.width):
        raise Declined(f"values of {pages.value_bits} bits in pairs, {pages.width} wide: two tokens do not fill words")


def append_codes(k: Tensor, v: Tensor, pages: CodePages, starts: Tensor) -> None:
    tokens, heads, width = k.shape
    _check(k, width)
    if not tokens:
        return
    _check_pairs(pages)
    if appends(k, v, pages):
        append_at_once(k, v, pages)
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
        *_index(pages, starts),
        HEADS=heads,
        KEY_BITS=pages.key_bits,
        VALUE_BITS=pages.value_bits,
        MATRIX=matrix,
        PAIRS=pairs,
        R=together,
        **_sizes(pages),
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
    _check(k, width)
    _check_pairs(pages)
    turn, matrix = turn_for(width, pages.seed, False, k.device)
    if matrix or not 0 < tokens <= MOST_TURNED:
        q, k = norm_rope(q, k, inv_freq, positions, norms, eps, mscale, interleaved)
        append_codes(k, v, pages, starts)
        return q
    out = q.new_empty(q.shape)
    turn_and_append[(2 * heads + q.shape[1], tokens)](
        *(q, k, v, out, *(norms or (None, None)), inv_freq, positions),
        *(inv_freq.shape[0], float(mscale), float(eps), q.stride(1)),
        *(pages.key_codes, pages.key_norms, *levels_for(pages.key_bits, width, k.device)),
        *(pages.value_codes, pages.value_norms, *levels_for(pages.value_bits, width, k.device)),
        turn,
        *_index(pages, starts),
        Q_HEADS=q.shape[1],
        HEADS=heads,
        D=width,
        KEY_BITS=pages.key_bits,
        VALUE_BITS=pages.value_bits,
        INTERLEAVED=interleaved,
        PAIRS=pages.arrangement is Arrangement.PAIRS,
        num_warps=1,
        **_sizes(pages),
    )
    return out


def append_latent_codes(latent: Tensor, k_rope: Tensor, pages: LatentCodes, starts: Tensor) -> None:
    (tokens, width), rope = latent.shape, k_rope.shape[1]
    _check(latent, width)
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
        *_index(pages, starts),
        R=rope,
        PR=power_of_two(rope),
        BITS=pages.bits,
        MATRIX=matrix,
        **_sizes(pages),
        **_row(width),
    )


def _index(pages: CodePages | LatentCodes, starts: Tensor) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
    return pages.table, pages.lengths, starts, *pages.table.shape, pages.pool[0]


def _sizes(pages: CodePages | LatentCodes) -> dict[str, int]:
    return {"PAGE": pages.pool[1], "S": power_of_two(pages.table.shape[0])}


def turboquant_values(weights: Tensor, codes: Tensor, norms: Tensor, bits: int, width: int, threshold: float = 0.0) -> Tensor:
    _check(weights, width)
    (heads, tokens), rows = norms.shape, weights.shape[0]
    if not tokens:
        return weights.new_zeros(rows, width)
    group, padded = rows // heads, power_of_two(width)
    tiles, keys = cdiv(group, 16), max(16, min(64, 8192 // padded))
    programs = 8 if INTERPRETED else 4 * multiprocessors(weights.device)
    shares = max(1, min(cdiv(programs, tiles * heads), cdiv(tokens, keys)))
    share = cdiv(cdiv(tokens, shares), keys) * keys
    shares = cdiv(tokens, share)
    parts = torch.empty(shares, rows, width, device=weights.device)
    source = weights, codes, norms, codebook(bits, width, weights.device), parts, threshold
    sizes = {"D": width, "P": padded, "BITS": bits, "M": 16, "N": keys}
    sum_coded[(tiles, heads, shares)](*source, tokens, share, group, **sizes)
    return parts.sum(0).to(weights.dtype)


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
) -> Parts:
    _check(q, pages.width)
    (tokens, heads, width), blocks = q.shape, max(1, -(-pages.capacity // block))
    parts = parts_like(tokens * heads, blocks + (sinks is not None), width, q.device)
    if tokens:
        _attend(q, None, pages, starts, scale, window, softcap, block, blocks, parts)
    if sinks is not None:
        o, m, l = parts  # noqa: E741
        o[:, -1], l[:, -1] = 0.0, 1.0
        m.view(tokens, heads, -1)[..., -1] = sinks
    return parts


def turboquant_attention(
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    threshold: float = 0.0,
) -> Tensor:
    _check(q, pages.width)
    if not q.numel():
        return torch.empty_like(q)
    if serves(q, pages):
        return attend_few(q, pages, starts, scale, window, sinks, softcap)
    if worth_writing(q, pages):
        turned = _rotate(q, pages.seed, False, q.dtype)
        out = attention(turned, written(pages, starts, window, q.dtype), starts, scale, window, sinks, softcap)
        return _rotate(out, pages.seed, True, q.dtype)
    return _finish(_attend(q, None, pages, starts, scale, window, softcap), sinks, pages.seed, q)


def turboquant_latent_attention(q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float) -> Tensor:
    _check(q_latent, pages.width)
    if not q_latent.numel():
        return torch.empty_like(q_latent)
    return _finish(_attend(q_latent, q_rope, pages, starts, scale), None, pages.seed, q_latent)


def _attend(
    q: Tensor,
    q_rope: Tensor | None,
    pages: Any,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    block: int = 0,
    blocks: int = 0,
    parts: Parts | None = None,
) -> Parts:
    """Attend in parts: blocks of `block` positions each, or as many as fill the GPU."""
    (tokens, heads, width), latent = q.shape, q_rope is not None
    wide, padded, rope = q.dtype is torch.float32, power_of_two(width), 0 if q_rope is None else q_rope.shape[2]
    if latent:
        keys = values = pages.codes, pages.norms, book_for(pages.bits, width, not wide, q.device)
        key_heads, key_bits, value_bits = 1, pages.bits, pages.bits
    else:
        keys = pages.key_codes, pages.key_norms, book_for(pages.key_bits, width, not wide, q.device)
        values = pages.value_codes, pages.value_norms, book_for(pages.value_bits, width, not wide, q.device)
        key_heads, key_bits, value_bits = pages.heads, pages.key_bits, pages.value_bits
    sequences, table_width = pages.table.shape
    page, group = pages.pool[1], heads // key_heads
    read = padded if latent else 2 * padded
    cut = shape_for(
        tokens, sequences, group, key_heads, (read, padded), wide, table_width * page, q.device, 32 if latent else 64
    )
    splits = blocks or cut.splits
    parts = parts or parts_like(tokens * heads, splits, width, q.device)
    # in 16 bits the levels are larger by sqrt(D), and float16 holds queries best once they are scaled
    factor, unit = (1.0, 1.0) if wide or latent else (scale, width**-0.5)
    if latent and not wide:
        unit = width**-0.5
    turned = _rotate(q, pages.seed, False, torch.float32 if wide else torch.float16, factor)
    attend_codes[(cut.tiles, key_heads, splits)](
        turned,
        q_rope,
        *keys,
        *values,
        pages.rope if latent else None,
        pages.table,
        pages.lengths,
        starts,
        *parts,
        scale / factor,
        unit,
        softcap or 1.0,
        EVERYTHING if window is None else window,
        block,
        sequences,
        heads,
        table_width,
        pages.pool[0],
        splits,
        parts[1].shape[1],
        G=group,
        HEADS=key_heads,
        D=width,
        R=rope,
        M=cut.rows,
        N=cut.keys,
        P=padded,
        PR=max(16, power_of_two(rope)) if latent else 0,
        KEY_BITS=key_bits,
        VALUE_BITS=value_bits,
        WIDE=wide,
        LATENT=latent,
        SOFTCAP=softcap is not None,
        ALIGNED=page % cut.keys == 0 and block % cut.keys == 0,
        PAIRS=not latent and pages.arrangement is Arrangement.PAIRS,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **_sizes(pages),
    )
    return parts


def _finish(parts: Parts, sinks: Tensor | None, seed: int, like: Tensor) -> Tensor:
    """Merge parts and turn the rows back, into the shape and dtype of `like`."""
    out, (rows, blocks, width) = torch.empty_like(like), parts[0].shape
    turn, matrix = turn_for(width, seed, True, like.device)
    if matrix:
        merged = torch.empty(like.shape, device=like.device)
        launch_merge(parts, sinks, merged, like.shape[1])
        return _rotate(merged, seed, True, like.dtype)
    sizes = {"D": width, "S": power_of_two(blocks), "C": min(32, power_of_two(blocks))}
    finish_rows[(rows,)](*parts, sinks, turn, out, like.shape[1], blocks, **sizes)
    return out
