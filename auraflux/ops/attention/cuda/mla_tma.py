"""TMA loads of latents for latent attention on Hopper, with zeros at invisible positions."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait

ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


class LatentShape(NamedTuple):
    """Compile-time shape of the kernels.

    page, sequences  tokens per page, sequences rounded up to a power of two
    heads            of a program
    positions        of a tile
    stages, before   tiles in flight, and how many of them are loaded before `gdc_wait`
    split_keys       see `invariant_split_keys`
    """

    page: int
    sequences: int
    heads: int
    positions: int
    stages: int
    before: int
    split_keys: int


@gluon.jit
def _feed_queries(queries, rotated, Q, QR, bar, row, HEADS: gl.constexpr):
    """Load queries, which may come from the preceding kernel."""
    gdc_wait()
    gdc_launch_dependents()
    mbarrier.expect(bar, HEADS * 576 * 2)
    tma.async_copy_global_to_shared(queries, [row, 0], bar, Q)
    tma.async_copy_global_to_shared(rotated, [row, 0], bar, QR)


@gluon.jit
def feed(queries, rotated, latents, ropes, memory, table, begin, old, count, row, pool, SHAPE: gl.constexpr):
    """Load `count` tiles of N positions from `begin` on; table entries outside the pool are not followed.

    Positions before `old` are of earlier steps: up to BEFORE tiles of these are loaded before the preceding kernel has ended;
    not more, as its end is seen only when pending loads are complete.
    memory  Q, QR, K, R; and bars of full tiles [ST], of empty ones [ST], and of the queries
    """
    PAGE: gl.constexpr = SHAPE.page
    HEADS: gl.constexpr = SHAPE.heads
    N: gl.constexpr = SHAPE.positions
    ST: gl.constexpr = SHAPE.stages
    BEFORE: gl.constexpr = SHAPE.before
    bars = memory.bars
    waited = False
    following = gl.load(table + begin // PAGE)
    for i in range(count):
        first, page = begin + i * N, following
        following = gl.load(table + (begin + gl.minimum(i + 1, count - 1) * N) // PAGE)
        line = gl.where((page >= 0) & (page < pool), page, 0) * PAGE + first % PAGE
        # no tile is released before the queries are loaded
        if (not waited) & ((first + N > old) | (i == BEFORE)):
            _feed_queries(queries, rotated, memory.Q, memory.QR, bars.index(2 * ST), row, HEADS)
            waited = True
        mbarrier.wait(bars.index(ST + i % ST), (i // ST % 2) ^ 1)
        mbarrier.expect(bars.index(i % ST), N * 576 * 2)
        tma.async_copy_global_to_shared(latents, [line, 0], bars.index(i % ST), memory.K.index(i % ST))
        tma.async_copy_global_to_shared(ropes, [line, 0], bars.index(i % ST), memory.R.index(i % ST))
    if not waited:
        _feed_queries(queries, rotated, memory.Q, memory.QR, bars.index(2 * ST), row, HEADS)


@gluon.jit
def clear(K, left, N: gl.constexpr):
    """Zero positions that are not visible, so that a weight of 0 times them is 0."""
    row = gl.arange(0, N, gl.SliceLayout(1, ROWS))
    for part in gl.static_range(4):
        some = K.slice(part * 128, 128, dim=1)
        some.store(gl.where((row < left)[:, None], some.load(ROWS), 0.0))
    fence_async_shared()
    gl.thread_barrier()
