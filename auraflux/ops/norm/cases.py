"""Inputs for the norms: a decode row, many rows, heads, odd widths, narrow types, zeros and large values."""

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.norm.reference import (
    add_rms_norm,
    gated_rms_norm,
    group_rms_norm,
    layer_norm,
    per_layer_inputs,
    qk_norm,
    rms_norm,
)


def rows(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Args:
    return {"x": (torch.randn(shape) * scale).to(dtype), "weight": torch.rand(shape[-1]) + 0.5, "eps": 1e-6}


def pairs(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Args:
    args = rows(*shape, dtype=dtype)
    return {"x": args.pop("x"), name: torch.randn(shape).to(dtype), **args}


def shifted(*shape: int, dtype: torch.dtype = torch.float32, offset: float = 0.5) -> Args:
    args = rows(*shape, dtype=dtype)
    return {"x": args["x"] + offset, "weight": args["weight"], "bias": torch.randn(shape[-1]), "eps": 1e-6}


def heads(*shape: int, key_heads: int, mean: bool = False, dtype: torch.dtype = torch.float32) -> Args:
    k = torch.randn(*shape[:-2], key_heads, shape[-1])
    return {"q": torch.randn(shape).to(dtype), "k": k.to(dtype), "eps": 1e-6, "mean": mean}


BF16 = torch.bfloat16


def grouped(*shape: int, dtype: torch.dtype = torch.float32) -> Args:
    return {**pairs("z", *shape, dtype=dtype), "weight": torch.rand(shape[1:]) + 0.5}


def layered(tokens: int, layers: int, width: int, dtype: torch.dtype = torch.float32) -> Args:
    projected, embedded = torch.randn(2, tokens, layers * width).to(dtype)
    return {"projected": projected, "embedded": embedded, "weight": torch.randn(width), "eps": 1e-3, "share": 0.7}


CASES = [
    Case(rms_norm, "one-row", lambda: rows(1, 2880), bench=True),
    Case(rms_norm, "many-rows", lambda: rows(512, 4096), bench=True),
    Case(rms_norm, "heads", lambda: rows(5, 16, 128)),
    Case(rms_norm, "odd-width", lambda: rows(7, 333)),
    Case(rms_norm, "one-element", lambda: rows(3, 1)),
    Case(rms_norm, "zeros", lambda: rows(2, 64, scale=0.0)),
    Case(rms_norm, "large", lambda: rows(2, 100, scale=1e15)),
    Case(rms_norm, "bf16", lambda: rows(3, 128, dtype=BF16), tol=4e-3),
    Case(layer_norm, "one-row", lambda: shifted(1, 128), bench=True),
    Case(layer_norm, "many-rows", lambda: shifted(512, 128), bench=True),
    Case(layer_norm, "odd-width", lambda: shifted(7, 333)),
    Case(layer_norm, "far-off", lambda: shifted(3, 100, offset=30.0)),
    Case(layer_norm, "bf16", lambda: shifted(3, 128, dtype=BF16), tol=4e-3),
    Case(add_rms_norm, "one-row", lambda: pairs("residual", 1, 4096), bench=True),
    Case(add_rms_norm, "many-rows", lambda: pairs("residual", 40, 2048)),
    Case(add_rms_norm, "odd-width", lambda: pairs("residual", 3, 63)),
    Case(add_rms_norm, "bf16", lambda: pairs("residual", 3, 100, dtype=BF16), tol=4e-3),
    Case(gated_rms_norm, "one-token", lambda: pairs("z", 1, 32, 128), bench=True),
    Case(gated_rms_norm, "many-tokens", lambda: pairs("z", 33, 32, 128)),
    Case(gated_rms_norm, "odd-width", lambda: pairs("z", 3, 5, 63)),
    Case(gated_rms_norm, "bf16", lambda: pairs("z", 3, 4, 64, dtype=BF16), tol=4e-3),
    Case(group_rms_norm, "one-token", lambda: grouped(1, 8, 512), bench=True),
    Case(group_rms_norm, "many-tokens", lambda: grouped(33, 4, 128)),
    Case(group_rms_norm, "odd-width", lambda: grouped(3, 5, 63)),
    Case(group_rms_norm, "bf16", lambda: grouped(3, 2, 100, dtype=BF16), tol=4e-3),
    Case(per_layer_inputs, "one-token", lambda: layered(1, 35, 256), bench=True),
    Case(per_layer_inputs, "many-tokens", lambda: layered(65, 5, 64), bench=True),
    Case(per_layer_inputs, "odd-width", lambda: layered(3, 7, 63)),
    Case(per_layer_inputs, "no-tokens", lambda: layered(0, 2, 16)),
    Case(per_layer_inputs, "bf16", lambda: layered(5, 3, 100, BF16), tol=4e-3),
    Case(qk_norm, "one-token", lambda: heads(1, 16, 128, key_heads=16), bench=True),
    Case(qk_norm, "many-tokens", lambda: heads(65, 16, 128, key_heads=8)),
    Case(qk_norm, "mean", lambda: heads(3, 4, 64, key_heads=2, mean=True)),
    Case(qk_norm, "odd-width", lambda: heads(7, 3, 63, key_heads=3)),
    Case(qk_norm, "bf16", lambda: heads(2, 4, 128, key_heads=4, dtype=BF16), tol=4e-3),
]
