"""Any number of tokens times a weight of any format in portable Triton, with one summation order for any number of tokens.

Rows of the weight are the tensor cores' rows and tokens their columns, so that tokens do not mix. K is split into shares of
SHARE: each share is summed from zero, and shares are added in order, by the program that has all of them or, where tokens are
few, by a second kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.codes import Codes, constants, operands
from auraflux.ops.gpu.blocks.tiles import columns_of, tokens_tile, weights_tile
from auraflux.ops.gpu.device import INTERPRETED, multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.linear.reference import Weight
from auraflux.quant import QTensor

ROWS, SHARE = 64, 1024
TILES = (16, 64, 128)  # tokens of a program
WARPS, STAGES = 4, 3


@triton.jit
def multiply_shares(
    x, codes, bias, out, part, tokens, rows, K, shares, BITS: tl.constexpr, GROUP: tl.constexpr,
    FORM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BK: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows by TOKENS tokens; grid (tiles of rows, tiles of tokens, shares or 1).

    part  float32 [shares, tokens, rows] partial sums; None to sum all shares into `out`
    BITS, GROUP, FORM  of the weight; 0 bits for a dense one
    WIDE  multiply in float32
    """
    row, token = tl.program_id(0) * ROWS + tl.arange(0, ROWS), (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    PRECISION: tl.constexpr = "tf32x3" if WIDE else "tf32"
    begin, end = tl.program_id(2), tl.program_id(2) + 1
    if part is None:
        begin, end = 0, shares
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for share in range(begin, end):
        found = tl.zeros([ROWS, TOKENS], tl.float32)
        for start in range(share * SHARE, tl.minimum((share + 1) * SHARE, K), BK):
            value = tokens_tile(x, token, tokens, start, K, BK)
            w = weights_tile(codes, row, rows, start, K, BITS, GROUP, FORM, BK)
            if WIDE:
                found = tl.dot(w.to(tl.float32), value.to(tl.float32), found, input_precision=PRECISION)
            else:
                found = tl.dot(w.to(value.dtype), value, found, input_precision=PRECISION)
        total += found
    there = (row < rows)[:, None] & (token < tokens)[None, :]
    at = token[None, :] * rows + row[:, None]
    if part is not None:
        tl.store(part + tl.program_id(2).to(tl.int64) * tokens * rows + at, total, mask=there)
    else:
        if bias is not None:
            total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def add_in_order(part, bias, out, rows, count, shares, BLOCK: tl.constexpr):
    """Sum the shares of `count` products in order; grid (blocks,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for share in range(shares):
        total += tl.load(part + (at * 0 + share) * count + at, mask=at < count, other=0.0)
    if bias is not None:
        total += tl.load(bias + at % rows, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)


def multiply(x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor) -> None:
    (tokens, width), rows = x.shape, weight.shape[0]
    if isinstance(weight, QTensor):
        codes, form = operands(weight), constants(weight)
    else:
        codes, form = Codes(weight, weight, weight), {"BITS": 0, "GROUP": 1, "FORM": ""}
    wide = x.dtype is torch.float32 or INTERPRETED or (isinstance(weight, Tensor) and weight.dtype is not x.dtype)
    most = TILES[-2 if wide else -1]
    tile = next((size for size in TILES if tokens <= size <= most), most)
    shares, tiles = cdiv(width, SHARE), (cdiv(rows, ROWS), cdiv(tokens, tile))
    split = shares > 1 and (INTERPRETED or tiles[0] * tiles[1] < 4 * multiprocessors(x.device))
    part = torch.empty(shares, tokens, rows, device=x.device) if split else None
    launch(multiply_shares, (*tiles, shares if split else 1))(
        x, codes, bias, out, part, tokens, rows, width, shares,
        **form, WIDE=wide, ROWS=ROWS, TOKENS=tile, BK=columns_of(weight), SHARE=SHARE,
        num_warps=WARPS, num_stages=2 if wide else STAGES,
    )  # fmt: skip
    if part is not None:
        count = tokens * rows
        launch(add_in_order, (cdiv(count, 1024),))(part, bias, out, rows, count, shares, 1024)
