"""Decode attention over latents (MLA) by cp.async and mma.sync, in Gluon, for up to 32 heads.

The rows of a product are a token's heads. Each warp has 64 channels of the latents: it copies them, multiplies them with its
part of the queries and, when the warps have added up their scores, accumulates them. So chains of products are short, and a
tile is read from shared memory once for scores and once for sums. Programs of a token split its keys into equal ranges.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from auraflux.ops.attention.pages import LatentPages
from auraflux.ops.gpu.blocks.flash import MOST_SPLITS
from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.gpu.blocks.softmax import LN2, LOG2E, empty_partials, launch_merge
from auraflux.ops.gpu.device import multiprocessors, ready
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.hopper.reduce import warp_uniform

MOST_HEADS = 32
WIDTHS = (256, 512)  # of latents: 64 channels for each of four or eight warps
KEYS = 32  # of a tile
F32 = gl.float32


class LatentShape(NamedTuple):
    """Compile-time shape: heads padded to full rows, warps, keys of a tile, channels of rotated keys, tokens per page.

    sequences  rounded up to a power of two
    """

    rows: int
    warps: int
    keys: int
    rope: int
    page: int
    sequences: int


@gluon.constexpr_function
def sums_of(warps):
    """Return the layout of accumulators: a matrix for each warp."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def parts_of(width, warps):
    """Return the layout of rows, `width` channels of them for each warp, 16 bytes for each thread."""
    lanes = width // 8
    return gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def _channels(rows, ROWS: gl.constexpr, WIDTH: gl.constexpr, STRIDE: gl.constexpr, LAYOUT: gl.constexpr, WARPS: gl.constexpr):
    """Return offsets of rows that are STRIDE elements long, [WARPS, ROWS, WIDTH], and each element's channel."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    row = rows + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    channel = warp * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return row * STRIDE + channel, channel, row


@gluon.jit
def _queries(q, token, heads, WIDTH: gl.constexpr, STRIDE: gl.constexpr, SHAPE: gl.constexpr):
    """Load a token's queries as operands, `WIDTH` channels for each warp."""
    LAYOUT: gl.constexpr = parts_of(WIDTH, SHAPE.warps)
    at, channel, head = _channels(0, SHAPE.rows, WIDTH, STRIDE, LAYOUT, SHAPE.warps)
    x = gl.load(q + token.to(gl.int64) * heads * STRIDE + at, mask=(channel < STRIDE) & (head < heads), other=0.0)
    return gl.convert_layout(x, gl.DotOperandLayout(0, sums_of(SHAPE.warps), 2))


@gluon.jit
def _fetch(K, R, pools, stage, page, first, end, SHAPE: gl.constexpr):
    """Begin copying a tile of latents and rotated keys; those from `end` on become zeros."""
    W: gl.constexpr = SHAPE.warps
    N: gl.constexpr = SHAPE.keys
    latents, ropes = pools
    if first < end:
        base = (gl.maximum(page, 0).to(gl.int64) * SHAPE.page + first % SHAPE.page) * (64 * W)
        at, _, row = _channels(0, N, 64, 64 * W, parts_of(64, W), W)
        async_copy.async_copy_global_to_shared(K.index(stage), latents + base + at, mask=(first + row < end) & (page >= 0))
        base = (gl.maximum(page, 0).to(gl.int64) * SHAPE.page + first % SHAPE.page) * SHAPE.rope
        at, channel, row = _channels(0, N, 16, SHAPE.rope, parts_of(16, W), W)
        there = (first + row < end) & (channel < SHAPE.rope) & (page >= 0)
        async_copy.async_copy_global_to_shared(R.index(stage), ropes + base + at, mask=there)
    async_copy.commit_group()


@gluon.jit
def _page_of(index, sequence, first, SHAPE: gl.constexpr):
    """Return the page of a tile, -1 for one outside the pool or the table."""
    place = first // SHAPE.page
    page = gl.load(index.table + sequence.to(gl.int64) * index.width + gl.minimum(place, index.width - 1))
    return gl.where((page < index.pool) & (place < index.width), page, -1)


