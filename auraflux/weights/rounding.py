"""Rounding large weights to codes: some rows at a time, on all cores."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from auraflux.quant import QTensor, quantize

PIECE = 1 << 16  # weights


def quantize_large(weight: Tensor, bits: int, group: int) -> QTensor:
    """`quantize`, in pieces: rounding takes ten times the memory of what is rounded."""
    rows = weight.flatten(0, -2)
    step = max(1, PIECE // rows.shape[1])
    if step >= len(rows):
        return quantize(weight, bits, group)
    first = quantize(rows[:step], bits, group)
    assert first.biases is not None
    wholes = [part.new_empty(len(rows), part.shape[1]) for part in (first.packed, first.scales, first.biases)]

    def write(start: int) -> None:
        made = quantize(rows[start : start + step], bits, group)
        assert made.biases is not None
        for whole, part in zip(wholes, (made.packed, made.scales, made.biases), strict=True):
            whole[start : start + step] = part

    with one_thread_each() as pool:
        list(pool.map(write, range(0, len(rows), step)))
    packed, scales, biases = (whole.view(*weight.shape[:-1], -1) for whole in wholes)
    return QTensor(packed, scales, biases, bits, group, tuple(weight.shape))


@contextmanager
def one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """Threads that share work among them, and no others below: torch would stop for all its threads after every small step."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as pool:
            yield pool
    finally:
        torch.set_num_threads(count)
