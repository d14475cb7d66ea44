"""Attention over paged caches: grouped heads with window, sinks and softcap, and the absorbed form of latent attention.

The tokens of all sequences of a batch are stacked in one axis T; sequence b has those from starts[b] to starts[b + 1]. They are
its last: the i-th of n stands at position lengths[b] - n + i. Scores, softmax and sums are float32.
"""

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.attention.pages import DTYPES, KVPages, LatentPages, rows_of, spans
from auraflux.quant import QTensor

Weight = Tensor | QTensor


def _check_starts(starts: Tensor, pages: KVPages | LatentPages) -> None:
    check_dtype("starts", starts, torch.int32)
    check_shape("starts", starts, pages.lengths.shape[0] + 1)


def _check_append_kv(k: Tensor, v: Tensor, pages: KVPages, starts: Tensor) -> None:
    check_dense(k=k, v=v, pages=pages.k, starts=starts)
    _, heads, _, width = pages.k.shape
    check_shape("k", k, None, heads, width)
    check_shape("v", v, k.shape[0], heads, pages.v.shape[3])
    check_dtype("k", k, *DTYPES)
    check_dtype("v", v, *DTYPES)
    _check_starts(starts, pages)


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


def _check_attention(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    check_dense(q=q, pages=pages.k, starts=starts, sinks=sinks)
    _, heads, _, width = pages.k.shape
    check_shape("q", q, None, None, width)
    check_dtype("q", q, *DTYPES)
    _check_starts(starts, pages)
    if q.shape[1] % heads:
        raise InputError(f"q has {q.shape[1]} heads, the cache {heads}: the first must be a multiple of the second.")
    if sinks is not None:
        check_shape("sinks", sinks, q.shape[1])
        check_dtype("sinks", sinks, torch.float32)
    if window is not None and window < 0:
        raise InputError(f"window is {window}; it may be 0, a number of positions, or None for all.")
    if softcap is not None and not softcap > 0:
        raise InputError(f"softcap is {softcap}; it must be positive, or None.")


@op(origins=("attn_scores_batched", "attn_softmax_batched", "attn_values_batched"), check=_check_attention)
def attention(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from each query to the keys at its position and before it.

    q        [T, Hq, D]   Hq a multiple of Hkv; query heads [h*Hq/Hkv, (h+1)*Hq/Hkv) use key head h
    starts   [B + 1]      int32
    window   a query at p sees only positions above p - window
    sinks    [Hq]         float32; the logit, not scaled, of one more key whose value is 0
    softcap  squash scores to softcap * tanh(score / softcap)
    returns  [T, Hq, Dv]  in q's dtype; zeros where nothing is visible
    """
    heads, groups = pages.k.shape[1], q.shape[1] // pages.k.shape[1]
    out = q.new_zeros(*q.shape[:2], pages.v.shape[3])
    reach = None if window is None else max(window - 1, 0)
    for b, start, new, first, length in spans(pages, starts, q.shape[0], reach):
        page, slot = rows_of(pages, b, first, length)
        k, v = pages.k[page, :, slot].float(), pages.v[page, :, slot].float()  # [L, Hkv, D]
        queries = q[start : start + new].float().unflatten(1, (heads, groups)) * scale
        scores = torch.einsum("nhgd,thd->hgnt", queries, k)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = _visible(new, first, length, window, q.device)
        sink = None if sinks is None else sinks.view(heads, groups, 1, 1)
        found = _attend(scores, v.transpose(0, 1)[:, None], visible, sink)
        out[start : start + new] = found.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out


def _visible(new: int, first: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Which of the positions [first, length) each of the last `new` queries sees: [new, length - first]."""
    position = torch.arange(length - new, length, device=device)[:, None]
    key = torch.arange(first, length, device=device)
    seen = key <= position
    return seen if window is None else seen & (key > position - window)


def _attend(scores: Tensor, values: Tensor, visible: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax over the visible keys, and the values so weighted: [.., n, L], [.., L, D], [n, L], [.., 1, 1] -> [.., n, D]."""
    scores = scores.masked_fill(~visible, -torch.inf)
    lowest = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    peak = torch.cat([scores, lowest if sink is None else sink.expand_as(lowest)], -1).amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == -torch.inf, 0)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - peak)
    if torch.isfinite(values).all():
        mixed = weights @ values
    else:
        # a weight of 0 times NaN is NaN: a value that a query does not see must not reach it
        mixed = (weights[..., None] * values[..., None, :, :]).masked_fill(~visible[..., None], 0).sum(-2)
    return (mixed / total).masked_fill(total == 0, 0)


def _check_merge_partials(o: Tensor, m: Tensor, l: Tensor) -> None:  # noqa: E741
    check_dense(o=o, m=m, l=l)
    check_shape("o", o, None, None, None)
    for name, tensor in (("m", m), ("l", l)):
        check_shape(name, tensor, *o.shape[:2])
        check_dtype(name, tensor, torch.float32)
    check_dtype("o", o, torch.float32)


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
    """Join what blocks of keys gave for the same query into the attention over all of them.

    o       [N, blocks, D]  float32, sums of exp(score - m) * value
    m       [N, blocks]     float32, each block's largest score
    l       [N, blocks]     float32, sums of exp(score - m); 0 for a block that saw nothing, whose o and m are not looked at
    returns [N, D]          float32; zeros where no block saw anything
    """
    live = l != 0
    peak = m.masked_fill(~live, -torch.inf).amax(1, keepdim=True)
    weight = torch.exp(m - peak).masked_fill(~live, 0)
    total = (weight * l).sum(1, keepdim=True)
    mixed = (weight[..., None] * o).masked_fill(~live[..., None], 0).sum(1)
    return (mixed / total).masked_fill(~live.any(1, keepdim=True), 0)


def _check_append_latent(latent: Tensor, k_rope: Tensor, pages: LatentPages, starts: Tensor) -> None:
    check_dense(latent=latent, k_rope=k_rope, pages=pages.latent, starts=starts)
    check_shape("latent", latent, None, pages.latent.shape[2])
    check_shape("k_rope", k_rope, latent.shape[0], pages.rope.shape[2])
    check_dtype("latent", latent, *DTYPES)
    check_dtype("k_rope", k_rope, *DTYPES)
    _check_starts(starts, pages)


@op(origins=("mla_kv_cache_append",), check=_check_append_latent)
def append_latent(latent: Tensor, k_rope: Tensor, pages: LatentPages, starts: Tensor) -> None:
    """Write new latents and rotated keys to the last positions of their sequences.

    latent  [T, C]
    k_rope  [T, R]
    pages   updated in place; its lengths count the new tokens already
    starts  [B + 1]  int32
    """
    for b, start, new, first, length in spans(pages, starts, latent.shape[0], 0):
        page, slot = rows_of(pages, b, first, length)
        pages.latent[page, slot] = latent[start : start + new].to(pages.latent.dtype)
        pages.rope[page, slot] = k_rope[start : start + new].to(pages.rope.dtype)


def _check_latent_attention(q_latent: Tensor, q_rope: Tensor, pages: LatentPages, starts: Tensor, scale: float) -> None:
    check_dense(q_latent=q_latent, q_rope=q_rope, pages=pages.latent, starts=starts)
    check_shape("q_latent", q_latent, None, None, pages.latent.shape[2])
    check_shape("q_rope", q_rope, *q_latent.shape[:2], pages.rope.shape[2])
    check_dtype("q_latent", q_latent, *DTYPES)
    check_dtype("q_rope", q_rope, *DTYPES)
    _check_starts(starts, pages)


@op(origins=("mla_sdpa_folded", "mla_sdpa_tile_accumulate", "mla_sdpa_tile_finalize"), check=_check_latent_attention)
def latent_attention(q_latent: Tensor, q_rope: Tensor, pages: LatentPages, starts: Tensor, scale: float) -> Tensor:
    """Attend with absorbed queries to the latents themselves, at each query's position and before it.

    q_latent [T, H, C]  from `latent_query`
    q_rope   [T, H, R]
    starts   [B + 1]    int32
    returns  [T, H, C]  in q_latent's dtype, for `latent_output`
    """
    out = torch.zeros_like(q_latent)
    for b, start, new, first, length in spans(pages, starts, q_latent.shape[0], None):
        page, slot = rows_of(pages, b, first, length)
        latent, rope = pages.latent[page, slot].float(), pages.rope[page, slot].float()
        mine = slice(start, start + new)
        scores = torch.einsum("nhc,tc->hnt", q_latent[mine].float(), latent)
        scores = (scores + torch.einsum("nhr,tr->hnt", q_rope[mine].float(), rope)) * scale
        found = _attend(scores, latent, _visible(new, first, length, None, latent.device), None)
        out[mine] = found.transpose(0, 1).to(out.dtype)
    return out


def _check_latent_query(q_nope: Tensor, weight: Weight, rows: int) -> None:
    check_shape("q_nope", q_nope, None, None, None)
    _check_latent_weight("q_nope", q_nope, weight)
    _, heads, nope = q_nope.shape
    if weight.shape[0] != heads * rows or not nope <= rows:
        raise InputError(
            f"the weight has {weight.shape[0]} rows; {heads} heads of {rows} rows, the first {nope} for keys, do not fit."
        )


def _check_latent_weight(name: str, x: Tensor, weight: Weight) -> None:
    check_dense(**{name: x, "weight": weight})
    check_dtype(name, x, *DTYPES)
    if len(weight.shape) != 2:
        raise InputError(f"the weight has shape {list(weight.shape)}; a matrix is needed.")


def _matrix(weight: Weight) -> Tensor:
    return weight.dequantize(torch.float32) if isinstance(weight, QTensor) else weight.float()


@op(origins=("mla_q_prime_4bit",), check=_check_latent_query)
def latent_query(q_nope: Tensor, weight: Weight, rows: int) -> Tensor:
    """Carry queries into the latent space: each head's with the key rows of its part of `kv_b_proj`.

    q_nope  [T, H, N]
    weight  [H * rows, C]  dense or quantized; row h*rows + i belongs to coordinate i of head h
    rows    of one head: N for keys, then those for values
    returns [T, H, C]      in q_nope's dtype
    """
    keys = _matrix(weight).unflatten(0, (-1, rows))[:, : q_nope.shape[2]]
    return torch.einsum("thi,hic->thc", q_nope.float(), keys).to(q_nope.dtype).contiguous()


def _check_latent_output(v: Tensor, weight: Weight, nope: int) -> None:
    check_shape("v", v, None, None, weight.shape[-1])
    _check_latent_weight("v", v, weight)
    heads = v.shape[1]
    if weight.shape[0] % heads or not 0 <= nope < weight.shape[0] // heads:
        raise InputError(f"the weight has {weight.shape[0]} rows; {heads} heads with values after {nope} rows do not fit.")


@op(origins=("mla_out_per_head_4bit",), check=_check_latent_output)
def latent_output(v: Tensor, weight: Weight, nope: int) -> Tensor:
    """Bring mixed latents back to each head's values, with the value rows of its part of `kv_b_proj`.

    v       [T, H, C]  from `latent_attention`
    weight  [H * rows, C]  dense or quantized; row h*rows + nope + f gives value f of head h
    returns [T, H, rows - nope]  in v's dtype
    """
    values = _matrix(weight).unflatten(0, (v.shape[1], -1))[:, nope:]
    return torch.einsum("thc,hfc->thf", v.float(), values).to(v.dtype).contiguous()


def _check_split_latent(q: Tensor, kv: Tensor, heads: int, nope: int) -> None:
    check_shape("q", q, None, None)
    check_shape("kv", kv, q.shape[0], None)
    check_dense(q=q, kv=kv)
    rope = q.shape[1] // heads - nope
    if q.shape[1] % heads or not 0 < rope < kv.shape[1]:
        raise InputError(
            f"q is {q.shape[1]} wide, kv {kv.shape[1]}: {heads} heads of {nope} and their rotated part do not fit."
        )


@op(origins=("mla_split_q_kv",), check=_check_split_latent)
def split_latent(q: Tensor, kv: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take the projections of latent attention apart.

    q       [T, heads * (nope + R)]  per head the plain part, then the one to rotate
    kv      [T, C + R]               the latent, then the key to rotate
    returns ([T, heads, nope], [T, heads, R], [T, C], [T, R]), each contiguous
    """
    q = q.unflatten(1, (heads, -1))
    rope = q.shape[2] - nope
    parts = (q[..., :nope], q[..., nope:], kv[:, :-rope], kv[:, -rope:])
    return tuple(part.contiguous() for part in parts)  # type: ignore[return-value]
