"""Some tokens on Hopper from the residual stream to scores: added, normalised, times small dense weights in one launch.

As in `gemm_cluster.py`, the programs of a cluster share K, and each leaves its sums with the one that adds up those rows. Rows
are so few that `mma` serves as well as `wgmma`, and programs can be many: more tokens than a cluster takes have others.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.copy import COMMIT, COPY16, copy, wait_ptx
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.mma import times
from auraflux.ops.hopper.ptx import ARRIVE, AWAIT, MEET, run
from auraflux.ops.hopper.shared_memory import four_words_at, put_four_floats
from auraflux.ops.hopper.sizes import cdiv, power_of_two
from auraflux.ops.linear.cuda.call import Normed
from auraflux.ops.linear.cuda.gemm_cluster_parts import pass_left, pass_lengths, sizes_of, store_normed, store_sums, take_tokens
from auraflux.ops.linear.cuda.gemm_cluster_ptx import room, threads
from auraflux.ops.linear.cuda.row_copies import chosen

MOST_TOKENS = 256
FEW, TOGETHER = 64, 32  # tokens that one cluster takes for some rows, and of a cluster where there are more
WIDTHS = (2048, 4096)
BLOCKS, WARPS, PROGRAMS = 2, 8, 8  # of 16 rows of a cluster, of a program, of a cluster


class DenseProduct(NamedTuple):
    """A dense weight that tokens are multiplied by, and where the products go."""

    weight: Tensor
    out: Tensor


@gluon.jit
def _ask(base, tid, w, row0, rows, rank, S: gl.constexpr):
    """Request a program's inputs of a cluster's rows; the last row again where there are no more."""
    EACH: gl.constexpr = S.part // 16
    for n in gl.static_range(16 * S.blocks * EACH // (32 * S.warps)):
        e = tid + 32 * S.warps * n
        r, c = e // EACH, e % EACH
        at = gl.minimum(row0 + r, rows - 1).to(gl.int64) * S.width + rank * S.chunk + c * 8
        copy(COPY16, base + r * S.pitch + c * 16, w + at, tid >= 0)


@gluon.jit
def _multiply(base, lane, up, across, S: gl.constexpr):
    """16 rows of a warp times all tokens, over its share of a program's inputs: lane t has 16 of each 64, in eight pairs."""
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
                c = times(c, (a0[j], a1[j], a2[j], a3[j]), b0[j], b1[j])
            new += c  # type: ignore[assignment]
        acc = new
    return acc


@gluon.jit(do_not_specialize_on_alignment=["tokens"])
def scores_batch(
    x, normed, h, products, rows, ends, turns, tokens, K: gl.constexpr, BLOCKS: gl.constexpr, TILES: gl.constexpr,
    W: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """8 TILES tokens, 16 BLOCKS rows a cluster of C programs; the sum of x and delta goes to `total`, its norm to `h`.

    Grid (clusters for all rows, for all tokens). Weights have their clusters one after the other, see `chosen`.
    """
    ACROSS: gl.constexpr = W // BLOCKS
    S: gl.constexpr = sizes_of(K, BLOCKS, TILES, W, ACROSS, C, True)
    everyone = gl.arange(0, 32 * W * C, threads(W, C))
    rank, tid = everyone // (32 * W), everyone % (32 * W)
    warp, lane = tid // 32, tid % 32
    up, across = warp // ACROSS, warp % ACROSS
    program, before = gl.program_id(0), gl.program_id(1) * (8 * TILES)
    own, number = chosen(program, ends, products)
    # numbers, also where they are known when the kernel is compiled
    rows, _ = chosen(program, ends, [0 * program + count for count in rows])
    row0, tokens = number * (16 * BLOCKS), gl.minimum(tokens - before, 8 * TILES)
    skipped = before * K
    x, h, y = x + skipped, h + skipped, own.out + before * rows
    normed = Normed(normed.delta + skipped, normed.weight, normed.total + skipped, normed.eps)
    memory, base = room(S.nbytes, everyone, C)
    _ask(base, tid, own.weight, row0, rows, rank, S)
    run(COMMIT, lane)
    run(ARRIVE, lane)
    run(AWAIT, lane)
    sums = take_tokens(base, tid, x, normed, tokens, rank, program, turns, S)
    run(wait_ptx(0), lane)
    gl.thread_barrier()
    acc = _multiply(base, lane, up, across, S)
    gl.thread_barrier()
    for n in gl.static_range(TILES):
        some = (acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3])
        put_four_floats(base + (across * S.units + up * TILES + n) * 512 + lane * 16, some)
    gl.thread_barrier()
    # all programs are there
    run(MEET, lane)
    pass_left(base, warp, lane, rank, S)
    pass_lengths(base, tid, rank, S)
    run(ARRIVE, lane)
    run(MEET, lane)
    store_normed(h, sums, normed.weight, base, tid, tokens, rank, program, turns, normed.eps, S)
    store_sums(y, base, warp, lane, rank, row0, rows, tokens, normed.eps, True, S)
    memory._keep_alive()


def multiply(x: Tensor, delta: Tensor, norm: Tensor, eps: float, weights: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Tokens [T, H]: the norm, the sum it was made of, and the products with one or two weights."""
    tokens, width = x.shape
    h, total = torch.empty_like(x), torch.empty_like(x)
    rows = [weight.shape[0] for weight in weights]
    outs = [x.new_empty(tokens, count) for count in rows]
    ends = tuple(accumulate(cdiv(count, 16 * BLOCKS) for count in rows))
    products = tuple(DenseProduct(weight, out) for weight, out in zip(weights, outs, strict=True))
    tiles = power_of_two(cdiv(tokens if tokens <= FEW else TOGETHER, 8))
    launch(scores_batch, (ends[-1], cdiv(tokens, 8 * tiles)))(
        x, Normed(delta, norm, total, float(eps)), h, products, tuple(rows), ends[:-1], ends[-1], tokens,
        width, BLOCKS, tiles, WARPS, PROGRAMS, num_warps=WARPS, num_ctas=PROGRAMS, launch_pdl=True,
    )  # fmt: skip
    return h, total, outs
