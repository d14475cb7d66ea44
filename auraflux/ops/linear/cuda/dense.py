"""Dense rows on CUDA: embedding look-up, dequantized rows, and one token times dense weights of few rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.codes import constants, operands, weights_at
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.quant import QTensor

BLOCK = 1024  # elements of a row per program
BLOCK_K = 2048  # inputs per iteration


@triton.jit
def dequantize_rows(
    packed, scales, biases, ids, out, rows, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Dequantize the rows `ids` of a weight, or all; an id out of range gives NaN."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source, good = row, True
    if ids is not None:
        source = tl.load(ids + row).to(tl.int64)
        good = (source >= 0) & (source < rows)
    there = k < K
    weight = weights_at(packed, scales, biases, source, k, there & good, K, BITS, GROUP, FORM)
    tl.store(out + row * K + k, tl.where(good, weight, float("nan")), mask=there)


@triton.jit
def take_rows(table, ids, out, rows, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(ids + row).to(tl.int64)
    good = (source >= 0) & (source < rows)
    tl.store(out + row * K + k, tl.load(table + source * K + k, mask=(k < K) & good, other=float("nan")), mask=k < K)


@triton.jit
def dense_one(x, weight, weight1, out, out1, rows, K, COLUMNS: tl.constexpr):
    """Multiply one token by one row of a dense weight, or of a second one after it; any dtype, accumulated in float32."""
    row = tl.program_id(0)
    if weight1 is not None:  # noqa: SIM102 - the first is decided when the kernel is compiled
        if row >= rows:
            weight, out, row = weight1, out1, row - rows
    weight += row.to(tl.int64) * K
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, K, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        total += tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32) * value
    tl.store(out + row, tl.sum(total, 0))


def take(table: Tensor, ids: Tensor) -> Tensor:
    """Return rows of a table; NaN for an id out of range."""
    rows, width = table.shape
    out = table.new_empty(len(ids), width)
    if out.numel():
        block = min(BLOCK, power_of_two(width))
        launch(take_rows, (len(ids), cdiv(width, block)))(table, ids, out, rows, width, block)
    return out


def multiply_dense(x: Tensor, weight: Tensor, second: Tensor | None = None) -> list[Tensor]:
    """Multiply one token by one or two dense weights, into x's dtype."""
    (rows, width), more = weight.shape, 0 if second is None else second.shape[0]
    outs = [x.new_empty(1, count) for count in (rows, more)]
    block = min(BLOCK_K, power_of_two(width))
    out1 = None if second is None else outs[1]
    launch(dense_one, (rows + more,))(x, weight, second, outs[0], out1, rows, width, block, num_warps=4)
    return outs[: 1 if second is None else 2]


def dequantized(weight: QTensor, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """Return a weight dequantized, or only its rows `ids`."""
    rows, width = weight.shape
    count = rows if ids is None else len(ids)
    out = torch.empty(count, width, dtype=dtype, device=weight.device)
    if out.numel():
        block = min(BLOCK, power_of_two(width))
        grid = (count, cdiv(width, block))
        launch(dequantize_rows, grid)(*operands(weight), ids, out, rows, width, **constants(weight), BLOCK=block)
    return out
