"""Attention over paged caches: grouped heads with window, sinks and softcap. Latent attention (MLA) is in `reference_latent`,
token selection for sparse attention in `reference_token_selection`.

The tokens of all sequences of a batch are stacked in one axis T; sequence b has those from starts[b] to starts[b + 1]. They are
its last: the i-th of n is at position lengths[b] - n + i. Scores, softmax and sums are float32.
"""

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.attention.pages import DTYPES, KVPages, check_starts, rows_of, spans
from auraflux.ops.attention.reference_latent import (
    append_latent,
    latent_attention,
    latent_output,
    latent_partials,
    latent_query,
    rope_append_latent,
    split_latent,
)
from auraflux.ops.attention.reference_token_selection import append_keys, choose_positions
from auraflux.ops.attention.softmax import mean, visible, weigh

__all__ = [
    "append_keys",
    "append_kv",
    "append_latent",
    "attention",
    "attention_partials",
    "choose_positions",
    "latent_attention",
    "latent_output",
    "latent_partials",
    "latent_query",
    "merge_partials",
    "rope_append_latent",
    "split_latent",
]


def _check_append_kv(k: Tensor, v: Tensor, pages: KVPages, starts: Tensor) -> None:
    check_dense(k=k, v=v, pages=pages.k, starts=starts)
    _, heads, _, width = pages.k.shape
    check_shape("k", k, None, heads, width)
    check_shape("v", v, k.shape[0], heads, pages.v.shape[3])
    check_dtype("k", k, *DTYPES)
    check_dtype("v", v, *DTYPES)
    check_starts(starts, pages)


@op(origins=("kv_cache_append_n_tokens",), check=_check_append_kv)
def append_kv(k: Tensor, v: Tensor, pages: KVPages, starts: Tensor) -> None:
    """Write new keys and values to the last positions of their sequences.

    k       [T, Hkv, D]
    v       [T, Hkv, Dv]
    pages   updated in place; its lengths count the new tokens already
    starts  [B + 1]       int32
    """
    for b, start, new, first, length in spans(pages, starts, k.shape[0], 0):
        page, slot = rows_of(pages, b, first, length)
        pages.k[page, :, slot] = k[start : start + new].to(pages.k.dtype)
        pages.v[page, :, slot] = v[start : start + new].to(pages.v.dtype)


def check_window(window: int | None) -> None:
    """Check that a window is a number of positions or None."""
    if window is not None and not 0 <= window < 1 << 63:
        raise InputError(f"'window' is {window}; it must be a number of positions below 2**63, or None.")


def check_ends(ends: Tensor | None, tokens: int) -> None:
    """Check that there is an end for each token, or None."""
    if ends is not None:
        check_shape("ends", ends, tokens)
        check_dtype("ends", ends, torch.int32)


def _check_attention(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    ends: Tensor | None = None,
) -> None:
    check_dense(q=q, pages=pages.k, starts=starts, sinks=sinks, ends=ends)
    _, heads, _, width = pages.k.shape
    check_shape("q", q, None, None, width)
    check_dtype("q", q, *DTYPES)
    check_starts(starts, pages)
    if q.shape[1] % heads:
        raise InputError(f"q has {q.shape[1]} heads, the cache {heads}; the number of query heads must be a multiple.")
    if sinks is not None:
        check_shape("sinks", sinks, q.shape[1])
        check_dtype("sinks", sinks, torch.float32)
    check_window(window)
    check_ends(ends, len(q))
    if softcap is not None and not softcap > 0:
        raise InputError(f"softcap is {softcap}; it must be positive, or None.")


