"""Any number of tokens times four-bit weights on Hopper, each to the bit as `matvec_int4.py` multiplies one.

There a warp takes every W-th run of eight groups, and lane t of four has groups 2t and 2t + 1 of each run: sums over runs, then
over lanes, then over warps. The products of two groups are those of `hopper/mma_int4.py` here as there, so it is enough to
take pairs of groups in the order (warp, lane, run) and to add up in three steps. A program multiplies 16 rows for each of its
warps by a tile of tokens; where these are few, the warps of `matvec_int4.py` are programs, and their sums go through memory.

Tokens are brought into the order of the tensor cores first, by the functions that bring a single one there.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.codes import Codes
from auraflux.ops.hopper.copy import COMMIT, COPY16, copy, wait_ptx
from auraflux.ops.hopper.device import multiprocessors
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.mma_int4 import group_sums, sum_x
from auraflux.ops.hopper.ptx import AWAIT, run, shared
from auraflux.ops.hopper.reduce import sum_over
from auraflux.ops.hopper.shared_memory import float_pair_at, four_words_at, put
from auraflux.ops.hopper.sizes import cdiv
from auraflux.ops.linear.cuda.call import PLAIN, Normed, Plain
from auraflux.ops.linear.cuda.matvec_int4 import gated_sum, load_inputs, norm_factor, operands, pair_sum, warps_for
from auraflux.ops.linear.cuda.row_copies import chosen
from auraflux.quant import QTensor

WARPS = 8
ROWS = 16 * WARPS  # of a program
TILES = (8, 16, 32, 64)  # tokens of a program
DEEP = 4  # stages in flight
# of a row 64 bytes are read at a time, and 256 come from memory: the others will be asked for next
COPY = gl.constexpr("{.reg .pred p; setp.ne.b32 p,$3,0; @p cp.async.cg.shared.global.L2::256B [$1],[$2],16; mov.b32 $0,0;}")
FETCH = gl.constexpr("prefetch.global.L2 [$1]; prefetch.global.L2 [$2]; mov.b32 $0,0;")


class Weight(NamedTuple):
    """A weight, where its products go, and how many rows it has."""

    codes: Codes
    out: Tensor
    rows: int


class Tokens(NamedTuple):
    """Tokens in order.

    x        [padded, K / 64, 128 bytes]  halves of 64 bytes, 16 of each lane of four
    sums     [K / 64, padded]             of each group
    factors  [padded]                     what results are multiplied by; None for nothing
    """

    x: Tensor
    sums: Tensor
    factors: Tensor | None


@gluon.jit
def _store_words(at, words, first: gl.constexpr, there):
    """Store four words side by side where `there`."""
    text: gl.constexpr = "{.reg .pred p; setp.ne.b32 p,$6,0; @p st.global.v4.b32 [$1],{$2,$3,$4,$5}; mov.b32 $0,0;}"
    args = [at, words[first], words[first + 1], words[first + 2], words[first + 3], there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,l,r,r,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def order_tokens(x, normed, tokens, padded, K: gl.constexpr, W: gl.constexpr):
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
        at = (tokens.x + ((token * (K // 64) + first + g) * 128 + t * 16)).to(gl.int64)
        _store_words(at, xs[i], 0, first + g < K // 64)
        _store_words(at + 64, xs[i], 4, first + g < K // 64)
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
def _copy_codes(slot, tid, codes, row0, rows, block, K: gl.constexpr, NW: gl.constexpr):
    """Ask for the codes of 16 NW rows and two groups; halves of them change places with every two rows."""
    R: gl.constexpr = 16 * NW
    for j in gl.static_range(R * 4 // (32 * NW)):
        e = tid + j * (32 * NW)
        row, chunk = e // 4, e % 4
        there = (row0 + row < rows) & (block < K // 128)
        source = codes.packed + ((row0 + row).to(gl.int64) * (K // 2) + block * 64 + chunk * 16)
        copy(COPY, slot + row * 64 + (chunk ^ (row // 2 % 2 * 2)) * 16, source, there)


@gluon.jit
def _fetch_lines(codes, tid, row0, rows, K: gl.constexpr, NW: gl.constexpr):
    """Bring the scales and biases of 16 NW rows into the cache."""
    EACH: gl.constexpr = (K // 32 + 127) // 128
    for j in gl.static_range((16 * NW * EACH + 32 * NW - 1) // (32 * NW)):
        e = tid + j * (32 * NW)
        at = gl.minimum(row0 + e // EACH, rows - 1).to(gl.int64) * (K // 128) + gl.minimum(e % EACH * 32, K // 128 - 1)
        args = [(codes.scales + at).to(gl.int64), (codes.biases + at).to(gl.int64)]
        gl.inline_asm_elementwise(FETCH, "=r,l,l", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _lines(codes, row, rows, block, K: gl.constexpr):
    """Load scales and biases of two groups of rows g and g + 8 of a warp."""
    there = (row < rows) & (block < K // 128)
    at = gl.minimum(row, rows - 1).to(gl.int64) * (K // 128) + gl.minimum(block, K // 128 - 1)
    s0, b0 = gl.load(codes.scales + at, there, 0), gl.load(codes.biases + at, there, 0)
    # rows are whole sixteens
    at += 8 * (K // 128)
    return s0, gl.load(codes.scales + at, there, 0), b0, gl.load(codes.biases + at, there, 0)


@gluon.jit
def _copy_tokens(slot, tid, tokens, token0, padded, block, K: gl.constexpr, T: gl.constexpr, NW: gl.constexpr):
    """Ask for two groups of T tokens and their sums; halves of a group change places with every token."""
    for j in gl.static_range((T * 16 + 32 * NW - 1) // (32 * NW)):
        e = tid + j * (32 * NW)
        token, chunk = e // 16, e % 16
        there = (e < T * 16) & (block < K // 128)
        source = tokens.x + ((token0 + token).to(gl.int64) * (K // 64) + block * 2) * 128 + chunk * 16
        copy(COPY16, slot + token * 256 + (chunk ^ (token % 2 * 4)) * 16, source, there)
    group, some = tid // (T // 4), tid % (T // 4) * 4
    source = tokens.sums + ((block * 2 + group).to(gl.int64) * padded + token0 + some)
    copy(COPY16, slot + T * 256 + group * (T * 4) + some * 4, source, (tid < T // 2) & (block < K // 128))


@gluon.jit
def _inputs(slot, lane, group: gl.constexpr, first: gl.constexpr, TILES: gl.constexpr):
    """A lane's part of one group of some octets of tokens, and their sums."""
    g, t = lane // 4, lane % 4
    x = ()
    for m in gl.static_range(TILES):
        at = slot + (first + m) * 2048 + g * 256
        x += four_words_at(at + ((group * 8 + t) ^ (g % 2 * 4)) * 16)
        x += four_words_at(at + ((group * 8 + 4 + t) ^ (g % 2 * 4)) * 16)
    return x


