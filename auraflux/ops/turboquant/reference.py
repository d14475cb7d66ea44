"""Vectors stored as a norm and one code per rotated coordinate, and attention that runs on the codes.

A rotation preserves inner products, so scores are computed between the rotated query and the levels of the codes, values are
summed in the rotated space, and only the result is rotated back. The mathematics is in README.md.
"""

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.attention.pages import DTYPES, check_starts, rows_of
from auraflux.ops.attention.reference import check_ends, check_window, merge_partials
from auraflux.ops.rope.reference import check_norm_rope, norm_rope
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.codebook import Codebook, check_bits, codebook
from auraflux.ops.turboquant.full_precision import FullPrecisionKV
from auraflux.ops.turboquant.pages import CodePages, row_words, unpack
from auraflux.ops.turboquant.reference_codec import decode, encode, rotate
from auraflux.ops.turboquant.reference_latent import (
    append_latent_codes,
    rope_append_latent_codes,
    turboquant_latent_attention,
    turboquant_latent_partials,
)
from auraflux.ops.turboquant.reference_rows import Query, coded_rows, full_precision_rows
from auraflux.ops.turboquant.reference_token_selection import append_key_codes, choose_coded_positions
from auraflux.ops.turboquant.rotation import check_rotation

__all__ = [
    "append_codes",
    "append_key_codes",
    "append_latent_codes",
    "choose_coded_positions",
    "decode",
    "encode",
    "rope_append_codes",
    "rope_append_latent_codes",
    "rotate",
    "turboquant_attention",
    "turboquant_latent_attention",
    "turboquant_latent_partials",
    "turboquant_partials",
    "turboquant_values",
]


def _check_append_codes(k: Tensor, v: Tensor, pages: CodePages, starts: Tensor) -> None:
    check_dense(k=k, v=v, starts=starts, pages=pages.table)
    for name, tensor in (("k", k), ("v", v)):
        check_dtype(name, tensor, *DTYPES)
        check_shape(name, tensor, k.shape[0], pages.heads, pages.width)
    check_starts(starts, pages)


@op(check=_check_append_codes)
def append_codes(k: Tensor, v: Tensor, pages: CodePages, starts: Tensor) -> None:
    """Encode the keys and values of new tokens and store them at the end of their sequences.

    k, v    [T, Hkv, D]
    pages   updated in place; their lengths include the new tokens
    starts  [B + 1]      int32
    """
    batch = pages.spans(starts, k.shape[0], reach=0)
    coded, uncentred = k, k
    if pages.calibration is not None and batch:
        positions = torch.cat([torch.arange(first, length, device=k.device) for _, _, _, first, length in batch])
        coded, uncentred = pages.calibration.reduced(k, positions), pages.calibration.scaled(k)
    key_codes, key_norms = encode.reference(coded, pages.key_bits, pages.seed, pages.key_book)
    value_codes, value_norms = encode.reference(v, pages.value_bits, pages.seed, pages.value_book)
    rows = pages.arranged(Arrangement.ROWS)
    for b, start, new, first, length in batch:
        page, slot = pages.rows_of(b, first, length)
        mine = slice(start, start + new)
        pages.key_codes[page, :, slot], pages.key_norms[page, :, slot] = key_codes[mine], key_norms[mine]
        rows.value_codes[page, :, slot], pages.value_norms[page, :, slot] = value_codes[mine], value_norms[mine]
    if rows is not pages:
        pages.value_codes.copy_(rows.arranged(pages.arrangement).value_codes)
    if pages.full_precision is not None:
        rotated_k, rotated_v = (rotate.reference(x.float(), pages.seed) for x in (uncentred, v))
        for b, start, new, first, length in batch:
            _store_full_precision(
                pages.full_precision, b, first, length, rotated_k[start : start + new], rotated_v[start : start + new]
            )


def _store_full_precision(full_precision: FullPrecisionKV, b: int, first: int, length: int, k: Tensor, v: Tensor) -> None:
    """Store the rotated rows of positions [first, length) of a sequence that full-precision pages hold."""
    for region, begin, end in (
        (full_precision.head, first, min(length, full_precision.sink_tokens)),
        (full_precision.recent, first, length),
    ):
        if region is None or begin >= end:
            continue
        page, slot = rows_of(region, b, begin, end)
        mine = slice(begin - first, end - first)
        region.k[page, :, slot], region.v[page, :, slot] = k[mine].to(region.k.dtype), v[mine].to(region.v.dtype)


