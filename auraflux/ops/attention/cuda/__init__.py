"""Attention on CUDA. Plain Triton serves everything: `flash`, `flash_paged`, `mla_products`.

On Hopper Gluon serves what it can faster: few tokens in `decode`, many in `prefill`; latents in
`mla_columns` for few heads and in `mla_rows` for many.
"""

import torch
from torch import Tensor

from auraflux.ops.attention.cuda.append import append_rows, split_rows
from auraflux.ops.attention.cuda.builds import KERNELS
from auraflux.ops.attention.cuda.decode import attend_decode, fits_decode
from auraflux.ops.attention.cuda.flash import EVERYTHING, Parts, launch_merge, narrow, parts_like, shape_for
from auraflux.ops.attention.cuda.flash_paged import attend_pages
from auraflux.ops.attention.cuda.mla_columns import MOST_COLUMNS, attend_columns
from auraflux.ops.attention.cuda.mla_products import latent_output, latent_query
from auraflux.ops.attention.cuda.mla_rope_append import append_turned_latent, fits_turned
from auraflux.ops.attention.cuda.mla_rows import attend_rows, fits_latent
from auraflux.ops.attention.cuda.prefill import attend_prefill, fits_prefill
from auraflux.ops.attention.pages import KVPages, LatentPages, Pages
from auraflux.ops.hopper.device import ready
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.norm.cuda import rms_norm
from auraflux.ops.rope.cuda import rope

__all__ = [
    "KERNELS",
    "append_kv",
    "append_latent",
    "attention",
    "attention_partials",
    "latent_attention",
    "latent_output",
    "latent_query",
    "merge_partials",
    "rope_append_latent",
    "split_latent",
]


