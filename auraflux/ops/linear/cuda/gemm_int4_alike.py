"""Any number of tokens times four-bit weights on Hopper, each to the bit as `matvec_int4.py` multiplies one.

Tokens are brought into the order of the tensor cores first, by the functions that bring a single one there. Then a program
multiplies ROWS rows by a tile of tokens (`gemm_int4_alike_tiles.py`); where these are few, the warps of `matvec_int4.py` are
programs, and their sums go through memory.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.device import multiprocessors
from auraflux.ops.hopper.launch import described, launch
from auraflux.ops.hopper.mma_int4 import sum_x
from auraflux.ops.hopper.ptx import AWAIT, run, shared
from auraflux.ops.hopper.reduce import sum_over
from auraflux.ops.hopper.shared_memory import put
from auraflux.ops.hopper.sizes import cdiv
from auraflux.ops.linear.cuda.call import PLAIN, Normed, Plain
from auraflux.ops.linear.cuda.gemm_int4_alike_tiles import Weight, multiply_alike
from auraflux.ops.linear.cuda.gemm_wgmma_launch import tile_layout
from auraflux.ops.linear.cuda.matvec_int4 import MOST_WEIGHTS, gated_sum, load_inputs, norm_factor, warps_for
from auraflux.ops.linear.cuda.row_copies import chosen
from auraflux.quant import QTensor

WARPS = 8
ROWS = 16 * WARPS  # of a program
TILES = (8, 16, 32, 64)  # tokens of a program
MOST_REGISTERS = 128  # of a thread that brings tokens into order; by itself the assembler takes 48, and memory for the rest
STAGES_NBYTES, MOST_STAGES = 208 << 10, 8  # of shared memory, and what is in flight in it


@gluon.constexpr_function
def _pairs_ptx():
    words = "".join(f"@p st.global.b32 [$1+{16 * n}],${2 + n};" for n in range(8))
    return f"{{.reg .pred p; setp.ne.b32 p,$10,0; {words} mov.b32 $0,0;}}"


class Tokens(NamedTuple):
    """Tokens in order.

    x        [tiles, K / 64, T, 128 bytes]  of each step of 16 inputs 16 bytes for codes of even words, 16 of odd ones
    sums     [K / 64, padded]               of each group
    factors  [padded]                       what results are multiplied by; None for nothing
    """

    x: Tensor
    sums: Tensor
    factors: Tensor | None


@gluon.jit
def _store_pairs(at, pairs, there):
    """Store eight words 16 bytes apart, in the order in which products take them, where `there`."""
    text: gl.constexpr = _pairs_ptx()
    args = [at, pairs[0], pairs[4], pairs[1], pairs[5], pairs[2], pairs[6], pairs[3], pairs[7], there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,l,r,r,r,r,r,r,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def order_tokens(x, normed, tokens, padded, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr):
    """Bring a token into order, adding to it and normalising it first if asked; grid (tokens,)."""
    MINE: gl.constexpr = ((K // 256 + 1) // 2 + W - 1) // W
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    token = gl.program_id(0).to(gl.int64)
    run(AWAIT, lane)
    xs, squares = load_inputs(x + token * K, normed, token * K, warp, g, t, lane >= 0, MINE, K, W)
    for i in gl.static_range(MINE):
        first = (warp + i * W) * 8
        line = (token // T * (K // 64) + first + g) * T + token % T
        _store_pairs((tokens.x + (line * 128 + t * 4)).to(gl.int64), xs[i], first + g < K // 64)
        # the columns of this product are groups
        a, b = sum_x(xs[i])
        mine = (g == 0) & (first + 2 * t < K // 64)
        gl.store(tokens.sums + (first + 2 * t) * padded + token, a, mine)
        gl.store(tokens.sums + (first + 2 * t + 1) * padded + token, b, mine)
    if normed.weight is not None:
        memory, box = shared(4 * W, tid)
        put(box + warp * 4, sum_over(squares, 32))
        gl.thread_barrier()
        gl.store(tokens.factors + token + tid * 0, norm_factor(box, tid, normed.eps, K, W), tid == 0)
        memory._keep_alive()


@gluon.jit
def _added(part, tile, token, padded, tid, factors, tiles, W: gl.constexpr):
    """What all warps found for a token and a tile of rows."""
    R: gl.constexpr = tid.shape[0]
    found = (tid * 0).to(gl.float32)
    for v in gl.static_range(W):
        found += gl.load(part + ((v * padded + token).to(gl.int64) * tiles + tile) * R + tid)
    if factors is not None:
        found *= gl.load(factors + token)
    return found


@gluon.jit
def add_warps(part, factors, weights, ends, padded, tiles, W: gl.constexpr, R: gl.constexpr, GATED: gl.constexpr):
    """Add up the sums of W warps, and gate one weight's with the other's if asked; grid (tiles of rows, tokens)."""
    tid = gl.arange(0, R, gl.BlockedLayout([1], [32], [R // 32], [0]))
    tile, token = gl.program_id(0), gl.program_id(1)
    own, number = chosen(tile, ends, [(each.out, 0 * tile + each.rows) for each in weights])
    out, rows = own
    run(AWAIT, tid)
    found = _added(part, tile, token, padded, tid, factors, tiles, W)
    if GATED:
        found = gated_sum(found, _added(part, tile + gl.num_programs(0), token, padded, tid, factors, tiles, W))
    row = number * R + tid
    gl.store(out + token.to(gl.int64) * rows + row, found.to(gl.bfloat16), row < rows)


def multiply(
    x: Tensor, weights: Sequence[QTensor], outs: Sequence[Tensor], gated: bool = False, normed: Normed | Plain = PLAIN
) -> None:
    """Tokens times up to MOST_WEIGHTS weights of one width; gated: silu(first) * second, into one out.

    normed  what x goes through first
    """
    (count, width), processors = x.shape, multiprocessors(x.device)
    rows = [weight.shape[0] for weight in weights]
    tile, warps = next((size for size in TILES if count <= size), TILES[-1]), warps_for(rows, width, gated, processors)
    padded = cdiv(count, tile) * tile
    ordered = x.new_empty(padded * (width // 64), 64)
    sums = x.new_empty(width // 64, padded, dtype=torch.float32)
    factors = None if normed.weight is None else sums.new_empty(padded)
    tokens = Tokens(ordered.view(torch.int8), sums, factors)
    sizes = padded, width, warps, tile
    launch(order_tokens, (count,))(x, normed, tokens, *sizes, num_warps=warps, maxnreg=MOST_REGISTERS, launch_pdl=True)
    ends = tuple(accumulate(cdiv(each, ROWS) for each in rows))
    split = ends[-1] * (padded // tile) < processors
    part = sums.new_empty(warps, padded, ends[-1] * ROWS) if split else None
    joined = gated and not split
    pairs = 1 if tile > 32 else 2
    given = tuple(_lines(weight, out, pairs) for weight, out in zip(weights, [*outs, *outs] if gated else outs, strict=True))
    stage = ROWS * 64 * pairs + 2 * pairs * tile * 132
    words, height = 16 * pairs, ROWS // 2 if joined else ROWS
    codes = [described(weight.packed, [height, words], tile_layout("i32", height, words)) for weight in weights]
    ends_here = () if joined else ends[:-1]
    # neighbours multiply the same rows, which come from memory once
    grid = padded // tile, warps if split else 1, cdiv(rows[0], height) if joined else ends[-1]
    launch(multiply_alike, grid)(
        described(ordered, [2 * pairs * tile, 64], tile_layout("bf16", 2 * pairs * tile, 64)),
        described(sums, [2 * pairs, tile], _plain_layout()), factors,
        *codes, *[None] * (MOST_WEIGHTS - len(codes)), given, ends_here, part, count, padded, width, warps, tile, ROWS, pairs,
        min(MOST_STAGES, STAGES_NBYTES // stage), joined, num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    if part is not None:
        tiles = ends[0] if gated else ends[-1]
        launch(add_warps, (tiles, count))(
            part, factors, given[:1] if gated else given, () if gated else ends[:-1], padded, ends[-1], warps, ROWS, gated,
            num_warps=ROWS // 32, launch_pdl=True,
        )  # fmt: skip


@cache
def _plain_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def _lines(weight: QTensor, out: Tensor, pairs: int) -> Weight:
    """A weight whose scales and biases are words of so many pairs of groups."""
    assert weight.biases is not None
    kind = torch.int32 if pairs == 1 else torch.int64
    return Weight(weight.scales.view(kind), weight.biases.view(kind), out, weight.shape[0])
