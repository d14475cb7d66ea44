"""Attention on CUDA, in Triton: how it computes is in `_flash`, `_flash_pages` and `_latent_flash`."""

import torch
from torch import Tensor

from auraflux.ops._triton import Build, cdiv, power_of_two, ready
from auraflux.ops.attention._flash import EVERYTHING, Parts, join, launch_merge, merge, narrow, parts_like, shape_for
from auraflux.ops.attention._flash_pages import attend_pages
from auraflux.ops.attention._latent_flash import latent_output, latent_products, latent_query
from auraflux.ops.attention._latent_hopper import attend_hopper, fits_hopper, latent_tiles, merge_tiles, tile_layout
from auraflux.ops.attention._rows import append_rows, split_rows
from auraflux.ops.attention.pages import KVPages, LatentPages, Pages

__all__ = [
    "append_kv",
    "append_latent",
    "attention",
    "attention_partials",
    "latent_attention",
    "latent_output",
    "latent_query",
    "merge_partials",
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
    if out.numel() and fits_hopper(q_latent, q_rope, pages):
        attend_hopper(q_latent, q_rope, pages, starts, scale, out)
        return out
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


def _attend_build(kind: str, rows: int, keys: int, whole: bool, latent: bool = False, **options: int) -> Build:
    """Attention over pages of 64: 32 heads of 128 on 8, or 16 heads on one latent of 512 with a rotated key of 64."""
    pointer, sizes = f"*{kind}", "fp32 fp32 i32 i32 i32:16 i32 i32 i32"
    spare = dict.fromkeys(("part_o", "part_m", "part_l") if whole else (), None)
    spare |= {} if whole else {"out": None}
    spare |= {"sinks": None} if latent else {"q_rope": None, "sinks": None}
    shape = {"G": 16, "HEADS": 1, "D": 512, "DV": 64, "P": 512, "PV": 64} if latent else {
        "G": 4, "HEADS": 8, "D": 128, "DV": 128, "P": 128, "PV": 128}  # fmt: skip
    flags = {"WIDE": kind == "fp32", "LATENT": latent, "SOFTCAP": False, "ALIGNED": True, "WHOLE": whole}
    pointers = [pointer] * (4 if latent else 3) + ["*i32"] * 3 + ([pointer] if whole else ["*fp32"] * 3)
    constants = {**spare, **shape, "PAGE": 64, "M": rows, "N": keys, "S": 1, **flags}
    return Build(attend_pages, f"{' '.join(pointers)} {sizes}", constants, kind != "fp32", options)


def _latent_build(whole: bool) -> Build:
    """Heads over one sequence in parts, or over a batch of 32 at once."""
    tiles = (f"tensordesc<bf16[64,{columns}],{tile_layout(columns)!r}>".replace(" ", "") for columns in (512, 64, 512, 64))
    left_out = ("part_o", "part_m", "part_l") if whole else ("out",)
    results, sizes = "*bf16" if whole else "*fp32 *fp32 *fp32", "fp32 i32 i32:16 i32 i32 i32"
    constants = {**dict.fromkeys(left_out, None), "PAGE": 64, "S": 32 if whole else 1}
    types = f"{' '.join(tiles)} *i32 *i32 *i32 {results} {sizes}"
    return Build(latent_tiles, types, constants, hot=True, options={"num_warps": 8})


_MERGED = {"sinks": None, "D": 128, "P": 64, "S": 64, "C": 32}
_ROWS = "*i32 *i32 *i32 i32 i32 i32"
_WEIGHT = {"HEADS": 64, "ROWS": 256, "USED": 128, "C": 512, "BITS": 4, "GROUP": 64, "R": 32, "B": 64, "WIDE": False}
_KV = {"HEADS": 8, "A": 128, "B": 128, "PAGE": 64, "P": 128, "S": 1}

KERNELS = [
    _attend_build("bf16", 16, 64, whole=False, num_warps=4, num_stages=3),
    _attend_build("bf16", 128, 64, whole=True, num_warps=8, num_stages=3),
    _attend_build("fp32", 16, 32, whole=False, num_warps=4, num_stages=2),
    _attend_build("fp32", 32, 32, whole=True, num_warps=4, num_stages=2),
    _attend_build("bf16", 16, 32, whole=False, latent=True, num_warps=8, num_stages=2),
    _latent_build(whole=False),
    _latent_build(whole=True),
    Build(merge_tiles, "*fp32 *fp32 *fp32 *bf16 i32:16", {"S": 128, "P": 32}, hot=True),
    Build(merge, "*fp32 *fp32 *fp32 *bf16 i32:16 i32:16", _MERGED, hot=True),
    Build(
        join,
        "*fp32 *fp32 *fp32 *fp32 *fp32 *fp32 i32:16 i32:16",
        {"sinks": None, "D": 128, "P": 64, "S": 64, "C": 32},
        hot=True,
    ),
    Build(
        append_rows, f"*bf16 *bf16 *bf16 *bf16 {_ROWS}", {"HEADS": 8, "A": 128, "B": 128, "PAGE": 64, "P": 128, "S": 1}, True
    ),
    Build(
        split_rows, "*bf16 *bf16 *bf16 *bf16 *bf16 *bf16", {"HEADS": 128, "NOPE": 128, "ROPE": 64, "LATENT": 512, "BLOCK": 1024}
    ),
    Build(latent_products, "*bf16 *i32 *bf16 *bf16 *bf16 i32", {**_WEIGHT, "SKIP": 0, "QUERY": True, "T": 16}, hot=True),
    Build(latent_products, "*bf16 *i32 *bf16 *bf16 *bf16 i32", {**_WEIGHT, "SKIP": 128, "QUERY": False, "T": 64}, hot=True),
]
