"""Quantized latents of MLA: one vector for all heads that is key and value at once, and an unquantized RoPE key."""

from collections.abc import Iterator

import torch
from torch import Tensor

from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.attention.pages import DTYPES, check_starts
from auraflux.ops.attention.reference_latent import check_rope_append_latent, check_sinks, split_latent, with_sinks
from auraflux.ops.attention.softmax import weigh
from auraflux.ops.norm.reference import rms_norm
from auraflux.ops.rope.reference import rope
from auraflux.ops.turboquant.codebook import codebook
from auraflux.ops.turboquant.full_precision import FullPrecisionLatents
from auraflux.ops.turboquant.pages import LatentCodes, unpack
from auraflux.ops.turboquant.reference_codec import encode, rotate


def _check_append_latent_codes(latent: Tensor, k_rope: Tensor, pages: LatentCodes, starts: Tensor) -> None:
    check_dense(latent=latent, k_rope=k_rope, starts=starts, pages=pages.table)
    check_dtype("latent", latent, *DTYPES)
    check_dtype("k_rope", k_rope, *DTYPES)
    check_shape("latent", latent, None, pages.width)
    check_shape("k_rope", k_rope, latent.shape[0], pages.rope.shape[2])
    check_starts(starts, pages)


@op(check=_check_append_latent_codes)
def append_latent_codes(latent: Tensor, k_rope: Tensor, pages: LatentCodes, starts: Tensor) -> None:
    """Encode the latents of new tokens and store them with the RoPE keys at the end of their sequences.

    latent  [T, C]
    k_rope  [T, R]
    pages   updated in place, with their full-precision rows; their lengths include the new tokens
    starts  [B + 1]  int32
    """
    batch = pages.spans(starts, latent.shape[0], reach=0)
    codes, norms = encode.reference(latent, pages.bits, pages.seed, pages.book)
    for b, start, new, first, length in batch:
        page, slot = pages.rows_of(b, first, length)
        mine = slice(start, start + new)
        pages.codes[page, slot], pages.norms[page, slot] = codes[mine], norms[mine]
        pages.rope[page, slot] = k_rope[mine].to(pages.rope.dtype)
    if pages.full_precision is not None:
        rotated = rotate.reference(latent.float(), pages.seed)
        for b, start, new, first, length in batch:
            _store_full_precision(pages.full_precision, b, first, length, rotated[start : start + new])


def _store_full_precision(full_precision: FullPrecisionLatents, b: int, first: int, length: int, latent: Tensor) -> None:
    """Store the rotated latents of positions [first, length) of a sequence that full-precision pages hold."""
    for region, begin, end in (
        (full_precision.head, first, min(length, full_precision.sink_tokens)),
        (full_precision.recent, first, length),
    ):
        if region is not None and begin < end:
            page, slot = region.rows_of(b, begin, end)
            region.rows[page, slot] = latent[begin - first : end - first].to(region.rows.dtype)


def _check_rope_append_latent_codes(
    q: Tensor, kv: Tensor, heads: int, nope: int, pages: LatentCodes, starts: Tensor, norm: Tensor, eps: float,
    inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False,
) -> None:  # fmt: skip
    check_rope_append_latent(q, kv, heads, nope, norm, inv_freq, positions, pages.width, pages.rope.shape[2])
    check_dense(q=q, starts=starts, pages=pages.table)
    check_starts(starts, pages)


