"""How latents reach the kernels of latent attention on Hopper: by TMA, and with zeros where nothing is seen."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def _feed_queries(queries, rotated, Q, QR, bar, row, HEADS: gl.constexpr):
    """Queries may come from the kernel before."""
    gdc_wait()
    gdc_launch_dependents()
    mbarrier.expect(bar, HEADS * 576 * 2)
    tma.async_copy_global_to_shared(queries, [row, 0], bar, Q)
    tma.async_copy_global_to_shared(rotated, [row, 0], bar, QR)


@gluon.jit
def feed(
    queries, rotated, latents, ropes, Q, QR, K, R, bars, table, begin, old, count, row, pool,
    PAGE: gl.constexpr, HEADS: gl.constexpr, N: gl.constexpr, ST: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """Ask for `count` tiles of N positions from `begin` on; a table that leads outside the pool is not followed.

    Positions before `old` are of earlier steps: up to BEFORE tiles of these are asked for before the kernel launched before
    this one has ended; not more, as its end is seen only when what was asked for has come.
    bars  of full tiles [ST], of empty ones [ST], and of the queries
    """
    waited = False
    following = gl.load(table + begin // PAGE)
    for i in range(count):
        first, page = begin + i * N, following
        following = gl.load(table + (begin + gl.minimum(i + 1, count - 1) * N) // PAGE)
        line = gl.where((page >= 0) & (page < pool), page, 0) * PAGE + first % PAGE
        # no tile is given back before the queries are there
        if (not waited) & ((first + N > old) | (i == BEFORE)):
            _feed_queries(queries, rotated, Q, QR, bars.index(2 * ST), row, HEADS)
            waited = True
        mbarrier.wait(bars.index(ST + i % ST), (i // ST % 2) ^ 1)
        mbarrier.expect(bars.index(i % ST), N * 576 * 2)
        tma.async_copy_global_to_shared(latents, [line, 0], bars.index(i % ST), K.index(i % ST))
        tma.async_copy_global_to_shared(ropes, [line, 0], bars.index(i % ST), R.index(i % ST))
    if not waited:
        _feed_queries(queries, rotated, Q, QR, bars.index(2 * ST), row, HEADS)


@gluon.jit
def clear(K, left, N: gl.constexpr):
    """Make zeros of positions that are not seen: 0 times what lies there must be 0."""
    row = gl.arange(0, N, gl.SliceLayout(1, ROWS))
    for part in gl.static_range(4):
        some = K.slice(part * 128, 128, dim=1)
        some.store(gl.where((row < left)[:, None], some.load(ROWS), 0.0))
    fence_async_shared()
    gl.thread_barrier()
