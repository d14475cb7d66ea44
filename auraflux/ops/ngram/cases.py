"""Inputs for the n-gram ops: one token and many, odd widths, sequences without tokens, products of zero."""

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.ngram.reference import far_conv, gate_values

BF16 = torch.bfloat16


def values(tokens: int, n: int, hidden: int, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> Args:
    keys, queries = (torch.randn(tokens, n, hidden).to(dtype) * factor for _ in range(2))
    return {"keys": keys, "queries": queries, "values": torch.randn(tokens, hidden).to(dtype)}


def conv(counts: list[int], channels: int, taps: int = 4, step: int = 3, dtype: torch.dtype = torch.float32) -> Args:
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    state = torch.randn(len(counts), (taps - 1) * step, channels).to(dtype)
    weight = torch.randn(taps, channels) * 0.5
    return {"x": torch.randn(sum(counts), channels).to(dtype), "state": state, "weight": weight, "starts": starts, "step": step}


CASES = [
    Case(gate_values, "one-token", lambda: values(1, 4, 2048), bench=True),
    Case(gate_values, "many-tokens", lambda: values(63, 4, 1024)),
    Case(gate_values, "odd", lambda: values(5, 3, 333)),
    Case(gate_values, "nothing-in-common", lambda: values(3, 2, 100, factor=0.0)),
    Case(gate_values, "bf16", lambda: values(3, 4, 63, BF16), tol=4e-3),
    Case(far_conv, "one-token", lambda: conv([1], 8192), bench=True),
    Case(far_conv, "one-token-each", lambda: conv([1] * 5, 333)),
    Case(far_conv, "ragged", lambda: conv([1, 0, 100, 7], 1111)),
    Case(far_conv, "two-taps", lambda: conv([3, 9], 63, taps=2, step=5)),
    Case(far_conv, "one-tap", lambda: conv([3, 2], 63, taps=1)),
    Case(far_conv, "bf16", lambda: conv([4, 1], 100, dtype=BF16), tol=4e-3),
]
