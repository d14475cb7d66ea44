"""Inputs for the adapters' product: one row and many, rows without an adapter, odd sizes."""

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.lora.reference import add_lora

BF16 = torch.bfloat16


def adapted(
    tokens: int, width: int, height: int, rank: int = 16, count: int = 3, dtype: torch.dtype = torch.float32, one: bool = False
) -> Args:
    """Return rows whose adapters are drawn from all and none; with `one`, all have the last adapter."""
    slots = torch.full((tokens,), count - 1) if one else torch.randint(-1, count, (tokens,))
    return {
        "y": torch.randn(tokens, height).to(dtype),
        "x": torch.randn(tokens, width).to(dtype),
        "slots": slots.int(),
        "a": (torch.randn(count, rank, width) / width**0.5).to(dtype),
        "b": torch.randn(count, rank, height).to(dtype),
    }


CASES = [
    Case(add_lora, "one-row", lambda: adapted(1, 2048, 4096, one=True), bench=True),
    Case(add_lora, "8-rows", lambda: adapted(8, 2048, 4096, count=8), bench=True),
    Case(add_lora, "many-rows", lambda: adapted(256, 1024, 512), bench=True),
    Case(add_lora, "decode", lambda: adapted(1, 128, 96, one=True)),
    Case(add_lora, "odd", lambda: adapted(7, 63, 100, rank=5)),
    Case(add_lora, "rank-1", lambda: adapted(3, 33, 1, rank=1, count=1)),
    Case(add_lora, "none", lambda: {**adapted(4, 64, 32), "slots": torch.full((4,), -1, dtype=torch.int32)}),
    Case(add_lora, "empty", lambda: adapted(0, 64, 32)),
    Case(add_lora, "bf16", lambda: adapted(5, 96, 64, dtype=BF16), tol=8e-3),
]
