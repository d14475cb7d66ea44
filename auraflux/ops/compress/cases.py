"""Inputs for compressed windows: windows that close within a step and across steps, with and without the window before."""

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.attention.pages import RowPages
from auraflux.ops.compress.reference import compress_windows

PAGE = 8


def windows(
    lengths: list[int],
    new: list[int],
    rate: int,
    width: int,
    twice: bool,
    per_page: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Args:
    """Return arguments for sequences of the given lengths and numbers of new tokens."""
    wide, most = width * (1 + twice), max(lengths)
    pages, rooms = -(-most // PAGE), -(-(most // rate + 1) // per_page)
    count = len(lengths)
    seen = torch.tensor(lengths, dtype=torch.int32)
    table = torch.randperm(count * pages).int().view(count, pages)
    rows = RowPages(torch.randn(count * pages, PAGE, 2 * wide), table, seen)
    places = torch.randperm(count * rooms).int().view(count, rooms)
    entries = RowPages(torch.zeros(count * rooms, per_page, width, dtype=dtype), places, seen)
    starts = torch.tensor([0, *new]).cumsum(0).int()
    turning = torch.cat([torch.zeros(width // 4), torch.rand(width // 2 - width // 4)])
    learned = {"bias": torch.randn(rate, wide), "norm": torch.rand(width), "eps": 1e-6, "inv_freq": turning}
    return {"x": torch.randn(sum(new), 2 * wide), "rows": rows, "starts": starts, "entries": entries, **learned}


CASES = [
    Case(compress_windows, "whole", lambda: windows([33], [33], 4, 16, True)),
    Case(compress_windows, "one-token", lambda: windows([32, 31, 4], [1, 1, 1], 4, 16, True)),
    Case(compress_windows, "once", lambda: windows([33, 17], [20, 3], 8, 16, False)),
    Case(compress_windows, "odd", lambda: windows([31, 7], [11, 5], 3, 10, True, 1)),
    Case(compress_windows, "bf16", lambda: windows([70, 5], [37, 5], 8, 48, True, 2, torch.bfloat16), tol=4e-3),
    Case(compress_windows, "many-sequences", lambda: windows([64, 63, 31, 9], [33, 1, 0, 9], 32, 48, False, 1)),
]
