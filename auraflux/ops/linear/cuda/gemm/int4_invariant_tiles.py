"""Rows of four-bit weights times a tile of tokens on Hopper, bit-identical to the one token of `matvec/int4_invariant.py`.

Weights are dequantized in registers as in `wgmma.py`, and tokens are in the same order. Accumulators restart every 128 inputs,
half a block: `wgmma` sums eight products of 16 as `mma` does. These units are summed in the order of inputs, by shares of
several blocks, and so are the shares, whether a program has one of them or all.

- A unit's sums are added after the next unit's products have been issued, so that the tensor cores do not wait.
- Codes and tokens are loaded by TMA from a producer warp, in blocks of 256 inputs.
- Gated: g is of the first weight, g + 8 of the second, so that a lane has both sums of a result.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.linear.cuda.gemm.wgmma import BACK, held, prefetch_scales, scaled_lines, weights_of, words_of
from auraflux.ops.linear.cuda.matvec.int4 import gated_sum
from auraflux.ops.linear.cuda.row_copies import select_weight

BF, F32, I32 = gl.bfloat16, gl.float32, gl.int32
BLOCK = gl.constexpr(256)  # inputs
GROUP = gl.constexpr(64)


class Weight(NamedTuple):
    """Scales, biases, result and number of rows of a weight."""

    scales: Any
    biases: Any
    out: Any
    rows: int


@gluon.jit
def _feed(
    xs, codes, X, C, full, empty, row0, which, tile, first, count, K: gl.constexpr, ST: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    ROWS: gl.constexpr = X.shape[1]
    NBYTES: gl.constexpr = C.shape[1] * (BLOCK // 2) + ROWS * 128
    for n in gl.static_range(ST):
        mbarrier.expect(full.index(n), NBYTES, pred=n < count)
        _request_codes(codes, C.index(n), full.index(n), row0, first + n, which, n < count, GATED)
    # codes do not depend on the previous kernel, tokens do
    gdc_wait()
    gdc_launch_dependents()
    for n in range(count):
        stage = n % ST
        bar = full.index(stage)
        if n >= ST:
            mbarrier.wait(empty.index(stage), (n // ST - 1) % 2)
            mbarrier.expect(bar, NBYTES)
            _request_codes(codes, C.index(stage), bar, row0, first + n, which, n < count, GATED)
        tma.async_copy_global_to_shared(xs, [(tile * (K // BLOCK) + first + n) * ROWS, 0], bar, X.index(stage))


@gluon.jit
def _request_codes(codes, to, bar, row0, block, which, there, GATED: gl.constexpr):
    word = block * (BLOCK // 8)
    if GATED:
        HALF: gl.constexpr = to.shape[0] // 2
        for i in gl.static_range(2):
            tma.async_copy_global_to_shared(codes[i], [row0, word], bar, to.slice(i * HALF, HALF, dim=0), pred=there)
    else:
        for i in gl.static_range(len(codes)):
            tma.async_copy_global_to_shared(codes[i], [row0, word], bar, to, pred=there & (which == i))


@gluon.jit
def _unit(words, more, lines, X, before, acc, N: gl.constexpr, ACC: gl.constexpr):
    """Issue a unit's eight products into `acc`; return them and the sums of the previous unit, which are complete."""
    T: gl.constexpr = ACC.instr_shape[1]
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    for n in gl.static_range(2):
        for j in gl.static_range(4):
            a = weights_of(more if n else words, lines[0], lines[1], lines[2], j, A)
            x = X.slice((N + n) * T, T, dim=0).permute((1, 0)).slice(16 * j, 16, dim=0)
            acc = warpgroup_mma(a, x, acc, use_acc=n + j > 0, is_async=True)
            if n + j > 0:
                acc = warpgroup_mma_wait(1, deps=[acc])
            else:
                acc, before = warpgroup_mma_wait(1, deps=[acc, before])
    return acc, before


