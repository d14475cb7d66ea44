"""Latent attention by cp.async and mma.sync, in Gluon: 16 or 32 heads of one token per program, in bf16.

Four warps share the channels of a latent, a quarter each, which they load themselves: heads are rows of a product, positions
its columns. The warps add their parts of the scores in shared memory, and each has all weights for its channels of the result.
Twice as many warps take 32 heads.
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
# rows of 128 or 16 channels for `ldmatrix` without bank conflicts
TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
NARROW = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0]))


class Tiling(NamedTuple):
    """Tiling of the heads of a token: heads of a program, positions of a tile, tiles in shared memory."""

    heads: int
    positions: int
    stages: int


TILINGS = (Tiling(16, 32, 2), Tiling(32, 16, 4))


class Shape(NamedTuple):
    """Compile-time shape of the kernel.

    page, sequences    tokens per page, sequences rounded up to a power of two
    heads, positions   of a program, of a tile
    stages             tiles in shared memory
    split_keys         see `invariant_split_keys`
    """

    page: int
    sequences: int
    heads: int
    positions: int
    stages: int
    split_keys: int


@gluon.constexpr_function
def products(heads):
    """Return the layout of products [4, heads, positions or channels], with a quarter of the channels for each warp."""
    return gl.NVMMADistributedLayout([2, 0], [4, heads // 16, 1], [1, 16, 8])


@gluon.constexpr_function
def parts_of_scores(heads, positions):
    """Return the layout of four parts of scores in each thread, otherwise as in `products`."""
    more = [[0, 0, 8 << i] for i in range((positions // 8).bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [*([0, 16 << i, 0] for i in range((heads // 16).bit_length() - 1)), [0, 0, 0], [0, 0, 0]]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 8, 0], *more, [1, 0, 0], [2, 0, 0]], lanes, warps, [], [4, heads, positions]
    )


@gluon.constexpr_function
def exchange(positions):
    """Return the shared-memory layout of parts of scores, without bank conflicts between rows."""
    return gl.SwizzledSharedLayout(8, max(1, 32 // positions), min(4, positions // 8), [2, 1, 0])


@gluon.constexpr_function
def quarters(width, warps):
    """Return a layout whose threads have 16 bytes of a row of `width` channels of their warp's quarter."""
    lanes = width // 8
    return gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [4, warps // 4, 1], [2, 1, 0])


@gluon.jit
def offsets(COUNT: gl.constexpr, WIDTH: gl.constexpr, L: gl.constexpr):
    """Return row numbers [1, COUNT, 1] and channels [4, 1, WIDTH] of four quarters."""
    row = gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    quarter = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    return row, quarter * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]


@gluon.jit
def fetch_quarters(to, source, left, WIDTH: gl.constexpr, COUNT: gl.constexpr, WARPS: gl.constexpr):
    """Begin copying COUNT rows of four times WIDTH channels; those beyond `left` become zeros."""
    row, channel = offsets(COUNT, WIDTH, quarters(WIDTH, WARPS))
    async_copy.async_copy_global_to_shared(to, source + row * (4 * WIDTH) + channel, mask=(row < left) & (channel >= 0))


@gluon.jit
def load_queries(q, heads, WIDTH: gl.constexpr, M: gl.constexpr):
    """Load queries of a quarter as operands; rows beyond `heads` are zeros."""
    row, channel = offsets(M, WIDTH, gl.DotOperandLayout(0, products(M), 2))
    return gl.load(q + row * (4 * WIDTH) + channel, mask=(row < heads) & (channel >= 0), other=0.0)


@gluon.jit
def sum_of_parts(s, X, M: gl.constexpr, N: gl.constexpr):
    """Add the scores of the four quarters: [heads, positions]."""
    X.store(s)
    return gl.convert_layout(gl.sum(X.load(parts_of_scores(M, N)), 0), gl.SliceLayout(0, products(M)), assert_trivial=True)


@gluon.jit
def weights_of(s, m, l):  # noqa: E741
    """Return softmax weights of scores to base 2, the rescaling of earlier sums, and the new maxima and sums."""
    top = gl.maximum(m, gl.max(s, 1))
    safe = gl.where(top == float("-inf"), 0.0, top)
    p, fade = gl.exp2(s - safe[:, None]), gl.exp2(m - safe)
    return p, fade, top, l * fade + gl.sum(p, 1)


@gluon.jit
def mix(acc, p, fade, tile, M: gl.constexpr, N: gl.constexpr):
    """Accumulate a tile's latents by their weights."""
    L: gl.constexpr = products(M)
    every = gl.zeros([4, M, N], gl.float32, L) + gl.expand_dims(p, 0)
    weights = gl.convert_layout(every.to(tile.dtype), gl.DotOperandLayout(0, L, 2), assert_trivial=True)
    fade = gl.convert_layout(fade, gl.SliceLayout(0, gl.SliceLayout(2, L)), assert_trivial=True)
    return mma_v2(weights, tile.load(gl.DotOperandLayout(1, L, 2)), acc * fade[None, :, None])


