"""Products with weights on CPU. Quantized weights run compiled drivers (`products.py`), dense ones torch's BLAS.

The exception is a bf16 weight met by few tokens: widening all of it first would take longer than the product, so it is
widened as it is read.
"""

from array import array

import numpy as np
import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops._jit import Kernel, arguments, as_float, float_of_bits, floats, halves, int32s, jit, like, share, threads
from auraflux.ops.activation.cpu import swiglu
from auraflux.ops.linear.products import BLOCK, driver_for, padded, token_indices
from auraflux.ops.linear.reference import Weight
from auraflux.quant import QTensor, mxfp4

FEW_TOKENS = 8  # up to here a dense bf16 weight is widened as it is read
PARALLEL_FROM = 1 << 16  # weights; below this, waking the threads costs more than the work


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    flat = rows_of(x)
    out = multiply(flat, weight) if isinstance(weight, QTensor) else multiply_dense(flat, weight)
    if bias is not None:
        out += bias
    return shaped(out, x)


def gate_up_swiglu(x: Tensor, gate: Weight, up: Weight) -> Tensor:
    flat = rows_of(x)
    if isinstance(gate, QTensor) and isinstance(up, QTensor):
        if same_format(gate, up):
            gated, other = multiply(flat, gate, up).view(2, len(flat), gate.shape[0])
        else:
            gated, other = multiply(flat, gate), multiply(flat, up)
    elif isinstance(gate, Tensor) and isinstance(up, Tensor):
        gated, other = multiply_dense(flat, gate), multiply_dense(flat, up)
    else:
        raise Declined("one of gate and up is quantized, the other dense")
    return shaped(swiglu(gated, other), x)


def rows_of(x: Tensor) -> Tensor:
    """x as float32 [T, K]."""
    wide = as_float(x)
    return wide if wide.dim() == 2 else wide.view(-1, wide.shape[-1])


def shaped(out: Tensor, x: Tensor) -> Tensor:
    """Results [T, N] with the leading axes and the dtype of x."""
    return like(out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1]), x)


def same_format(a: QTensor, b: QTensor) -> bool:
    return (a.bits, a.group, a.lanes, a.scales.dtype) == (b.bits, b.group, b.lanes, b.scales.dtype)


def multiply(x: Tensor, *weights: QTensor) -> Tensor:
    """Multiply one stack of tokens by weights of one shape and format.

    x       [T, K]  float32
    returns [len(weights) * T, N], one weight's results after the other's
    """
    first = weights[0]
    if first.lanes not in (1, BLOCK):
        raise Declined(f"rows lie {first.lanes} side by side; these kernels take 1 or {BLOCK}")
    tokens, rows = x.shape[0], first.shape[0]
    wide = padded(rows)
    out = torch.empty(len(weights) * tokens, wide)
    index, to = token_indices(tokens), out.data_ptr()
    products = array("q")
    for weight in weights:
        products.extend((*weight.addresses, index, tokens, to))
        to += 4 * tokens * wide
    driver_for(first)(x.data_ptr(), tokens, first, products.buffer_info()[0], len(weights), 4 * wide)
    return out if wide == rows else out[:, :rows].contiguous()


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


def multiply_dense(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] float32, weight [N, K] -> [T, N]."""
    if weight.dtype is torch.bfloat16 and x.shape[0] <= FEW_TOKENS:
        out = torch.empty(x.shape[0], weight.shape[0])
        jobs = threads() if weight.numel() >= PARALLEL_FROM else 1
        _bf16_rows(jobs, x.data_ptr(), *x.shape, weight.data_ptr(), weight.shape[0], out.data_ptr())
        return out
    return torch.nn.functional.linear(x, as_float(weight))


@jit
def _decode_row(words_at, scales_at, biases_at, levels_at, bits, group, width, out_at):
    """code -> levels[code] * scale + bias, for one row."""
    words, out, levels = int32s(words_at, width * bits // 32), floats(out_at, width), floats(levels_at, 1 << bits)
    scales, biases = floats(scales_at, width // group), floats(biases_at, width // group)
    for i in range(width):
        word, shift = (i * bits) >> 5, (i * bits) & 31
        code = np.uint32(words[word]) >> np.uint32(shift)
        if shift + bits > 32:
            code |= np.uint32(words[word + 1]) << np.uint32(32 - shift)
        out[i] = levels[code & np.uint32((1 << bits) - 1)] * scales[i // group] + biases[i // group]


@Kernel
def _decode_rows(args, job, jobs):
    words, scales, biases, levels, bits, group, width, rows, out = arguments(args, 9)
    groups = width // group
    for row in share(rows, job, jobs):
        meta = 4 * row * groups
        _decode_row(
            words + row * width * bits // 8, scales + meta, biases + meta, levels, bits, group, width, out + 4 * row * width
        )


def embed(ids: Tensor, table: Weight) -> Tensor:
    if not isinstance(table, QTensor):
        return table[ids.long()]
    rows = table.take(ids.long())
    if rows.biases is None:
        levels, scales = mxfp4.levels(), mxfp4.scale_values(rows.scales)
        biases = torch.zeros_like(scales)
    else:
        levels, scales, biases = torch.arange(2.0**table.bits), rows.scales.float(), rows.biases.float()
    out = torch.empty(rows.shape)
    jobs = threads() if out.numel() >= PARALLEL_FROM else 1
    arrays = (rows.packed.data_ptr(), scales.data_ptr(), biases.data_ptr(), levels.data_ptr())
    _decode_rows(jobs, *arrays, table.bits, table.group, table.shape[1], len(ids), out.data_ptr())
    return out
