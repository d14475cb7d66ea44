"""Products of many tokens in FP8: tensor cores multiply e4m3 at twice the rate of bf16.

Each row of activations and of the weight is divided by a scale of its own, so that its largest value is the largest of e4m3,
and rounded. `torch._scaled_mm` multiplies the rows and applies both scales. e4m3 has 3 bits of mantissa: the op's contract
does not allow that, so only callers that ask for it (`fp8_products`) get this route.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import power_of_two
from auraflux.ops.linear.cuda.dequantize import dense_weight
from auraflux.quant import QTensor

FEWEST_TOKENS = 512  # more than a decode batch has; with fewer, rounding the weight costs what the product saves
MULTIPLE = 16  # of inputs and outputs
WIDEST = 1 << 15  # inputs, which a program holds in registers
WORD = 8  # 4-bit codes in a word
FP8 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)  # of e4m3
TINY = tl.constexpr(1e-30)  # stands for the largest value of a row of zeros


@triton.jit
def round_rows(x, out, scales, width, WIDTH: tl.constexpr):
    """Round a row to e4m3; a program per row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    there = column < width
    values = tl.load(x + row * width + column, mask=there, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0), TINY) / LARGEST
    tl.store(out + row * width + column, (values / scale).to(out.dtype.element_ty), mask=there)
    tl.store(scales + row, scale)


@triton.jit
def round_int4(packed, scales, biases, out, row_scales, words, GROUP: tl.constexpr, WORDS: tl.constexpr):
    """Round a row of affine 4-bit weights to e4m3; a program per row.

    The row's scale follows from the two ends of each group's range.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WORDS)
    there, group = at < words, row * (words // (GROUP // 8)) + at // (GROUP // 8)
    word = tl.load(packed + row * words + at, mask=there, other=0)
    step = tl.load(scales + group, mask=there, other=0.0).to(tl.float32)
    least = tl.load(biases + group, mask=there, other=0.0).to(tl.float32)
    most = tl.maximum(tl.abs(least), tl.abs(least + 15.0 * step))
    scale = tl.maximum(tl.max(most, 0), TINY) / LARGEST
    step, least = step / scale, least / scale
    code = (word[:, None] >> (4 * tl.arange(0, 8))[None, :]) & 15
    values = code.to(tl.float32) * step[:, None] + least[:, None]
    to = row * words * 8 + at[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out + to, values.to(out.dtype.element_ty), mask=there[:, None])
    tl.store(row_scales + row, scale)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [T, K] in e4m3 and their scales [T]."""
    rows, width = x.shape
    out, scales = x.new_empty(rows, width, dtype=FP8), x.new_empty(rows, dtype=torch.float32)
    wide = power_of_two(width)
    launch(round_rows, (rows,))(x, out, scales, width, wide, num_warps=min(16, max(1, wide // 512)))
    return out, scales


def rounded_weight(weight: QTensor | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a weight [N, K] in e4m3 and the scales of its rows [N]."""
    if isinstance(weight, Tensor):
        return rounded(weight)
    if weight.bits != 4 or weight.biases is None or weight.lanes != 1:
        return rounded(dense_weight(weight, dtype))
    (rows, width), words = weight.shape, weight.shape[1] // WORD
    out = torch.empty(rows, width, dtype=FP8, device=weight.device)
    scales, wide = torch.empty(rows, dtype=torch.float32, device=weight.device), power_of_two(words)
    operands = weight.packed, weight.scales, weight.biases, out, scales, words
    launch(round_int4, (rows,))(*operands, weight.group, wide, num_warps=min(8, max(1, wide // 64)))
    return out, scales


def multiply(x: Tensor, weights: list[QTensor | Tensor]) -> list[Tensor]:
    """Multiply tokens [T, K] by weights [N, K] each, rounded to e4m3; in x's dtype."""
    tokens, token_scales = rounded(x)
    outs = []
    for weight in weights:
        rows, row_scales = rounded_weight(weight, x.dtype)
        scales = token_scales[:, None], row_scales[None, :]
        outs.append(torch._scaled_mm(tokens, rows.T, *scales, out_dtype=x.dtype, use_fast_accum=True))
    return outs