def check_rope_append_codes(
    q: Tensor, k: Tensor, v: Tensor, pages: CodePages, starts: Tensor, inv_freq: Tensor, positions: Tensor,
    norms: tuple[Tensor, Tensor] | None = None, eps: float = 0.0, mscale: float = 1.0, interleaved: bool = False,
) -> None:  # fmt: skip
    check_norm_rope(q, k, inv_freq, positions, norms)
    check_shape("positions", positions, q.shape[0])
    _check_append_codes(k, v, pages, starts)


@op(check=check_rope_append_codes)
def rope_append_codes(
    q: Tensor, k: Tensor, v: Tensor, pages: CodePages, starts: Tensor, inv_freq: Tensor, positions: Tensor,
    norms: tuple[Tensor, Tensor] | None = None, eps: float = 0.0, mscale: float = 1.0, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Normalise and rotate the queries and keys of new tokens, then encode and store keys and values.

    q, k, inv_freq, positions, norms, eps, mscale, interleaved  see `norm_rope`
    k, v, pages, starts                                         see `append_codes`
    returns  [T, Hq, D]  the queries
    """
    q, k = norm_rope.reference(q, k, inv_freq, positions, norms, eps, mscale, interleaved)
    append_codes.reference(k, v, pages, starts)
    return q


def _check_turboquant_values(
    weights: Tensor, codes: Tensor, norms: Tensor, bits: int, width: int, threshold: float = 0.0,
    levels: Codebook | None = None,
) -> None:  # fmt: skip
    check_dense(weights=weights, codes=codes, norms=norms)
    check_bits("bits", bits)
    check_rotation(width, 0)
    check_dtype("weights", weights, *DTYPES)
    check_dtype("codes", codes, torch.int32)
    check_dtype("norms", norms, torch.float32)
    check_shape("norms", norms, None, None)
    check_shape("codes", codes, *norms.shape, row_words(bits, width))
    check_shape("weights", weights, None, norms.shape[1])
    _check_groups("weights", weights.shape[0], norms.shape[0])
    if not threshold >= 0:
        raise InputError(f"'threshold' is {threshold}; a weight of at least 0 is needed.")
    if levels is not None:
        levels.check("levels", bits, codes)


@op(
    origins=("aura_value_int2", "aura_value_int3", "aura_value_int4", "aura_value_int6", "aura_value_int8"),
    check=_check_turboquant_values,
)
def turboquant_values(
    weights: Tensor, codes: Tensor, norms: Tensor, bits: int, width: int, threshold: float = 0.0,
    levels: Codebook | None = None,
) -> Tensor:  # fmt: skip
    """Sum the quantized values of all tokens by their weights, skipping weights below `threshold`.

    weights [Hq, T]          Hq a multiple of Hkv
    codes   [Hkv, T, words]  int32
    norms   [Hkv, T]         float32
    levels  explicit codebook; None for the default one
    returns [Hq, D]          in the rotated space, in weights' dtype
    """
    rows = codebook(bits, width, codes.device, levels)[unpack(codes, bits, width)]
    wide = weights.float().unflatten(0, (norms.shape[0], -1))  # Hkv, Hq / Hkv, T
    weighed = torch.where(wide >= threshold, wide * norms.unsqueeze(1), 0.0)
    return (weighed @ rows).flatten(0, 1).to(weights.dtype)


def _check_turboquant_partials(
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
) -> None:
    check_turboquant_attention(q, pages, starts, scale, window, sinks, softcap, threshold, ends)
    if block < 1:
        raise InputError(f"'block' is {block}; at least one token is needed.")


@op(check=_check_turboquant_partials)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to each block of positions separately: merged and rotated back, the blocks are the attention over all.

    q, starts, scale, window, sinks, softcap, ends  see `turboquant_attention`
    block      positions in a block; block n holds those from n * block on
    threshold  values with a smaller share of their block's weights are skipped
    returns    (o [T * Hq, N, D], m [T * Hq, N], l [T * Hq, N]), float32, for `merge_partials`; o is still rotated

    N covers the capacity of the table; a block without visible positions has o = 0, m = -inf, l = 0. With full-precision rows
    there is one more block, of the rows that a query reads from there. With sinks there is another, the last: o = 0, m = sink,
    l = 1. When positions are split between calls, one of them gets the sinks.
    """
    return _partials(q, pages, starts, scale, block, window, sinks, softcap, threshold, ends)


def _partials(
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
) -> tuple[Tensor, Tensor, Tensor]:
    pages = pages.arranged(Arrangement.ROWS)
    tokens, heads, width = q.shape
    blocks = max(1, -(-pages.capacity // block)) + (pages.full_precision is not None)
    out = torch.zeros(tokens, heads, blocks + (sinks is not None), width, device=q.device)
    highest = torch.full(out.shape[:3], -torch.inf, device=q.device)
    total = torch.zeros(out.shape[:3], device=q.device)
    query = Query(q.float(), pages, scale, softcap)
    reach = None if window is None else max(window - 1, 0)
    for b, start, new, oldest, length in pages.spans(starts, tokens, reach):
        mine, query_positions = slice(start, start + new), torch.arange(length - new, length, device=q.device)[:, None]
        parts = [(n, coded_rows(pages, b, *bounds)) for n, bounds in _split(oldest, length, block)]
        if pages.full_precision is not None:
            parts.append((blocks - 1, full_precision_rows(pages.full_precision, b, new, length)))
        for n, rows in parts:
            seen = rows.positions <= query_positions if ends is None else rows.positions < ends[mine, None]
            if window is not None:
                seen &= rows.positions > query_positions - window
            if pages.full_precision is not None:
                seen &= pages.full_precision.covers(query_positions, rows.positions) == rows.full_precision
            found = query.attend(mine, rows, seen, 0.0 if rows.full_precision else threshold)
            out[mine, :, n], highest[mine, :, n], total[mine, :, n] = found
    if sinks is not None:
        highest[..., -1], total[..., -1] = sinks, 1.0
    return out.flatten(0, 1), highest.flatten(0, 1), total.flatten(0, 1)


def _split(oldest: int, length: int, block: int) -> list[tuple[int, tuple[int, int]]]:
    """Return the blocks of positions [oldest, length), and the range of positions in each."""
    return [(n, (max(n * block, oldest), min((n + 1) * block, length))) for n in range(oldest // block, -(-length // block))]


def check_turboquant_attention(
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    threshold: float = 0.0,
    ends: Tensor | None = None,
) -> None:
    check_dense(q=q, starts=starts, sinks=sinks, pages=pages.table, ends=ends)
    check_dtype("q", q, *DTYPES)
    check_attention_options(q, pages, starts, window, sinks, softcap, threshold, ends)


def check_attention_options(
    q: Tensor, pages: CodePages, starts: Tensor, window: int | None, sinks: Tensor | None, softcap: float | None,
    threshold: float, ends: Tensor | None,
) -> None:  # fmt: skip
    check_shape("q", q, None, None, pages.width)
    _check_groups("q", q.shape[1], pages.heads)
    check_starts(starts, pages)
    if sinks is not None:
        check_dtype("sinks", sinks, torch.float32)
        check_shape("sinks", sinks, q.shape[1])
    check_window(window)
    check_ends(ends, len(q))
    if softcap is not None and not softcap > 0:
        raise InputError(f"'softcap' is {softcap}; a positive number is needed, or None for no cap.")
    if not 0 <= threshold < 1:
        raise InputError(f"'threshold' is {threshold}; a share of all weights is needed, from 0 to below 1.")


@op(
    origins=(
        "aura_flash_sdpa_kb4_vb2_d64",
        "aura_flash_sdpa_kb4_vb4_d64",
        "aura_flash_sdpa_kb4_vb2_d128",
        "aura_flash_sdpa_kb4_vb4_d128",
        "flash_attn_vec_tq_dk256",
        "flash_attn_vec_tq_dk512",
    ),
    check=check_turboquant_attention,
)
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
    """Attend from each query to the quantized keys at its position and before it.

    q          [T, Hq, D]  not rotated; Hq a multiple of Hkv
    starts     [B + 1]     int32
    window     a query at p sees only positions above p - window
    sinks      [Hq]        float32; the logit, not scaled, of one more key whose value is 0
    softcap    squash scores to softcap * tanh(score / softcap)
    threshold  values with a smaller share of the weights of all keys, without sinks, are skipped
    ends       [T]         int32; see `attention`
    returns    [T, Hq, D]  in q's dtype; zeros where nothing is visible

    A one-pass kernel only knows an upper bound of a share. It may read values that are skipped here, never the reverse, so
    results agree up to `threshold` times the values' norms.
    """
    options = window, sinks, softcap, threshold, ends
    partials = _partials(q, pages, starts, scale, max(1, pages.capacity), *options)
    out = merge_partials.reference(*partials).view(q.shape)
    return rotate.reference(out, pages.seed, inverse=True).to(q.dtype)


def _check_groups(name: str, query_heads: int, heads: int) -> None:
    if min(query_heads, heads) < 1 or query_heads % heads:
        raise InputError(f"'{name}' has {query_heads} heads; a multiple of the {heads} quantized ones is needed.")
