"""Rounding large weights to codes: some rows at a time, on all cores."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from auraflux.quant import QTensor, quantize
from auraflux.quant.gguf_blocks import REQUANTIZED_BITS, requantized_group

PIECE = 1 << 16  # weights


def quantize_large(weight: Tensor | QTensor, bits: int, group: int) -> QTensor:
    """`quantize`, in pieces: rounding takes ten times the memory of what is rounded. Codes are taken in single precision."""
    *stack, count, width = weight.shape
    step, count = max(1, PIECE // width), math.prod((*stack, count))
    if step >= count:
        return quantize(_numbers(weight), bits, group)
    rows = _joined(weight)
    first = quantize(_numbers(rows, range(step)), bits, group)
    assert first.biases is not None
    wholes = [part.new_empty(count, part.shape[1]) for part in (first.packed, first.scales, first.biases)]

    def write(start: int) -> None:
        made = quantize(_numbers(rows, range(start, min(count, start + step))), bits, group)
        assert made.biases is not None
        for whole, part in zip(wholes, (made.packed, made.scales, made.biases), strict=True):
            whole[start : start + step] = part

    with one_thread_each() as pool:
        list(pool.map(write, range(0, count, step)))
    packed, scales, biases = (whole.view(*weight.shape[:-1], -1) for whole in wholes)
    return QTensor(packed, scales, biases, bits, group, tuple(weight.shape))


def _joined(weight: Tensor | QTensor) -> Tensor | QTensor:
    if isinstance(weight, QTensor):
        return weight.rows().joined() if len(weight.shape) == 3 else weight.rows()
    return weight.flatten(0, -2)


def _numbers(weight: Tensor | QTensor, rows: range | None = None) -> Tensor:
    if isinstance(weight, QTensor):
        some = weight if rows is None else weight.take(torch.arange(rows.start, rows.stop, device=weight.device))
        return some.dequantize(torch.float32)
    return weight if rows is None else weight[rows.start : rows.stop]


def for_mlx(weight: QTensor) -> QTensor:
    """A weight in a format that MLX has not, rounded to one that it has."""
    return quantize_large(weight, REQUANTIZED_BITS, requantized_group(weight.shape[-1]))


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