def attention(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    out = torch.empty(*q.shape[:2], pages.v.shape[3], dtype=q.dtype, device=q.device)
    if out.numel() and fits_decode(q, pages):
        attend_decode(q, pages, starts, scale, window, sinks, softcap, out)
    elif out.numel() and fits_prefill(q, pages, scale):
        attend_prefill(q, pages, starts, scale, window, sinks, softcap, out)
    else:
        _attend(q, None, (pages.k, pages.v), pages, starts, scale, out, window, sinks, softcap)
    return out


def attention_partials(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Parts:
    out = parts_like(q.shape[0] * q.shape[1], 1, pages.v.shape[3], q.device)
    _attend(q, None, (pages.k, pages.v), pages, starts, scale, out, window, sinks, softcap)
    return out


def latent_attention(q_latent: Tensor, q_rope: Tensor, pages: LatentPages, starts: Tensor, scale: float) -> Tensor:
    out = torch.empty_like(q_latent)
    if out.numel() and fits_latent(q_latent, q_rope, pages):
        attend = attend_columns if q_latent.shape[1] <= MOST_COLUMNS else attend_rows
        attend(q_latent, q_rope, pages, starts, scale, out)
    else:
        _attend(q_latent, q_rope, (pages.latent, pages.rope), pages, starts, scale, out)
    return out


def _attend(
    q: Tensor,
    q_rope: Tensor | None,
    pools: tuple[Tensor, Tensor],
    pages: Pages,
    starts: Tensor,
    scale: float,
    out: Tensor | Parts,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    """Attend with products in 16 bits where all operands have the same 16, into results or into parts of one block."""
    ready(q)
    (tokens, heads, width), (a, b), latent = q.shape, pools, q_rope is not None
    key_heads = 1 if latent else a.shape[1]
    result = width if latent else b.shape[-1]
    if not tokens * heads * result:
        return
    wide = not narrow(q, *pools, q if q_rope is None else q_rope)
    sequences, table_width = pages.table.shape
    (pool, page), group = pages.pool, heads // key_heads
    padded = max(16, power_of_two(width)), max(16, power_of_two(b.shape[-1]))
    widths = sum(padded), padded[0] if latent else padded[1]
    # with more rows Triton 3.6 gave wrong sums where a tile is key and value at once
    cut = shape_for(tokens, sequences, group, key_heads, widths, wide, table_width * page, q.device, 32 if latent else 128)
    whole = cut.splits == 1 and isinstance(out, Tensor)
    parts = None if whole else parts_like(tokens * heads, cut.splits, result, q.device)
    attend_pages[(cut.tiles, key_heads, cut.splits)](
        q,
        q_rope,
        a,
        b,
        pages.table,
        pages.lengths,
        starts,
        sinks,
        out if whole else None,
        *(parts or (None,) * 3),
        scale,
        softcap or 1.0,
        EVERYTHING if window is None else window,
        sequences,
        heads,
        table_width,
        pool,
        cut.splits,
        G=group,
        HEADS=key_heads,
        D=width,
        DV=b.shape[-1],
        PAGE=page,
        M=cut.rows,
        N=cut.keys,
        P=padded[0],
        PV=padded[1],
        S=power_of_two(sequences),
        WIDE=wide,
        LATENT=latent,
        SOFTCAP=softcap is not None,
        ALIGNED=page % cut.keys == 0,
        WHOLE=whole,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    if parts is not None:
        launch_merge(parts, sinks, out, heads)


def append_kv(k: Tensor, v: Tensor, pages: KVPages, starts: Tensor) -> None:
    _append([(k, pages.k), (v, pages.v)], pages, starts, k.shape[1])


def append_latent(latent: Tensor, k_rope: Tensor, pages: LatentPages, starts: Tensor) -> None:
    _append([(latent, pages.latent), (k_rope, pages.rope)], pages, starts, 1)


def _append(sides: list[tuple[Tensor, Tensor]], pages: Pages, starts: Tensor, heads: int) -> None:
    (a, pool_a), (b, pool_b) = sides
    ready(a)
    tokens, (sequences, table_width), (pool, page) = a.shape[0], pages.table.shape, pages.pool
    if not tokens * heads:
        return
    wider = max(a.shape[-1], b.shape[-1])
    append_rows[(tokens, heads)](
        a,
        b,
        pool_a,
        pool_b,
        pages.table,
        pages.lengths,
        starts,
        sequences,
        table_width,
        pool,
        HEADS=heads,
        A=a.shape[-1],
        B=b.shape[-1],
        PAGE=page,
        P=power_of_two(wider),
        S=power_of_two(sequences),
        num_warps=1 if wider <= 256 else 4,
    )


def merge_partials(o: Tensor, m: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    ready(o)
    out = o.new_empty(o.shape[0], o.shape[2])
    if not o.shape[1]:
        return out.zero_()
    if out.numel():
        launch_merge((o, m, l), None, out, 1)
    return out


def split_latent(q: Tensor, kv: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ready(q)
    tokens, rope = q.shape[0], q.shape[1] // heads - nope
    latent = kv.shape[1] - rope
    parts = (
        q.new_empty(tokens, heads, nope),
        q.new_empty(tokens, heads, rope),
        kv.new_empty(tokens, latent),
        kv.new_empty(tokens, rope),
    )
    if tokens:
        wider, block = max(q.shape[1], kv.shape[1]), 1024
        sizes = {"HEADS": heads, "NOPE": nope, "ROPE": rope, "LATENT": latent, "BLOCK": block}
        split_rows[(tokens, cdiv(wider, block))](q, kv, *parts, **sizes)
    return parts


def rope_append_latent(
    q: Tensor, kv: Tensor, heads: int, nope: int, pages: LatentPages, starts: Tensor, norm: Tensor, eps: float,
    inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ready(q)
    turning = inv_freq, positions, mscale, interleaved
    if fits_turned(q, heads, nope, inv_freq):
        return append_turned_latent(q, kv, heads, nope, pages, starts, norm, eps, turning)
    q_nope, q_rope, latent, k_rope = split_latent(q, kv, heads, nope)
    append_latent(rms_norm(latent, norm, eps), rope(k_rope[:, None], *turning)[:, 0], pages, starts)
    return q_nope, rope(q_rope, *turning)
