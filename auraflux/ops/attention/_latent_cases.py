"""Inputs for latent attention (MLA): few and many heads, ragged batches, odd widths, weights of all formats."""

from collections.abc import Callable
from functools import partial

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.attention._inputs import BF16, F16, F32, RAGGED, index, pairs, starts_of
from auraflux.ops.attention.pages import LatentPages
from auraflux.ops.attention.reference import (
    append_latent,
    latent_attention,
    latent_output,
    latent_partials,
    latent_query,
    rope_append_latent,
    split_latent,
)
from auraflux.ops.rope.frequencies import rope_frequencies
from auraflux.quant import QTensor


def latent_pages(lengths: list[int], width: int, rope: int, page: int = 16, dtype: torch.dtype = F32) -> LatentPages:
    count, table, lengths_ = index(lengths, page)
    return LatentPages(torch.randn(count, page, width).to(dtype), torch.randn(count, page, rope).to(dtype), table, lengths_)


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
    """Return a random weight: quantized, or float32 with 32 bits, bfloat16 with 16."""
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
    rotated_channels: int | None = None,
    interleaved: bool = True,
) -> Args:
    """Return projections with `widths` of the nope part, the rope part (`rotated_channels` of it rotated) and the latent."""
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
        "inv_freq": rope_frequencies(rotated_channels or rope, 1e4),
        "positions": torch.cat(spans).int(),
        "mscale": 1.2,
        "interleaved": interleaved,
    }


def with_sinks(args: Args) -> Args:
    return {**args, "sinks": torch.randn(args["q_latent"].shape[1])}


def strided_heads(args: Args, name: str) -> Args:
    """Make an argument's heads strided."""
    x = args[name]
    return {**args, name: torch.cat((x, x), 2)[..., : x.shape[2]]}


def in_bf16(make: Callable[..., Args], name: str, *sizes: int) -> Args:
    args = make(*sizes)
    return {**args, name: args[name].to(BF16)}


def latent_flops(args: Args) -> int:
    _, heads, width = args["q_latent"].shape
    return 2 * pairs(args) * heads * (2 * width + args["q_rope"].shape[2])


def up_flops(args: Args) -> int:
    tokens, heads, nope = args["q_nope"].shape
    return 2 * tokens * heads * nope * args["weight"].shape[1]


def down_flops(args: Args) -> int:
    tokens, heads, width = args["v"].shape
    return 2 * tokens * width * (args["weight"].shape[0] - heads * args["nope"])