@gluon.jit
def store_part(parts, at, splits, room, acc, m, l, M: gl.constexpr):  # noqa: E741
    """Store the mean of a program's latents, its largest scores and its sums of weights."""
    L: gl.constexpr = products(M)
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, L))
    head = gl.arange(0, M, rows)
    if parts.m is not None:
        gl.store(parts.m + at + head * splits, m, mask=head < room)
        gl.store(parts.l + at + head * splits, l, mask=head < room)
    share = gl.convert_layout(gl.where(l == 0.0, 0.0, 1.0 / l), gl.SliceLayout(0, gl.SliceLayout(2, L)), assert_trivial=True)
    row, channel = offsets(M, 128, L)
    found = (acc * share[None, :, None]).to(parts.o.dtype.element_ty)
    gl.store(parts.o + at * 512 + row * (splits * 512) + channel, found, mask=(row < room) & (channel >= 0))


@gluon.jit
def latents_mma(q_latent, q_rope, pools, index, parts, scale, heads, splits, SHAPE: gl.constexpr):
    """Attend from M heads of one token to one split of its positions; grid (tokens * tiles of heads, splits)."""
    PAGE: gl.constexpr = SHAPE.page
    M: gl.constexpr = SHAPE.heads
    N: gl.constexpr = SHAPE.positions
    ST: gl.constexpr = SHAPE.stages
    NW: gl.constexpr = M // 4
    L: gl.constexpr = products(M)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    latents, ropes = pools
    tiles = (heads + M - 1) // M
    token, first, split = gl.program_id(0) // tiles, gl.program_id(0) % tiles * M, gl.program_id(1)
    share = split_range(token, split, splits, 1 << 30, index, SHAPE.sequences, N, SHAPE.split_keys, NW)
    sequence, begin, _, end, count, _, _ = share
    table = index.table + sequence.to(gl.int64) * index.width
    K = gl.allocate_shared_memory(BF, [ST, 4, N, 128], TILE)
    R = gl.allocate_shared_memory(BF, [ST, 4, N, 16], NARROW)
    X = gl.allocate_shared_memory(F32, [4, M, N], exchange(N))
    last = begin + gl.maximum(count - 1, 0) * N
    page = gl.load(table + begin // PAGE)
    for i in gl.static_range(ST - 1):
        following = gl.load(table + gl.minimum(begin + (i + 1) * N, last) // PAGE)
        _fetch(K.index(i), R.index(i), latents, ropes, page, begin + i * N, end, index.pool, PAGE, N, NW)
        page = following
    line, room = token * heads + first, heads - first
    q = load_queries(q_latent + line.to(gl.int64) * 512, room, 128, M)
    qr = load_queries(q_rope + line.to(gl.int64) * 64, room, 16, M)
    m = gl.full([M], float("-inf"), F32, gl.SliceLayout(1, gl.SliceLayout(0, L)))
    l = gl.full([M], 0.0, F32, gl.SliceLayout(1, gl.SliceLayout(0, L)))  # noqa: E741
    acc = gl.full([4, M, 128], 0.0, F32, L)
    zero = gl.full([4, M, N], 0.0, F32, L)
    position = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(0, L)))
    for i in range(count):
        at = begin + i * N
        async_copy.wait_group(ST - 2)
        gl.thread_barrier()
        following = gl.load(table + gl.minimum(at + ST * N, last) // PAGE)
        place = (i + ST - 1) % ST
        _fetch(K.index(place), R.index(place), latents, ropes, page, at + (ST - 1) * N, end, index.pool, PAGE, N, NW)
        page, tile = following, K.index(i % ST)
        s = mma_v2(qr, R.index(i % ST).permute([0, 2, 1]).load(RIGHT), zero)
        s = mma_v2(q, tile.permute([0, 2, 1]).load(RIGHT), s)
        s = sum_of_parts(s, X, M, N)
        here = gl.load(table + at // PAGE)
        left = gl.where((here >= 0) & (here < index.pool), end - at, 0)
        p, fade, m, l = weights_of(gl.where((position < left)[None, :], s * scale, float("-inf")), m, l)  # noqa: E741
        acc = mix(acc, p, fade, tile, M, N)
    store_part(parts, line.to(gl.int64) * splits + split, splits, room, acc, m, l, M)


@gluon.jit
def _fetch(K, R, latents, ropes, page, at, end, pool, PAGE: gl.constexpr, N: gl.constexpr, NW: gl.constexpr):
    """Begin copying the tile of positions from `at` on, as one group; invisible positions become zeros."""
    known = (page >= 0) & (page < pool)
    line = gl.where(known, page, 0).to(gl.int64) * PAGE + at % PAGE
    left = gl.where(known, end - at, 0)
    if at < end:
        fetch_quarters(K, latents + line * 512, left, 128, N, NW)
        fetch_quarters(R, ropes + line * 64, left, 16, N, NW)
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
        scale * LOG2E.value, heads, splits, Shape(page, power_of_two(sequences), *tiling, fixed),
        num_warps=tiling.heads // 4,
    )  # fmt: skip
    if parts is not None:
        merge(parts, None, out, MERGED, False)


def tiling_for(heads: int) -> Tiling:
    return TILINGS[heads > TILINGS[0].heads]
