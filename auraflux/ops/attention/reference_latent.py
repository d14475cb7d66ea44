"""Latent attention (MLA) in absorbed form: queries are projected into the latent space, and the results back."""

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_heads, check_shape, op
from auraflux.ops.attention.pages import DTYPES, LatentPages, check_starts, rows_of, spans
from auraflux.ops.attention.softmax import mean, visible, weigh
from auraflux.ops.norm.reference import rms_norm
from auraflux.ops.rope.reference import check_rope, rope
from auraflux.quant import QTensor

Weight = Tensor | QTensor


def _check_append_latent(latent: Tensor, k_rope: Tensor, pages: LatentPages, starts: Tensor) -> None:
    check_dense(latent=latent, k_rope=k_rope, pages=pages.latent, starts=starts)
    check_shape("latent", latent, None, pages.latent.shape[2])
    check_shape("k_rope", k_rope, latent.shape[0], pages.rope.shape[2])
    check_dtype("latent", latent, *DTYPES)
    check_dtype("k_rope", k_rope, *DTYPES)
    check_starts(starts, pages)


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


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Check that queries [T, H, C] have a sink per head, or none."""
    if sinks is not None:
        check_dense(q=q, sinks=sinks)
        check_shape("sinks", sinks, q.shape[1])
        check_dtype("sinks", sinks, torch.float32)


def _check_latent_attention(
    q_latent: Tensor, q_rope: Tensor, pages: LatentPages, starts: Tensor, scale: float, sinks: Tensor | None = None
) -> None:
    check_dense(q_latent=q_latent, q_rope=q_rope, pages=pages.latent, starts=starts)
    check_sinks(sinks, q_latent)
    check_shape("q_latent", q_latent, None, None, pages.latent.shape[2])
    check_shape("q_rope", q_rope, *q_latent.shape[:2], pages.rope.shape[2])
    check_dtype("q_latent", q_latent, *DTYPES)
    check_dtype("q_rope", q_rope, *DTYPES)
    check_starts(starts, pages)


@op(check=_check_latent_attention)
def latent_partials(
    q_latent: Tensor, q_rope: Tensor, pages: LatentPages, starts: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `latent_attention` without the final division, see `attention_partials`.

    returns  (o [T * H, 1, C], m [T * H, 1], l [T * H, 1]), float32, a block for `merge_partials`
    """
    o = torch.zeros_like(q_latent, dtype=torch.float32)
    m, l = o.new_full(o.shape[:2], -torch.inf), o.new_zeros(o.shape[:2])  # noqa: E741
    for b, start, new, first, length in spans(pages, starts, q_latent.shape[0], None):
        page, slot = rows_of(pages, b, first, length)
        latent, rope = pages.latent[page, slot].float(), pages.rope[page, slot].float()
        mine = slice(start, start + new)
        scores = torch.einsum("nhc,tc->hnt", q_latent[mine].float(), latent)
        scores = (scores + torch.einsum("nhr,tr->hnt", q_rope[mine].float(), rope)) * scale
        found = weigh(scores, latent, visible(new, length, first, length, None, latent.device))
        o[mine], highest, total = (part.transpose(0, 1) for part in found)
        m[mine], l[mine] = highest.squeeze(-1), total.squeeze(-1)
    return tuple(part.flatten(0, 1).unsqueeze(1) for part in (o, m, l))  # type: ignore[return-value]


