"""Attention of a program of `prefill` to tiles that all its rows see whole: no masks, and products in flight.

Where registers and shared memory have room, in heads of 128 channels, tiles are taken in pairs: half the barriers, and twice as
much for the tensor cores to do.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from auraflux.ops.attention.cuda.prefill_tiles import F32, SCORES, advance, capped, soften
from auraflux.ops.hopper.split_kv import columns


@gluon.jit
def scores_of(x, K, bars, stage, phase):
    """Begin the products of queries with a tile of keys."""
    zero = gl.full([64, 64], 0.0, F32, SCORES)
    mbarrier.wait(bars.index(stage), phase)
    return warpgroup_mma(x, K.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def attend_whole(
    x, K, V, bars, acc, m, l, stage, phase, count, scale, softcap, factor,  # noqa: E741
    D: gl.constexpr, ST: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Attend to tiles one by one: scores are softened while the weights before meet their values."""
    SUMS: gl.constexpr = columns(D)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    spare = gl.allocate_shared_memory(F32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if count > 0:
        s = warpgroup_mma_wait(0, deps=[scores_of(x, K, bars, stage, phase)])
        mbarrier.arrive(bars.index(2 * ST + stage))
        p, fade, m, l = soften(capped(s, scale, softcap, SOFTCAP), m, l, factor, D)  # noqa: E741
        acc = acc * fade[:, None]
        weights = gl.convert_layout(p.to(V.dtype), WEIGHTS)
        for _ in range(count - 1):
            before, before_phase = stage, phase
            stage, phase = advance(stage, phase, ST)
            s = scores_of(x, K, bars, stage, phase)
            mbarrier.wait(bars.index(ST + before), before_phase)
            acc = warpgroup_mma(weights, V.index(before), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(bars.index(2 * ST + stage))
            p, fade, m, l = soften(capped(s, scale, softcap, SOFTCAP), m, l, factor, D)  # noqa: E741
            weights = gl.convert_layout(p.to(V.dtype), WEIGHTS)
            # nobody reads it: without a store and a barrier the assembler waits first and softens then
            spare.store(l)
            gl.thread_barrier()
            acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
            mbarrier.arrive(bars.index(3 * ST + before))
            acc = acc * fade[:, None]
        mbarrier.wait(bars.index(ST + stage), phase)
        acc = warpgroup_mma(weights, V.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, m, l


@gluon.jit
def attend_one(
    x, K, V, bars, acc, m, l, stage, phase, scale, softcap, factor,  # noqa: E741
    D: gl.constexpr, ST: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Attend to one tile, after which there are others."""
    s = warpgroup_mma_wait(0, deps=[scores_of(x, K, bars, stage, phase)])
    mbarrier.arrive(bars.index(2 * ST + stage))
    p, fade, m, l = soften(capped(s, scale, softcap, SOFTCAP), m, l, factor, D)  # noqa: E741
    weights = gl.convert_layout(p.to(V.dtype), gl.DotOperandLayout(0, columns(D), 2))
    mbarrier.wait(bars.index(ST + stage), phase)
    acc = warpgroup_mma(weights, V.index(stage), acc * fade[:, None], is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(bars.index(3 * ST + stage))
    return acc, m, l


@gluon.jit
def _soften_pair(s, t, m, l, scale, softcap, factor, DTYPE: gl.constexpr, D: gl.constexpr, SOFTCAP: gl.constexpr):  # noqa: E741
    """`soften` for two tiles, whose weights are made operands."""
    s, t = capped(s, scale, softcap, SOFTCAP), capped(t, scale, softcap, SOFTCAP)
    top = gl.maximum(m, gl.max(gl.maximum(s, t), 1) * factor)
    safe = gl.where(top == float("-inf"), 0.0, top)
    p, r = gl.exp2(s * factor - safe[:, None]), gl.exp2(t * factor - safe[:, None])
    fade = gl.exp2(m - safe)
    l = l * fade + gl.sum(p + r, 1)  # noqa: E741
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, columns(D), 2)
    p, r = gl.convert_layout(p.to(DTYPE), WEIGHTS), gl.convert_layout(r.to(DTYPE), WEIGHTS)
    return p, r, gl.convert_layout(fade, gl.SliceLayout(1, columns(D))), top, l


@gluon.jit
def attend_pairs(
    x, K, V, bars, acc, m, l, stage, phase, count, scale, softcap, factor,  # noqa: E741
    D: gl.constexpr, ST: gl.constexpr, SOFTCAP: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Attend to tiles two by two: the scores of two are begun before the weights of two are used.

    The two groups of warps take turns: one begins its products when the other has its scores, and is at its softmax.
    """
    after, after_phase = advance(stage, phase, ST)
    s, t = scores_of(x, K, bars, stage, phase), scores_of(x, K, bars, after, after_phase)
    s, t = warpgroup_mma_wait(0, deps=[s, t])
    mbarrier.arrive(bars.index(2 * ST + stage))
    mbarrier.arrive(bars.index(2 * ST + after))
    p, r, fade, m, l = _soften_pair(s, t, m, l, scale, softcap, factor, V.dtype, D, SOFTCAP)  # noqa: E741
    acc = acc * fade[:, None]
    for i in range(count // 2 - 1):
        a, a_phase, b, b_phase = stage, phase, after, after_phase
        stage, phase = advance(after, after_phase, ST)
        after, after_phase = advance(stage, phase, ST)
        # the first group's first turn is over before it has begun
        mbarrier.wait(bars.index(4 * ST + PART), (i + 1 + PART) % 2)
        s, t = scores_of(x, K, bars, stage, phase), scores_of(x, K, bars, after, after_phase)
        mbarrier.wait(bars.index(ST + a), a_phase)
        acc = warpgroup_mma(p, V.index(a), acc, is_async=True)
        mbarrier.wait(bars.index(ST + b), b_phase)
        acc = warpgroup_mma(r, V.index(b), acc, is_async=True)
        s, t = warpgroup_mma_wait(2, deps=[s, t])
        mbarrier.arrive(bars.index(4 * ST + 1 - PART))
        mbarrier.arrive(bars.index(2 * ST + stage))
        mbarrier.arrive(bars.index(2 * ST + after))
        p, r, fade, m, l = _soften_pair(s, t, m, l, scale, softcap, factor, V.dtype, D, SOFTCAP)  # noqa: E741
        acc, p, r = warpgroup_mma_wait(0, deps=[acc, p, r])
        mbarrier.arrive(bars.index(3 * ST + a))
        mbarrier.arrive(bars.index(3 * ST + b))
        acc = acc * fade[:, None]
    mbarrier.wait(bars.index(ST + stage), phase)
    acc = warpgroup_mma(p, V.index(stage), acc, is_async=True)
    mbarrier.wait(bars.index(ST + after), after_phase)
    acc = warpgroup_mma(r, V.index(after), acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc]), m, l
