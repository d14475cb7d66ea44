"""Quantization of large weights in chunks of rows: on all cores, or on a GPU."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from auraflux.quant import QTensor, quantize
from auraflux.quant.gguf_blocks import REQUANTIZED_BITS, requantized_group
from auraflux.weights.device_copy import copy_to_device

CHUNK = 1 << 16  # weights
GPU_CHUNK = 1 << 22
SMALLER_GROUPS = 64, 32


def fitting_group(width: int, group: int) -> int | None:
    """Return the group, or the next smaller one that divides a width; None if none does."""
    return next((each for each in (group, *SMALLER_GROUPS) if each <= group and width % each == 0), None)


def quantize_large(weight: Tensor | QTensor, bits: int, group: int, gpu: torch.device | None = None) -> QTensor:
    """Quantize in chunks, since `quantize` takes ten times the memory of its input; codes are dequantized to float32 first.

    gpu  quantize on this GPU, where the result stays; with the same result as on a CPU
    """
    *stack, count, width = weight.shape
    step, count = max(1, (CHUNK if gpu is None else GPU_CHUNK) // width), math.prod((*stack, count))
    if step >= count:
        return quantize(_dense(weight, None, gpu), bits, group)
    rows = _flatten_stack(weight)
    first = quantize(_dense(rows, range(step), gpu), bits, group)
    assert first.biases is not None
    outputs = [part.new_empty(count, part.shape[1]) for part in (first.packed, first.scales, first.biases)]

    def write(start: int) -> None:
        made = quantize(_dense(rows, range(start, min(count, start + step)), gpu), bits, group)
        assert made.biases is not None
        for output, part in zip(outputs, (made.packed, made.scales, made.biases), strict=True):
            output[start : start + step] = part

    starts = range(0, count, step)
    if gpu is None:
        with single_threaded_workers() as pool:
            list(pool.map(write, starts))
    else:
        for start in starts:
            write(start)
    packed, scales, biases = (output.view(*weight.shape[:-1], -1) for output in outputs)
    return QTensor(packed, scales, biases, bits, group, tuple(weight.shape))


def _flatten_stack(weight: Tensor | QTensor) -> Tensor | QTensor:
    if isinstance(weight, QTensor):
        return weight.rows().flatten_stack() if len(weight.shape) == 3 else weight.rows()
    return weight.flatten(0, -2)


def _dense(weight: Tensor | QTensor, rows: range | None = None, device: torch.device | None = None) -> Tensor:
    if isinstance(weight, QTensor):
        some = weight if rows is None else weight.take(torch.arange(rows.start, rows.stop, device=weight.device))
        found = some.dequantize(torch.float32)
    else:
        found = weight if rows is None else weight[rows.start : rows.stop]
    return found if device is None else copy_to_device(found, device)


def requantize_for_mlx(weight: QTensor) -> QTensor:
    """Requantize a weight to a format that MLX supports."""
    return quantize_large(weight, REQUANTIZED_BITS, requantized_group(weight.shape[-1]))


@contextmanager
def single_threaded_workers() -> Iterator[ThreadPoolExecutor]:
    """Yield a thread pool with torch limited to one thread per worker, which avoids a barrier after every small op."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as pool:
            yield pool
    finally:
        torch.set_num_threads(count)