@op(origins=("mla_sdpa_folded", "mla_sdpa_tile_accumulate", "mla_sdpa_tile_finalize"), check=_check_latent_attention)
def latent_attention(
    q_latent: Tensor, q_rope: Tensor, pages: LatentPages, starts: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attend with absorbed queries to the latents, at each query's position and before it.

    q_latent [T, H, C]  from `latent_query`
    q_rope   [T, H, R]
    starts   [B + 1]    int32
    sinks    [H]        float32; unscaled logit of one more key whose value is 0
    returns  [T, H, C]  in q_latent's dtype, for `latent_output`
    """
    found = latent_partials.reference(q_latent, q_rope, pages, starts, scale)
    return with_sinks(found, sinks).view_as(q_latent).to(q_latent.dtype)


def with_sinks(partials: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None) -> Tensor:
    """Divide partials of one block by their sums of weights, each with that of the head's sink: [T * H, C]."""
    o, m, total = partials
    if sinks is not None:
        total = total + torch.exp(sinks.repeat(len(o) // len(sinks))[:, None] - m)
    return mean(o.squeeze(1), total)


def _check_latent_query(q_nope: Tensor, weight: Weight, rows: int) -> None:
    check_shape("q_nope", q_nope, None, None, None)
    _check_latent_weight("q_nope", q_nope, weight)
    _, heads, nope = q_nope.shape
    if weight.shape[0] != heads * rows or not nope <= rows:
        raise InputError(
            f"the weight has {weight.shape[0]} rows; {heads} heads of {rows} rows, the first {nope} for keys, do not fit."
        )


def _check_latent_weight(name: str, x: Tensor, weight: Weight) -> None:
    check_heads(name, x)
    # with strided heads, a single head is dense
    check_dense(**{name: x if x.is_contiguous() else x[:1, :1], "weight": weight})
    check_dtype(name, x, *DTYPES)
    if len(weight.shape) != 2:
        raise InputError(f"the weight has shape {list(weight.shape)}; a matrix is needed.")
    if not isinstance(weight, QTensor):
        check_dtype("weight", weight, *DTYPES)


def _matrix(weight: Weight) -> Tensor:
    return weight.dequantize(torch.float32) if isinstance(weight, QTensor) else weight.float()


@op(origins=("mla_q_prime_4bit",), check=_check_latent_query)
def latent_query(q_nope: Tensor, weight: Weight, rows: int) -> Tensor:
    """Project queries into the latent space with the key rows of each head in `kv_b_proj`.

    q_nope  [T, H, N]      its heads may be strided
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
    """Project attended latents to each head's values with its value rows in `kv_b_proj`.

    v       [T, H, C]  from `latent_attention`; its heads may be strided
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
    if q.shape[1] % heads or nope < 0 or not 0 < rope < kv.shape[1]:
        raise InputError(
            f"q is {q.shape[1]} wide, kv {kv.shape[1]}: {heads} heads of {nope} and their rotated part do not fit."
        )


@op(origins=("mla_split_q_kv",), check=_check_split_latent)
def split_latent(q: Tensor, kv: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the projections of latent attention.

    q       [T, heads * (nope + R)]  per head the nope part, then the part to rotate
    kv      [T, C + R]               the latent, then the key to rotate
    returns ([T, heads, nope], [T, heads, R], [T, C], [T, R]), each contiguous
    """
    q = q.unflatten(1, (heads, -1))
    rope = q.shape[2] - nope
    parts = (q[..., :nope], q[..., nope:], kv[:, :-rope], kv[:, -rope:])
    return tuple(part.contiguous() for part in parts)  # type: ignore[return-value]


def check_rope_append_latent(
    q: Tensor, kv: Tensor, heads: int, nope: int, norm: Tensor, inv_freq: Tensor, positions: Tensor, width: int, rope: int
) -> None:
    """Check arguments against pages of `width` latent and `rope` key channels."""
    _check_split_latent(q, kv, heads, nope)
    check_dense(q=q, norm=norm, inv_freq=inv_freq, positions=positions)
    check_dtype("q", q, *DTYPES)
    check_dtype("kv", kv, q.dtype)
    check_shape("kv", kv, None, width + rope)
    check_shape("norm", norm, width)
    check_shape("q", q, None, heads * (nope + rope))
    check_rope(q.unflatten(1, (heads, -1))[..., nope:], inv_freq, positions)


def _check_rope_append_latent(
    q: Tensor, kv: Tensor, heads: int, nope: int, pages: LatentPages, starts: Tensor, norm: Tensor, eps: float,
    inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False,
) -> None:  # fmt: skip
    sizes = pages.latent.shape[2], pages.rope.shape[2]
    check_rope_append_latent(q, kv, heads, nope, norm, inv_freq, positions, *sizes)
    check_dense(q=q, pages=pages.latent, starts=starts)
    check_starts(starts, pages)


@op(check=_check_rope_append_latent)
def rope_append_latent(
    q: Tensor, kv: Tensor, heads: int, nope: int, pages: LatentPages, starts: Tensor, norm: Tensor, eps: float,
    inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Split the projections of latent attention, normalise latents, rotate queries and keys, and append to the cache.

    q, kv, heads, nope                       see `split_latent`
    pages, starts                            see `append_latent`
    norm, eps                                of the latents, see `rms_norm`
    inv_freq, positions, mscale, interleaved  see `rope`
    returns ([T, heads, nope], [T, heads, R])  the queries' nope part, whose heads may be strided, and the rotated one
    """
    q_nope, q_rope, latent, k_rope = split_latent.reference(q, kv, heads, nope)
    rotation = inv_freq, positions, mscale, interleaved
    rotated = rope.reference(k_rope[:, None], *rotation)[:, 0].contiguous()
    append_latent.reference(rms_norm.reference(latent, norm, eps), rotated, pages, starts)
    return q_nope, rope.reference(q_rope, *rotation)
