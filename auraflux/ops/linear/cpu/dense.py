"""Dense weights met by few tokens, as routers are: read row by row, once, bf16 widened on the way."""

import numpy as np
import torch
from torch import Tensor

from auraflux.ops.simd.jit import Kernel, arguments, floats, halves, share, threads
from auraflux.ops.simd.math import float_of_bits

FEW_TOKENS = 8  # up to here a weight is read once, row by row
PARALLEL_FROM = 1 << 16  # weights; below this, waking the threads costs more than the work


@Kernel
def _bf16_rows(args, job, jobs):
    x, tokens, width, weight, rows, out = arguments(args, 6)
    for row in share(rows, job, jobs):
        w = halves(weight + 2 * row * width, width)
        for token in range(tokens):
            acts = floats(x + 4 * token * width, width)
            total = np.float32(0)
            for i in range(width):
                total += float_of_bits(np.uint32(w[i]) << np.uint32(16)) * acts[i]
            floats(out + 4 * token * rows, rows)[row] = total


@Kernel
def _f32_rows(args, job, jobs):
    x, tokens, width, weight, rows, out = arguments(args, 6)
    for row in share(rows, job, jobs):
        w = floats(weight + 4 * row * width, width)
        for token in range(tokens):
            acts = floats(x + 4 * token * width, width)
            total = np.float32(0)
            for i in range(width):
                total += w[i] * acts[i]
            floats(out + 4 * token * rows, rows)[row] = total


ROWS_OF = {torch.bfloat16: _bf16_rows, torch.float32: _f32_rows}


def multiply_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] float32, weight [N, K] -> [T, N]."""
    out = torch.empty(x.shape[0], weight.shape[0])
    jobs = threads() if weight.numel() >= PARALLEL_FROM else 1
    ROWS_OF[weight.dtype](jobs, x.data_ptr(), *x.shape, weight.data_ptr(), weight.shape[0], out.data_ptr())
    return out