@gluon.jit
def _sums_at(slot, lane, group: gl.constexpr, first: gl.constexpr, T: gl.constexpr, TILES: gl.constexpr):
    found = ()
    for m in gl.static_range(TILES):
        found += float_pair_at(slot + T * 256 + group * (T * 4) + (first + m) * 32 + lane % 4 * 8)
    return found


@gluon.jit
def _codes_at(at):
    """Load 16 codes of row g and of row g + 8."""
    text: gl.constexpr = "ld.shared.b64 $0,[$2]; ld.shared.b64 $1,[$2+512];"
    return gl.inline_asm_elementwise(text, "=l,=l,r,~{memory}", [at], (gl.int64,) * 2, is_pure=False, pack=1)


@gluon.jit
def _add_block(chain, slot, lines, warp, lane, there, T: gl.constexpr, NW: gl.constexpr):
    """Add the products of two groups: of each octet of tokens, rows g and g + 8 at tokens 2t and 2t + 1."""
    R: gl.constexpr = 16 * NW
    TILES: gl.constexpr = 1 if T == 8 else 2
    g, t = lane // 4, lane % 4
    codes = slot + (warp * 16 + g) * 64 + t * 8
    s0, s1, b0, b1 = lines
    inputs, flip = slot + R * 64, g // 2 % 2 * 32
    new = ()
    for m in gl.static_range(0, T // 8, TILES):
        first = _sums_at(inputs, lane, 0, m, T, TILES)
        a = group_sums(_codes_at(codes + flip), _inputs(inputs, lane, 0, m, TILES), first, TILES)
        second = _sums_at(inputs, lane, 1, m, T, TILES)
        b = group_sums(_codes_at(codes + (32 - flip)), _inputs(inputs, lane, 1, m, TILES), second, TILES)
        for k in gl.static_range(4 * TILES):
            s, bias = s0, b0
            if k % 4 >= 2:
                s, bias = s1, b1
            found = pair_sum(s, bias, a[k], b[k], first[k // 4 * 2 + k % 2], second[k // 4 * 2 + k % 2])
            new += (chain[m * 4 + k] + gl.where(there, found, 0.0),)  # type: ignore[assignment]
    return new


@gluon.jit
def _all_added(total, more):
    new = ()
    for k in gl.static_range(len(total)):
        new += (total[k] + more[k],)
    return new


@gluon.jit
def _block_of(n, v, K: gl.constexpr, W: gl.constexpr, SPLIT: gl.constexpr):
    """The n-th pair of groups, of those of warp v or of all."""
    MINE: gl.constexpr = ((K // 256 + 1) // 2 + W - 1) // W
    warp = v if SPLIT else n // (4 * MINE)
    return (warp + n % MINE * W) * 4 + n // MINE % 4


@gluon.jit
def multiply_alike(
    tokens, weights, ends, part, count, padded, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr, NW: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """16 NW rows by T tokens; grid (tiles of tokens, W or 1, tiles of rows of all weights).

    part  where sums of each warp go, float32 [W, padded, tiles of rows * 16 NW]; None if a program has those of all
    """
    SPLIT: gl.constexpr = part is not None
    MINE: gl.constexpr = ((K // 256 + 1) // 2 + W - 1) // W
    STEPS: gl.constexpr = 4 * MINE if SPLIT else 4 * MINE * W
    STAGE: gl.constexpr = 16 * NW * 64 + T * 264
    N: gl.constexpr = T // 2
    tid = gl.arange(0, 32 * NW, gl.BlockedLayout([1], [32], [NW], [0]))
    warp, lane = tid // 32, tid % 32
    v, token0 = gl.program_id(1), gl.program_id(0) * T
    own, number = chosen(gl.program_id(2), ends, [(each.codes, each.out, 0 * v + each.rows) for each in weights])
    codes, out, rows = own
    row0 = number * (16 * NW)
    memory, ring = shared(D * STAGE, tid)
    _fetch_lines(codes, tid, row0, rows, K, NW)
    for d in gl.static_range(D - 1):
        block = _block_of(d + 0 * v, v, K, W, SPLIT) if d < STEPS else K + 0 * v
        _copy_codes(ring + d * STAGE, tid, codes, row0, rows, block, K, NW)
    run(AWAIT, lane)
    for d in gl.static_range(D - 1):
        block = _block_of(d + 0 * v, v, K, W, SPLIT) if d < STEPS else K + 0 * v
        _copy_tokens(ring + (d * STAGE + 16 * NW * 64), tid, tokens, token0, padded, block, K, T, NW)
        run(COMMIT, lane)
    zero, row = (tid * 0).to(gl.float32), warp * 16 + lane // 4
    total, n = (zero,) * N, 0 * v
    lines = _lines(codes, row0 + row, rows, _block_of(n, v, K, W, SPLIT), K)
    for _ in range(1 if SPLIT else W):
        some = (zero,) * N
        for _ in range(4):
            chain = (zero,) * N
            for _ in range(MINE):
                run(wait_ptx(D - 2), lane)
                gl.thread_barrier()
                slot = ring + (n + D - 1) % D * STAGE
                block = gl.where(n + D - 1 < STEPS, _block_of(n + D - 1, v, K, W, SPLIT), K)
                _copy_codes(slot, tid, codes, row0, rows, block, K, NW)
                _copy_tokens(slot + 16 * NW * 64, tid, tokens, token0, padded, block, K, T, NW)
                run(COMMIT, lane)
                # those of the next block come while this one is multiplied
                block = gl.where(n + 1 < STEPS, _block_of(n + 1, v, K, W, SPLIT), K)
                following = _lines(codes, row0 + row, rows, block, K)
                there = _block_of(n, v, K, W, SPLIT) < K // 128
                chain = _add_block(chain, ring + n % D * STAGE, lines, warp, lane, there, T, NW)
                lines, n = following, n + 1
            some = _all_added(some, chain)
        total = _all_added(total, some)
    for k in gl.static_range(N):
        token, mine = token0 + k // 4 * 8 + lane % 4 * 2 + k % 2, row + k % 4 // 2 * 8
        if SPLIT:
            at = (v * padded + token).to(gl.int64) * gl.num_programs(2) + gl.program_id(2)
            gl.store(part + at * (16 * NW) + mine, total[k], token < count)
        else:
            found = total[k]
            if tokens.factors is not None:
                found *= gl.load(tokens.factors + token)
            there = (token < count) & (row0 + mine < rows)
            gl.store(out + token.to(gl.int64) * rows + (row0 + mine), found.to(gl.bfloat16), there)
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


@gluon.jit
def gate_rows(gate, up, out, count, BLOCK: gl.constexpr):
    """silu(gate) * up of products that are stored; grid (blocks,)."""
    tid = gl.program_id(0).to(gl.int64) * BLOCK + gl.arange(0, BLOCK, gl.BlockedLayout([4], [32], [BLOCK // 128], [0]))
    run(AWAIT, tid.to(gl.int32))
    there = tid < count
    a, b = gl.load(gate + tid, there, 0.0).to(gl.float32), gl.load(up + tid, there, 0.0).to(gl.float32)
    gl.store(out + tid, gated_sum(a, b).to(gl.bfloat16), there)


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
    ordered = x.new_empty(padded, width // 64, 128, dtype=torch.int8)
    sums = x.new_empty(width // 64, padded, dtype=torch.float32)
    factors = None if normed.weight is None else sums.new_empty(padded)
    tokens = Tokens(ordered, sums, factors)
    launch(order_tokens, (count,))(x, normed, tokens, padded, width, warps, num_warps=warps, launch_pdl=True)
    ends = tuple(accumulate(cdiv(each, ROWS) for each in rows))
    split = ends[-1] * (padded // tile) < processors
    part = sums.new_empty(warps, padded, ends[-1] * ROWS) if split else None
    made = [x.new_empty(count, each) for each in rows] if gated and not split else [*outs, *outs] if gated else outs
    given = tuple(Weight(_in_words(weight), out, weight.shape[0]) for weight, out in zip(weights, made, strict=True))
    # neighbours multiply the same rows, which come from memory once
    grid = padded // tile, warps if split else 1, ends[-1]
    launch(multiply_alike, grid)(
        tokens, given, ends[:-1], part, count, padded, width, warps, tile, WARPS, DEEP, num_warps=WARPS, launch_pdl=True
    )
    if part is not None:
        tiles = ends[0] if gated else ends[-1]
        launch(add_warps, (tiles, count))(
            part, factors, given[:1] if gated else given, () if gated else ends[:-1], padded, ends[-1], warps, ROWS, gated,
            num_warps=ROWS // 32, launch_pdl=True,
        )  # fmt: skip
    elif gated:
        elements = outs[0].numel()
        launch(gate_rows, (cdiv(elements, 1024),))(*made, outs[0], elements, 1024, num_warps=8, launch_pdl=True)


def _in_words(weight: QTensor) -> Codes:
    """Codes in bytes, scales and biases of two groups in words."""
    packed, scales, biases = operands(weight)
    assert biases is not None
    return Codes(packed, scales.view(torch.int32), biases.view(torch.int32))
