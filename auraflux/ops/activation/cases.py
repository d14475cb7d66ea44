"""Inputs for the activations: decode and prefill sizes, odd widths, narrow types, extreme values."""

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.activation.reference import (
    clamped_swiglu,
    clip,
    gate_heads,
    geglu,
    limited_swiglu,
    relu_square,
    sigmoid_gate,
    split_q_gate,
    swiglu,
)

BF16 = torch.bfloat16


def pair(first: str, second: str, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Args:
    return {first: (torch.randn(shape) * scale).to(dtype), second: torch.randn(shape).to(dtype)}


def gate_up(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Args:
    return pair("gate", "up", *shape, dtype=dtype, scale=scale)


def clamped(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 5.0) -> Args:
    args = gate_up(*shape, dtype=dtype, scale=scale)
    return {"gate": args["gate"], "up": args["up"] * scale, "alpha": 1.702, "limit": 7.0}


def limited(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 5.0) -> Args:
    args = gate_up(*shape, dtype=dtype, scale=scale)
    return {"gate": args["gate"], "up": args["up"] * scale, "limit": 10.0}


def clipped(*shape: int, dtype: torch.dtype = torch.float32) -> Args:
    return {"x": (torch.randn(shape) * 3).to(dtype), "limit": 2.5}


def heads(tokens: int, heads: int, width: int, dtype: torch.dtype = torch.float32) -> Args:
    return {"x": torch.randn(tokens, heads * 2 * width).to(dtype), "heads": heads}


def gated(tokens: int, heads: int, width: int, soft: bool, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Args:
    x, gate = torch.randn(tokens, heads, width).to(dtype), (torch.randn(tokens, heads) * scale).to(dtype)
    return {"x": x, "gate": gate, "soft": soft}


CASES = [
    Case(swiglu, "one-token", lambda: gate_up(1, 6144), bench=True),
    Case(swiglu, "many-tokens", lambda: gate_up(256, 2048), bench=True),
    Case(swiglu, "odd-width", lambda: gate_up(7, 333)),
    Case(swiglu, "none", lambda: gate_up(0, 64)),
    Case(swiglu, "far-out", lambda: gate_up(3, 100, scale=200.0)),
    Case(swiglu, "bf16", lambda: gate_up(3, 63, dtype=BF16), tol=4e-3),
    Case(geglu, "one-token", lambda: gate_up(1, 6144), bench=True),
    Case(geglu, "many-tokens", lambda: gate_up(40, 2048)),
    Case(geglu, "odd-width", lambda: gate_up(3, 333)),
    Case(geglu, "far-out", lambda: gate_up(3, 100, scale=50.0)),
    Case(geglu, "bf16", lambda: gate_up(3, 63, dtype=BF16), tol=4e-3),
    Case(clip, "one-token", lambda: clipped(1, 6144), bench=True),
    Case(clip, "odd-width", lambda: clipped(7, 333)),
    Case(clip, "none", lambda: clipped(0, 64)),
    Case(clip, "bf16", lambda: clipped(3, 63, dtype=BF16), tol=4e-3),
    Case(clamped_swiglu, "one-token", lambda: clamped(4, 2880), bench=True),
    Case(clamped_swiglu, "many-tokens", lambda: clamped(40, 2880)),
    Case(clamped_swiglu, "odd-width", lambda: clamped(5, 333)),
    Case(clamped_swiglu, "far-out", lambda: clamped(3, 100, scale=200.0)),
    Case(clamped_swiglu, "bf16", lambda: clamped(3, 63, dtype=BF16), tol=4e-3),
    Case(limited_swiglu, "one-token", lambda: limited(6, 2048), bench=True),
    Case(limited_swiglu, "odd-width", lambda: limited(5, 333)),
    Case(limited_swiglu, "far-out", lambda: limited(3, 100, scale=200.0)),
    Case(limited_swiglu, "gate-apart", lambda: {**limited(5, 333, scale=5.0), "gate_limit": 2.5}),
    Case(limited_swiglu, "bf16", lambda: limited(3, 63, dtype=BF16), tol=4e-3),
    Case(relu_square, "one-token", lambda: {"x": torch.randn(1, 3712)}, bench=True),
    Case(relu_square, "many-tokens", lambda: {"x": torch.randn(40, 1856)}),
    Case(relu_square, "odd-width", lambda: {"x": torch.randn(3, 333) * 100}),
    Case(relu_square, "bf16", lambda: {"x": torch.randn(3, 63).to(BF16)}, tol=4e-3),
    Case(sigmoid_gate, "one-token", lambda: pair("x", "gate", 1, 16, 256), bench=True),
    Case(sigmoid_gate, "many-tokens", lambda: pair("x", "gate", 63, 16, 256)),
    Case(sigmoid_gate, "odd-width", lambda: pair("x", "gate", 3, 333, scale=30.0)),
    Case(sigmoid_gate, "bf16", lambda: pair("x", "gate", 3, 100, dtype=BF16), tol=4e-3),
    Case(sigmoid_gate, "apart", lambda: {"x": torch.randn(3, 5, 33), "gate": torch.randn(3, 5, 2, 33)[:, :, 1]}),
    Case(gate_heads, "one-token", lambda: gated(1, 64, 128, soft=True), bench=True),
    Case(gate_heads, "many-tokens", lambda: gated(63, 16, 128, soft=False)),
    Case(gate_heads, "odd-width", lambda: gated(3, 5, 33, soft=True, scale=30.0)),
    Case(gate_heads, "channels", lambda: gated(3, 333, 1, soft=True)),
    Case(gate_heads, "bf16", lambda: gated(3, 5, 33, soft=False, dtype=BF16), tol=4e-3),
    Case(split_q_gate, "one-token", lambda: heads(1, 16, 256), bench=True),
    Case(split_q_gate, "many-tokens", lambda: heads(100, 16, 128), bench=True),
    Case(split_q_gate, "odd-width", lambda: heads(7, 3, 63)),
    Case(split_q_gate, "one-head", lambda: heads(2, 1, 5)),
    Case(split_q_gate, "bf16", lambda: heads(3, 5, 33, dtype=BF16)),
]
