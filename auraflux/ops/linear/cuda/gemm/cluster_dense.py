"""Residual add, RMS norm and small dense weights (router scores) for several tokens on Hopper, in one launch.

As in `cluster.py`, the programs of a cluster split K, and each sends its sums to the one that reduces those rows. Rows are few,
so that `mma` is as fast as `wgmma` and there is room for many programs: further tokens get further clusters.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.hopper.copy import COMMIT, COPY16, copy, wait_ptx
from auraflux.ops.hopper.mma import mma_bf16
from auraflux.ops.hopper.ptx import CLUSTER_ARRIVE, CLUSTER_WAIT, WAIT_AND_LAUNCH, run
from auraflux.ops.hopper.shared_memory import four_words_at, put_four_floats
from auraflux.ops.linear.cuda.call import FusedNorm
from auraflux.ops.linear.cuda.gemm.cluster_parts import (
    load_tokens,
    send_partial_sums,
    send_squares,
    sizes_of,
    store_normed,
    store_sums,
)
from auraflux.ops.linear.cuda.gemm.cluster_ptx import room, threads
from auraflux.ops.linear.cuda.row_copies import select_weight

MOST_TOKENS = 256
FEW, TOGETHER = 64, 32  # tokens up to which one cluster takes all, and tokens per cluster where there are more
WIDTHS = (2048, 4096)
BLOCKS, WARPS, PROGRAMS = 2, 8, 8  # blocks of 16 rows per cluster, warps per program, programs per cluster


class DenseProduct(NamedTuple):
    """A dense weight and its result."""

    weight: Tensor
    out: Tensor


@gluon.jit
def _request(base, tid, w, row0, rows, rank, S: gl.constexpr):
    """Request a program's inputs of a cluster's rows; past the end, the last row again."""
    EACH: gl.constexpr = S.part // 16
    for n in gl.static_range(16 * S.blocks * EACH // (32 * S.warps)):
        e = tid + 32 * S.warps * n
        r, c = e // EACH, e % EACH
        at = gl.minimum(row0 + r, rows - 1).to(gl.int64) * S.width + rank * S.chunk + c * 8
        copy(COPY16, base + r * S.pitch + c * 16, w + at, tid >= 0)


@gluon.jit
def _multiply(base, lane, up, across, S: gl.constexpr):
    """Multiply a warp's 16 rows by all tokens over its slice of a program's inputs.

    Lane t has 16 of each 64, in eight pairs.
    """
    TILES: gl.constexpr = S.tiles
    GROUPS: gl.constexpr = S.chunk // 64 // S.across
    g, t = lane // 4, lane % 4
    mine = base + (up * 16 + g) * S.pitch + across * (GROUPS * 128) + t * 32
    x_mine = base + S.tokens_at + g * S.half + across * (GROUPS * 128) + t * 32
    acc = ((lane * 0).to(gl.float32),) * (4 * TILES)
    for q in gl.static_range(GROUPS):
        at = mine + q * 128
        a0, a1, a2, a3 = (
            four_words_at(at),
            four_words_at(at + 8 * S.pitch),
            four_words_at(at + 16),
            four_words_at(at + 8 * S.pitch + 16),
        )
        new = ()
        for m in gl.static_range(TILES):
            b0, b1 = four_words_at(x_mine + (8 * m * S.half + q * 128)), four_words_at(x_mine + (8 * m * S.half + q * 128 + 16))
            c = (acc[4 * m], acc[4 * m + 1], acc[4 * m + 2], acc[4 * m + 3])
            for j in gl.static_range(4):
                c = mma_bf16(c, (a0[j], a1[j], a2[j], a3[j]), b0[j], b1[j])
            new += c  # type: ignore[assignment]
        acc = new
    return acc


@gluon.jit(do_not_specialize_on_alignment=["tokens"])
def scores_batch(
    x, normed, h, products, rows, ends, clusters, tokens, K: gl.constexpr, BLOCKS: gl.constexpr, TILES: gl.constexpr,
    W: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Multiply 8 TILES tokens by 16 BLOCKS rows per cluster of C programs; x + delta goes to `total`, its norm to `h`.

    Grid (clusters of all rows, clusters of all tokens). Clusters of the weights follow each other, see `select_weight`.
    """
    ACROSS: gl.constexpr = W // BLOCKS
    S: gl.constexpr = sizes_of(K, BLOCKS, TILES, W, ACROSS, C, True)
    everyone = gl.arange(0, 32 * W * C, threads(W, C))
    rank, tid = everyone // (32 * W), everyone % (32 * W)
    warp, lane = tid // 32, tid % 32
    up, across = warp // ACROSS, warp % ACROSS
    program, before = gl.program_id(0), gl.program_id(1) * (8 * TILES)
    own, number = select_weight(program, ends, products)
    # tensors, even where the compiler knows the numbers
    rows, _ = select_weight(program, ends, [0 * program + count for count in rows])
    row0, tokens = number * (16 * BLOCKS), gl.minimum(tokens - before, 8 * TILES)
    skipped = before * K
    x, h, y = x + skipped, h + skipped, own.out + before * rows
    normed = FusedNorm(normed.delta + skipped, normed.weight, normed.total + skipped, normed.eps)
    memory, base = room(S.nbytes, everyone, C)
    _request(base, tid, own.weight, row0, rows, rank, S)
    run(COMMIT, lane)
    run(CLUSTER_ARRIVE, lane)
    run(WAIT_AND_LAUNCH, lane)
    sums = load_tokens(base, tid, x, normed, tokens, rank, program, clusters, S)
    run(wait_ptx(0), lane)
    gl.thread_barrier()
    acc = _multiply(base, lane, up, across, S)
    gl.thread_barrier()
    for n in gl.static_range(TILES):
        some = (acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3])
        put_four_floats(base + (across * S.units + up * TILES + n) * 512 + lane * 16, some)
    gl.thread_barrier()
    # all programs of the cluster have started
    run(CLUSTER_WAIT, lane)
    send_partial_sums(base, warp, lane, rank, S)
    send_squares(base, tid, rank, S)
    run(CLUSTER_ARRIVE, lane)
    run(CLUSTER_WAIT, lane)
    store_normed(h, sums, normed.weight, base, tid, tokens, rank, program, clusters, normed.eps, S)
    store_sums(y, base, warp, lane, rank, row0, rows, tokens, normed.eps, True, S)
    memory._keep_alive()


def multiply(x: Tensor, delta: Tensor, norm: Tensor, eps: float, weights: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the normalised tokens [T, H], the sums x + delta, and the products with one or two weights."""
    tokens, width = x.shape
    h, total = torch.empty_like(x), torch.empty_like(x)
    rows = [weight.shape[0] for weight in weights]
    outs = [x.new_empty(tokens, count) for count in rows]
    ends = tuple(accumulate(cdiv(count, 16 * BLOCKS) for count in rows))
    products = tuple(DenseProduct(weight, out) for weight, out in zip(weights, outs, strict=True))
    tiles = power_of_two(cdiv(tokens if tokens <= FEW else TOGETHER, 8))
    launch(scores_batch, (ends[-1], cdiv(tokens, 8 * tiles)))(
        x, FusedNorm(delta, norm, total, float(eps)), h, products, tuple(rows), ends[:-1], ends[-1], tokens,
        width, BLOCKS, tiles, WARPS, PROGRAMS, num_warps=WARPS, num_ctas=PROGRAMS, launch_pdl=True,
    )  # fmt: skip
    return h, total, outs
