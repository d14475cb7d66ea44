"""Products of MLA with each head's part of `kv_b_proj`, dense or quantized, in plain Triton.

A tile of the weight is brought to plain numbers and goes through the tensor core; its rows are summed over for queries, its
columns for values.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops._dispatch import Declined, is_invariant
from auraflux.ops.hopper.flash import narrow
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.quant import QTensor

MANY = 64  # tokens, for which tiles are as they may be largest


@triton.jit
def weight_tile(packed, scales, biases, row, inside, c, C: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Give rows of the weight at columns `c`, a power of two of them, as float32; with 0 BITS it is dense."""
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
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SKIP: tl.constexpr,
    USED: tl.constexpr,
    C: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Multiply T tokens' vectors of one head with rows [SKIP, SKIP + USED) of its ROWS in the weight.

    QUERY   sum over the rows, B columns a program; otherwise over the columns, R rows a program
    grid    (HEADS, parts of the result, tiles of tokens)
    """
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
    """Multiply tokens by `used` rows of each head's `rows`, after `skip`; queries by their columns, else by the rows."""
    x = x.contiguous()
    parts: tuple[Any, Any, Any] = (weight, None, None)
    bits = group = 0
    if isinstance(weight, QTensor):
        if weight.biases is None:
            raise Declined("an MXFP4 weight")
        if weight.lanes != 1:
            raise Declined("a weight whose rows are interleaved")
        parts, bits, group = (weight.packed, weight.scales, weight.biases), weight.bits, weight.group
    tokens, heads, width = x.shape[0], x.shape[1], weight.shape[1]
    if not out.numel():
        return
    many = MANY if is_invariant() else tokens
    tile = min(64, max(16, power_of_two(many)))
    # few tokens: small parts of the result, so that all of the GPU reads the weight
    grid_rows, grid_columns = (32, 64) if query else (16 if many <= 16 else 64, 64)
    pieces = cdiv(width, grid_columns) if query else cdiv(used, grid_rows)
    launch(latent_products, (heads, pieces, cdiv(tokens, tile)))(
        x,
        *parts,
        out,
        tokens,
        HEADS=heads,
        ROWS=rows,
        SKIP=skip,
        USED=used,
        C=width,
        BITS=bits,
        GROUP=group,
        QUERY=query,
        T=tile,
        R=grid_rows,
        B=grid_columns,
        WIDE=not narrow(x),
        num_warps=4,
    )
