"""Attention of a `prefill` program to tiles that all its rows see completely: no masks, and MMAs in flight.

Where registers and shared memory suffice, with heads of 128 channels, tiles are processed in pairs: half the barriers, and
twice the work per tensor-core batch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from auraflux.ops.attention.cuda.prefill_tiles import F32, SCORES, advance, online_softmax, softcap_log2
from auraflux.ops.hopper.split_kv import columns


@gluon.jit
def scores_of(x, K, bars, stage, phase):
    """Issue the products of queries with a tile of keys."""
    zero = gl.full([64, 64], 0.0, F32, SCORES)
    mbarrier.wait(bars.index(stage), phase)
    return warpgroup_mma(x, K.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def attend_unmasked(x, memory, acc, m, l, stage, phase, count, scores, factor, SHAPE: gl.constexpr):  # noqa: E741
    """Attend to tiles one by one: their softmax overlaps with the previous tile's weight products."""
    D: gl.constexpr = SHAPE.width
    ST: gl.constexpr = SHAPE.stages
    SOFTCAP: gl.constexpr = SHAPE.softcap
    K, V, bars, scale, softcap = memory.K, memory.V, memory.bars, scores.scale, scores.softcap
    SUMS: gl.constexpr = columns(D)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    spare = gl.allocate_shared_memory(F32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if count > 0:
        s = warpgroup_mma_wait(0, deps=[scores_of(x, K, bars, stage, phase)])
        mbarrier.arrive(bars.index(2 * ST + stage))
        p, rescale, m, l = online_softmax(softcap_log2(s, scale, softcap, SOFTCAP), m, l, factor, columns(D))  # noqa: E741
        acc = acc * rescale[:, None]
        weights = gl.convert_layout(p.to(V.dtype), WEIGHTS)
        for _ in range(count - 1):
            before, before_phase = stage, phase
            stage, phase = advance(stage, phase, ST)
            s = scores_of(x, K, bars, stage, phase)
            mbarrier.wait(bars.index(ST + before), before_phase)
            acc = warpgroup_mma(weights, V.index(before), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(bars.index(2 * ST + stage))
            p, rescale, m, l = online_softmax(softcap_log2(s, scale, softcap, SOFTCAP), m, l, factor, columns(D))  # noqa: E741
            weights = gl.convert_layout(p.to(V.dtype), WEIGHTS)
            # a dummy store: without it and the barrier ptxas moves the wait before the softmax
            spare.store(l)
            gl.thread_barrier()
            acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
            mbarrier.arrive(bars.index(3 * ST + before))
            acc = acc * rescale[:, None]
        mbarrier.wait(bars.index(ST + stage), phase)
        acc = warpgroup_mma(weights, V.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, m, l


@gluon.jit
def attend_one(x, memory, acc, m, l, stage, phase, scores, factor, SHAPE: gl.constexpr):  # noqa: E741
    """Attend to one tile before the pairs."""
    D: gl.constexpr = SHAPE.width
    ST: gl.constexpr = SHAPE.stages
    SOFTCAP: gl.constexpr = SHAPE.softcap
    K, V, bars, scale, softcap = memory.K, memory.V, memory.bars, scores.scale, scores.softcap
    s = warpgroup_mma_wait(0, deps=[scores_of(x, K, bars, stage, phase)])
    mbarrier.arrive(bars.index(2 * ST + stage))
    p, rescale, m, l = online_softmax(softcap_log2(s, scale, softcap, SOFTCAP), m, l, factor, columns(D))  # noqa: E741
    weights = gl.convert_layout(p.to(V.dtype), gl.DotOperandLayout(0, columns(D), 2))
    mbarrier.wait(bars.index(ST + stage), phase)
    acc = warpgroup_mma(weights, V.index(stage), acc * rescale[:, None], is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(bars.index(3 * ST + stage))
    return acc, m, l


@gluon.jit
def _softmax_pair(s, t, m, l, scale, softcap, factor, DTYPE: gl.constexpr, D: gl.constexpr, SOFTCAP: gl.constexpr):  # noqa: E741
    """Run `online_softmax` on two tiles, and convert their weights to MMA operands."""
    s, t = softcap_log2(s, scale, softcap, SOFTCAP), softcap_log2(t, scale, softcap, SOFTCAP)
    top = gl.maximum(m, gl.max(gl.maximum(s, t), 1) * factor)
    safe = gl.where(top == float("-inf"), 0.0, top)
    p, r = gl.exp2(s * factor - safe[:, None]), gl.exp2(t * factor - safe[:, None])
    rescale = gl.exp2(m - safe)
    l = l * rescale + gl.sum(p + r, 1)  # noqa: E741
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, columns(D), 2)
    p, r = gl.convert_layout(p.to(DTYPE), WEIGHTS), gl.convert_layout(r.to(DTYPE), WEIGHTS)
    return p, r, gl.convert_layout(rescale, gl.SliceLayout(1, columns(D))), top, l


@gluon.jit
def attend_pairs(
    x, memory, acc, m, l, stage, phase, count, scores, factor, SHAPE: gl.constexpr, PART: gl.constexpr,  # noqa: E741
):  # fmt: skip
    """Attend to tiles two by two: the scores of two are issued before the weights of two are used.

    The two warpgroups alternate: one issues its MMAs when the other has its scores, and computes its softmax.
    """
    D: gl.constexpr = SHAPE.width
    ST: gl.constexpr = SHAPE.stages
    SOFTCAP: gl.constexpr = SHAPE.softcap
    K, V, bars, scale, softcap = memory.K, memory.V, memory.bars, scores.scale, scores.softcap
    after, after_phase = advance(stage, phase, ST)
    s, t = scores_of(x, K, bars, stage, phase), scores_of(x, K, bars, after, after_phase)
    s, t = warpgroup_mma_wait(0, deps=[s, t])
    mbarrier.arrive(bars.index(2 * ST + stage))
    mbarrier.arrive(bars.index(2 * ST + after))
    p, r, rescale, m, l = _softmax_pair(s, t, m, l, scale, softcap, factor, V.dtype, D, SOFTCAP)  # noqa: E741
    acc = acc * rescale[:, None]
    for i in range(count // 2 - 1):
        a, a_phase, b, b_phase = stage, phase, after, after_phase
        stage, phase = advance(after, after_phase, ST)
        after, after_phase = advance(stage, phase, ST)
        # the first warpgroup passes its first wait at once
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
        p, r, rescale, m, l = _softmax_pair(s, t, m, l, scale, softcap, factor, V.dtype, D, SOFTCAP)  # noqa: E741
        acc, p, r = warpgroup_mma_wait(0, deps=[acc, p, r])
        mbarrier.arrive(bars.index(3 * ST + a))
        mbarrier.arrive(bars.index(3 * ST + b))
        acc = acc * rescale[:, None]
    mbarrier.wait(bars.index(ST + stage), phase)
    acc = warpgroup_mma(p, V.index(stage), acc, is_async=True)
    mbarrier.wait(bars.index(ST + after), after_phase)
    acc = warpgroup_mma(r, V.index(after), acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc]), m, l
