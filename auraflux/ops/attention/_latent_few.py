"""Latent attention for up to 16 heads on Hopper, in Gluon: rows of products are positions or channels, columns are heads.

The matrix units take 64 rows at a time: 64 positions score with all heads, and 64 channels at a time gather the values of all
heads. So the work is small beside reading the latents, which come by the copy engine while those before are worked on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

BF, F32 = gl.bfloat16, gl.float32
TURNED = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
LIST = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def request(latents, ropes, K, R, bar, table, i, begin, pool, PAGE: gl.constexpr):
    """Ask for the tile of 64 positions that is i-th from `begin` on; a table that leads outside the pool is not followed."""
    first = begin + i * 64
    page = gl.load(table + first // PAGE)
    row = gl.where((page >= 0) & (page < pool), page, 0) * PAGE + first % PAGE
    mbarrier.expect(bar.index(i % 2), 64 * 576 * 2)
    tma.async_copy_global_to_shared(latents, [row, 0], bar.index(i % 2), K.index(i % 2))
    tma.async_copy_global_to_shared(ropes, [row, 0], bar.index(i % 2), R.index(i % 2))


@gluon.jit
def clear(K, left, ROWS: gl.constexpr):
    """Make zeros of positions that are not seen: 0 times what lies there must be 0."""
    row = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    for part in gl.static_range(4):
        some = K.slice(part * 128, 128, dim=1)
        some.store(gl.where((row < left)[:, None], some.load(ROWS), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def latent_columns(
    queries, rotated, latents, ropes, table, lengths, starts, out, part_o, part_m, part_l,
    scale, sequences, heads, table_width, pool, splits, PAGE: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """The heads of one token with one share of its positions; grid (tokens, splits)."""
    gdc_launch_dependents()
    token, split = gl.program_id(0), gl.program_id(1)
    b = gl.arange(0, S, LIST)
    sequence = gl.sum((gl.load(starts + b + 1, mask=b < sequences, other=2147483647) <= token).to(gl.int32), 0)
    seen = gl.load(lengths + sequence) - gl.load(starts + sequence + 1) + token + 1
    share = (((seen + 63) // 64 + splits - 1) // splits) * 64
    begin = split * share
    end = gl.minimum(seen, begin + share)
    head, at = gl.arange(0, 16, gl.SliceLayout(0, TURNED)), token.to(gl.int64) * heads * splits + split
    if begin >= end:
        if part_l is not None:
            gl.store(part_l + at + head * splits, head.to(F32) * 0.0, mask=head < heads)
        return
    table += sequence.to(gl.int64) * table_width
    Q = gl.allocate_shared_memory(BF, [16, 512], queries.layout)
    QR = gl.allocate_shared_memory(BF, [16, 64], rotated.layout)
    K = gl.allocate_shared_memory(BF, [2, 64, 512], latents.layout)
    R = gl.allocate_shared_memory(BF, [2, 64, 64], ropes.layout)
    P = gl.allocate_shared_memory(BF, [16, 64], rotated.layout)
    bar = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(3):
        mbarrier.init(bar.index(n), count=1)
    fence_async_shared()
    gl.thread_barrier()
    count = (end - begin + 63) // 64
    request(latents, ropes, K, R, bar, table, 0, begin, pool, PAGE)
    mbarrier.expect(bar.index(2), 16 * 576 * 2)
    tma.async_copy_global_to_shared(queries, [token * heads, 0], bar.index(2), Q)
    tma.async_copy_global_to_shared(rotated, [token * heads, 0], bar.index(2), QR)
    if count > 1:
        request(latents, ropes, K, R, bar, table, 1, begin, pool, PAGE)
    m = gl.full([16], float("-inf"), F32, gl.SliceLayout(0, TURNED))
    l = gl.full([16], 0.0, F32, gl.SliceLayout(0, TURNED))  # noqa: E741
    acc = gl.full([512, 16], 0.0, F32, TURNED)
    zero = gl.full([64, 16], 0.0, F32, TURNED)
    position = gl.arange(0, 64, gl.SliceLayout(1, TURNED))
    mbarrier.wait(bar.index(2), 0)
    for i in range(count):
        stage, first = i % 2, begin + i * 64
        mbarrier.wait(bar.index(stage), i // 2 % 2)
        page = gl.load(table + first // PAGE)
        left = gl.where((page >= 0) & (page < pool), end - first, 0)
        if left < 64:
            clear(K.index(stage), left, ROWS)
        s = warpgroup_mma(K.index(stage), Q.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(R.index(stage), QR.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        s = gl.where((position < left)[:, None], s * scale, float("-inf"))
        top = gl.maximum(m, gl.max(s, 0))
        safe = gl.where(top == float("-inf"), 0.0, top)
        p = gl.exp2(s - safe[None, :])
        fade = gl.exp2(m - safe)
        P.permute((1, 0)).store(p.to(BF))
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(K.index(stage).permute((1, 0)), P.permute((1, 0)), acc * fade[None, :], is_async=True)
        m, l = top, l * fade + gl.sum(p, 0)  # noqa: E741
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        if i + 2 < count:
            request(latents, ropes, K, R, bar, table, i + 2, begin, pool, PAGE)
    channel = gl.arange(0, 512, gl.SliceLayout(1, TURNED))
    inside = (channel >= 0)[:, None] & (head < heads)[None, :]
    if out is not None:
        where = token.to(gl.int64) * heads * 512 + (channel[:, None] + head[None, :] * 512)
        gl.store(out + where, (acc * gl.where(l == 0.0, 0.0, 1.0 / l)[None, :]).to(BF), mask=inside)
    else:
        gl.store(part_o + at * 512 + (channel[:, None] + head[None, :] * (splits * 512)), acc, mask=inside)
        gl.store(part_m + at + head * splits, m, mask=head < heads)
        gl.store(part_l + at + head * splits, l, mask=head < heads)
