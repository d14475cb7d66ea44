"""Inputs for sampling: a vocabulary of 250,000 and small ones, each filter alone and all together, ties and masked tokens."""

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.sample.reference import penalize, sample

BF16 = torch.bfloat16
VOCABULARY = 248_320


def rows(
    batch: int,
    size: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    *,
    scale: float = 3.0,
    dtype: torch.dtype = torch.float32,
) -> Args:
    return {
        "logits": (torch.randn(batch, size) * scale).to(dtype),
        "uniform": torch.rand(batch),
        "temperature": torch.full((batch,), temperature),
        "top_k": torch.full((batch,), top_k, dtype=torch.int32),
        "top_p": torch.full((batch,), top_p),
        "min_p": torch.full((batch,), min_p),
    }


def mixed(batch: int, size: int) -> Args:
    """Rows that differ in every setting."""
    return {
        **rows(batch, size),
        "temperature": torch.rand(batch) * 2 * (torch.rand(batch) > 0.2),
        "top_k": torch.randint(0, 40, (batch,), dtype=torch.int32) * (torch.rand(batch) > 0.4),
        "top_p": torch.where(torch.rand(batch) > 0.4, torch.rand(batch), 1.0),
        "min_p": torch.where(torch.rand(batch) > 0.5, torch.rand(batch) * 0.2, 0.0),
    }


def tied(batch: int, size: int, top_k: int, top_p: float) -> Args:
    return {**rows(batch, size, 0.7, top_k, top_p), "logits": torch.randint(-2, 4, (batch, size)).float()}


def masked(batch: int, size: int, allowed: int, top_k: int = 0, top_p: float = 1.0) -> Args:
    args = rows(batch, size, top_k=top_k, top_p=top_p)
    args["logits"][:, torch.randperm(size)[allowed:]] = -torch.inf
    return args


def broken() -> Args:
    args = mixed(6, 33)
    args["logits"][0, 4:] = args["logits"][1] = torch.nan
    args["logits"][2] = -torch.inf
    args["logits"][3, 7] = args["logits"][4, 5:9] = torch.inf
    return args


def seen(batch: int, size: int, dtype: torch.dtype = torch.float32) -> Args:
    return {
        "logits": (torch.randn(batch, size) * 3).to(dtype),
        "prompt_mask": torch.rand(batch, size) < 0.3,
        "output_counts": torch.randint(0, 5, (batch, size), dtype=torch.int32) * (torch.rand(batch, size) < 0.2),
        "repetition": 0.8 + torch.rand(batch),
        "presence": torch.randn(batch),
        "frequency": torch.randn(batch),
    }


CASES = [
    Case(sample, "greedy", lambda: rows(1, VOCABULARY, 0.0), bench=True),
    Case(sample, "usual", lambda: rows(1, VOCABULARY, 0.7, 20, 0.8), bench=True),
    Case(sample, "no-filter", lambda: rows(1, VOCABULARY), bench=True),
    Case(sample, "top-p", lambda: rows(1, VOCABULARY, top_p=0.95)),
    Case(sample, "min-p", lambda: rows(1, VOCABULARY, min_p=0.05)),
    Case(sample, "flat", lambda: rows(2, 100_000, top_p=0.9, scale=0.01)),
    Case(sample, "steep", lambda: rows(3, 5000, scale=1e4)),
    Case(sample, "mixed", lambda: mixed(63, 333)),
    Case(sample, "mixed-many", lambda: mixed(63, 5000)),
    Case(sample, "cold", lambda: rows(5, 1000, 1e-4, 50, 0.9)),
    Case(sample, "hot", lambda: rows(5, 1000, 1e4, 50, 0.9)),
    Case(sample, "tiny-top-p", lambda: rows(5, 100, top_p=1e-6)),
    Case(sample, "top-k-one", lambda: rows(5, 100, top_k=1)),
    Case(sample, "top-k-all", lambda: rows(5, 100, top_k=1000)),
    Case(sample, "one-token", lambda: rows(3, 1, top_k=5, top_p=0.5, min_p=0.5)),
    Case(sample, "no-rows", lambda: rows(0, 100)),
    Case(sample, "ties-top-k", lambda: tied(33, 100, 7, 1.0)),
    Case(sample, "ties-top-p", lambda: tied(33, 100, 0, 0.6)),
    Case(sample, "masked", lambda: masked(9, 333, 10, top_k=20, top_p=0.9)),
    Case(sample, "masked-but-one", lambda: masked(9, 333, 1)),
    Case(sample, "broken", broken),
    Case(sample, "bf16", lambda: rows(9, 1000, 0.8, 30, 0.9, dtype=BF16)),
    Case(penalize, "one-row", lambda: seen(1, VOCABULARY), bench=True),
    Case(penalize, "many-rows", lambda: seen(7, 10_000)),
    Case(penalize, "odd-size", lambda: seen(5, 333)),
    Case(penalize, "bf16", lambda: seen(3, 100, BF16), tol=4e-3),
]
