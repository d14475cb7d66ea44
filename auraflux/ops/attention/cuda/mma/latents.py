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
    """Tiling of the heads of a token.

    heads      of a program
    halves     of a tile, each with four warps for 16 heads
    positions  of a half
    stages     tiles in shared memory
    """

    heads: int
    halves: int
    positions: int
    stages: int


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


@gluon.constexpr_function
def warps_of(tiling):
    heads, halves, _, _ = tiling
    return heads // 4 * halves


@gluon.constexpr_function
def products(tiling):
    """Return the layout of products [4 * halves, heads, positions or channels], with a quarter of the channels for a warp."""
    heads, halves, _, _ = tiling
    return gl.NVMMADistributedLayout([2, 0], [4 * halves, heads // 16, 1], [1, 16, 8])


@gluon.constexpr_function
def four_parts(tiling, inside, dims):
    """Return a layout of [halves, 4, heads, positions], or [4 * halves, ...] if `dims` is 3, as in `products`.

    inside  all quarters are in each thread, and not in a warp each
    """
    heads, halves, positions, _ = tiling

    def base(half, quarter, head, position):
        return [half, quarter, head, position] if dims == 4 else [4 * half + quarter, head, position]

    own = [base(0, 1, 0, 0), base(0, 2, 0, 0)]
    regs = [base(0, 0, 0, 1), base(0, 0, 8, 0), *(base(0, 0, 0, 8 << i) for i in range((positions // 8).bit_length() - 1))]
    lanes = [base(0, 0, 0, 2), base(0, 0, 0, 4), *(base(0, 0, 1 << i, 0) for i in range(3))]
    warps = [base(0, 0, 16 << i, 0) for i in range((heads // 16).bit_length() - 1)]
    warps += [base(0, 0, 0, 0)] * 2 if inside else own
    warps += [base(1 << i, 0, 0, 0) for i in range(halves.bit_length() - 1)]
    shape = [halves, 4, heads, positions] if dims == 4 else [4 * halves, heads, positions]
    return gl.DistributedLinearLayout([*regs, *own] if inside else regs, lanes, warps, [], shape)


@gluon.constexpr_function
def scores_layout(tiling):
    """Return the layout of scores and weights [halves, heads, positions], the same in the warps of all quarters."""
    return gl.SliceLayout(1, four_parts(tiling, False, 4))


@gluon.constexpr_function
def exchange(positions):
    """Return the shared-memory layout of parts of scores, without bank conflicts between rows."""
    return gl.SwizzledSharedLayout(8, max(1, 32 // positions), min(4, positions // 8), [2, 1, 0])


@gluon.constexpr_function
def rows_of_quarters(width, tiling):
    """Return a layout whose threads have 16 bytes of a row of `width` channels of their warp's quarter."""
    heads, halves, _, _ = tiling
    lanes = width // 8
    return gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [4 * halves, heads // 16, 1], [2, 1, 0])


@gluon.jit
def offsets(COUNT: gl.constexpr, WIDTH: gl.constexpr, HALVES: gl.constexpr, L: gl.constexpr):
    """Return row numbers [4 * HALVES, COUNT, 1] and channels [4 * HALVES, 1, WIDTH] of four quarters of COUNT rows."""
    row = gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    part = gl.arange(0, 4 * HALVES, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    return part // 4 * COUNT + row, part % 4 * WIDTH + channel


@gluon.jit
def fetch_quarters(to, source, left, WIDTH: gl.constexpr, TILING: gl.constexpr, L: gl.constexpr):
    """Begin copying a tile of rows of four times WIDTH numbers; those beyond `left` become zeros."""
    row, channel = offsets(TILING.positions, WIDTH, TILING.halves, L)
    async_copy.async_copy_global_to_shared(to, source + row * (4 * WIDTH) + channel, mask=(row < left) & (channel >= 0))


@gluon.jit
def load_queries(q, heads, WIDTH: gl.constexpr, TILING: gl.constexpr):
    """Load queries of a quarter as operands; rows beyond `heads` are zeros."""
    row, channel = offsets(TILING.heads, WIDTH, TILING.halves, gl.DotOperandLayout(0, products(TILING), 2))
    row = row % TILING.heads
    return gl.load(q + row * (4 * WIDTH) + channel, mask=(row < heads) & (channel >= 0), other=0.0)


@gluon.jit
def tile_positions(TILING: gl.constexpr):
    """Return the positions of scores in a tile: [halves, 1, positions]."""
    L: gl.constexpr = scores_layout(TILING)
    half = gl.arange(0, TILING.halves, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    return half * TILING.positions + gl.arange(0, TILING.positions, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]


@gluon.jit
def sum_of_parts(s, X, TILING: gl.constexpr):
    """Add the scores of the four quarters: [halves, heads, positions]."""
    X.store(s)
    H: gl.constexpr = TILING.halves
    M: gl.constexpr = TILING.heads
    N: gl.constexpr = TILING.positions
    parts = gl.reshape(X.load(four_parts(TILING, True, 3)), [H, 4, M, N])
    return gl.convert_layout(gl.sum(parts, 1), scores_layout(TILING), assert_trivial=True)


@gluon.jit
def weights_of(s, m, l):  # noqa: E741
    """Return softmax weights of scores to base 2, the rescaling of earlier sums, and the new maxima and sums."""
    top = gl.maximum(m, gl.max(s, 2))
    safe = gl.where(top == float("-inf"), 0.0, top)
    p, fade = gl.exp2(s - safe[:, :, None]), gl.exp2(m - safe)
    return p, fade, top, l * fade + gl.sum(p, 2)


@gluon.jit
def for_quarters(x, TILING: gl.constexpr):
    """Return a number of each half and head [halves, heads] for the rows of products: [4 * halves, heads, 1]."""
    L: gl.constexpr = four_parts(TILING, False, 4)
    H: gl.constexpr = TILING.halves
    M: gl.constexpr = TILING.heads
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, L)), assert_trivial=True)
    every = gl.zeros([H, 4, M], gl.float32, gl.SliceLayout(3, L)) + gl.expand_dims(x, 1)
    rows = gl.reshape(every, [4 * H, M])
    return gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(2, products(TILING)), assert_trivial=True), 2)


@gluon.jit
def mix(acc, p, fade, tile, TILING: gl.constexpr):
    """Accumulate a tile's latents by their weights."""
    L: gl.constexpr = products(TILING)
    WIDE: gl.constexpr = four_parts(TILING, False, 4)
    H: gl.constexpr = TILING.halves
    M: gl.constexpr = TILING.heads
    N: gl.constexpr = TILING.positions
    every = gl.zeros([H, 4, M, N], gl.float32, WIDE) + gl.expand_dims(p, 1)
    weights = gl.reshape(every.to(tile.dtype), [4 * H, M, N])
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, L, 2), assert_trivial=True)
    return mma_v2(weights, tile.load(gl.DotOperandLayout(1, L, 2)), acc * for_quarters(fade, TILING))


@gluon.jit
def add_halves(acc, m, l, TILING: gl.constexpr):  # noqa: E741
    """Return the mean of a program's latents [4, heads, 128], its largest scores and its sums of weights [heads]."""
    top = gl.max(m, 0)
    fade = gl.exp2(m - gl.where(top == float("-inf"), 0.0, top)[None, :])
    total = gl.sum(l * fade, 0)
    share = fade * gl.where(total == 0.0, 0.0, 1.0 / total)[None, :]
    H: gl.constexpr = TILING.halves
    M: gl.constexpr = TILING.heads
    return gl.sum(gl.reshape(acc * for_quarters(share, TILING), [H, 4, M, 128]), 0), top, total


@gluon.jit
def store_part(parts, at, splits, room, acc, m, l, TILING: gl.constexpr):  # noqa: E741
    """Store the mean of a program's latents, its largest scores and its sums of weights."""
    M: gl.constexpr = TILING.heads
    L: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [4, warps_of(TILING) // 4, 1], [2, 1, 0])
    found, m, l = add_halves(acc, m, l, TILING)  # noqa: E741
    if parts.m is not None:
        rows: gl.constexpr = m.type.layout
        head = gl.arange(0, M, rows)
        gl.store(parts.m + at + head * splits, m, mask=head < room)
        gl.store(parts.l + at + head * splits, l, mask=head < room)
    row, channel = offsets(M, 128, 1, L)
    found = gl.convert_layout(found.to(parts.o.dtype.element_ty), L)
    gl.store(parts.o + at * 512 + row * (splits * 512) + channel, found, mask=(row < room) & (channel >= 0))


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
