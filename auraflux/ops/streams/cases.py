"""Inputs for hyper-connections: one token and many, odd numbers of streams and widths, extreme weights."""

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.streams.reference import (
    collapse_streams,
    expand_streams,
    gate_streams,
    norm_streams,
    read_streams,
    start_streams,
    sum_streams,
    write_streams,
)

BF16 = torch.bfloat16


def collapse(
    tokens: int, n: int, hidden: int, spread: float = 1.0, rounds: int = 20, dtype: torch.dtype = torch.float32
) -> Args:
    width = n * (n + 2)
    weights = {"mixes": torch.randn(tokens, width) * spread, "base": torch.randn(width), "scale": torch.rand(3) + 0.5}
    return {"x": torch.randn(tokens, n, hidden).to(dtype), **weights, "eps": 1e-6, "rounds": rounds}


def read(tokens: int, n: int, hidden: int, dtype: torch.dtype = torch.float32) -> Args:
    weights = {"mixes": torch.randn(tokens, 2 * n), "base": torch.randn(2 * n), "scale": torch.rand(2) + 0.5}
    return {"x": torch.randn(tokens, n, hidden).to(dtype), **weights, "eps": 1e-2, "most": 1.7}


def total(tokens: int, n: int, hidden: int, dtype: torch.dtype = torch.float32) -> Args:
    weights = {"mixes": torch.randn(tokens, n), "base": torch.randn(n), "scale": torch.rand(1) + 0.5, "eps": 1e-6}
    return {"x": torch.randn(tokens, n, hidden).to(dtype), **weights}


def expand(tokens: int, n: int, hidden: int, dtype: torch.dtype = torch.float32) -> Args:
    weights = {"write": torch.rand(tokens, n) * 2, "mix": torch.rand(tokens, n, n)}
    return {"x": torch.randn(tokens, n, hidden).to(dtype), "found": torch.randn(tokens, hidden).to(dtype), **weights}


def norm(tokens: int, n: int, hidden: int, dtype: torch.dtype = torch.float32) -> Args:
    return {"x": torch.randn(tokens, n, hidden).to(dtype) * 3, "weight": torch.rand(n, hidden) + 0.5, "eps": 1e-6}


def gate(tokens: int, n: int, hidden: int, dtype: torch.dtype = torch.float32) -> Args:
    return {"x": torch.randn(tokens, n, hidden).to(dtype), "gates": torch.randn(tokens, n, hidden).to(dtype) * 3}


def write(tokens: int, n: int, hidden: int, dtype: torch.dtype = torch.float32) -> Args:
    found, mixes = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, n).to(dtype) * 3
    return {"x": torch.randn(tokens, n, hidden).to(dtype), "found": found, "mixes": mixes}


CASES = [
    Case(start_streams, "one-token", lambda: {"x": torch.randn(1, 2816), "count": 4}, bench=True),
    Case(start_streams, "odd-bf16", lambda: {"x": torch.randn(7, 333).to(BF16), "count": 3}),
    Case(collapse_streams, "one-token", lambda: collapse(1, 4, 4096), bench=True),
    Case(collapse_streams, "many-tokens", lambda: collapse(63, 4, 1024)),
    Case(collapse_streams, "odd", lambda: collapse(5, 3, 333)),
    Case(collapse_streams, "one-stream", lambda: collapse(3, 1, 100)),
    Case(collapse_streams, "one-round", lambda: collapse(3, 4, 100, rounds=1)),
    Case(collapse_streams, "far-out", lambda: collapse(3, 4, 100, spread=100.0)),
    Case(collapse_streams, "bf16", lambda: collapse(3, 4, 63, dtype=BF16), tol=4e-3),
    Case(read_streams, "one-token", lambda: read(1, 4, 2816), bench=True),
    Case(read_streams, "many-tokens", lambda: read(63, 4, 1024)),
    Case(read_streams, "odd", lambda: read(5, 3, 333)),
    Case(read_streams, "bf16", lambda: read(3, 4, 63, BF16), tol=4e-3),
    Case(sum_streams, "one-token", lambda: total(1, 4, 4096), bench=True),
    Case(sum_streams, "odd", lambda: total(7, 3, 333)),
    Case(sum_streams, "bf16", lambda: total(3, 4, 63, BF16), tol=4e-3),
    Case(expand_streams, "unmixed", lambda: {**expand(5, 3, 333), "mix": None}),
    Case(expand_streams, "unmixed-bf16", lambda: {**expand(2, 4, 63, BF16), "mix": None}, tol=4e-3),
    Case(expand_streams, "one-token", lambda: expand(1, 4, 4096), bench=True),
    Case(expand_streams, "many-tokens", lambda: expand(63, 4, 1024)),
    Case(expand_streams, "odd", lambda: expand(5, 3, 333)),
    Case(expand_streams, "bf16", lambda: expand(3, 4, 63, BF16), tol=4e-3),
    Case(norm_streams, "one-token", lambda: norm(1, 4, 2048), bench=True),
    Case(norm_streams, "many-tokens", lambda: norm(63, 4, 1024)),
    Case(norm_streams, "odd", lambda: norm(5, 3, 333)),
    Case(norm_streams, "bf16", lambda: norm(3, 4, 63, BF16), tol=4e-3),
    Case(gate_streams, "one-token", lambda: gate(1, 4, 2048), bench=True),
    Case(gate_streams, "many-tokens", lambda: gate(63, 4, 1024)),
    Case(gate_streams, "odd", lambda: gate(5, 3, 333)),
    Case(gate_streams, "bf16", lambda: gate(3, 4, 63, BF16), tol=4e-3),
    Case(write_streams, "one-token", lambda: write(1, 4, 2048), bench=True),
    Case(write_streams, "many-tokens", lambda: write(63, 4, 1024)),
    Case(write_streams, "odd", lambda: write(5, 3, 333)),
    Case(write_streams, "bf16", lambda: write(3, 4, 63, BF16), tol=4e-3),
]
