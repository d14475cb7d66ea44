"""Helpers for attention cases: page tables, sequence starts, and the amount of work."""

from itertools import pairwise

import torch

from auraflux.ops._cases import Args

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
RAGGED = [70, 5, 9, 130], [33, 0, 1, 2]  # lengths, and new tokens among them


def index(lengths: list[int], page: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return a pool size, a shuffled page table with a few unowned pages, and the lengths."""
    width = max(-(-length // page) for length in lengths)
    count = len(lengths) * width + 3
    table = torch.randperm(count)[: len(lengths) * width].view(len(lengths), width).int()
    return count, table, torch.tensor(lengths, dtype=torch.int32)


def starts_of(new: list[int]) -> torch.Tensor:
    return torch.tensor([sum(new[:i]) for i in range(len(new) + 1)], dtype=torch.int32)


def pairs(args: Args) -> int:
    """Return the number of visible (query, key) pairs, without a window."""
    starts, lengths = args["starts"].tolist(), args["pages"].lengths.tolist()
    new = [b - a for a, b in pairwise(starts)]
    return sum(n * length - n * (n - 1) // 2 for n, length in zip(new, lengths, strict=True))
