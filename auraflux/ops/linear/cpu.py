"""Products with weights on CPU. Quantized weights run compiled drivers (`products.py`), dense ones torch's BLAS.

The exception is a bf16 weight met by few tokens: widening all of it first would take longer than the product, so it is
widened as it is read.
"""

from array import array

import numpy as np
import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined, is_exact
from auraflux.ops._jit import Kernel, arguments, as_float, float_of_bits, floats, halves, int32s, jit, like, share, threads
from auraflux.ops.activation.cpu import swiglu
from auraflux.ops.linear.products import BLOCK, addresses, padded, run_products, token_indices
from auraflux.ops.linear.reference import Weight
from auraflux.quant import QTensor, mxfp4

FEW_TOKENS = 8  # up to here a dense bf16 weight is widened as it is read
PARALLEL_FROM = 1 << 16  # weights; below this, waking the threads costs more than the work


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    flat = as_float(x).view(-1, x.shape[-1])
    out = multiply(flat, weight)[0] if isinstance(weight, QTensor) else multiply_dense(flat, weight)
    if bias is not None:
        out += bias
    return like(out.view(*x.shape[:-1], weight.shape[0]), x)


def gate_up_swiglu(x: Tensor, gate: Weight, up: Weight) -> Tensor:
    flat = as_float(x).view(-1, x.shape[-1])
    if isinstance(gate, QTensor) and isinstance(up, QTensor):
        both = multiply(flat, gate, up) if same_format(gate, up) else [multiply(flat, gate)[0], multiply(flat, up)[0]]
    elif isinstance(gate, Tensor) and isinstance(up, Tensor):
        both = [multiply_dense(flat, gate), multiply_dense(flat, up)]
    else:
        raise Declined("one of gate and up is quantized, the other dense")
    return like(swiglu(both[0], both[1]).view(*x.shape[:-1], gate.shape[0]), x)


def same_format(a: QTensor, b: QTensor) -> bool:
    return (a.bits, a.group, a.lanes, a.scales.dtype) == (b.bits, b.group, b.lanes, b.scales.dtype)


def multiply(x: Tensor, *weights: QTensor) -> Tensor:
    """Multiply one stack of tokens by weights of one shape and format.

    x       [T, K]  float32
    returns [len(weights), T, N]
    """
    first = weights[0]
    if first.lanes not in (1, BLOCK):
        raise Declined(f"rows lie {first.lanes} side by side; these kernels take 1 or {BLOCK}")
    tokens, rows = x.shape[0], first.shape[0]
    wide = padded(rows)
    out = torch.empty(len(weights), tokens, wide)
    index = token_indices(tokens)
    products = array("q")
    for number, weight in enumerate(weights):
        products.extend((*addresses(weight), index, tokens, out.data_ptr() + 4 * number * tokens * wide))
    run_products(x.data_ptr(), tokens, first, products.buffer_info()[0], len(weights), 4 * wide, not is_exact())
    return out if wide == rows else out[..., :rows].contiguous()


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
    where = ids.long()
    if not isinstance(table, QTensor):
        return table[where]
    if table.lanes == 1:
        taken = [None if t is None else t[where] for t in (table.packed, table.scales, table.biases)]
    else:
        block, lane = where // table.lanes, where % table.lanes
        taken = [None if t is None else t[block, :, lane] for t in (table.packed, table.scales, table.biases)]
    words = taken[0].contiguous()
    if taken[2] is None:
        levels, scales = mxfp4.levels(), mxfp4.scale_values(taken[1])
        biases = torch.zeros_like(scales)
    else:
        levels, scales, biases = torch.arange(2.0**table.bits), taken[1].float(), taken[2].float()
    scales, biases = scales.contiguous(), biases.contiguous()
    out = torch.empty(len(ids), table.shape[1])
    jobs = threads() if out.numel() >= PARALLEL_FROM else 1
    arrays = (words.data_ptr(), scales.data_ptr(), biases.data_ptr(), levels.data_ptr())
    _decode_rows(jobs, *arrays, table.bits, table.group, table.shape[1], len(ids), out.data_ptr())
    return out