@gluon.jit
def attend_heads(queries, pools, index, out, parts, scale, heads, splits, SHAPE: gl.constexpr):
    """Attend from a token to the keys of one split; grid (tokens, splits)."""
    M: gl.constexpr = SHAPE.rows
    W: gl.constexpr = SHAPE.warps
    N: gl.constexpr = SHAPE.keys
    SUMS: gl.constexpr = sums_of(W)
    SCORES: gl.constexpr = gl.SliceLayout(0, SUMS)
    DTYPE: gl.constexpr = queries[0].dtype.element_ty
    token, split = gl.program_id(0), gl.program_id(1)
    b = gl.arange(0, SHAPE.sequences, gl.BlockedLayout([1], [32], [W], [0]))
    start = gl.load(index.starts + b, mask=b < index.sequences, other=1 << 30)
    sequence = gl.sum((start <= token).to(gl.int32), 0) - 1
    if SHAPE.sequences > 1:
        sequence = warp_uniform(sequence)
    position = gl.load(index.lengths + sequence) - gl.load(index.starts + sequence + 1) + token
    share = ((position + N) // N + splits - 1) // splits * N
    begin, end = split * share, gl.minimum(position + 1, (split + 1) * share)
    x = _queries(queries[0], token, heads, 64, 64 * W, SHAPE)
    x_rope = _queries(queries[1], token, heads, 16, SHAPE.rope, SHAPE)
    K = gl.allocate_shared_memory(DTYPE, [2, W, N, 64], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    R = gl.allocate_shared_memory(DTYPE, [2, W, N, 16], gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0]))
    _fetch(K, R, pools, 0, _page_of(index, sequence, begin, SHAPE), begin, end, SHAPE)
    following = _page_of(index, sequence, begin + N, SHAPE)
    m = gl.full([M], float("-inf"), F32, gl.SliceLayout(1, SCORES))
    l = gl.full([M], 0.0, F32, gl.SliceLayout(1, SCORES))  # noqa: E741
    acc = gl.full([W, M, 64], 0.0, F32, SUMS)
    zero, factor = gl.full([W, M, N], 0.0, F32, SUMS), scale * LOG2E
    page, stage = _page_of(index, sequence, begin, SHAPE), 0
    for first in range(begin, end, N):
        async_copy.wait_group(0)
        gl.thread_barrier()
        here, page = page, following
        _fetch(K, R, pools, 1 - stage, page, first + N, end, SHAPE)
        following = _page_of(index, sequence, first + 2 * N, SHAPE)
        s = mma_v2(x, K.index(stage).permute((0, 2, 1)).load(gl.DotOperandLayout(1, SUMS, 2)), zero)
        s = mma_v2(x_rope, R.index(stage).permute((0, 2, 1)).load(gl.DotOperandLayout(1, SUMS, 2)), s)
        seen = (first + gl.arange(0, N, gl.SliceLayout(0, SCORES)) < end) & (here >= 0)
        s = gl.where(seen[None, :], gl.sum(s, 0) * factor, float("-inf"))
        top = gl.maximum(m, gl.max(s, 1))
        safe = gl.where(top == float("-inf"), 0.0, top)
        p, fade = gl.exp2(s - safe[:, None]), gl.exp2(m - safe)
        m, l = top, l * fade + gl.sum(p, 1)  # noqa: E741
        weights = gl.expand_dims(p.to(DTYPE), 0).broadcast_to([W, M, N])
        acc = acc * gl.expand_dims(fade[:, None], 0)
        values = K.index(stage).load(gl.DotOperandLayout(1, SUMS, 2))
        acc = mma_v2(gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2)), values, acc)
        stage = 1 - stage
    at, _, head = _channels(0, M, 64, 64 * W, SUMS, W)
    row = gl.arange(0, M, gl.SliceLayout(1, SCORES))
    if parts is None:
        part = gl.where(l == 0.0, 0.0, 1.0 / l)
        result = (acc * gl.expand_dims(part[:, None], 0)).to(out.dtype.element_ty)
        gl.store(out + token.to(gl.int64) * heads * (64 * W) + at, result, mask=head < heads)
    else:
        at = at + head * ((splits - 1) * (64 * W))
        base = token.to(gl.int64) * heads * splits + split
        gl.store(parts.o + base * (64 * W) + at, acc, mask=head < heads)
        gl.store(parts.m + base + row * splits, m * LN2, mask=row < heads)
        gl.store(parts.l + base + row * splits, l, mask=row < heads)


def attend_latents(q_latent: Tensor, q_rope: Tensor, pages: LatentPages, starts: Tensor, scale: float, out: Tensor) -> None:
    """Run `latent_attention` into `out`."""
    ready(q_latent)
    (tokens, heads, width), rope = q_latent.shape, q_rope.shape[2]
    sequences, table_width = pages.table.shape
    programs = cdiv(multiprocessors(q_latent.device), tokens)
    splits = max(1, min(MOST_SPLITS, programs, cdiv(table_width * pages.pool[1], 2 * KEYS)))
    parts = None if splits == 1 else empty_partials(tokens * heads, splits, width, out.device)
    shape = LatentShape(16 if heads <= 16 else 32, width // 64, KEYS, rope, pages.pool[1], power_of_two(sequences))
    launch(attend_heads, (tokens, splits))(
        (q_latent, q_rope), (pages.latent, pages.rope), index_of(pages, starts), out if parts is None else None, parts, scale,
        heads, splits, shape, num_warps=width // 64,
    )  # fmt: skip
    if parts is not None:
        launch_merge(parts, None, out, heads)
