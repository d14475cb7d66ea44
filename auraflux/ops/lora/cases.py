"""Inputs for the adapters' products: one row and many, rows without an adapter, several weights, a norm, odd sizes."""

from dataclasses import replace
from typing import Any

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops._gpu_inputs import codes
from auraflux.ops.linear.adapters import Adapters
from auraflux.ops.lora.inputs import LinearInput
from auraflux.ops.lora.reference import add_lora, lora_gate_up, lora_linears

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
        "inputs": LinearInput(
            torch.randn(tokens, width).to(dtype),
            torch.randn(tokens, width).to(dtype) if delta else None,
            torch.rand(width) + 0.5 if norm else None,
            1e-5 if norm else 0.0,
        ),
        "ys": [torch.randn(tokens, height).to(dtype) for height in heights],
        "adapters": Adapters(
            slots.int(),
            [(torch.randn(count, rank, width) / width**0.5).to(dtype) if rank else None for rank in ranks],
            [torch.randn(count, r, height).to(dtype) if r else None for r, height in zip(ranks, heights, strict=True)],
        ),
        "overlap": overlap,
    }


def products(
    tokens: int,
    width: int,
    heights: tuple[int, ...],
    ranks: tuple[int, ...] = (16,),
    bits: int = 0,
    bias: bool = False,
    **options: Any,
) -> Args:
    """Return the same with weights in place of their products; `bits`: quantized, otherwise dense."""
    args = adapted(tokens, width, heights, ranks, **options)
    dtype = args["inputs"].x.dtype
    dense = [(torch.randn(height, width) / width**0.5).to(dtype) for height in heights if not bits]
    weights = [codes(height, width, bits=bits) for height in heights] if bits else dense
    biases = [torch.randn(height).to(dtype) for height in heights] if bias else None
    return {"inputs": args["inputs"], "weights": weights, "adapters": args["adapters"], "biases": biases}


def gated(tokens: int, width: int, height: int, ranks: tuple[int, ...] = (16, 16), **options: Any) -> Args:
    """Return the same for gate and up."""
    args = products(tokens, width, (height, height), ranks, **options)
    gate, up = args["weights"]
    return {"inputs": args["inputs"], "gate": gate, "up": up, "adapters": args["adapters"]}


def without_adapters(args: Args) -> Args:
    """Return arguments whose rows have no adapter."""
    adapters = args["adapters"]
    return args | {"adapters": replace(adapters, slots=torch.full_like(adapters.slots, -1))}


CASES = [
    Case(add_lora, "one-row", lambda: adapted(1, 2048, (4096,), one=True), bench=True),
    Case(add_lora, "8-rows", lambda: adapted(8, 2048, (4096,), count=8), bench=True),
    Case(add_lora, "many-rows", lambda: adapted(256, 1024, (512,)), bench=True),
    Case(add_lora, "decode", lambda: adapted(1, 128, (96,), one=True, overlap=True)),
    Case(add_lora, "odd", lambda: adapted(7, 63, (100,), (5,))),
    Case(add_lora, "rank-1", lambda: adapted(3, 33, (1,), (1,), count=1)),
    Case(add_lora, "none", lambda: without_adapters(adapted(4, 64, (32,)))),
    Case(add_lora, "empty", lambda: adapted(0, 64, (32,))),
    Case(add_lora, "bf16", lambda: adapted(5, 96, (64,), dtype=BF16), tol=8e-3),
    Case(add_lora, "normed", lambda: adapted(3, 100, (63, 32, 33), (16, 1, 33), norm=True, delta=True, overlap=True)),
    Case(add_lora, "norm-only", lambda: adapted(2, 1100, (40, 300), (64, 3), norm=True)),
    Case(add_lora, "bf16-normed", lambda: adapted(2, 600, (96, 64), dtype=BF16, norm=True, delta=True), tol=8e-3),
    # more parts than programs
    Case(add_lora, "64-rows", lambda: adapted(64, 1100, (300,), (64,)), slow=True),
    Case(add_lora, "65-rows", lambda: adapted(65, 33, (40, 8), (2,), norm=True, delta=True)),
    Case(add_lora, "rank-300", lambda: adapted(2, 48, (40,), (300,))),
    Case(lora_linears, "plain", lambda: products(3, 100, (63, 32), (5,))),
    Case(lora_linears, "normed", lambda: products(3, 128, (64, 32, 33), (16, 0, 33), norm=True, delta=True, bias=True)),
    Case(lora_linears, "bf16", lambda: products(1, 256, (64, 32, 32), (16, 0, 5), bits=4, dtype=BF16, one=True), tol=8e-3),
    Case(
        lora_linears,
        "bf16-normed",
        lambda: products(1, 768, (64, 32), (33, 64), bits=4, dtype=BF16, norm=True, delta=True),
        tol=8e-3,
    ),
    Case(lora_linears, "8-rows", lambda: products(8, 512, (128,), bits=4, dtype=BF16), tol=8e-3),
    Case(lora_linears, "65-rows", lambda: products(65, 33, (40, 8), (2,), norm=True, delta=True)),
    Case(lora_linears, "empty", lambda: products(0, 64, (32,))),
    Case(lora_gate_up, "one-row", lambda: gated(1, 512, 1024, bits=4, dtype=BF16, one=True, norm=True), tol=8e-3),
    Case(lora_gate_up, "normed", lambda: gated(3, 100, 63, (16, 5), norm=True, delta=True)),
    Case(lora_gate_up, "one-changed", lambda: gated(2, 100, 63, (16, 0), norm=True)),
    Case(lora_gate_up, "none", lambda: without_adapters(gated(4, 64, 32))),
    Case(lora_gate_up, "empty", lambda: gated(0, 64, 32)),
    Case(lora_gate_up, "65-rows", lambda: gated(65, 33, 40, (2, 2))),
]