@op(check=_check_rope_append_latent_codes)
def rope_append_latent_codes(
    q: Tensor, kv: Tensor, heads: int, nope: int, pages: LatentCodes, starts: Tensor, norm: Tensor, eps: float,
    inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `rope_append_latent` on pages of quantized latents, see `append_latent_codes`."""
    q_nope, q_rope, latent, k_rope = split_latent.reference(q, kv, heads, nope)
    rotation = inv_freq, positions, mscale, interleaved
    rotated = rope.reference(k_rope[:, None], *rotation)[:, 0].contiguous()
    append_latent_codes.reference(rms_norm.reference(latent, norm, eps), rotated, pages, starts)
    return q_nope, rope.reference(q_rope, *rotation)


def _check_turboquant_latent_attention(
    q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float, sinks: Tensor | None = None
) -> None:
    check_sinks(sinks, q_latent)
    check_dense(q_latent=q_latent, q_rope=q_rope, starts=starts, pages=pages.table)
    check_dtype("q_latent", q_latent, *DTYPES)
    check_dtype("q_rope", q_rope, *DTYPES)
    check_shape("q_latent", q_latent, None, None, pages.width)
    check_shape("q_rope", q_rope, *q_latent.shape[:2], pages.rope.shape[2])
    check_starts(starts, pages)


@op(check=_check_turboquant_latent_attention)
def turboquant_latent_partials(
    q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `turboquant_latent_attention` without the final division and rotation.

    returns  (o [T * H, 1, C], m [T * H, 1], l [T * H, 1]), float32, one block for `merge_partials`
    """
    rotated, rotated_keys = rotate.reference(q_latent.float(), pages.seed), q_rope.float()
    o = torch.zeros_like(rotated)
    m, l = o.new_full(o.shape[:2], -torch.inf), o.new_zeros(o.shape[:2])  # noqa: E741
    for b, start, new, _, length in pages.spans(starts, q_latent.shape[0], reach=None):
        mine, query_positions = slice(start, start + new), torch.arange(length - new, length, device=o.device)[:, None]
        scores, values, seen = [], [], []
        for positions, latents, norms, full_precision in _latents(pages, b, new, length):
            page, slot = pages.rows_of(b, int(positions[0]), int(positions[-1]) + 1)
            score = torch.einsum("nhc,tc->hnt", rotated[mine], latents) * norms
            scores.append((score + torch.einsum("nhr,tr->hnt", rotated_keys[mine], pages.rope[page, slot].float())) * scale)
            values.append(latents * norms[:, None])
            visible = positions <= query_positions
            seen.append(
                visible
                if pages.full_precision is None
                else visible & (pages.full_precision.covers(query_positions, positions) == full_precision)
            )
        found = weigh(torch.cat(scores, -1), torch.cat(values), torch.cat(seen, -1))
        o[mine], highest, total = (part.transpose(0, 1) for part in found)
        m[mine], l[mine] = highest.squeeze(-1), total.squeeze(-1)
    return tuple(part.flatten(0, 1).unsqueeze(1) for part in (o, m, l))  # type: ignore[return-value]


@op(check=_check_turboquant_latent_attention)
def turboquant_latent_attention(
    q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attend with absorbed queries to quantized latents, at each query's position and before it.

    q_latent [T, H, C]  not rotated; from `latent_query`
    q_rope   [T, H, R]
    starts   [B + 1]    int32
    sinks    [H]        float32; unscaled logit of one more key whose value is 0
    returns  [T, H, C]  in q_latent's dtype, for `latent_output`
    """
    found = turboquant_latent_partials.reference(q_latent, q_rope, pages, starts, scale)
    out = with_sinks(found, sinks).view_as(q_latent)
    return rotate.reference(out, pages.seed, inverse=True).to(q_latent.dtype)


def _latents(pages: LatentCodes, b: int, new: int, length: int) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
    """Yield positions of a sequence, their rotated latents and norms, and whether they are in full precision."""
    page, slot = pages.rows_of(b, 0, length)
    book = codebook(pages.bits, pages.width, page.device, pages.book)
    levels = book[unpack(pages.codes[page, slot], pages.bits, pages.width)]  # t, C
    yield torch.arange(length, device=page.device), levels, pages.norms[page, slot], False
    if (full_precision := pages.full_precision) is None:
        return
    near = max(full_precision.sink_tokens, length - new - full_precision.recent_window + 1)
    for region, first, last in (
        (full_precision.head, 0, min(full_precision.sink_tokens, length)),
        (full_precision.recent, near, length),
    ):
        if region is not None and first < last:
            page, slot = region.rows_of(b, first, last)
            rows = region.rows[page, slot].float()
            yield torch.arange(first, last, device=page.device), rows, torch.ones(len(rows), device=page.device), True
