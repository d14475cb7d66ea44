"""Rounding large weights to codes: some rows at a time, on all cores."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from auraflux.quant import QTensor, quantize

PIECE = 1 << 18  # weights


def quantize_large(weight: Tensor, bits: int, group: int) -> QTensor:
    """`quantize`, in pieces: rounding takes ten times the memory of what is rounded."""
    rows = weight.flatten(0, -2)
    pieces = rows.split(max(1, PIECE // rows.shape[1]))
    if len(pieces) == 1:
        return quantize(weight, bits, group)
    with _one_thread_each() as pool:
        made = list(pool.map(lambda piece: quantize(piece, bits, group), pieces))
    packed, scales, biases = (
        torch.cat([getattr(one, part) for one in made]).view(*weight.shape[:-1], -1) for part in ("packed", "scales", "biases")
    )
    return QTensor(packed, scales, biases, bits, group, tuple(weight.shape))


@contextmanager
def _one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """Threads that share work among them, and no others below: torch would stop for all its threads after every small step."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as pool:
            yield pool
    finally:
        torch.set_num_threads(count)
