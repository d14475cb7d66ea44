"""Latent attention by cp.async and mma.sync, in Gluon: 16 or 32 heads of one token per program, in bf16.

Four warps share the channels of a latent, a quarter each, which they load themselves: heads are rows of a product, positions
its columns. The warps add their parts of the scores in shared memory, and each has all weights for its channels of the result.
Eight warps take 32 heads, or two halves of each tile, whose results they add at the end.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from auraflux.ops.attention.pages import LatentPages
from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.gpu.blocks.softmax import LOG2E
from auraflux.ops.gpu.device import multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.hopper.latent_tiles import (
    NARROW,
    TILE,
    Tiling,
    exchange,
    fetch_quarters,
    load_queries,
    mix,
    products,
    rows_of_quarters,
    scores_layout,
    store_part,
    sum_of_parts,
    tile_positions,
    warps_of,
    weights_of,
)
from auraflux.ops.hopper.split_kv import (
    SingleSplit,
    empty_split_partials,
    invariant_split_keys,
    merge,
    split_range,
    splits_for,
)

LATENT, ROPE = 512, 64
MERGED = 64  # channels of a program that merges
BF, F32 = gl.bfloat16, gl.float32
TILINGS = (Tiling(16, 1, 32, 2), Tiling(32, 1, 32, 2))


class Shape(NamedTuple):
    """Compile-time shape of the kernel.

    page, sequences  tokens per page, sequences rounded up to a power of two
    tiling           see `Tiling`
    split_keys       see `invariant_split_keys`
    """

    page: int
    sequences: int
    tiling: Tiling
    split_keys: int


@gluon.jit
def latents_mma(q_latent, q_rope, pools, index, parts, scale, heads, splits, SHAPE: gl.constexpr):
    """Attend from a program's heads of one token to one split of its positions; grid (tokens * tiles of heads, splits)."""
    PAGE: gl.constexpr = SHAPE.page
    TILING: gl.constexpr = SHAPE.tiling
    M: gl.constexpr = TILING.heads
    H: gl.constexpr = TILING.halves
    N: gl.constexpr = TILING.positions
    ST: gl.constexpr = TILING.stages
    TILED: gl.constexpr = N * H
    L: gl.constexpr = products(TILING)
    ROWS: gl.constexpr = gl.SliceLayout(2, scores_layout(TILING))
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    latents, ropes = pools
    tiles = (heads + M - 1) // M
    token, first, split = gl.program_id(0) // tiles, gl.program_id(0) % tiles * M, gl.program_id(1)
    share = split_range(token, split, splits, 1 << 30, index, SHAPE.sequences, TILED, SHAPE.split_keys, warps_of(TILING))
    sequence, begin, _, end, count, _, _ = share
    table = index.table + sequence.to(gl.int64) * index.width
    K = gl.allocate_shared_memory(BF, [ST, 4 * H, N, 128], TILE)
    R = gl.allocate_shared_memory(BF, [ST, 4 * H, N, 16], NARROW)
    X = gl.allocate_shared_memory(F32, [4 * H, M, N], exchange(N))
    last = begin + gl.maximum(count - 1, 0) * TILED
    page = gl.load(table + begin // PAGE)
    line, room = token * heads + first, heads - first
    # before the tiles, which they would otherwise wait for
    q = load_queries(q_latent + line.to(gl.int64) * 512, room, 128, TILING)
    qr = load_queries(q_rope + line.to(gl.int64) * 64, room, 16, TILING)
    for i in gl.static_range(ST - 1):
        following = gl.load(table + gl.minimum(begin + (i + 1) * TILED, last) // PAGE)
        _fetch(K.index(i), R.index(i), latents, ropes, page, begin + i * TILED, end, index.pool, PAGE, TILING)
        page = following
    m = gl.full([H, M], float("-inf"), F32, ROWS)
    l = gl.full([H, M], 0.0, F32, ROWS)  # noqa: E741
    acc = gl.full([4 * H, M, 128], 0.0, F32, L)
    zero = gl.full([4 * H, M, N], 0.0, F32, L)
    position = tile_positions(TILING)
    for i in range(count):
        at = begin + i * TILED
        async_copy.wait_group(ST - 2)
        gl.thread_barrier()
        following = gl.load(table + gl.minimum(at + ST * TILED, last) // PAGE)
        place = (i + ST - 1) % ST
        _fetch(K.index(place), R.index(place), latents, ropes, page, at + (ST - 1) * TILED, end, index.pool, PAGE, TILING)
        page, tile = following, K.index(i % ST)
        s = mma_v2(qr, R.index(i % ST).permute([0, 2, 1]).load(RIGHT), zero)
        s = mma_v2(q, tile.permute([0, 2, 1]).load(RIGHT), s)
        s = sum_of_parts(s, X, TILING)
        here = gl.load(table + at // PAGE)
        left = gl.where((here >= 0) & (here < index.pool), end - at, 0)
        p, fade, m, l = weights_of(gl.where(position < left, s * scale, float("-inf")), m, l)  # noqa: E741
        acc = mix(acc, p, fade, tile, TILING)
    store_part(parts, line.to(gl.int64) * splits + split, splits, room, acc, m, l, TILING)


@gluon.jit
def _fetch(K, R, latents, ropes, page, at, end, pool, PAGE: gl.constexpr, TILING: gl.constexpr):
    """Begin copying the tile of positions from `at` on, as one group; invisible positions become zeros."""
    known = (page >= 0) & (page < pool)
    line = gl.where(known, page, 0).to(gl.int64) * PAGE + at % PAGE
    left = gl.where(known, end - at, 0)
    if at < end:
        fetch_quarters(K, latents + line * 512, left, 128, TILING, rows_of_quarters(128, TILING))
        fetch_quarters(R, ropes + line * 64, left, 16, TILING, rows_of_quarters(16, TILING))
    async_copy.commit_group()


def attend_latents(
    q_latent: Tensor,
    q_rope: Tensor,
    pages: LatentPages,
    starts: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Run `latent_attention` into `out`."""
    (tokens, heads, _), (sequences, table_width), page = q_latent.shape, pages.table.shape, pages.pool[1]
    tiling = tiling_for(heads)
    tiles = tokens * cdiv(heads, tiling.heads)
    wanted = max(1, multiprocessors(out.device) // tiles)
    splits, fixed = splits_for(wanted, table_width * page), invariant_split_keys()
    # bf16 partials: the additional rounding is below that of the result
    parts = (
        None if splits == 1 and not fixed else empty_split_partials(tokens * heads, splits, LATENT, torch.bfloat16, out.device)
    )
    launch(latents_mma, (tiles, splits))(
        q_latent, q_rope, (pages.latent, pages.rope), index_of(pages, starts), parts or SingleSplit(out),
        scale * LOG2E.value, heads, splits, Shape(page, power_of_two(sequences), tiling, fixed),
        num_warps=tiling.heads // 4 * tiling.halves,
    )  # fmt: skip
    if parts is not None:
        merge(parts, None, out, MERGED, False)


def tiling_for(heads: int) -> Tiling:
    return TILINGS[heads > TILINGS[0].heads]
