"""Inputs for the adapters' products: one row and many, rows without an adapter, several weights, a norm, odd sizes."""

from typing import Any

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.lora.reference import add_lora, add_lora_swiglu

BF16 = torch.bfloat16


def adapted(
    tokens: int,
    width: int,
    heights: tuple[int, ...],
    ranks: tuple[int, ...] = (16,),
    count: int = 3,
    dtype: torch.dtype = torch.float32,
    norm: bool = False,
    delta: bool = False,
    one: bool = False,
    overlap: bool = False,
) -> Args:
    """Return rows whose adapters are drawn from all and none; with `one`, all have the last adapter."""
    slots = torch.full((tokens,), count - 1) if one else torch.randint(-1, count, (tokens,))
    ranks = ranks * len(heights) if len(ranks) == 1 else ranks
    return {
        "x": torch.randn(tokens, width).to(dtype),
        "ys": [torch.randn(tokens, height).to(dtype) for height in heights],
        "slots": slots.int(),
        "a": [(torch.randn(count, rank, width) / width**0.5).to(dtype) for rank in ranks],
        "b": [torch.randn(count, rank, height).to(dtype) for rank, height in zip(ranks, heights, strict=True)],
        "delta": torch.randn(tokens, width).to(dtype) if delta else None,
        "norm": torch.rand(width) + 0.5 if norm else None,
        "eps": 1e-5 if norm else 0.0,
        "overlap": overlap,
    }


def gated(tokens: int, width: int, height: int, ranks: tuple[int, ...] = (16,), **options: Any) -> Args:
    """Return the same for gate and up."""
    args = adapted(tokens, width, (height, height), ranks, **options)
    gate, up = args.pop("ys")
    return {"x": args.pop("x"), "gate": gate, "up": up, **args}


CASES = [
    Case(add_lora, "one-row", lambda: adapted(1, 2048, (4096,), one=True), bench=True),
    Case(add_lora, "8-rows", lambda: adapted(8, 2048, (4096,), count=8), bench=True),
    Case(add_lora, "many-rows", lambda: adapted(256, 1024, (512,)), bench=True),
    Case(add_lora, "decode", lambda: adapted(1, 128, (96,), one=True, overlap=True)),
    Case(add_lora, "odd", lambda: adapted(7, 63, (100,), (5,))),
    Case(add_lora, "rank-1", lambda: adapted(3, 33, (1,), (1,), count=1)),
    Case(add_lora, "none", lambda: {**adapted(4, 64, (32,)), "slots": torch.full((4,), -1, dtype=torch.int32)}),
    Case(add_lora, "empty", lambda: adapted(0, 64, (32,))),
    Case(add_lora, "bf16", lambda: adapted(5, 96, (64,), dtype=BF16), tol=8e-3),
    Case(add_lora, "normed", lambda: adapted(3, 100, (63, 32, 33), (16, 1, 33), norm=True, delta=True, overlap=True)),
    Case(add_lora, "norm-only", lambda: adapted(2, 1100, (40, 300), (64, 3), norm=True)),
    Case(add_lora, "bf16-normed", lambda: adapted(2, 600, (96, 64), dtype=BF16, norm=True, delta=True), tol=8e-3),
    # more parts than programs
    Case(add_lora, "64-rows", lambda: adapted(64, 1100, (300,), (64,)), slow=True),
    Case(add_lora, "65-rows", lambda: adapted(65, 33, (40, 8), (2,), norm=True, delta=True)),
    Case(add_lora, "rank-300", lambda: adapted(2, 48, (40,), (300,))),
    Case(add_lora_swiglu, "one-row", lambda: gated(1, 2048, 4096, one=True), bench=True),
    Case(add_lora_swiglu, "normed", lambda: gated(3, 100, 63, (16, 5), norm=True, delta=True, overlap=True)),
    Case(add_lora_swiglu, "wide", lambda: gated(2, 1100, 300, (64,), norm=True)),
    Case(add_lora_swiglu, "bf16", lambda: gated(4, 96, 64, dtype=BF16), tol=8e-3),
    Case(add_lora_swiglu, "none", lambda: {**gated(4, 64, 32), "slots": torch.full((4,), -1, dtype=torch.int32)}),
    Case(add_lora_swiglu, "empty", lambda: gated(0, 64, 32)),
    Case(add_lora_swiglu, "65-rows", lambda: gated(65, 33, 40, (2,))),
]