@op(check=_check_attention)
def attention_partials(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `attention` without the final division; merged with the partials of other keys it is attention over all of them.

    q, starts, scale, window, sinks, softcap  as for `attention`; of several calls for the same queries one gets the sinks
    returns  (o [T * Hq, 1, Dv], m [T * Hq, 1], l [T * Hq, 1]), float32, a block for `merge_partials`

    Where nothing is visible o = 0, m = -inf, l = 0; with sinks m = sink, l = 1.
    """
    return _partials(q, pages, starts, scale, window, sinks, softcap)


def _partials(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, groups = pages.k.shape[1], q.shape[1] // pages.k.shape[1]
    o = q.new_zeros(*q.shape[:2], pages.v.shape[3], dtype=torch.float32)
    m, l = o.new_full(q.shape[:2], -torch.inf), o.new_zeros(q.shape[:2])  # noqa: E741
    lookback = None if window is None else max(window - 1, 0)
    for b, start, new, first, length in spans(pages, starts, q.shape[0], lookback):
        page, slot = rows_of(pages, b, first, length)
        k, v = pages.k[page, :, slot].float(), pages.v[page, :, slot].float()  # [L, Hkv, D]
        mine = slice(start, start + new)
        queries = q[mine].float().unflatten(1, (heads, groups)) * scale
        scores = torch.einsum("nhgd,thd->hgnt", queries, k)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = visible(new, length, first, length, window, q.device, None if ends is None else ends[mine])
        sink = None if sinks is None else sinks.view(heads, groups, 1, 1)
        found = weigh(scores, v.transpose(0, 1)[:, None], seen, sink)
        o[mine], highest, total = (part.permute(2, 0, 1, 3).flatten(1, 2) for part in found)
        m[mine], l[mine] = highest.squeeze(-1), total.squeeze(-1)
    return tuple(part.flatten(0, 1).unsqueeze(1) for part in (o, m, l))  # type: ignore[return-value]


@op(origins=("attn_scores_batched", "attn_softmax_batched", "attn_values_batched"), check=_check_attention)
def attention(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """Attend from each query to the keys at its position and before it.

    q        [T, Hq, D]   Hq a multiple of Hkv; query heads [h*Hq/Hkv, (h+1)*Hq/Hkv) use key head h
    starts   [B + 1]      int32
    window   a query at p sees only positions above p - window
    sinks    [Hq]         float32; unscaled logit of one more key whose value is 0
    softcap  cap scores: softcap * tanh(score / softcap)
    ends     [T]          int32; a query sees positions before this one, and those after its own in spite of a window. Not
                          beyond its sequence
    returns  [T, Hq, Dv]  in q's dtype; zeros where nothing is visible
    """
    o, _, l = _partials(q, pages, starts, scale, window, sinks, softcap, ends)  # noqa: E741
    return mean(o.squeeze(1), l).view(*q.shape[:2], pages.v.shape[3]).to(q.dtype)


def _check_merge_partials(o: Tensor, m: Tensor, l: Tensor) -> None:  # noqa: E741
    check_dense(o=o, m=m, l=l)
    check_shape("o", o, None, None, None)
    for name, tensor in (("m", m), ("l", l)):
        check_shape(name, tensor, *o.shape[:2])
        check_dtype(name, tensor, torch.float32)
    check_dtype("o", o, torch.float32)
    if not o.shape[1]:
        raise InputError(f"'o' has shape {list(o.shape)}; at least one block is needed.")


@op(
    origins=(
        "aura_flash_pass2_d64",
        "aura_flash_pass2_d80",
        "aura_flash_pass2_d96",
        "aura_flash_pass2_d128",
        "aura_flash_pass2_d256",
        "aura_flash_pass2_d512",
        "flash_attn_vec_tq_reduce",
    ),
    check=_check_merge_partials,
)
def merge_partials(o: Tensor, m: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    """Merge partial attention over blocks of keys into the attention over all of them.

    o       [N, blocks, D]  float32, sums of exp(score - m) * value
    m       [N, blocks]     float32, each block's largest score
    l       [N, blocks]     float32, sums of exp(score - m); 0 for a block without visible keys, whose o and m are ignored
    returns [N, D]          float32; zeros where no block has visible keys
    """
    live = l != 0
    peak = m.masked_fill(~live, -torch.inf).amax(1, keepdim=True)
    weight = torch.exp(m - peak).masked_fill(~live, 0)
    total = (weight * l).sum(1, keepdim=True)
    mixed = (weight[..., None] * o).masked_fill(~live[..., None], 0).sum(1)
    return (mixed / total).masked_fill(~live.any(1, keepdim=True), 0)
