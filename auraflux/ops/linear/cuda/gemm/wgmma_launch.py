"""Launch of products by tiles of tokens on Hopper: token order, tile choice by measured cost, sum of shares (`wgmma.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.blocks.elementwise import silu
from auraflux.ops.gpu.device import multiprocessors
from auraflux.ops.gpu.launch import launch, tensor_descriptor
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.linear.cuda.call import FusedNorm
from auraflux.ops.linear.cuda.gemm.wgmma import Tiles, WeightRows, multiply_tiles
from auraflux.quant import QTensor

BITS = (4, 8)
FEW = 16  # tokens up to which skinny GEMMs are faster, where they take the weight
MOST_TOGETHER = 3  # weights per launch
# for more, dequantizing a weight once costs less than unpacking it for every tile of tokens. 4-bit gate and up are the
# exception: their products would go through memory. On an H200 8192 tokens of llama-8b take 183 ms instead of 188
MOST_TOKENS = 1024
MOST_SHARES = 8
NEAR = 8  # tiles of tokens multiplied by the same rows concurrently
WIDEST = 16384  # inputs of a token that a program normalises
MOST_BOX = 256  # rows of a TMA box
ORDERED, ADDED = 1024, 32  # inputs per program that permutes tokens, rows per program that sums shares
STAGES_NBYTES = 216 << 10  # of shared memory, for all stages of a program
# cost on an H200, µs: (tokens, rows) of a program -> 16 inputs; rows -> start
STEP_US = {(32, 128): 0.053, (64, 128): 0.062, (128, 128): 0.103, (256, 128): 0.185}
STEP_US |= {(32, 256): 0.083, (64, 256): 0.106, (128, 256): 0.178}
START_US = {128: 4.0, 256: 6.5}
ADD_US, BYTE_US = 1.5, 2e-7  # launch of the kernel that sums shares, and each byte of shares stored or loaded


@dataclass(frozen=True)
class Plan:
    """Tile of a product: tokens and rows per program, inputs of a block, blocks in flight, programs that split K."""

    tile: int
    rows: int
    block: int
    stages: int
    shares: int


@triton.jit
def _input_at(at, BITS: tl.constexpr, KB: tl.constexpr):
    """Return which input is stored at a place of a token.

    Lane t of four has a quarter of a block's KB inputs, 16 for each 64: pairs (j, j + PLANES) of words v.
    """
    PLANES: tl.constexpr = 16 // BITS
    e, t, v, j = at % 2, at // 2 % 4, at // 8 % (8 // PLANES), at % 64 // (64 // PLANES)
    return at // KB * KB + KB // 4 * t + at % KB // 64 * 16 + 2 * PLANES * v + j + PLANES * e


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def order_tokens(x, out, tokens, K, padded, BITS: tl.constexpr, T: tl.constexpr, KB: tl.constexpr, BLOCK: tl.constexpr):
    """Store tokens [tiles, K / 64, T, 64] in the order in which lanes unpack codes, padded with zeros."""
    # the next kernel reads only weights before its own wait
    gdc_launch_dependents()
    gdc_wait()
    token, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = _input_at(at, BITS, KB)
    value = tl.load(x + token.to(tl.int64) * K + k, mask=(k < K) & (token < tokens), other=0.0)
    tile = (token // T).to(tl.int64) * padded * T
    tl.store(out + tile + (at // 64 * T + token % T) * 64 + at % 64, value, mask=at < padded)


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def order_normed(x, normed, out, tokens, K, padded, BITS: tl.constexpr, T: tl.constexpr, KB: tl.constexpr, WIDTH: tl.constexpr):
    """Permute as `order_tokens` does, with delta added into `total`, if any, and the norm applied first.

    One token per program.
    """
    gdc_launch_dependents()
    gdc_wait()
    token, at = tl.program_id(0), tl.arange(0, WIDTH)
    line = token.to(tl.int64) * K
    there = (at < K) & (token < tokens)
    wide = _summed(x, normed.delta, line, at, there)
    if normed.delta is not None:
        tl.store(normed.total + line + at, wide, mask=there)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / K + normed.eps)
    k = _input_at(at, BITS, KB)
    there = (k < K) & (token < tokens)
    wide = _summed(x, normed.delta, line, k, there)
    value = wide * factor * tl.load(normed.weight + k, mask=there, other=0.0)
    tile = (token // T).to(tl.int64) * padded * T
    tl.store(out + tile + (at // 64 * T + token % T) * 64 + at % 64, value, mask=at < padded)


@triton.jit
def _summed(x, delta, line, k, there):
    """Load inputs k of x + delta, rounded as a stored sum would be; zeros past the end."""
    wide = tl.load(x + line + k, mask=there, other=0.0).to(tl.float32)
    if delta is not None:
        wide += tl.load(delta + line + k, mask=there, other=0.0).to(tl.float32)
        wide = wide.to(x.dtype.element_ty).to(tl.float32)
    return wide


@triton.jit(do_not_specialize_on_alignment=["tokens", "tiles"])
def add_shares(
    part, y0, y1, y2, sizes, tokens, tiles, shares, COUNT: tl.constexpr, GATED: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
    BR: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Sum the shares of BR rows and BT tokens, gating one weight's sums with the other's if GATED; grid (rows, tokens)."""
    gdc_wait()
    gdc_launch_dependents()
    EACH: tl.constexpr = R // 2 if GATED else R
    at, r = tl.program_id(0) // (EACH // BR), tl.program_id(0) % (EACH // BR) * BR + tl.arange(0, BR)
    tile, c = tl.program_id(1) // (T // BT), tl.program_id(1) % (T // BT) * BT + tl.arange(0, BT)
    stride = tl.num_programs(1).to(tl.int64) // (T // BT) * tiles * (R * T)
    part += (tile * tiles + at).to(tl.int64) * (R * T) + ((r // 8 * 16 + r % 8 if GATED else r)[:, None] * T + c[None, :])
    found = tl.load(part)
    for share in range(1, shares):
        found += tl.load(part + share * stride)
    if GATED:
        part += 8 * T
        up = tl.load(part)
        for share in range(1, shares):
            up += tl.load(part + share * stride)
        found = silu(found) * up
    before, rows0 = 0 * at, 0 * at + sizes.rows0
    if COUNT > 1:  # noqa: SIM102 - decided when the kernel is compiled
        if at >= sizes.end0:
            y0, rows0, before = y1, sizes.rows1, sizes.end0
    if COUNT > 2:  # noqa: SIM102 - decided when the kernel is compiled
        if at >= sizes.end1:
            y0, rows0, before = y2, sizes.rows2, sizes.end1
    row, token = (at - before) * EACH + r, tile * T + c
    to = token.to(tl.int64)[None, :] * rows0 + row[:, None]
    tl.store(y0 + to, found.to(y0.dtype.element_ty), mask=(row < rows0)[:, None] & (token < tokens)[None, :])


@cache
def plan(tokens: int, rows: tuple[int, ...], width: int, bits: int, processors: int) -> Plan:
    """Return the tile of least cost as measured: programs run in waves of one per multiprocessor."""
    best, least = None, float("inf")
    for (tile, height), shares in product(STEP_US, range(1, MOST_SHARES + 1)):
        block = 256 if tile <= 64 and bits == 4 else 128
        stages = min(6, STAGES_NBYTES // (height * block * bits // 8 + block * tile * 2))
        # with 8 bits, programs of 16 warps run out of registers
        if stages < 3 or shares > max(1, cdiv(width, block) // 2) or (bits == 8 and height == 256):
            continue
        tiles, lines = cdiv(tokens, tile), sum(cdiv(n, height) for n in rows)
        steps = cdiv(cdiv(width, block), shares) * (block // 16)
        took = cdiv(lines * tiles * shares, processors) * (START_US[height] + steps * STEP_US[tile, height])
        if shares > 1:
            took += ADD_US + 8 * shares * lines * height * tiles * tile * BYTE_US
        if took < least:
            best, least = Plan(tile, height, block, stages, shares), took
    assert best is not None
    return best


@cache
def tile_layout(kind: str, rows: int, columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16 if kind == "bf16" else gl.int32)


def _tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    kind = "bf16" if x.dtype is torch.bfloat16 else "i32"
    return tensor_descriptor(x, [rows, columns], tile_layout(kind, rows, columns))


def multiply(
    x: Tensor, weights: Sequence[QTensor], outs: Sequence[Tensor], gated: bool = False, normed: FusedNorm | None = None
) -> None:
    """Multiply tokens by up to MOST_TOGETHER weights of one format and width; gated: silu(first) * second, into one out.

    normed  residual add and norm applied to x first
    """
    rows = tuple(weight.shape[0] for weight in weights)
    found = plan(x.shape[0], rows, x.shape[1], weights[0].bits, multiprocessors(x.device))
    launch_tiles(x, weights, outs, gated, found, normed)


def launch_tiles(
    x: Tensor, weights: Sequence[QTensor], outs: Sequence[Tensor], gated: bool, how: Plan, normed: FusedNorm | None = None
) -> None:
    (tokens, width), bits, group = x.shape, weights[0].bits, weights[0].group
    tile, block = how.tile, how.block
    # rows of one weight per program, and the number of weights with separate row tiles
    each, count = (how.rows // 2, 1) if gated else (how.rows, len(weights))
    blocks, tiles = cdiv(width, block), cdiv(tokens, tile)
    share = cdiv(blocks, how.shares)
    shares, padded = cdiv(blocks, share), blocks * block
    ordered = x.new_empty(tiles * padded // 64 * tile, 64)
    if normed is None:
        grid = tiles * tile, cdiv(padded, ORDERED)
        launch(order_tokens, grid)(x, ordered, tokens, width, padded, bits, tile, block, ORDERED, num_warps=4, launch_pdl=True)
    else:
        wide = power_of_two(padded)
        launch(order_normed, (tiles * tile,))(
            x, normed, ordered, tokens, width, padded, bits, tile, block, wide,
            num_warps=min(16, max(4, wide // 256)), launch_pdl=True,
        )  # fmt: skip
    rows = [weight.shape[0] for weight in weights[:count]]
    ends = list(accumulate(cdiv(n, each) for n in rows))
    sizes = Tiles(*_filled(ends[:-1], MOST_TOGETHER - 1), *_filled(rows))
    part = None
    if shares > 1:
        part = torch.empty(shares * tiles * ends[-1] * how.rows * tile, dtype=torch.float32, device=x.device)
    ys = _filled(outs if part is None else [])
    lines = _filled([WeightRows(w.scales, w.biases, y) for w, y in zip(weights, ys, strict=False)])
    ws = _filled([_tiles(weight.packed, each, block * bits // 32) for weight in weights])
    launch(multiply_tiles, (ends[-1], shares, tiles))(
        _tiles(ordered, min(MOST_BOX, block // 64 * tile), 64), *ws, *lines, part, sizes, width, tokens, blocks, share,
        gated, how.rows, tile, block, group, how.stages, NEAR, num_warps=how.rows // 16, launch_pdl=True,
    )  # fmt: skip
    if part is not None:
        grid = ends[-1] * (each // ADDED), tiles * cdiv(tile, 64)
        launch(add_shares, grid)(
            part, *_filled(outs), sizes, tokens, ends[-1], shares, count, gated, how.rows, tile, ADDED, min(tile, 64),
            num_warps=4, launch_pdl=True,
        )  # fmt: skip


def _filled(given: Sequence[Any], count: int = MOST_TOGETHER) -> list[Any]:
    return [*given, *[None] * (count - len(given))]
