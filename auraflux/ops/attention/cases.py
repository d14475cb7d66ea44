"""Inputs for attention: one token and many, ragged batches, odd widths and pages, narrow caches, windows, sinks, softcap."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.attention.pages import KVPages, LatentPages
from auraflux.ops.attention.reference import (
    append_kv,
    append_latent,
    attention,
    attention_partials,
    latent_attention,
    latent_output,
    latent_query,
    merge_partials,
    rope_append_latent,
    split_latent,
)
from auraflux.ops.rope.frequencies import rope_frequencies
from auraflux.quant import QTensor

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def index(lengths: list[int], page: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """A pool's size, a table in random order with a few pages that belong to nobody, and the lengths."""
    width = max(-(-length // page) for length in lengths)
    count = len(lengths) * width + 3
    table = torch.randperm(count)[: len(lengths) * width].view(len(lengths), width).int()
    return count, table, torch.tensor(lengths, dtype=torch.int32)


def starts_of(new: list[int]) -> torch.Tensor:
    return torch.tensor([sum(new[:i]) for i in range(len(new) + 1)], dtype=torch.int32)


def kv_pages(
    lengths: list[int], heads: int, width: int, value_width: int | None = None, page: int = 16, dtype: torch.dtype = F32
) -> KVPages:
    count, table, lengths_ = index(lengths, page)
    k, v = torch.randn(count, heads, page, width), torch.randn(count, heads, page, value_width or width)
    return KVPages(k.to(dtype), v.to(dtype), table, lengths_)


def latent_pages(lengths: list[int], width: int, rope: int, page: int = 16, dtype: torch.dtype = F32) -> LatentPages:
    count, table, lengths_ = index(lengths, page)
    return LatentPages(torch.randn(count, page, width).to(dtype), torch.randn(count, page, rope).to(dtype), table, lengths_)


def queries(
    lengths: list[int],
    new: list[int],
    heads: tuple[int, int],
    width: int,
    value_width: int | None = None,
    page: int = 16,
    dtype: torch.dtype = F32,
    cache: torch.dtype | None = None,
    window: int | None = None,
    sinks: bool = False,
    softcap: float | None = None,
) -> Args:
    pages = kv_pages(lengths, heads[1], width, value_width, page, cache or dtype)
    return {
        "q": torch.randn(sum(new), heads[0], width).to(dtype),
        "pages": pages,
        "starts": starts_of(new),
        "scale": width**-0.5,
        "window": window,
        "sinks": torch.randn(heads[0]) if sinks else None,
        "softcap": softcap,
    }


def decode_at(thousands: int) -> Args:
    return queries([1024 * thousands], [1], (32, 8), 128, page=64)


def stale_pages() -> Args:
    args = queries([50, 3], [2, 1], (4, 2), 64, page=7, window=10)
    args["pages"].table[0, :5] = -1
    return args


def not_finite() -> Args:
    """Values that only late queries see, and bits beyond the end that nobody does."""
    args = queries([40], [40], (4, 2), 32, page=16)
    pages = args["pages"]
    last = pages.table[0, 2]
    pages.v[last, :, 3] = torch.nan
    pages.v[last, 0, 5, 7] = torch.inf
    pages.k[last, :, 8:] = torch.nan
    pages.v[last, :, 8:] = torch.nan
    return args


def beyond_the_end(lengths: list[int], new: list[int], **options: Any) -> Args:
    """Bits beyond the end that nobody sees, and a value that only later queries do, in bf16."""
    args = queries(lengths, new, (8, 2), 128, page=64, dtype=BF16, **options)
    pages = args["pages"]
    for b, length in enumerate(lengths):
        last = pages.table[b, length // 64]
        pages.k[last, :, length % 64 :] = torch.nan
        pages.v[last, :, length % 64 :] = torch.nan
        pages.v[last, 1, length % 64 - 1, 7] = torch.inf
    return args


def not_finite_decode() -> Args:
    args = queries([38], [1], (4, 2), 64)
    args["pages"].v[args["pages"].table[0, 2], 1, 5] = torch.inf
    return args


def new_rows(
    lengths: list[int], new: list[int], heads: int, width: int, page: int, dtype: torch.dtype = F32, cache: torch.dtype = F32
) -> Args:
    pages = kv_pages(lengths, heads, width, width + 1, page, cache)
    k, v = torch.randn(sum(new), heads, width), torch.randn(sum(new), heads, width + 1)
    return {"k": k.to(dtype), "v": v.to(dtype), "pages": pages, "starts": starts_of(new)}


def partials(rows: int, blocks: int, width: int, empty: float = 0.2) -> Args:
    o, m, total = torch.randn(rows, blocks, width), torch.randn(rows, blocks) * 5, torch.rand(rows, blocks) + 0.5
    gone = torch.rand(rows, blocks) < empty
    gone[0] = rows > 1
    total[gone] = 0
    o[gone], m[gone] = torch.nan, torch.tensor([torch.nan, -torch.inf, torch.inf])[torch.randint(3, (int(gone.sum()),))]
    return {"o": o, "m": m, "l": total}


def latent_queries(
    lengths: list[int],
    new: list[int],
    heads: int,
    width: int,
    rope: int,
    page: int = 16,
    dtype: torch.dtype = F32,
    cache: torch.dtype | None = None,
) -> Args:
    return {
        "q_latent": torch.randn(sum(new), heads, width).to(dtype),
        "q_rope": torch.randn(sum(new), heads, rope).to(dtype),
        "pages": latent_pages(lengths, width, rope, page, cache or dtype),
        "starts": starts_of(new),
        "scale": (width + rope) ** -0.5,
    }


def new_latents(lengths: list[int], new: list[int], width: int, rope: int, page: int, dtype: torch.dtype = F32) -> Args:
    pages = latent_pages(lengths, width, rope, page, dtype)
    return {
        "latent": torch.randn(sum(new), width),
        "k_rope": torch.randn(sum(new), rope),
        "pages": pages,
        "starts": starts_of(new),
    }


def matrix(rows: int, width: int, bits: int, group: int, scales: torch.dtype) -> torch.Tensor | QTensor:
    """A random weight: codes, or with 32 bits float32, with 16 bfloat16."""
    if bits in (32, 16):
        return (torch.randn(rows, width) * width**-0.5).to(F32 if bits == 32 else BF16)
    packed = torch.randint(-(2**31), 2**31, (rows, width * bits // 32), dtype=torch.int32)
    scale, bias = torch.rand(2, rows, width // group) * 2**-bits
    return QTensor(packed, scale.to(scales), (bias - 0.5).to(scales), bits, group, (rows, width))


def up(
    tokens: int, heads: int, nope: int, values: int, width: int, bits: int = 4, group: int = 64, scales: torch.dtype = BF16
) -> Args:
    weight = matrix(heads * (nope + values), width, bits, group, scales)
    return {"q_nope": torch.randn(tokens, heads, nope), "weight": weight, "rows": nope + values}


def down(
    tokens: int, heads: int, nope: int, values: int, width: int, bits: int = 4, group: int = 64, scales: torch.dtype = BF16
) -> Args:
    weight = matrix(heads * (nope + values), width, bits, group, scales)
    return {"v": torch.randn(tokens, heads, width), "weight": weight, "nope": nope}


def projections(tokens: int, heads: int, nope: int, rope: int, width: int) -> Args:
    q, kv = torch.randn(tokens, heads * (nope + rope)), torch.randn(tokens, width + rope)
    return {"q": q, "kv": kv, "heads": heads, "nope": nope}


def new_projections(
    lengths: list[int],
    new: list[int],
    heads: int,
    widths: tuple[int, int, int],
    page: int,
    dtype: torch.dtype = F32,
    cache: torch.dtype | None = None,
    turned: int | None = None,
    interleaved: bool = True,
) -> Args:
    """`widths` of a query's plain part, its rotated part, of which `turned` channels are turned, and a latent."""
    _, rope, width = widths
    made = projections(sum(new), heads, *widths)
    spans = [torch.arange(length - n, length) for length, n in zip(lengths, new, strict=True)]
    return {
        **made,
        "q": made["q"].to(dtype),
        "kv": made["kv"].to(dtype),
        "pages": latent_pages(lengths, width, rope, page, cache or dtype),
        "starts": starts_of(new),
        "norm": 1 + 0.1 * torch.randn(width),
        "eps": 1e-6,
        "inv_freq": rope_frequencies(turned or rope, 1e4),
        "positions": torch.cat(spans).int(),
        "mscale": 1.2,
        "interleaved": interleaved,
    }


def apart(args: Args, name: str) -> Args:
    """The same with heads of an argument that lie apart."""
    x = args[name]
    return {**args, name: torch.cat((x, x), 2)[..., : x.shape[2]]}


def in_bf16(make: Callable[..., Args], name: str, *sizes: int) -> Args:
    args = make(*sizes)
    return {**args, name: args[name].to(BF16)}


def pairs(args: Args) -> int:
    """Query and key positions that see each other, without a window."""
    starts, lengths = args["starts"].tolist(), args["pages"].lengths.tolist()
    new = [b - a for a, b in pairwise(starts)]
    return sum(n * length - n * (n - 1) // 2 for n, length in zip(new, lengths, strict=True))


def attention_flops(args: Args) -> int:
    pages = args["pages"]
    return 2 * pairs(args) * args["q"].shape[1] * (pages.k.shape[3] + pages.v.shape[3])


def latent_flops(args: Args) -> int:
    _, heads, width = args["q_latent"].shape
    return 2 * pairs(args) * heads * (2 * width + args["q_rope"].shape[2])


def up_flops(args: Args) -> int:
    tokens, heads, nope = args["q_nope"].shape
    return 2 * tokens * heads * nope * args["weight"].shape[1]


def down_flops(args: Args) -> int:
    tokens, heads, width = args["v"].shape
    return 2 * tokens * width * (args["weight"].shape[0] - heads * args["nope"])


RAGGED = [70, 5, 9, 130], [33, 0, 1, 2]

CASES = [
    *(
        Case(attention, f"decode-{n}k-none", partial(decode_at, n), bench=True, flops=attention_flops, slow=n > 8)
        for n in (1, 8, 32)
    ),
    Case(
        attention,
        "decode-4k-bf16",
        lambda: queries([4096], [1], (32, 8), 128, page=64, cache=BF16),
        bench=True,
        flops=attention_flops,
    ),
    Case(
        attention, "prefill-512-of-512", lambda: queries([512], [512], (32, 8), 128, page=64), bench=True, flops=attention_flops
    ),
    Case(attention, "batch", lambda: queries([300, 64, 700, 1], [1] * 4, (8, 2), 128)),
    Case(attention, "ragged", lambda: queries(*RAGGED, (8, 2), 64)),
    Case(attention, "one-token", lambda: queries([1], [1], (4, 4), 64)),
    Case(attention, "grouped-by-7", lambda: queries([100], [1], (14, 2), 96)),
    Case(attention, "one-key-head", lambda: queries([100], [1], (40, 1), 64)),
    Case(attention, "window", lambda: queries(*RAGGED, (8, 2), 80, page=7, window=17)),
    Case(attention, "window-decode", lambda: queries([333, 5], [1, 1], (8, 2), 80, page=7, window=100)),
    Case(attention, "no-window-left", lambda: queries(*RAGGED, (8, 2), 64, window=0)),
    Case(attention, "stale-pages", stale_pages),
    Case(attention, "sinks", lambda: queries(*RAGGED, (16, 2), 64, sinks=True, window=32)),
    Case(attention, "softcap", lambda: queries(*RAGGED, (4, 2), 256, softcap=2.0)),
    Case(attention, "everything", lambda: queries(*RAGGED, (6, 2), 100, 33, 7, sinks=True, window=20, softcap=5.0)),
    Case(attention, "width-63", lambda: queries([333, 40], [1, 3], (6, 2), 63, page=7)),
    Case(attention, "width-512", lambda: queries([100, 40], [1, 3], (4, 1), 512)),
    Case(attention, "narrow-heads", lambda: queries([100, 40], [1, 3], (4, 2), 8, 5)),
    Case(attention, "not-finite", not_finite),
    Case(attention, "not-finite-decode", not_finite_decode),
    Case(attention, "long-decode", lambda: queries([2000, 3], [1, 1], (4, 1), 64, sinks=True)),
    Case(attention, "long-chunk", lambda: queries([1500, 3], [3, 1], (4, 1), 64, sinks=True)),
    Case(attention, "bf16", lambda: queries(*RAGGED, (8, 2), 64, dtype=BF16), tol=4e-3),
    Case(attention, "bf16-decode", lambda: queries([700, 40], [1, 1], (8, 2), 128, page=64, dtype=BF16), tol=4e-3),
    Case(
        attention, "bf16-decode-batch", lambda: queries([70] * 34, [1] * 34, (6, 2), 64, None, 64, BF16, sinks=True), tol=4e-3
    ),
    Case(
        attention,
        "bf16-decode-window",
        lambda: queries([700, 9], [2, 1], (6, 2), 64, None, 64, BF16, None, 100, True),
        tol=4e-3,
    ),
    Case(
        attention, "bf16-decode-softcap", lambda: queries([300], [1], (16, 1), 256, page=64, dtype=BF16, softcap=3.0), tol=4e-3
    ),
    Case(attention, "f16-decode", lambda: queries([500], [1], (32, 1), 128, page=128, dtype=F16, sinks=True), tol=1e-3),
    Case(attention, "bf16-decode-not-finite", lambda: beyond_the_end([300, 130], [1, 2], window=100), tol=4e-3),
    Case(attention, "bf16-prefill", lambda: queries([333, 100, 7], [300, 100, 0], (8, 2), 128, page=64, dtype=BF16), tol=4e-3),
    Case(
        attention, "bf16-prefill-window", lambda: queries([400], [300], (6, 2), 64, None, 128, BF16, None, 70, True), tol=4e-3
    ),
    Case(
        attention,
        "bf16-prefill-softcap",
        lambda: queries([200], [130], (4, 2), 256, page=64, dtype=BF16, softcap=3.0),
        tol=4e-3,
    ),
    Case(attention, "f16-prefill", lambda: queries([200], [200], (4, 4), 128, page=64, dtype=F16), tol=1e-3),
    Case(attention, "bf16-prefill-not-finite", lambda: beyond_the_end([300, 130], [200, 130]), tol=4e-3),
    Case(attention, "bf16-cache", lambda: queries(*RAGGED, (8, 2), 100, page=7, cache=BF16)),
    Case(attention, "f16-cache", lambda: queries(*RAGGED, (8, 2), 100, page=7, cache=F16)),
    Case(attention_partials, "decode", lambda: queries([1000, 300], [1, 1], (8, 2), 128, page=64, window=128), bench=True),
    Case(attention_partials, "everything", lambda: queries(*RAGGED, (6, 2), 100, 33, 7, sinks=True, window=20, softcap=5.0)),
    Case(attention_partials, "long-decode", lambda: queries([2000, 3], [1, 1], (4, 1), 64)),
    Case(attention_partials, "nothing-visible", lambda: queries(*RAGGED, (4, 2), 63, window=0)),
    Case(attention_partials, "only-sinks", lambda: queries(*RAGGED, (4, 2), 63, window=0, sinks=True)),
    Case(attention_partials, "bf16", lambda: queries(*RAGGED, (8, 2), 64, dtype=BF16), tol=4e-3),
    Case(append_kv, "one-token", lambda: new_rows([700], [1], 8, 128, 64), bench=True),
    Case(append_kv, "many-tokens", lambda: new_rows([900, 1], [512, 0], 8, 128, 64), bench=True),
    Case(append_kv, "ragged", lambda: new_rows(*RAGGED, 3, 63, 7)),
    Case(append_kv, "narrower", lambda: new_rows(*RAGGED, 2, 64, 16, cache=BF16)),
    Case(append_kv, "wider", lambda: new_rows(*RAGGED, 2, 64, 16, dtype=F16)),
    Case(merge_partials, "long-context", lambda: partials(32, 64, 128), bench=True),
    *(Case(merge_partials, f"width-{d}", partial(partials, 5, 7, d)) for d in (64, 80, 96, 128, 256, 512, 63)),
    Case(merge_partials, "one-block", lambda: partials(3, 1, 64, 0.0)),
    Case(merge_partials, "nothing-live", lambda: partials(3, 4, 64, 1.0)),
    Case(merge_partials, "many-rows", lambda: partials(300, 5, 100)),
    Case(latent_attention, "decode", lambda: latent_queries([2048], [1], 16, 512, 64, 64), bench=True, flops=latent_flops),
    Case(
        latent_attention,
        "decode-128-heads",
        lambda: latent_queries([1024], [1], 128, 512, 64, 64),
        bench=True,
        flops=latent_flops,
    ),
    Case(latent_attention, "prefill", lambda: latent_queries([200], [200], 16, 128, 64), flops=latent_flops),
    Case(latent_attention, "ragged", lambda: latent_queries(*RAGGED, 5, 63, 7, 7)),
    Case(latent_attention, "bf16", lambda: latent_queries(*RAGGED, 4, 64, 16, dtype=BF16), tol=4e-3),
    Case(latent_attention, "few-heads-bf16", lambda: latent_queries([130, 64], [1, 1], 8, 512, 64, 64, BF16), tol=4e-3),
    Case(latent_attention, "many-heads-bf16", lambda: latent_queries([200, 3], [2, 1], 128, 512, 64, 128, BF16), tol=4e-3),
    Case(latent_attention, "few-heads-batch", lambda: latent_queries([70] * 68, [1] * 68, 16, 512, 64, 64, BF16), tol=4e-3),
    Case(latent_attention, "odd-heads-bf16", lambda: latent_queries([500], [1], 21, 512, 64, 128, BF16), tol=4e-3),
    Case(latent_attention, "many-heads-batch", lambda: latent_queries([70] * 34, [1] * 34, 128, 512, 64, 64, BF16), tol=4e-3),
    Case(latent_attention, "80-heads-bf16", lambda: latent_queries([300, 20], [2, 1], 80, 512, 64, 64, BF16), tol=4e-3),
    Case(latent_attention, "f16-cache", lambda: latent_queries(*RAGGED, 4, 100, 16, cache=F16)),
    Case(append_latent, "one-token", lambda: new_latents([700], [1], 512, 64, 64), bench=True),
    Case(append_latent, "ragged", lambda: new_latents(*RAGGED, 63, 5, 7)),
    Case(append_latent, "narrower", lambda: new_latents(*RAGGED, 64, 16, 16, BF16)),
    Case(latent_query, "one-token", lambda: up(1, 64, 128, 128, 512), bench=True, flops=up_flops),
    Case(latent_query, "many-tokens", lambda: up(33, 9, 64, 32, 256), flops=up_flops),
    *(Case(latent_query, f"{bits}-bits", partial(up, 3, 5, 20, 7, 192, bits, 32)) for bits in (2, 3, 4, 5, 6, 8)),
    Case(latent_query, "f32-scales", lambda: up(2, 3, 20, 7, 128, 4, 128, F32)),
    Case(latent_query, "f16-scales", lambda: up(9, 3, 20, 7, 128, 4, 64, F16)),
    Case(latent_query, "dense", lambda: up(3, 9, 20, 7, 100, 32)),
    Case(latent_query, "dense-bf16", lambda: up(3, 9, 20, 7, 100, 16)),
    Case(latent_query, "heads-apart", lambda: apart(up(3, 5, 20, 7, 192), "q_nope")),
    Case(latent_output, "one-token", lambda: down(1, 64, 128, 128, 512), bench=True, flops=down_flops),
    Case(latent_output, "many-tokens", lambda: down(33, 9, 64, 32, 256), flops=down_flops),
    *(Case(latent_output, f"{bits}-bits", partial(down, 3, 5, 20, 7, 192, bits, 32)) for bits in (2, 3, 4, 5, 6, 8)),
    Case(latent_output, "dense", lambda: down(3, 9, 20, 7, 100, 32)),
    Case(latent_output, "dense-bf16", lambda: down(3, 9, 20, 7, 100, 16)),
    Case(latent_output, "heads-apart", lambda: apart(down(3, 5, 20, 7, 192), "v")),
    *(
        Case(latent_query, f"bf16-{tokens}-b{bits}", partial(in_bf16, up, "q_nope", tokens, *sizes, bits), tol=4e-3)
        for bits in (4, 8)
        for tokens, sizes in ((1, (3, 128, 128, 512)), (2, (5, 192, 64, 512)), (7, (2, 64, 64, 256)), (33, (3, 128, 128, 512)))
    ),
    Case(latent_query, "bf16-many", lambda: apart(in_bf16(up, "q_nope", 70, 3, 64, 32, 256), "q_nope"), tol=5e-3),
    *(Case(latent_query, f"bf16-odd-b{b}", partial(in_bf16, up, "q_nope", 3, 5, 20, 7, 192, b), tol=5e-3) for b in (3, 4, 16)),
    *(
        Case(latent_output, f"bf16-{tokens}-b{bits}", partial(in_bf16, down, "v", tokens, *sizes, bits), tol=4e-3)
        for bits in (4, 8)
        for tokens, sizes in ((1, (3, 128, 128, 512)), (2, (5, 0, 512, 128)), (9, (2, 64, 64, 256)), (33, (3, 128, 128, 512)))
    ),
    Case(latent_output, "bf16-many", lambda: apart(in_bf16(down, "v", 70, 3, 64, 32, 256), "v"), tol=5e-3),
    *(Case(latent_output, f"bf16-odd-b{b}", partial(in_bf16, down, "v", 3, 5, 20, 7, 192, b), tol=5e-3) for b in (3, 4, 16)),
    Case(
        rope_append_latent,
        "one-token",
        lambda: new_projections([700], [1], 128, (128, 64, 512), 64, BF16),
        tol=4e-3,
        bench=True,
    ),
    Case(rope_append_latent, "ragged", lambda: new_projections(*RAGGED, 3, (20, 10, 63), 7, interleaved=False)),
    Case(rope_append_latent, "some-turned", lambda: new_projections(*RAGGED, 3, (20, 10, 64), 7, turned=6)),
    Case(rope_append_latent, "narrower", lambda: new_projections([70, 5], [2, 1], 5, (16, 16, 64), 16, cache=BF16)),
    Case(rope_append_latent, "many", lambda: new_projections([130], [70], 3, (16, 16, 64), 16)),
    Case(split_latent, "one-token", lambda: projections(1, 128, 128, 64, 512), bench=True),
    Case(split_latent, "odd", lambda: projections(7, 3, 33, 5, 63)),
]
