"""Attention on CUDA; `routes.py` selects the kernels."""

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined, is_invariant
from auraflux.ops.attention.cuda.append import append_rows, split_rows
from auraflux.ops.attention.cuda.flash_paged import attend
from auraflux.ops.attention.cuda.mla_rope_append import not_fused, rope_append
from auraflux.ops.attention.cuda.routes import ATTENTION, HEAD_PRODUCTS, LATENT, Attend, AttendLatent, HeadProducts
from auraflux.ops.attention.pages import KVPages, LatentPages, Pages, causal_only
from auraflux.ops.gpu.blocks.flash import RecentKeys
from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.gpu.blocks.softmax import Partials, empty_partials, launch_merge
from auraflux.ops.gpu.device import ready
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.norm.cuda import rms_norm
from auraflux.ops.rope.cuda import rope
from auraflux.quant import QTensor

__all__ = [
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
    ends: Tensor | None = None,
    recent: RecentKeys | None = None,
) -> Tensor:
    causal_only(ends)
    out = torch.empty(*q.shape[:2], pages.v.shape[3], dtype=q.dtype, device=q.device)
    ATTENTION(Attend(q, pages, starts, scale, window, sinks, softcap, out, recent))
    return out


def attention_partials(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Partials:
    if is_invariant():
        raise Declined("the split of keys depends on the number of tokens")
    out = empty_partials(q.shape[0] * q.shape[1], 1, pages.v.shape[3], q.device)
    attend(q, None, (pages.k, pages.v), pages, starts, scale, out, window, sinks, softcap)
    return out


def latent_attention(
    q_latent: Tensor, q_rope: Tensor, pages: LatentPages, starts: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    out = torch.empty_like(q_latent)
    LATENT(AttendLatent(q_latent, q_rope, pages, starts, scale, out, sinks))
    return out


def latent_query(q_nope: Tensor, weight: Tensor | QTensor, rows: int) -> Tensor:
    ready(q_nope)
    tokens, heads, nope = q_nope.shape
    out = torch.empty(tokens, heads, weight.shape[1], dtype=q_nope.dtype, device=q_nope.device)
    HEAD_PRODUCTS(HeadProducts(q_nope, weight, rows, 0, nope, True, out))
    return out


def latent_output(v: Tensor, weight: Tensor | QTensor, nope: int) -> Tensor:
    ready(v)
    tokens, heads, _ = v.shape
    rows = weight.shape[0] // heads
    out = torch.empty(tokens, heads, rows - nope, dtype=v.dtype, device=v.device)
    HEAD_PRODUCTS(HeadProducts(v, weight, rows, nope, rows - nope, False, out))
    return out


def append_kv(k: Tensor, v: Tensor, pages: KVPages, starts: Tensor) -> None:
    _append([(k, pages.k), (v, pages.v)], pages, starts, k.shape[1])


def append_latent(latent: Tensor, k_rope: Tensor, pages: LatentPages, starts: Tensor) -> None:
    _append([(latent, pages.latent), (k_rope, pages.rope)], pages, starts, 1)


def _append(sides: list[tuple[Tensor, Tensor]], pages: Pages, starts: Tensor, heads: int) -> None:
    (a, pool_a), (b, pool_b) = sides
    ready(a)
    tokens, sequences, page = a.shape[0], len(pages.lengths), pages.pool[1]
    if not tokens * heads:
        return
    wider = max(a.shape[-1], b.shape[-1])
    launch(append_rows, (tokens, heads))(
        a,
        b,
        pool_a,
        pool_b,
        index_of(pages, starts),
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
        launch_merge(Partials(o, m, l), None, out, 1)
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
        launch(split_rows, (tokens, cdiv(wider, block)))(q, kv, *parts, **sizes)
    return parts


def rope_append_latent(
    q: Tensor, kv: Tensor, heads: int, nope: int, pages: LatentPages, starts: Tensor, norm: Tensor, eps: float,
    inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ready(q)
    rotation = inv_freq, positions, mscale, interleaved
    if not_fused(q, heads, nope, inv_freq) is None:
        return rope_append(q, kv, heads, nope, pages, starts, norm, eps, rotation)
    q_nope, q_rope, latent, k_rope = split_latent(q, kv, heads, nope)
    append_latent(rms_norm(latent, norm, eps), rope(k_rope[:, None], *rotation)[:, 0], pages, starts)
    return q_nope, rope(q_rope, *rotation)
