"""Products of MLA with each head's rows of `kv_b_proj`, dense or quantized, in Triton.

A tile of the weight is dequantized for the tensor core; queries sum over its rows, values over its columns.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops._dispatch import Declined, is_invariant
from auraflux.ops.gpu.blocks.flash import fits_half_precision
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.quant import QTensor

MANY = 64  # tokens from which on tiles are largest


class HeadRows(NamedTuple):
    """Compile-time shape of a weight: heads, rows per head, rows skipped and used, columns, bits (0 if dense), group."""

    heads: int
    rows: int
    skip: int
    used: int
    width: int
    bits: int
    group: int


class Tile(NamedTuple):
    """Tile of a program, whether it sums over rows (queries), and whether in float32."""

    query: bool
    tokens: int
    rows: int
    columns: int
    wide: bool


@triton.jit
def weight_tile(packed, scales, biases, row, inside, c, C: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Load weight rows at columns `c`, a power of two of them, as float32; BITS is 0 for a dense weight."""
    there = inside[:, None] & (c < C)[None, :]
    if BITS == 0:
        w = tl.load(packed + row[:, None] * C + c[None, :], mask=there, other=0.0).to(tl.float32)
    else:
        WORDS: tl.constexpr = C * BITS // 32
        bit = c * BITS
        at = row[:, None] * WORDS + (bit // 32)[None, :]
        word = tl.load(packed + at, mask=there, other=0).to(tl.uint32, bitcast=True)
        code = word >> (bit % 32)[None, :].to(tl.uint32)
        if 32 % BITS != 0:
            # the code may end in the next word
            over = (bit % 32 + BITS > 32)[None, :]
            following = tl.load(packed + at + 1, mask=there & over, other=0).to(tl.uint32, bitcast=True)
            code = code | tl.where(over, following << ((32 - bit % 32) % 32)[None, :].to(tl.uint32), 0)
        at = row[:, None] * (C // GROUP) + (c // GROUP)[None, :]
        scale = tl.load(scales + at, mask=there, other=0.0).to(tl.float32)
        bias = tl.load(biases + at, mask=there, other=0.0).to(tl.float32)
        w = (code & ((1 << BITS) - 1)).to(tl.float32) * scale + bias
    return w


@triton.jit
def latent_products(
    x,
    packed,
    scales,
    biases,
    out,
    tokens,
    WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Multiply T tokens' vectors of one head by rows [SKIP, SKIP + USED) of its ROWS in the weight.

    QUERY   sum over the rows, B columns a program; otherwise over the columns, R rows a program
    grid    (HEADS, blocks of the result, tiles of tokens)
    """
    HEADS: tl.constexpr = WEIGHT.heads
    ROWS: tl.constexpr = WEIGHT.rows
    SKIP: tl.constexpr = WEIGHT.skip
    USED: tl.constexpr = WEIGHT.used
    C: tl.constexpr = WEIGHT.width
    BITS: tl.constexpr = WEIGHT.bits
    GROUP: tl.constexpr = WEIGHT.group
    QUERY: tl.constexpr = TILE.query
    T: tl.constexpr = TILE.tokens
    R: tl.constexpr = TILE.rows
    B: tl.constexpr = TILE.columns
    WIDE: tl.constexpr = TILE.wide
    head = tl.program_id(0)
    t = tl.program_id(2) * T + tl.arange(0, T)
    at = (t.to(tl.int64) * HEADS + head)[:, None]
    here = (t < tokens)[:, None]
    PRECISION: tl.constexpr = "tf32x3" if WIDE else "tf32"
    KIND: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    first = (head * ROWS + SKIP).to(tl.int64)
    if QUERY:
        c = tl.program_id(1) * B + tl.arange(0, B)
        acc = tl.zeros([T, B], tl.float32)
        for i in range(0, USED, R):
            r = i + tl.arange(0, R)
            a = tl.load(x + at * USED + r[None, :], mask=here & (r < USED)[None, :], other=0.0).to(KIND)
            w = weight_tile(packed, scales, biases, first + r, r < USED, c, C, BITS, GROUP).to(KIND)
            acc = tl.dot(a, w, acc, input_precision=PRECISION)
        tl.store(out + at * C + c[None, :], acc.to(out.dtype.element_ty), mask=here & (c < C)[None, :])
    else:
        r = tl.program_id(1) * R + tl.arange(0, R)
        acc = tl.zeros([T, R], tl.float32)
        for i in range(0, C, B):
            c = i + tl.arange(0, B)
            a = tl.load(x + at * C + c[None, :], mask=here & (c < C)[None, :], other=0.0).to(KIND)
            w = weight_tile(packed, scales, biases, first + r, r < USED, c, C, BITS, GROUP).to(KIND)
            acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
        tl.store(out + at * USED + r[None, :], acc.to(out.dtype.element_ty), mask=here & (r < USED)[None, :])


def multiply(x: Tensor, weight: Tensor | QTensor, out: Tensor, rows: int, skip: int, used: int, query: bool) -> None:
    """Multiply tokens by `used` rows of each head's `rows`, after `skip`; queries sum over the rows, else over the columns."""
    x = x.contiguous()
    parts: tuple[Any, Any, Any] = (weight, None, None)
    bits = group = 0
    if isinstance(weight, QTensor):
        if weight.biases is None:
            raise Declined("the weight is MXFP4")
        if weight.lanes != 1:
            raise Declined("the weight's rows are interleaved")
        parts, bits, group = (weight.packed, weight.scales, weight.biases), weight.bits, weight.group
    tokens, heads, width = x.shape[0], x.shape[1], weight.shape[1]
    if not out.numel():
        return
    many = MANY if is_invariant() else tokens
    tile = min(64, max(16, power_of_two(many)))
    # few tokens: small blocks of the result, so that all multiprocessors read the weight
    grid_rows, grid_columns = (32, 64) if query else (16 if many <= 16 else 64, 64)
    result_blocks = cdiv(width, grid_columns) if query else cdiv(used, grid_rows)
    launch(latent_products, (heads, result_blocks, cdiv(tokens, tile)))(
        x,
        *parts,
        out,
        tokens,
        HeadRows(heads, rows, skip, used, width, bits, group),
        Tile(query, tile, grid_rows, grid_columns, not fits_half_precision(x)),
        num_warps=4,
    )