@gluon.jit
def _multiply(
    own, also, factors, part, X, C, full, empty, row0, tile, first, blocks, count, padded, K: gl.constexpr,
    SHARE: gl.constexpr, ST: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    R: gl.constexpr = C.shape[1]
    T: gl.constexpr = X.shape[1] // 4
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [R // 16, 1], [16, T, 16])
    ONE: gl.constexpr = held(R, 1)
    row, t = gl.arange(0, R, gl.SliceLayout(1, ONE)), gl.arange(0, 4, gl.SliceLayout(0, ONE))
    if GATED:
        second, row = row % 16 >= 8, row // 16 * 8 + row % 8
    row += row0
    inside, line = (row < own.rows)[:, None], (gl.minimum(row, own.rows - 1).to(gl.int64) * (K // GROUP))[:, None]
    scales, biases = own.scales + line, own.biases + line
    if GATED:
        scales = gl.where(second[:, None], also.scales + line, scales)
        biases = gl.where(second[:, None], also.biases + line, biases)
    k = (first * BLOCK + t * GROUP)[None, :]
    lines = scaled_lines(scales, biases, k, inside, K, GROUP, 2)
    # 32 bytes hold 16 groups: prefetch a row's next ones while these are used
    for ahead in range(first * BLOCK, (first + blocks) * BLOCK, 64 * GROUP):
        prefetch_scales(scales, biases, gl.minimum(ahead + t * (16 * GROUP), K - GROUP)[None, :] // GROUP)
    zero = gl.full([R, T], 0.0, F32, ACC)
    total, even, odd, i = zero, zero, zero, 0 * first
    for _ in range((blocks + SHARE - 1) // SHARE):
        some, odd = zero, zero
        for _ in range(gl.minimum(SHARE, blocks - i)):
            mbarrier.wait(full.index(i % ST), i // ST % 2)
            codes = C.index(i % ST).load(held(R, 8, GATED))
            if GATED:
                codes = codes.reshape(2, R // 16, 8, 32).permute(1, 0, 2, 3).reshape(R, 32)
            words = words_of(codes, BLOCK)
            k += BLOCK
            following = scaled_lines(scales, biases, k, inside, K, GROUP, 2)
            even, done = _unit(words[0], words[1], lines, X.index(i % ST), odd, even, 0, ACC)
            # the previous block has been read
            mbarrier.arrive(empty.index((i + ST - 1) % ST), pred=i > 0)
            some += done
            odd, done = _unit(words[2], words[3], lines, X.index(i % ST), even, odd, 2, ACC)
            some += done
            lines, i = following, i + 1
        odd = warpgroup_mma_wait(0, deps=[odd])
        some += odd
        total += some
    if part is not None:
        r, c = gl.arange(0, R, gl.SliceLayout(1, ACC)), tile * T + gl.arange(0, T, gl.SliceLayout(0, ACC))
        at = (gl.program_id(1) * padded + c).to(gl.int64) * gl.num_programs(2) + gl.program_id(2)
        gl.store(part + (at[None, :] * R + r[:, None]), total, mask=(c < count)[None, :])
    else:
        total *= BACK
        if factors is not None:
            total *= gl.load(factors + tile * T + gl.arange(0, T, gl.SliceLayout(0, ACC)))[None, :]
        _store(total, own.out, own.rows, count, row0, tile * T, GATED)


@gluon.jit
def _store(found, out, rows, count, row0, token0, GATED: gl.constexpr):
    M: gl.constexpr = found.shape[0]
    T: gl.constexpr = found.shape[1]
    if GATED:
        gate, up = gl.split(found.reshape(M // 16, 2, 8, T).permute(0, 2, 3, 1))
        found = gated_sum(gate, up).reshape(M // 2, T)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4] if GATED else [16, 2], [1, M // 16], [0, 1])
    r, c = row0 + gl.arange(0, found.shape[0], gl.SliceLayout(1, OUT)), token0 + gl.arange(0, T, gl.SliceLayout(0, OUT))
    at = c.to(gl.int64)[None, :] * rows + r[:, None]
    gl.store(out + at, gl.convert_layout(found.to(BF), OUT), mask=(r < rows)[:, None] & (c < count)[None, :])


@gluon.jit
def multiply_invariant(
    xs, factors, c0, c1, c2, c3, weights, ends, part, count, padded, K: gl.constexpr, SHARE: gl.constexpr, T: gl.constexpr,
    R: gl.constexpr, ST: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Multiply R rows by T tokens; grid (tiles of tokens, shares of K or 1, tiles of rows of all weights).

    xs        permuted tokens [tiles * K / 64 * T, 64]
    factors   of the norm, applied to results [padded]; None without a norm
    c0 to c3  codes of each weight, for TMA; None where there are fewer
    part      sums of each share, float32 [shares, padded, tiles of rows * R]; None if a program has all
    SHARE     blocks of a share
    """
    BLOCKS: gl.constexpr = K // BLOCK
    tile, split = gl.program_id(0), gl.program_id(1)
    codes = (c0,)
    if len(weights) > 1:
        codes += (c1,)  # type: ignore[assignment]
    if len(weights) > 2:
        codes += (c2,)  # type: ignore[assignment]
    if len(weights) > 3:
        codes += (c3,)  # type: ignore[assignment]
    own, number = select_weight(
        gl.program_id(2), ends, [(each.scales, each.biases, each.out, 0 * tile + each.rows) for each in weights]
    )
    own = Weight(own[0], own[1], own[2], own[3])
    which = 0 * tile
    for i in gl.static_range(len(ends)):
        which += (gl.program_id(2) >= ends[i]).to(I32)
    row0 = number * (R // 2 if GATED else R)
    first, blocks = 0 * split, 0 * split + BLOCKS
    if part is not None:
        first = split * SHARE
        blocks = gl.minimum(SHARE, BLOCKS - first)
    X = gl.allocate_shared_memory(BF, [ST, 4 * T, 64], xs.layout)
    C = gl.allocate_shared_memory(I32, [ST, R, BLOCK // 8], c0.layout)
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(ST):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=1)
    fence_async_shared()
    gl.thread_barrier()
    also = weights[1 if GATED else 0]
    gl.warp_specialize(
        [
            (_multiply, (own, also, factors, part, X, C, full, empty, row0, tile, first, blocks, count, padded, K, SHARE, ST,
                         GATED)),
            (_feed, (xs, codes, X, C, full, empty, row0, which, tile, first, blocks, K, ST, GATED)),
        ],
        [1],
        [24],
    )  # fmt: skip
