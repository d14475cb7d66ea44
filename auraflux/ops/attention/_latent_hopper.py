"""Latent attention for few tokens on Hopper, in Gluon: 64 heads of one token a program, in bf16.

Latents of 64 positions come by the copy engine, while those before are worked on, and stay where they are: they are keys to
the matrix units, then values. Two groups of four warps share the scores, half of the positions each, and the result, half of
the channels each. Rows beyond the heads of a token are computed and not kept: with 16 heads this still takes less time than
reading does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops._triton import INTERPRETED, UNPROVEN, capability, cdiv, multiprocessors, power_of_two
from auraflux.ops.attention._flash import parts_like
from auraflux.ops.attention.pages import LatentPages

HOPPER = (9, 0)
LATENT, ROPE, TILE = 512, 64, 64  # channels, and positions or heads of a tile
MOST_SPLITS = 128
MERGED = 32  # channels of a program that merges
LOG2E = 1.4426950408889634
BF, F32 = gl.bfloat16, gl.float32
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
RESULT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
LIST = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))


@gluon.jit
def _request(latents, ropes, K, R, bar, table, i, begin, pool, PAGE: gl.constexpr):
    """Ask for the tile of 64 positions that is i-th from `begin` on; a table that leads outside the pool is not followed."""
    first = begin + i * 64
    page = gl.load(table + first // PAGE)
    row = gl.where((page >= 0) & (page < pool), page, 0) * PAGE + first % PAGE
    mbarrier.expect(bar.index(i % 2), 64 * 576 * 2)
    tma.async_copy_global_to_shared(latents, [row, 0], bar.index(i % 2), K.index(i % 2))
    tma.async_copy_global_to_shared(ropes, [row, 0], bar.index(i % 2), R.index(i % 2))


@gluon.jit
def _clear(K, left):
    """Make zeros of positions that are not seen: 0 times what lies there must be 0."""
    row = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    for part in gl.static_range(4):
        some = K.slice(part * 128, 128, dim=1)
        some.store(gl.where((row < left)[:, None], some.load(ROWS), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _scores(Q, QR, K, R, bar, table, i, begin, end, pool, PAGE: gl.constexpr):
    """Begin the products of queries with the i-th tile; and how many of its positions are seen."""
    first = begin + i * 64
    mbarrier.wait(bar.index(i % 2), i // 2 % 2)
    page = gl.load(table + first // PAGE)
    left = gl.where((page >= 0) & (page < pool), end - first, 0)
    if left < 64:
        _clear(K.index(i % 2), left)
    s = warpgroup_mma(Q, K.index(i % 2).permute((1, 0)), gl.full([64, 64], 0.0, F32, SCORES), use_acc=False, is_async=True)
    return warpgroup_mma(QR, R.index(i % 2).permute((1, 0)), s, is_async=True), left


@gluon.jit
def _soften(s, left, scale, m, l, P):  # noqa: E741
    """Take a tile of scores into the running softmax: maximum, sum, what earlier ones keep; weights go to shared memory."""
    position = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    s = gl.where((position < left)[None, :], s * scale, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1))
    safe = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(s - safe[:, None])
    fade = gl.exp2(m - safe)
    P.store(p.to(BF))
    fence_async_shared()
    gl.thread_barrier()
    return top, l * fade + gl.sum(p, 1), gl.convert_layout(fade, gl.SliceLayout(1, RESULT))


@gluon.jit
def latent_tiles(
    queries, rotated, latents, ropes, table, lengths, starts, out, part_o, part_m, part_l,
    scale, sequences, heads, table_width, pool, splits, PAGE: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """64 heads of one token with one share of its positions; grid (tokens * tiles of heads, splits)."""
    gdc_launch_dependents()
    tiles = (heads + 63) // 64
    token, h0, split = gl.program_id(0) // tiles, gl.program_id(0) % tiles * 64, gl.program_id(1)
    b = gl.arange(0, S, LIST)
    sequence = gl.sum((gl.load(starts + b + 1, mask=b < sequences, other=2147483647) <= token).to(gl.int32), 0)
    seen = gl.load(lengths + sequence) - gl.load(starts + sequence + 1) + token + 1
    share = (((seen + 63) // 64 + splits - 1) // splits) * 64
    begin = split * share
    end = gl.minimum(seen, begin + share)
    row, at = gl.arange(0, 64, gl.SliceLayout(1, SCORES)), (token.to(gl.int64) * heads + h0) * splits + split
    if begin >= end:
        if part_l is not None:
            gl.store(part_l + at + row * splits, row.to(F32) * 0.0, mask=h0 + row < heads)
        return
    table += sequence.to(gl.int64) * table_width
    Q = gl.allocate_shared_memory(BF, [64, 512], queries.layout)
    QR = gl.allocate_shared_memory(BF, [64, 64], rotated.layout)
    K = gl.allocate_shared_memory(BF, [2, 64, 512], latents.layout)
    R = gl.allocate_shared_memory(BF, [2, 64, 64], ropes.layout)
    P = gl.allocate_shared_memory(BF, [64, 64], rotated.layout)
    bar = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(3):
        mbarrier.init(bar.index(n), count=1)
    fence_async_shared()
    gl.thread_barrier()
    count = (end - begin + 63) // 64
    mbarrier.expect(bar.index(2), 64 * 576 * 2)
    tma.async_copy_global_to_shared(queries, [token * heads + h0, 0], bar.index(2), Q)
    tma.async_copy_global_to_shared(rotated, [token * heads + h0, 0], bar.index(2), QR)
    _request(latents, ropes, K, R, bar, table, 0, begin, pool, PAGE)
    if count > 1:
        _request(latents, ropes, K, R, bar, table, 1, begin, pool, PAGE)
    m = gl.full([64], float("-inf"), F32, gl.SliceLayout(1, SCORES))
    l = gl.full([64], 0.0, F32, gl.SliceLayout(1, SCORES))  # noqa: E741
    acc = gl.full([64, 512], 0.0, F32, RESULT)
    mbarrier.wait(bar.index(2), 0)
    s, left = _scores(Q, QR, K, R, bar, table, 0, begin, end, pool, PAGE)
    s = warpgroup_mma_wait(0, deps=[s])
    for i in range(count - 1):
        # the matrix units have the next scores to make while these are softened
        following, after = _scores(Q, QR, K, R, bar, table, i + 1, begin, end, pool, PAGE)
        m, l, fade = _soften(s, left, scale, m, l, P)  # noqa: E741
        acc = warpgroup_mma(P, K.index(i % 2), acc * fade[:, None], is_async=True)
        s = warpgroup_mma_wait(1, deps=[following])
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        left = after
        if i + 2 < count:
            _request(latents, ropes, K, R, bar, table, i + 2, begin, pool, PAGE)
    m, l, fade = _soften(s, left, scale, m, l, P)  # noqa: E741
    acc = warpgroup_mma(P, K.index((count - 1) % 2), acc * fade[:, None], is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    channel, place = gl.arange(0, 512, gl.SliceLayout(0, RESULT)), gl.arange(0, 64, gl.SliceLayout(1, RESULT))
    inside = (h0 + place < heads)[:, None] & (channel >= 0)[None, :]
    if out is not None:
        part = gl.convert_layout(gl.where(l == 0.0, 0.0, 1.0 / l), gl.SliceLayout(1, RESULT))
        where = (token.to(gl.int64) * heads + h0) * 512 + (place[:, None] * 512 + channel[None, :])
        gl.store(out + where, (acc * part[:, None]).to(BF), mask=inside)
    else:
        where = at * 512 + (place[:, None] * (splits * 512) + channel[None, :])
        gl.store(part_o + where, acc, mask=inside)
        gl.store(part_m + at + row * splits, m, mask=h0 + row < heads)
        gl.store(part_l + at + row * splits, l, mask=h0 + row < heads)


@triton.jit
def merge_tiles(o, m, l, out, splits, S: tl.constexpr, P: tl.constexpr):  # noqa: E741
    """Merge the shares of one head at P channels; grid (tokens * heads, 512 / P)."""
    gdc_wait()
    row, s = tl.program_id(0).to(tl.int64) * splits, tl.arange(0, S)
    d = tl.program_id(1) * P + tl.arange(0, P)
    sums = tl.load(l + row + s, mask=s < splits, other=0.0)
    highest = tl.load(m + row + s, mask=sums != 0, other=float("-inf"))
    parts = tl.load(o + (row + s)[:, None] * 512 + d[None, :], mask=(sums != 0)[:, None], other=0.0)
    top = tl.max(highest, 0)
    kept = tl.where(sums != 0, tl.exp2(highest - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    total = tl.sum(kept * sums, 0)
    found = tl.sum(kept[:, None] * parts, 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + tl.program_id(0).to(tl.int64) * 512 + d, found.to(out.dtype.element_ty))


def fits_hopper(q_latent: Tensor, q_rope: Tensor, pages: LatentPages) -> bool:
    """Whether the kernel here serves a call: bf16, latents of 512 and keys of 64, pages of whole tiles, tokens that are few."""
    heads, tensors = q_latent.shape[1], (q_latent, q_rope, pages.latent, pages.rope)
    return (
        UNPROVEN
        and not INTERPRETED
        and all(x.dtype is torch.bfloat16 and not x.data_ptr() % 16 for x in tensors)
        and (q_latent.shape[2], q_rope.shape[2]) == (LATENT, ROPE)
        and pages.pool[1] % TILE == 0
        # many tokens with few heads share the reading of latents in the other kernel
        and (heads % TILE == 0 or q_latent.shape[0] <= 2 * pages.table.shape[0])
        and capability(q_latent.device) == HOPPER
    )


def tile_layout(columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([TILE, columns], BF)


def _tiles(x: Tensor) -> TensorDescriptor:
    flat = x.view(-1, x.shape[-1])
    return TensorDescriptor.from_tensor(flat, [TILE, flat.shape[1]], tile_layout(flat.shape[1]))


def attend_hopper(q_latent: Tensor, q_rope: Tensor, pages: LatentPages, starts: Tensor, scale: float, out: Tensor) -> None:
    """`latent_attention` into `out`."""
    (tokens, heads, _), (sequences, table_width), (pool, page) = q_latent.shape, pages.table.shape, pages.pool
    tiles = tokens * cdiv(heads, TILE)
    splits = max(1, min(MOST_SPLITS, multiprocessors(out.device) // tiles, cdiv(table_width * page, TILE)))
    parts = None if splits == 1 else parts_like(tokens * heads, splits, LATENT, out.device)
    args = (
        _tiles(q_latent), _tiles(q_rope), _tiles(pages.latent), _tiles(pages.rope), pages.table, pages.lengths,
        starts, out if parts is None else None, *(parts or (None,) * 3), scale * LOG2E, sequences, heads, table_width, pool,
        splits, page, power_of_two(sequences),
    )  # fmt: skip
    latent_tiles[tiles, splits](*args, num_warps=8)
    if parts is not None:
        grid = tokens * heads, LATENT // MERGED
        merge_tiles[grid](*parts, out, splits, power_of_two(splits), MERGED, num_warps=4, launch_pdl=True)
