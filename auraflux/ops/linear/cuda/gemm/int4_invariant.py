"""Any number of tokens times four-bit weights on Hopper, each bit-identical to the one token of `matvec/int4_invariant.py`.

Tokens are first permuted into the order of the tensor cores, by the functions that permute a single one. Then a program
multiplies rows by a tile of tokens (`int4_invariant_tiles.py`). K is split into shares by the shapes of the weights alone;
where tokens are few, shares are programs, and their sums go through memory.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, product
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.device import multiprocessors
from auraflux.ops.gpu.launch import launch, tensor_descriptor
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.hopper.ptx import LAUNCH, WAIT, run, shared
from auraflux.ops.hopper.reduce import sum_over
from auraflux.ops.hopper.shared_memory import put
from auraflux.ops.linear.cuda.call import NO_NORM, FusedNorm, NoNorm
from auraflux.ops.linear.cuda.gemm import wgmma_launch as gemm_wgmma_launch
from auraflux.ops.linear.cuda.gemm.int4_invariant_tiles import Weight, multiply_invariant
from auraflux.ops.linear.cuda.gemm.wgmma import BACK
from auraflux.ops.linear.cuda.gemm.wgmma_launch import ADD_US, BYTE_US, START_US, STEP_US, tile_layout
from auraflux.ops.linear.cuda.matvec import int4_invariant as matvec_int4_invariant
from auraflux.ops.linear.cuda.matvec.int4 import MOST_WEIGHTS, gated_sum, norm_factor, warp_runs
from auraflux.ops.linear.cuda.matvec.int4_invariant import first_input, launch_shape, load_runs
from auraflux.ops.linear.cuda.row_copies import select_weight
from auraflux.quant import QTensor

BLOCK = 256  # inputs
TILES = (8, 16, 32, 64)  # tokens per program
TUNED_TOKENS = 32  # tokens whose fastest split of K is used for any number
HIGH, MOST_HIGH = 256, 32  # rows per program, whose registers hold sums of this many tokens at most
LOW = 128  # rows per program for more tokens, or several shares
MOST_WARPS = 16  # of a program that permutes a token
MOST_REGISTERS = 128  # of a thread that permutes tokens; left alone the assembler takes 48 and spills
STAGES_NBYTES, MOST_STAGES = 208 << 10, 6  # of shared memory, and blocks in flight in it
ADDED, AT_ONCE = 128, 4  # rows and tokens of a program that sums shares: a token per warp, four rows per lane


@gluon.constexpr_function
def _pairs_ptx():
    words = "".join(f"@p st.global.b32 [$1+{32 * n}],${2 + n};" for n in range(4))
    return f"{{.reg .pred p; setp.ne.b32 p,$6,0; {words} mov.b32 $0,0;}}"


class Tokens(NamedTuple):
    """Permuted tokens.

    x        [tiles, K / 64, T, 128 bytes]  as `wgmma_launch.order_tokens` stores them
    factors  [padded]                       of the norm, applied to results; None without a norm
    """

    x: Tensor
    factors: Tensor | None


class Plan(NamedTuple):
    """Tokens and rows per program, blocks in flight, and whether shares of K are programs."""

    tile: int
    rows: int
    stages: int
    split: bool


@gluon.jit
def _store_pairs(at, pairs, there):
    """Store four words 32 bytes from each other, as products read them, where `there`."""
    text: gl.constexpr = _pairs_ptx()
    args = [at, pairs[0], pairs[1], pairs[2], pairs[3], there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,l,r,r,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def order_tokens(x, normed, tokens, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr):
    """Permute a token, with delta and norm applied first if any; grid (tokens,)."""
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    token = gl.program_id(0).to(gl.int64)
    # the next kernel reads only weights before its own wait
    run(LAUNCH, lane)
    run(WAIT, lane)
    squares = (tid * 0).to(gl.float32)
    for i in gl.static_range((warp_runs(K, W) + 1) // 2):
        pairs, squares = load_runs(x + token * K, normed, token * K, warp, lane, squares, lane >= 0, i, K, W)
        for c in gl.static_range(len(pairs)):
            begin = first_input(warp, lane, i, c, W)
            # in a block of 256 inputs, 16 of each group are adjacent
            line = (token // T * (K // 64) + begin // 256 * 4 + lane % 8 // 2) * T + token % T
            at = tokens.x + (line * 128 + lane % 2 * 16 + lane // 8 * 4)
            _store_pairs(at.to(gl.int64), pairs[c], begin < K)
    if normed.weight is not None:
        memory, box = shared(4 * W, tid)
        put(box + warp * 4, sum_over(squares, 32))
        gl.thread_barrier()
        gl.store(tokens.factors + token + tid * 0, norm_factor(box, tid, normed.eps, K, W), tid == 0)
        memory._keep_alive()


@gluon.jit
def _sum_shares(part, at, token, there, padded, factors, rows, SHARES: gl.constexpr):
    """Sum all shares for some tokens and rows."""
    shares = ()
    for v in gl.static_range(SHARES):
        line = (v * padded + token).to(gl.int64) * rows
        shares += (gl.load(part + line + at, mask=there, other=0.0),)  # type: ignore[assignment]
    found = (at * 0 + token * 0).to(gl.float32)
    for v in gl.static_range(SHARES):
        found += shares[v]
    found *= BACK
    if factors is not None:
        found *= gl.load(factors + token, mask=there, other=0.0)
    return found


@gluon.jit(do_not_specialize_on_alignment=["count"])
def add_in_order(
    part, factors, weights, ends, count, padded, rows, before, SHARES: gl.constexpr, A: gl.constexpr, N: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Sum shares, and gate one weight's with the other's if GATED; grid (tiles of A rows, tiles of N tokens).

    rows    of all weights in `part`, each padded to the tiles of rows that programs have
    before  of those, the rows of the first weight
    """
    L: gl.constexpr = gl.BlockedLayout([1, A // 32], [1, 32], [N, 1], [1, 0])
    tile = gl.program_id(0)
    r = gl.arange(0, A, gl.SliceLayout(0, L))[None, :]
    token = gl.program_id(1) * N + gl.arange(0, N, gl.SliceLayout(1, L))[:, None]
    own, number = select_weight(tile, ends, [(each.out, 0 * tile + each.rows) for each in weights])
    out, mine = own
    # the products started this kernel after their own wait: whatever the next kernel reads before its wait is complete
    run(LAUNCH, token)
    run(WAIT, token)
    found = _sum_shares(part, tile * A + r, token, token < count, padded, factors, rows, SHARES)
    if GATED:
        found = gated_sum(found, _sum_shares(part, before + tile * A + r, token, token < count, padded, factors, rows, SHARES))
    row = number * A + r
    gl.store(out + token.to(gl.int64) * mine + row, found.to(gl.bfloat16), mask=(row < mine) & (token < count))


@cache
def share_for(rows: tuple[int, ...], width: int, processors: int) -> int:
    """Return how many blocks of K are summed separately: the fastest for TUNED_TOKENS, used for any number of tokens."""
    blocks = width // BLOCK
    return cdiv(blocks, gemm_wgmma_launch.plan(TUNED_TOKENS, rows, width, 4, processors).shares)


@cache
def choose_tile(tokens: int, rows: tuple[int, ...], width: int, processors: int) -> Plan:
    """Return the fastest plan by the costs measured for `wgmma.py`."""
    tile = next((size for size in TILES if tokens <= size), TILES[-1])
    blocks, share = width // BLOCK, share_for(rows, width, processors)
    best, least = None, float("inf")
    for high, split in product((LOW, HIGH), (True, False)):
        shares = cdiv(blocks, share)
        if (split and shares == 1) or (high == HIGH and (tile > MOST_HIGH or (shares > 1 and not split))):
            continue
        lines, tiles = sum(cdiv(each, high) for each in rows), cdiv(tokens, tile)
        steps = (share if split else blocks) * (BLOCK // 16)
        programs = lines * tiles * (shares if split else 1)
        took = cdiv(programs, processors) * (START_US[high] + steps * STEP_US[max(TUNED_TOKENS, tile), high])
        if split:
            took += ADD_US + 8 * shares * lines * high * tiles * tile * BYTE_US
        if took < least:
            stages = min(MOST_STAGES, STAGES_NBYTES // (high * BLOCK // 2 + BLOCK * tile * 2))
            best, least = Plan(tile, high, stages, split), took
    assert best is not None
    return best


def multiply(
    x: Tensor, weights: Sequence[QTensor], outs: Sequence[Tensor], gated: bool = False, normed: FusedNorm | NoNorm = NO_NORM
) -> None:
    """Multiply tokens by up to MOST_WEIGHTS weights of one width; gated: silu(first) * second, into one out.

    normed  residual add and norm applied to x first
    """
    (count, width), processors = x.shape, multiprocessors(x.device)
    rows = tuple(weight.shape[0] for weight in weights)
    share = share_for(rows, width, processors)
    if count == 1:
        matvec_int4_invariant.multiply(x, weights, outs, share, gated, normed)
        return
    tile, height, stages, split = choose_tile(count, rows, width, processors)
    # with a norm, squares are summed as for one token; otherwise one load covers all of a token
    warps = (
        min(MOST_WARPS, power_of_two(cdiv(width, 1024))) if normed.weight is None else launch_shape(rows, width, processors)[0]
    )
    padded = cdiv(count, tile) * tile
    ordered = x.new_empty(padded * (width // 64), 64)
    factors = None if normed.weight is None else x.new_empty(padded, dtype=torch.float32)
    tokens = Tokens(ordered.view(torch.int8), factors)
    sizes = width, warps, tile
    launch(order_tokens, (count,))(x, normed, tokens, *sizes, num_warps=warps, maxnreg=MOST_REGISTERS, launch_pdl=True)
    shares, joined = cdiv(width // BLOCK, share) if split else 1, gated and not split
    ends = tuple(accumulate(cdiv(each, height) for each in rows))
    part = x.new_empty(shares, padded, ends[-1] * height, dtype=torch.float32) if split else None
    given = tuple(_lines(weight, out) for weight, out in zip(weights, [*outs, *outs] if gated else outs, strict=True))
    each = height // 2 if joined else height
    codes = [tensor_descriptor(weight.packed, [each, BLOCK // 8], tile_layout("i32", each, BLOCK // 8)) for weight in weights]
    # neighbouring programs multiply the same rows, which are then read from memory once
    grid = padded // tile, shares, cdiv(rows[0], each) if joined else ends[-1]
    launch(multiply_invariant, grid)(
        tensor_descriptor(ordered, [4 * tile, 64], tile_layout("bf16", 4 * tile, 64)), factors,
        *codes, *[None] * (MOST_WEIGHTS - len(codes)), given, () if joined else ends[:-1], part, count, padded, width, share,
        tile, height, stages, joined, num_warps=height // 16, launch_pdl=True,
    )  # fmt: skip
    if part is not None:
        ends = tuple(end * (height // ADDED) for end in ends)
        launch(add_in_order, (ends[0] if gated else ends[-1], cdiv(count, AT_ONCE)))(
            part, factors, given[:1] if gated else given, () if gated else ends[:-1], count, padded, ends[-1] * ADDED,
            ends[0] * ADDED, shares, ADDED, AT_ONCE, gated, num_warps=AT_ONCE, launch_pdl=True,
        )  # fmt: skip


def _lines(weight: QTensor, out: Tensor) -> Weight:
    assert weight.biases is not None
    return Weight(weight.scales, weight.biases, out, weight.shape[0])