LATENT_CASES = [
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
    Case(latent_attention, "sinks", lambda: with_sinks(latent_queries(*RAGGED, 5, 63, 7, 7))),
    Case(
        latent_attention,
        "sinks-bf16",
        lambda: with_sinks(latent_queries([130, 64], [1, 1], 8, 512, 64, 64, BF16)),
        tol=4e-3,
    ),
    Case(latent_attention, "bf16", lambda: latent_queries(*RAGGED, 4, 64, 16, dtype=BF16), tol=4e-3),
    Case(latent_attention, "few-heads-bf16", lambda: latent_queries([130, 64], [1, 1], 8, 512, 64, 64, BF16), tol=4e-3),
    Case(latent_attention, "many-heads-bf16", lambda: latent_queries([200, 3], [2, 1], 128, 512, 64, 128, BF16), tol=4e-3),
    Case(latent_attention, "few-heads-batch", lambda: latent_queries([70] * 68, [1] * 68, 16, 512, 64, 64, BF16), tol=4e-3),
    Case(latent_attention, "odd-heads-bf16", lambda: latent_queries([500], [1], 21, 512, 64, 128, BF16), tol=4e-3),
    Case(latent_attention, "many-heads-batch", lambda: latent_queries([70] * 34, [1] * 34, 128, 512, 64, 64, BF16), tol=4e-3),
    Case(latent_attention, "80-heads-bf16", lambda: latent_queries([300, 20], [2, 1], 80, 512, 64, 64, BF16), tol=4e-3),
    Case(latent_attention, "f16-cache", lambda: latent_queries(*RAGGED, 4, 100, 16, cache=F16)),
    Case(latent_partials, "decode", lambda: latent_queries([2048], [1], 16, 512, 64, 64), bench=True, flops=latent_flops),
    Case(latent_partials, "ragged", lambda: latent_queries(*RAGGED, 5, 63, 7, 7)),
    Case(latent_partials, "bf16", lambda: latent_queries(*RAGGED, 4, 64, 16, dtype=BF16), tol=4e-3),
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
    Case(latent_query, "strided-heads", lambda: strided_heads(up(3, 5, 20, 7, 192), "q_nope")),
    Case(latent_output, "one-token", lambda: down(1, 64, 128, 128, 512), bench=True, flops=down_flops),
    Case(latent_output, "many-tokens", lambda: down(33, 9, 64, 32, 256), flops=down_flops),
    *(Case(latent_output, f"{bits}-bits", partial(down, 3, 5, 20, 7, 192, bits, 32)) for bits in (2, 3, 4, 5, 6, 8)),
    Case(latent_output, "dense", lambda: down(3, 9, 20, 7, 100, 32)),
    Case(latent_output, "dense-bf16", lambda: down(3, 9, 20, 7, 100, 16)),
    Case(latent_output, "strided-heads", lambda: strided_heads(down(3, 5, 20, 7, 192), "v")),
    *(
        Case(latent_query, f"bf16-{tokens}-b{bits}", partial(in_bf16, up, "q_nope", tokens, *sizes, bits), tol=4e-3)
        for bits in (4, 8)
        for tokens, sizes in ((1, (3, 128, 128, 512)), (2, (5, 192, 64, 512)), (7, (2, 64, 64, 256)), (33, (3, 128, 128, 512)))
    ),
    Case(latent_query, "bf16-many", lambda: strided_heads(in_bf16(up, "q_nope", 70, 3, 64, 32, 256), "q_nope"), tol=5e-3),
    *(Case(latent_query, f"bf16-odd-b{b}", partial(in_bf16, up, "q_nope", 3, 5, 20, 7, 192, b), tol=5e-3) for b in (3, 4, 16)),
    *(
        Case(latent_output, f"bf16-{tokens}-b{bits}", partial(in_bf16, down, "v", tokens, *sizes, bits), tol=4e-3)
        for bits in (4, 8)
        for tokens, sizes in ((1, (3, 128, 128, 512)), (2, (5, 0, 512, 128)), (9, (2, 64, 64, 256)), (33, (3, 128, 128, 512)))
    ),
    Case(latent_output, "bf16-many", lambda: strided_heads(in_bf16(down, "v", 70, 3, 64, 32, 256), "v"), tol=5e-3),
    *(Case(latent_output, f"bf16-odd-b{b}", partial(in_bf16, down, "v", 3, 5, 20, 7, 192, b), tol=5e-3) for b in (3, 4, 16)),
    Case(
        rope_append_latent,
        "one-token",
        lambda: new_projections([700], [1], 128, (128, 64, 512), 64, BF16),
        tol=4e-3,
        bench=True,
    ),
    Case(rope_append_latent, "ragged", lambda: new_projections(*RAGGED, 3, (20, 10, 63), 7, interleaved=False)),
    Case(rope_append_latent, "partly-rotated", lambda: new_projections(*RAGGED, 3, (20, 10, 64), 7, rotated_channels=6)),
    Case(rope_append_latent, "narrower", lambda: new_projections([70, 5], [2, 1], 5, (16, 16, 64), 16, cache=BF16)),
    Case(rope_append_latent, "many", lambda: new_projections([130], [70], 3, (16, 16, 64), 16)),
    Case(split_latent, "one-token", lambda: projections(1, 128, 128, 64, 512), bench=True),
    Case(split_latent, "odd", lambda: projections(7, 3, 33, 5, 63)),
]
